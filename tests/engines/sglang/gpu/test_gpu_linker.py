"""The linker on a GPU: our kernels copy pages between SGLang's pool and the store.

Copies overlap with the computation of layers.
"""

import signal
from collections.abc import Callable, Iterator

import pytest
from endings import ended
from engine_answers import agree, answers, cached, found_locally, prompt
from restartable_node import RestartableNode
from sglang_handle import (
    SGLangHandle,
    check_partial_hit,
    check_store_hits,
    found_locally_and_stored,
    from_store,
    linker,
    wait_hit,
)

Engines = Callable[..., SGLangHandle]
Pair = tuple[SGLangHandle, SGLangHandle]
FAILED = "503: External KV cache load failed"
COUNT = 8


@pytest.fixture(scope="module")
def fleet(engines: Engines, store: RestartableNode) -> Pair:
    """Return (writer, reader); the reader's store fails when armed."""
    return (
        engines("writer", **linker(store.address, hold_s=2.0)),
        engines(
            "victim",
            disable_cuda_graph=False,
            **linker(store.address, module="faulty", load_timeout_s=2.0),
        ),
    )


@pytest.fixture(autouse=True)
def node_is_back(store: RestartableNode) -> Iterator[None]:
    yield
    if not store.running:
        store.start()


def test_store_hit_answers_like_a_local_hit(fleet: Pair, store: RestartableNode) -> None:
    """Compare with local hits of the same and of another process."""
    check_store_hits(*fleet, store)


def test_partial_hit_answers_like_a_local_hit(fleet: Pair, store: RestartableNode) -> None:
    check_partial_hit(*fleet, store)


def test_hits_and_misses_in_one_batch(fleet: Pair, store: RestartableNode) -> None:
    writer, reader = fleet
    head = prompt(20, 640)
    some = [head + prompt(21 + i, 20 + 90 * i) for i in range(4)]
    others = [prompt(30 + i, 400 + 77 * i) for i in range(4)]
    expected = writer.alone(*some, *others, salts=["computed anew"])
    found_locally_and_stored(writer, store, some[3], others[1])
    reader.reset()
    found = reader.generate(*some, *others)
    assert cached(found)[3] >= 640
    assert from_store(found)[5] == 448
    assert cached(found)[4] == cached(found)[6] == cached(found)[7] == 0
    assert agree(found, expected)


@pytest.mark.parametrize(("do", "nth"), [("kill", 1), ("kill", 4), ("die", 2)])
def test_node_killed_during_loads(do: str, nth: int, fleet: Pair, store: RestartableNode) -> None:
    """Requests with a promised load fail, as SGLang prescribes; the others succeed.

    The engine keeps serving.
    """
    writer, engine = fleet
    known = [prompt(100 * nth + i, 1200) for i in range(COUNT)]
    fresh = [prompt(100 * nth + 50 + i, 1200) for i in range(2)]
    expected = found_locally_and_stored(writer, store, *known) + writer.alone(
        *fresh, salts=["computed anew"]
    )
    store.flush()
    engine.reset()
    engine.arm(at="load", do=do, nth=nth, node_pid=store.pid)
    found = engine.generate(*known, *fresh)
    assert not store.running, "no load was in progress"
    ends = [one["finish"] for one in found]
    assert set(ends) <= {"length", FAILED}
    assert FAILED in ends[:COUNT]
    assert ends[COUNT:] == ["length"] * len(fresh)
    whole = [place for place, end in enumerate(ends) if end == "length"]
    assert agree([found[place] for place in whole], [expected[place] for place in whole])
    again = engine.generate(*known, *fresh)
    assert {one["finish"] for one in again} == {"length"}
    assert agree(again, expected)
    store.start()
    for one in known:
        wait_hit(engine, one)
    assert answers(engine.alone(*known)) == answers(found_locally(engine, *known))


def test_ended_engines_leave_nothing_behind(fleet: Pair, store: RestartableNode) -> None:
    writer, engine = fleet
    ended(writer, signal.SIGTERM)
    ended(engine, signal.SIGKILL)
    store.wait_nothing_open()
