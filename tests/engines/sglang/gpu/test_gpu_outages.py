"""HiCache on a GPU whose node is killed, stopped and started again: every request ends with the
tokens that it has without a store, and hits come back.
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
    """(without a store, with one that fails).

    SGLang's own wait for prefetches is its default.
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
    """The node is back with what it had on disk, and nothing that was stored in between
    is wrong.
    """
    for one in known:
        wait_hit(engine, one)
    found = engine.alone(*known)
    assert from_store(found) == [len(one) // 64 * 64 for one in known]
    assert answers(found) == answers(expected)


def test_the_node_is_killed_while_the_engine_is_idle(
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
def test_the_node_is_killed_in_the_middle_of_loads(
    do: str, nth: int, fleet: tuple[SGLangHandle, SGLangHandle], store: RestartableNode
) -> None:
    """In front of a load, or while it waits for its answer; some are done, others are asked for."""
    plain, engine = fleet
    known, fresh = prompts(10 + nth), prompts(20 + nth)
    expected = found_locally_and_stored(engine, store, *known)
    store.flush()
    engine.reset()
    engine.arm(at="load", do=do, nth=nth, node_pid=store.pid)
    found = engine.generate(*known, *fresh)
    assert not store.running, "no load was under way"
    assert from_store(found).count(0) >= COUNT + 1
    assert agree(found, [*expected, *plain.alone(*fresh)])
    store.start()
    hits_again(engine, known, expected)


@pytest.mark.parametrize("delay_s", [0.01, 0.04])
def test_the_node_is_killed_at_any_moment(
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


def test_the_node_is_stopped_and_goes_on(
    fleet: tuple[SGLangHandle, SGLangHandle], store: RestartableNode
) -> None:
    """It hangs: each request ends all the same, and late answers change nothing."""
    plain, engine = fleet
    known, fresh = prompts(60), prompts(61)
    expected = found_locally_and_stored(engine, store, *known)
    engine.reset()
    engine.arm(at="load", do="stop", nth=2, node_pid=store.pid)
    found = engine.generate(*known, *fresh)
    assert state(store.pid) == "T", "no load was under way"
    assert agree(found, [*expected, *plain.alone(*fresh)])
    store.go_on()
    hits_again(engine, known, expected)
    store.wait_nothing_open()
