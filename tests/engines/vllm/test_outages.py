"""The store fails at the worst moments. No request fails, every answer is the one without a store, and nothing
wrong is left behind: another process finds the pages when the node is back."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_handle import EngineHandle, RestartableNode, answers, cached, prompt

Engines = Callable[..., EngineHandle]
LOOKUP_S, LOAD_S = 0.5, 1.0
WIRES = {"async": "auto", "sync": "bulk"}  # shared memory and sockets: they fail differently
COMPUTING_S = 1.0  # room for what is no waiting, on a busy machine; a prompt takes 0.03 s

# What happens to the node, when, and how many of the prompt's blocks are stored before.
MOMENTS = {
    "before the lookup": ("lookup", "kill", 3),
    "during the lookup": ("lookup", "die", 3),
    "between lookup and load": ("load", "kill", 3),
    "during the load": ("load", "die", 3),
    "before the save": ("save", "kill", 0),
    "during the save": ("save", "die", 0),
    "before the commit": ("commit", "kill", 0),
}


@pytest.fixture(scope="module")
def writer(engines: Engines, models: Callable[..., str], store: RestartableNode) -> EngineHandle:
    return engines("writer", model=models("llama"), store={"address": store.address})


@pytest.fixture(scope="module", params=["async", "sync"])
def mode(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def victim(mode: str, engines: Engines, models: Callable[..., str], store: RestartableNode) -> EngineHandle:
    """The engine whose store fails."""
    options = {"load": mode, "wire": WIRES[mode], "lookup_timeout_s": LOOKUP_S, "load_timeout_s": LOAD_S}
    return engines(f"victim {mode}", model=models("llama"), store={"address": store.address, **options})


@pytest.fixture(autouse=True)
def node_is_back(store: RestartableNode) -> Iterator[None]:
    yield
    store.start()
    time.sleep(0.3)  # longer than the pause of the circuit breakers


def put(writer: EngineHandle, store: RestartableNode, whole: list[int], tokens: int) -> None:
    """Has the first tokens of a prompt stored, and on disk."""
    writer.reset()
    if tokens:
        writer.generate(whole[: tokens + 1], max_tokens=1)
        writer.settle()
        store.flush()


def reconnect(engine: EngineHandle) -> None:
    """Until the outage of the test before is forgotten: after one, requests wait only 0.05 s for a lookup, and
    saves are dropped while the circuit breaker is open."""
    for seed in (98, 99):
        engine.alone(prompt(seed, 40), max_tokens=1)
        engine.settle()
        time.sleep(0.3)
    engine.reset()
    engine.struck()


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_node_is_killed(
    moment: str, mode: str, plain: Engines, writer: EngineHandle, victim: EngineHandle, store: RestartableNode
) -> None:
    at, do, blocks = MOMENTS[moment]
    if at == "commit" and WIRES[mode] == "bulk":
        at = "save"  # over sockets the commit is a part of the put
    whole = prompt(list(MOMENTS).index(moment) + 100 * len(mode), 100)
    expected = answers(plain().alone(whole))
    put(writer, store, whole, 32 * blocks)
    victim.reset()
    victim.generate(prompt(99, 40), max_tokens=1)  # is connected
    victim.settle()
    victim.struck()
    victim.arm(at, do, node_pid=store.pid)
    found = victim.generate(whole)
    assert answers(found) == expected
    victim.settle()
    assert victim.struck() == [f"{do} at {at}"]

    store.start()
    time.sleep(0.3)
    assert answers(victim.alone(whole)) == expected
    reconnect(victim)  # the first call after the restart met a dead connection, and a save behind it is dropped
    assert answers(victim.alone(whole)) == expected
    victim.settle()
    reconnect(writer)
    third = writer.alone(whole)
    assert answers(third) == expected
    assert cached(third) == [96], "the victim stored again what was lost"


def test_the_node_is_gone_from_the_start(
    plain: Engines, engines: Engines, models: Callable[..., str], store: RestartableNode
) -> None:
    """The engine starts without its store, serves, and uses it once it is there."""
    store.end()
    orphan = engines("orphan", model=models("llama"), store={"address": store.address})
    whole = prompt(50, 100)
    expected = answers(plain().alone(whole))
    assert answers(orphan.alone(whole, whole)) == expected * 2
    store.start()
    time.sleep(0.3)
    orphan.alone(whole)
    found = orphan.alone(whole)
    assert answers(found) == expected
    assert cached(found) == [96]


def test_a_hung_node_costs_at_most_a_deadline(
    mode: str, plain: Engines, writer: EngineHandle, victim: EngineHandle, store: RestartableNode
) -> None:
    """R7, with the lookup: the first request waits for the deadline; then the circuit breaker is open."""
    prompts = [prompt(500 + 10 * len(mode) + i, 100) for i in range(4)]
    expected = answers(plain().alone(*prompts))
    put(writer, store, prompts[0], 96)
    victim.reset()
    store.stop()
    try:
        found = [victim.ask("generate", prompts=[one]) for one in prompts]
        seconds = [one["seconds"] for one in found]
        assert [answers(one["requests"])[0] for one in found] == expected
        assert max(seconds) < LOOKUP_S + COMPUTING_S
        assert sum(seconds) < 2 * (LOOKUP_S + COMPUTING_S), "each request waited anew"
    finally:
        store.go_on()
    time.sleep(0.3)
    assert cached(victim.alone(prompts[0])) == [96]


def test_a_node_that_hangs_during_a_load_costs_at_most_a_deadline(
    plain: Engines, writer: EngineHandle, victim: EngineHandle, store: RestartableNode
) -> None:
    """R7. Other requests are answered meanwhile if the load is asynchronous."""
    whole = prompt(70, 100)
    expected = answers(plain().alone(whole))
    put(writer, store, whole, 96)
    reconnect(victim)
    victim.arm("load", "stop", node_pid=store.pid)
    found = victim.ask("generate", prompts=[whole])
    store.go_on()
    assert victim.struck() == ["stop at load"]
    assert answers(found["requests"]) == expected
    assert found["seconds"] < LOOKUP_S + LOAD_S + COMPUTING_S


def test_a_node_that_hangs_during_a_save_delays_no_request(
    mode: str, plain: Engines, victim: EngineHandle, store: RestartableNode
) -> None:
    """R7. The blocks are given back when the save has ended."""
    whole, next_one = prompt(600 + len(mode), 100), prompt(700 + len(mode), 100)
    expected = answers(plain().alone(whole, next_one))
    victim.reset()
    victim.arm("save", "stop", node_pid=store.pid)
    found: list[dict[str, Any]] = [victim.ask("generate", prompts=[one], max_tokens=8) for one in (whole, next_one)]
    store.go_on()
    assert [answers(one["requests"])[0] for one in found] == expected
    assert found[0]["seconds"] < COMPUTING_S
    assert found[1]["seconds"] < LOOKUP_S + COMPUTING_S
    assert victim.settle()["blocks_held"] == 0


def test_a_slow_lookup_delays_only_its_own_request(
    mode: str, plain: Engines, writer: EngineHandle, victim: EngineHandle, store: RestartableNode
) -> None:
    """The engine goes on with other requests, asks its connector in every step, and gets the hit in the end."""
    slow, quick = prompt(190 + len(mode), 100), prompt(290 + len(mode), 100)
    expected = answers(plain().alone(slow, quick))
    put(writer, store, slow, 96)
    reconnect(victim)
    victim.arm("lookup", "slow", seconds=0.3)
    found = victim.generate(slow, quick)
    assert victim.struck() == ["slow at lookup"]
    assert answers(found) == expected
    assert cached(found) == [96, 0]
    assert found[0]["ttft_s"] > 0.29
    assert found[1]["ttft_s"] < 0.29, "it waited for the other one's lookup"


def test_a_slow_save_delays_nothing_and_keeps_its_blocks(
    mode: str, plain: Engines, writer: EngineHandle, victim: EngineHandle
) -> None:
    """Its request has ended long before; what others write meanwhile does not get into its pages."""
    prompts = [prompt(390 + 10 * len(mode) + i, 100) for i in range(3)]
    expected = answers(plain().alone(*prompts))
    reconnect(victim)
    victim.arm("save", "slow", seconds=1.0)
    found = victim.ask("generate", prompts=prompts[:1])
    assert found["seconds"] < 0.9
    rest = victim.generate(*prompts[1:])
    victim.settle()
    assert victim.struck() == ["slow at save"]
    assert answers(found["requests"] + rest) == expected
    third = writer.alone(*prompts)
    assert cached(third) == [96, 96, 96]
    assert answers(third) == expected
