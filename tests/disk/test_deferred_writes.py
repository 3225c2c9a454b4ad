"""The queue of pages that wait for space on a full disk, compared with a plain list."""

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.disk.writer import PRUNED_PER_ADD, DeferredWrites, DiskWriter
from node.memory.page import Page, State


class Space:
    """Stand in for the namespace of a page."""


def page(state: State = State.VISIBLE) -> Page:
    made = Page(Space(), b"", 0)  # type: ignore[arg-type]
    made.state = state
    return made


def test_deferred_pages_come_in_order(seed: int) -> None:
    rng, later = random.Random(seed), DeferredWrites()
    came: list[tuple[int, Page]] = []
    for due in range(5000):
        came.append((due, page()))
        later.add(*came[-1], count_max=64)
        if rng.random() < 0.4:
            rng.choice(came)[1].state = State.DOOMED
        if rng.random() < 0.3:
            due_first, first = later.first()
            assert later.pop() is first
            while came[0][1] is not first:
                assert came.pop(0)[1].state is State.DOOMED, (
                    "a page that is still in RAM was skipped"
                )
            assert came.pop(0) == (due_first, first)
    left = [later.pop() for _ in range(len(later))]
    assert [waiting for waiting in left if waiting.state is State.VISIBLE] == [
        waiting for _, waiting in came if waiting.state is State.VISIBLE
    ]
    with pytest.raises(IndexError):
        later.first()


def test_evicted_pages_are_dropped_a_few_at_a_time() -> None:
    later = DeferredWrites()
    for due in range(1000):
        later.add(due, page(State.DOOMED if due % 2 else State.VISIBLE), count_max=1000)
    lengths = []
    for due in range(1000, 2000):
        before = len(later)
        later.add(due, page(), count_max=1000)
        assert len(later) >= before + 1 - PRUNED_PER_ADD
        lengths.append(len(later))
    assert max(lengths[:500]) <= 1000, "the queue grew while it had evicted pages to drop"
    assert lengths[-1] == 1500, "pages that are still in RAM stay"


def test_tenant_fills_the_queue_only_in_proportion_beside_tenants_with_quotas() -> None:
    """A tenant that floods the queue leaves room for the next one."""
    writer = DiskWriter.__new__(DiskWriter)
    writer._queue_nbytes_max, writer.queue_nbytes, writer._queued = 100, 0, Counter()
    accounts = SimpleNamespace(any_limited=True)
    order = SimpleNamespace(accounts=accounts)
    writer._tier = cast(Any, SimpleNamespace(eviction=SimpleNamespace(order=order)))

    def space(tenant: str) -> Any:
        return SimpleNamespace(slot_nbytes=10, value=SimpleNamespace(tenant=tenant))

    def take(tenant: str) -> bool:
        fits = writer._fits(space(tenant))
        if fits:
            writer.queue_nbytes += 10
            writer._queued[tenant] += 10
        return fits

    assert [take("loud") for _ in range(10)].count(True) == 5
    assert take("quiet")
    accounts.any_limited = False
    assert [take("loud") for _ in range(10)].count(True) == 4
