"""HiCache on a GPU whose node is killed, stopped and restarted.

Every request ends with the same tokens as without a store, and hits resume afterwards.
"""

import threading
from collections.abc import Callable, Iterator

import pytest
from engine_answers import agree, answers, prompt
from processes import state
from restartable_node import RestartableNode
from sglang_handle import SGLangHandle, found_locally_and_stored, from_store, hicache, wait_hit

Engines = Callable[..., SGLangHandle]
COUNT = 8
PAGES = 18  # of each prompt


@pytest.fixture(scope="module")
def fleet(engines: Engines, store: RestartableNode) -> tuple[SGLangHandle, SGLangHandle]:
    """Return (engine without a store, engine whose store fails).

    SGLang's own wait for prefetches keeps its default.
    """
    faulty = hicache(
        store.address, module="faulty", policy="timeout", lookup_timeout_s=1.0, load_timeout_s=1.0
    )
    return engines("plain"), engines("victim", **faulty)


@pytest.fixture(autouse=True)
def node_is_back(store: RestartableNode) -> Iterator[None]:
    yield
    store.start()


def prompts(seed: int) -> list[list[int]]:
    return [prompt(seed * 100 + i, PAGES * 64 + 7 + 7 * i) for i in range(COUNT)]


def hits_again(
    engine: SGLangHandle, known: list[list[int]], expected: list[dict[str, object]]
) -> None:
    """Assert that pages on disk hit after the restart and that no stored page is wrong."""
    for one in known:
        wait_hit(engine, one)
    found = engine.alone(*known)
    assert from_store(found) == [len(one) // 64 * 64 for one in known]
    assert answers(found) == answers(expected)


def test_node_killed_while_the_engine_is_idle(
    fleet: tuple[SGLangHandle, SGLangHandle], store: RestartableNode
) -> None:
    plain, engine = fleet
    known, fresh = prompts(1), prompts(2)
    expected = found_locally_and_stored(engine, store, *known)
    store.flush()
    engine.reset()
    store.end()
    found = engine.generate(*known, *fresh)
    assert from_store(found) == [0] * COUNT * 2
    assert agree(found, [*expected, *plain.alone(*fresh)])
    store.start()
    hits_again(engine, known, expected)


@pytest.mark.parametrize(("do", "nth"), [("kill", 1), ("kill", 4), ("die", 2)])
def test_node_killed_during_loads(
    do: str, nth: int, fleet: tuple[SGLangHandle, SGLangHandle], store: RestartableNode
) -> None:
    """The node is killed before a load or during one, while other loads are done or pending."""
    plain, engine = fleet
    known, fresh = prompts(10 + nth), prompts(20 + nth)
    expected = found_locally_and_stored(engine, store, *known)
    store.flush()
    engine.reset()
    engine.arm(at="load", do=do, nth=nth, node_pid=store.pid)
    found = engine.generate(*known, *fresh)
    assert not store.running, "no load was in progress"
    assert from_store(found).count(0) >= COUNT + 1
    assert agree(found, [*expected, *plain.alone(*fresh)])
    store.start()
    hits_again(engine, known, expected)


@pytest.mark.parametrize("delay_s", [0.01, 0.04])
def test_node_killed_during_generation(
    delay_s: float, fleet: tuple[SGLangHandle, SGLangHandle], store: RestartableNode
) -> None:
    plain, engine = fleet
    seed = 30 + round(delay_s * 100)
    known, fresh = prompts(seed), prompts(seed + 10)
    expected = found_locally_and_stored(engine, store, *known)
    store.flush()
    engine.reset()
    killer = threading.Timer(delay_s, store.end)
    killer.start()
    found = engine.generate(*known, *fresh)
    killer.join()
    assert agree(found, [*expected, *plain.alone(*fresh)])
    store.start()
    hits_again(engine, known, expected)


def test_node_stopped_and_resumed(
    fleet: tuple[SGLangHandle, SGLangHandle], store: RestartableNode
) -> None:
    """While the node hangs each request ends anyway, and late answers have no effect."""
    plain, engine = fleet
    known, fresh = prompts(60), prompts(61)
    expected = found_locally_and_stored(engine, store, *known)
    engine.reset()
    engine.arm(at="load", do="stop", nth=2, node_pid=store.pid)
    found = engine.generate(*known, *fresh)
    assert state(store.pid) == "T", "no load was in progress"
    assert agree(found, [*expected, *plain.alone(*fresh)])
    store.go_on()
    hits_again(engine, known, expected)
    store.wait_nothing_open()
