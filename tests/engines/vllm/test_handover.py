"""Two real engines: prefill hands prompts over to decode, and fails at each point.

A proxy asks prefill for one token, and decode for the answer with prefill's ticket. Whatever
happens, decode answers as an engine without a store, after one deadline at most.
"""

import concurrent.futures
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_answers import answers, cached, prompt
from engine_handle import EngineHandle
from restartable_node import RestartableNode
from vllm_server import Server, hand_over, store_config

Engines = Callable[..., EngineHandle]
PATIENT_S, HASTY_S = 60.0, 1.0
ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


@pytest.fixture(scope="module")
def first(engines: Engines, models: Callable[..., str], store: RestartableNode) -> EngineHandle:
    return engines("prefill", model=models("llama"), store={"address": store.address})


@pytest.fixture(scope="module")
def patient(engines: Engines, models: Callable[..., str], store: RestartableNode) -> EngineHandle:
    options = {"address": store.address, "handover_wait_s": PATIENT_S}
    return engines("patient decode", model=models("llama"), store=options)


@pytest.fixture(scope="module")
def hasty(engines: Engines, models: Callable[..., str], store: RestartableNode) -> EngineHandle:
    options = {"address": store.address, "handover_wait_s": HASTY_S, "lookup_timeout_s": 2.0}
    return engines("hasty decode", model=models("llama"), store=options)


@pytest.fixture
def decoding() -> Iterator[concurrent.futures.Executor]:
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        yield executor


def prefill(engine: EngineHandle, whole: list[int]) -> dict[str, Any]:
    """Compute a prompt and return its ticket; the engine saves nothing before its next step."""
    engine.reset()
    (found,) = engine.generate(whole, max_tokens=1, transfer=ASK)
    assert set(found["transfer"]) == {"kvstore.ticket"}
    return found["transfer"]


def test_decode_waits_for_the_save(
    plain: Engines,
    first: EngineHandle,
    patient: EngineHandle,
    decoding: concurrent.futures.Executor,
) -> None:
    whole = prompt(9001, 100)
    expected = answers(plain().alone(whole))
    patient.reset()
    ticket = prefill(first, whole)
    found = decoding.submit(patient.generate, whole, transfer=ticket)
    time.sleep(1.0)
    assert not found.done()
    first.settle()
    assert answers(found.result()) == expected
    assert cached(found.result()) == [96]
    patient.settle()


def test_next_turn_finds_what_decode_generated(
    plain: Engines, first: EngineHandle, patient: EngineHandle
) -> None:
    whole = prompt(9002, 60)
    ticket = prefill(first, whole)
    first.settle()
    (turn,) = patient.generate(whole, max_tokens=40, transfer=ticket)
    patient.settle()
    again = whole + turn["tokens"] + prompt(9003, 20)
    found = first.alone(again)
    assert answers(found) == answers(plain().alone(again))
    assert cached(found) == [96]


@pytest.mark.parametrize("moment", ["never saved", "before the save", "during the save"])
def test_save_that_never_comes(
    moment: str,
    plain: Engines,
    first: EngineHandle,
    hasty: EngineHandle,
    store: RestartableNode,
    decoding: concurrent.futures.Executor,
) -> None:
    """The node is killed before or during the put, or prefill does not step any more."""
    whole = prompt(9010 + len(moment), 100)
    expected = answers(plain().alone(whole))
    hasty.reset()
    ticket = prefill(first, whole)
    if moment != "never saved":
        first.arm("save", "kill" if moment == "before the save" else "die", node_pid=store.pid)
    began = time.monotonic()
    found = decoding.submit(hasty.generate, whole, transfer=ticket)
    if moment != "never saved":
        first.settle()
    assert answers(found.result()) == expected
    if moment == "never saved":
        assert time.monotonic() - began >= HASTY_S
        assert cached(found.result()) == [0]
        first.settle()
    store.start()


@pytest.mark.parametrize("how", ["stop", "end"])
def test_node_that_fails_during_the_wait(
    how: str,
    plain: Engines,
    first: EngineHandle,
    hasty: EngineHandle,
    store: RestartableNode,
    decoding: concurrent.futures.Executor,
) -> None:
    whole = prompt(9030 + len(how), 100)
    expected = answers(plain().alone(whole))
    hasty.reset()
    ticket = prefill(first, whole)
    found = decoding.submit(hasty.generate, whole, transfer=ticket)
    time.sleep(0.3)
    store.stop() if how == "stop" else store.end()
    assert answers(found.result()) == expected
    assert cached(found.result()) == [0]
    store.start()
    first.settle()


def test_prefill_killed_after_its_ticket(
    plain: Engines,
    engines: Engines,
    models: Callable[..., str],
    hasty: EngineHandle,
    store: RestartableNode,
) -> None:
    doomed = engines("doomed prefill", model=models("llama"), store={"address": store.address})
    whole = prompt(9040, 100)
    ticket = prefill(doomed, whole)
    os.kill(doomed.pid, signal.SIGKILL)
    hasty.reset()
    found = hasty.generate(whole, transfer=ticket)
    assert answers(found) == answers(plain().alone(whole))
    assert cached(found) == [0]


def test_servers_and_a_proxy(
    plain: Engines, models: Callable[..., str], store: RestartableNode
) -> None:
    """The ticket passes vLLM's HTTP interface, and the proxy does not look into it."""
    whole = prompt(9050, 100)
    expected = plain().alone(whole)[0]["tokens"]
    config = store_config(
        store.address, lookup_timeout_s=30.0, load_timeout_s=60.0, handover_wait_s=PATIENT_S
    )
    with Server(models("llama"), config) as one, Server(models("llama"), config) as two:
        one.wait_up()
        two.wait_up()
        found = hand_over(one, two, whole)
        assert (found.tokens, found.cached_tokens) == (expected, 96)
        assert two.metrics()["vllm:kvstore_handovers_total"] == 1
        assert two.metrics()["vllm:kvstore_handovers_short_total"] == 0
