"""The store fails at the worst moments.

No request fails, every answer equals the one without a store, and no wrong page is stored: another
process loads the pages after the node's restart.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_answers import answers, cached, prompt
from engine_handle import EngineHandle
from restartable_node import RestartableNode

Engines = Callable[..., EngineHandle]
# Long timeouts: other delays are small beside them even on a busy machine. A prompt takes 0.03 s on
# an idle one.
LOOKUP_S, LOAD_S, SLOW_S = 4.0, 4.0, 2.0
COMPUTING_S = 30.0  # less than a save may take
BACK_S = 60.0  # until an engine uses its store again; normally tenths of a second
WIRES = {"shared memory": "auto", "sockets": "bulk"}  # they fail differently
_seeds = itertools.count(10_000)

# Moment -> (call, what happens to the node, number of the prompt's blocks stored before).
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


@pytest.fixture(scope="module", params=list(WIRES))
def mode(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def victim(
    mode: str, engines: Engines, models: Callable[..., str], store: RestartableNode
) -> EngineHandle:
    """Return the engine whose store fails."""
    options = {"wire": WIRES[mode], "lookup_timeout_s": LOOKUP_S, "load_timeout_s": LOAD_S}
    return engines(
        f"victim {mode}", model=models("llama"), store={"address": store.address, **options}
    )


@pytest.fixture(autouse=True)
def node_is_back(store: RestartableNode) -> Iterator[None]:
    yield
    store.start()


def put(writer: EngineHandle, store: RestartableNode, whole: list[int], tokens: int) -> None:
    """Store the first `tokens` tokens of a prompt, on disk too."""
    if tokens:
        reconnect(writer)
        writer.generate(whole[: tokens + 1], max_tokens=1)
        writer.settle()
        store.flush()


def reconnect(engine: EngineHandle) -> None:
    """Wait until the engine has recovered from an outage: its saves are stored and hit.

    While the circuit breaker is open saves are dropped, and after an outage requests wait only 0.05
    s for a lookup.
    """
    end = time.monotonic() + BACK_S
    while True:
        one = prompt(next(_seeds), 40)
        engine.alone(one, max_tokens=1)
        if cached(engine.alone(one, max_tokens=1)) == [32]:
            break
        assert time.monotonic() < end, "the engine does not use its store again"
    engine.reset()
    engine.struck()


@pytest.mark.parametrize("moment", MOMENTS)
def test_node_killed_during_a_call(
    moment: str,
    mode: str,
    plain: Engines,
    writer: EngineHandle,
    victim: EngineHandle,
    store: RestartableNode,
) -> None:
    at, do, blocks = MOMENTS[moment]
    if at == "commit" and WIRES[mode] == "bulk":
        at = "save"  # over sockets the commit is a part of the put
    whole = prompt(list(MOMENTS).index(moment) + 100 * len(mode), 100)
    expected = answers(plain().alone(whole))
    put(writer, store, whole, 32 * blocks)
    reconnect(victim)
    victim.arm(at, do, node_pid=store.pid)
    found = victim.generate(whole)
    assert answers(found) == expected
    victim.settle()
    assert victim.struck() == [f"{do} at {at}"]

    store.start()
    assert answers(victim.alone(whole)) == expected
    # The first call after the restart fails on the dead connection, and a save after it is dropped.
    reconnect(victim)
    assert answers(victim.alone(whole)) == expected
    victim.settle()
    reconnect(writer)
    third = writer.alone(whole)
    assert answers(third) == expected
    assert cached(third) == [96], "the victim must store the lost pages again"


def test_engine_starts_without_a_node(
    plain: Engines, engines: Engines, models: Callable[..., str], store: RestartableNode
) -> None:
    """An engine that starts without its store serves requests, and uses the store once it is up."""
    store.end()
    orphan = engines("orphan", model=models("llama"), store={"address": store.address})
    whole = prompt(50, 100)
    expected = answers(plain().alone(whole))
    assert answers(orphan.alone(whole, whole)) == expected * 2
    store.start()
    reconnect(orphan)
    orphan.alone(whole)
    found = orphan.alone(whole)
    assert answers(found) == expected
    assert cached(found) == [96]


def test_hung_node_costs_at_most_one_deadline(
    mode: str, plain: Engines, writer: EngineHandle, victim: EngineHandle, store: RestartableNode
) -> None:
    """R7: the first request waits for the lookup's deadline, which opens the circuit breaker."""
    prompts = [prompt(500 + 10 * len(mode) + i, 100) for i in range(4)]
    expected = answers(plain().alone(*prompts))
    put(writer, store, prompts[0], 96)
    reconnect(victim)
    store.stop()
    try:
        found = [victim.ask("generate", prompts=[one]) for one in prompts]
        seconds = [one["seconds"] for one in found]
        assert [answers(one["requests"])[0] for one in found] == expected
        assert max(seconds) < LOOKUP_S + COMPUTING_S
        assert min(seconds[1:]) < LOOKUP_S, "each request waited for the deadline"
    finally:
        store.go_on()
    reconnect(victim)
    assert cached(victim.alone(prompts[0])) == [96]


