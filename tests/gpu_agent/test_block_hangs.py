"""A store that answers lookups and hangs in loads, beside an engine's scheduler."""

from typing import Any

import pytest
from block_store import TOKENS, FakeRequest, MakeStore

from gpu_agent.blocks.cost_model import PAUSE_S_MAX, HitPolicy
from gpu_agent.blocks.save_plan import Report
from kvstore.transports.channel import CircuitBreaker


def hangs(store: Any, name: str) -> list[int]:
    """What a hit is offered, again and again; a load that is ordered ends unfinished."""
    request = FakeRequest(name, TOKENS)
    store.scheduler.ask(request)
    offered = [store.matched(request) for _ in range(2)]
    if offered[0]:
        store.scheduler.allocated(request, [[11, 12, 13, 14, 15]], 64)
        step = store.scheduler.step({}, dict).step
        request.num_computed_tokens = 0
        store.scheduler.ran(Report(step, finished={name: 1}, failed={name}))
    store.scheduler.finished(request, [[]])
    return offered


def test_hanging_loads_delay_few_requests(
    stores: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that lets lookups pass and no page: each request with a hit waited until its load's
    deadline.
    """
    now = [1000.0]
    store = stores()
    store.scheduler._hits._hangs = CircuitBreaker("loads", PAUSE_S_MAX, lambda: now[0])
    store.save(FakeRequest("first", TOKENS), [1, 2, 3, 4, 5])
    assert [hangs(store, f"gone {i}") for i in range(3)] == [
        [64, 64]
    ] * 3  # a page that is gone is soon told
    monkeypatch.setattr("gpu_agent.blocks.cost_model.HUNG_S", 0.0)
    assert hangs(store, "hangs") == [64, 64]
    for pause_s in (0.1, 0.2, 0.4):
        assert [hangs(store, f"waits {pause_s} {i}") for i in range(3)] == [[0, 0]] * 3
        now[0] += pause_s + 0.01
        assert hangs(store, f"tries {pause_s}") == [64, 64]
    assert store.scheduler.take_counts().hits_declined == 9
    now[0] += PAUSE_S_MAX
    well = FakeRequest("well", TOKENS)
    store.scheduler.ask(well)
    assert store.matched(well) == 64
    store.scheduler.allocated(well, [[11, 12, 13, 14, 15]], 64)
    assert store.loaded().failed == set()
    assert hangs(store, "again") == [64, 64]


class Clocked(HitPolicy):
    """With a clock that is moved by hand, and without `worth`."""

    def __init__(self) -> None:
        super().__init__(None)
        self.now = 1000.0
        self._hangs = CircuitBreaker("loads", PAUSE_S_MAX, lambda: self.now, lambda: 0.0)

    def taken_after(self, seconds: float) -> bool:
        self.now += seconds
        return self.accepts(0, 100, alone=False, granted=False)


def test_hits_pause_as_long_as_a_load_hung_and_twice_as_long_after_the_next() -> None:
    """What `docs/engines/vllm.md` says.

    The breaker's own pauses, a tenth of a second and up, passed for it.
    """
    hits = Clocked()
    for pause_s in (10.0, 20.0, 40.0, 60.0, 60.0):
        hits.failed(10.0)
        assert not hits.taken_after(pause_s - 0.01), pause_s
        assert hits.taken_after(0.02), pause_s


def test_a_load_that_ends_well_ends_the_doubling() -> None:
    hits = Clocked()
    for _ in range(3):
        hits.failed(10.0)
        assert hits.taken_after(PAUSE_S_MAX + 1.0)
    hits.succeeded()
    hits.failed(10.0)
    assert hits.taken_after(10.1)


@pytest.mark.parametrize(("seconds", "taken"), [(0.99, True), (1.0, False)])
def test_a_load_that_failed_sooner_than_after_a_second_met_a_page_that_is_gone(
    seconds: float, taken: bool
) -> None:
    hits = Clocked()
    hits.failed(seconds)
    assert hits.taken_after(0.0) == taken


def test_a_load_that_fails_on_several_ranks_hung_once(
    stores: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports name a request again while its other ranks end: each of them doubled the pause."""
    store, failed = stores(), list[float]()
    request = FakeRequest("one", TOKENS)
    store.scheduler.ask(request)
    monkeypatch.setattr(store.scheduler._hits, "failed", failed.append)
    for step in (1, 2):
        store.scheduler.ran(Report(step, failed={"one"}))
    store.scheduler.finished(request, [[]])
    assert len(failed) == 1
