"""A store that answers lookups but hangs in loads, with an engine's scheduler."""

from typing import Any

import pytest
from block_store import TOKENS, FakeRequest, MakeStore

from gpu_agent.blocks.cost_model import PAUSE_S_MAX, HitPolicy
from gpu_agent.blocks.save_plan import Report
from kvstore.transports.channel import CircuitBreaker


def offer_hit(store: Any, name: str) -> list[int]:
    """Return the hit offered to a request, twice; a load that it orders then fails."""
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
    """Regression: where only loads hung, each request waited until its load's deadline."""
    now = [1000.0]
    store = stores()
    store.scheduler._hit_policy._hangs = CircuitBreaker("loads", PAUSE_S_MAX, lambda: now[0])
    store.save(FakeRequest("first", TOKENS), [1, 2, 3, 4, 5])
    assert [offer_hit(store, f"gone {i}") for i in range(3)] == [
        [64, 64]
    ] * 3  # loads of missing pages fail fast
    monkeypatch.setattr("gpu_agent.blocks.cost_model.HUNG_S", 0.0)
    assert offer_hit(store, "hangs") == [64, 64]
    for pause_s in (0.1, 0.2, 0.4):
        assert [offer_hit(store, f"waits {pause_s} {i}") for i in range(3)] == [[0, 0]] * 3
        now[0] += pause_s + 0.01
        assert offer_hit(store, f"tries {pause_s}") == [64, 64]
    assert store.scheduler.take_counts().hits_declined == 9
    now[0] += PAUSE_S_MAX
    well = FakeRequest("well", TOKENS)
    store.scheduler.ask(well)
    assert store.matched(well) == 64
    store.scheduler.allocated(well, [[11, 12, 13, 14, 15]], 64)
    assert store.loaded().failed == set()
    assert offer_hit(store, "again") == [64, 64]


class Clocked(HitPolicy):
    """A policy with a manual clock and without a cost model."""

    def __init__(self) -> None:
        super().__init__(None)
        self.now = 1000.0
        self._hangs = CircuitBreaker("loads", PAUSE_S_MAX, lambda: self.now, lambda: 0.0)

    def taken_after(self, seconds: float) -> bool:
        self.now += seconds
        return self.accepts(0, 100, alone=False, granted=False)


def test_pause_of_hits_starts_at_the_hang_time_and_doubles() -> None:
    """The pauses are those in `docs/engines/vllm.md`.

    Regression: the breaker's own pauses, from 0.1 s on, were used.
    """
    hits = Clocked()
    for pause_s in (10.0, 20.0, 40.0, 60.0, 60.0):
        hits.failed(10.0)
        assert not hits.taken_after(pause_s - 0.01), pause_s
        assert hits.taken_after(0.02), pause_s


def test_successful_load_resets_the_pause() -> None:
    hits = Clocked()
    for _ in range(3):
        hits.failed(10.0)
        assert hits.taken_after(PAUSE_S_MAX + 1.0)
    hits.succeeded()
    hits.failed(10.0)
    assert hits.taken_after(10.1)


@pytest.mark.parametrize(("seconds", "taken"), [(0.99, True), (1.0, False)])
def test_load_that_failed_within_a_second_is_no_hang(seconds: float, taken: bool) -> None:
    hits = Clocked()
    hits.failed(seconds)
    assert hits.taken_after(0.0) == taken


def test_load_failed_on_several_ranks_counts_as_one_hang(
    stores: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: reports name a failed request again for each rank, and each doubled the pause."""
    store, failed = stores(), list[float]()
    request = FakeRequest("one", TOKENS)
    store.scheduler.ask(request)
    monkeypatch.setattr(store.scheduler._hit_policy, "failed", failed.append)
    for step in (1, 2):
        store.scheduler.ran(Report(step, failed={"one"}))
    store.scheduler.finished(request, [[]])
    assert len(failed) == 1