def test_node_hung_during_a_load_costs_at_most_one_deadline(
    plain: Engines, writer: EngineHandle, victim: EngineHandle, store: RestartableNode
) -> None:
    """R7: a request whose load hangs is answered by the deadline."""
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


def test_node_hung_during_a_save_delays_no_request(
    mode: str, plain: Engines, victim: EngineHandle, store: RestartableNode
) -> None:
    """R7: requests do not wait for a hung save, whose blocks are freed once it has ended."""
    whole, next_one = prompt(600 + len(mode), 100), prompt(700 + len(mode), 100)
    expected = answers(plain().alone(whole, next_one))
    reconnect(victim)
    victim.arm("save", "stop", node_pid=store.pid)
    found: list[dict[str, Any]] = [victim.ask("generate", prompts=[whole], max_tokens=8)]
    for _ in range(100):  # saves are batched, so a fast engine answers before
        if store.stopped:
            break
        # A prompt of less than a block.
        victim.ask("generate", prompts=[prompt(800 + len(mode), 20)], max_tokens=8)
    assert store.stopped
    found.append(victim.ask("generate", prompts=[next_one], max_tokens=8))
    store.go_on()
    assert [answers(one["requests"])[0] for one in found] == expected
    assert found[0]["seconds"] < COMPUTING_S
    assert found[1]["seconds"] < LOOKUP_S + COMPUTING_S
    assert victim.settle()["blocks_held"] == 0


def test_slow_lookup_delays_only_its_own_request(
    mode: str, plain: Engines, writer: EngineHandle, victim: EngineHandle, store: RestartableNode
) -> None:
    """The engine computes other requests, polls its connector in each step, and gets the hit."""
    slow, quick = prompt(190 + len(mode), 100), prompt(290 + len(mode), 100)
    expected = answers(plain().alone(slow, quick))
    put(writer, store, slow, 96)
    reconnect(victim)
    victim.arm("lookup", "slow", seconds=SLOW_S)
    found = victim.generate(slow, quick)
    assert victim.struck() == ["slow at lookup"]
    assert answers(found) == expected
    assert cached(found) == [96, 0]
    assert found[0]["ttft_s"] > 0.95 * SLOW_S
    # If the second request had waited, one step would have computed both.
    assert found[1]["ttft_s"] < found[0]["ttft_s"] - 0.1 * SLOW_S, "it waited for another lookup"


def test_slow_save_delays_nothing_and_keeps_its_blocks(
    mode: str, plain: Engines, writer: EngineHandle, victim: EngineHandle
) -> None:
    """The request ends long before its save; blocks written meanwhile do not get into its pages."""
    prompts = [prompt(390 + 10 * len(mode) + i, 100) for i in range(3)]
    expected = answers(plain().alone(*prompts))
    reconnect(victim)
    victim.arm("save", "slow", seconds=5 * SLOW_S)
    found = victim.ask("generate", prompts=prompts[:1])
    assert found["seconds"] < 4.9 * SLOW_S
    rest = victim.generate(*prompts[1:])
    victim.settle()
    assert victim.struck() == ["slow at save"]
    assert answers(found["requests"] + rest) == expected
    reconnect(writer)
    third = writer.alone(*prompts)
    assert cached(third) == [96, 96, 96]
    assert answers(third) == expected
