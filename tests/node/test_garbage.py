"""Full collections of Python's garbage: not because of pages, and still now and then."""

import gc
import sys
import threading
import time
import weakref

import pytest

from node import process
from node.memory.page import Page
from node.process import SeldomCollections


class Space:
    """As much of a namespace as a page refers to."""


class Ring:
    """In a cycle with itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.ring = self


def full_count() -> int:
    return gc.get_stats()[2]["collections"]


def many_pages(count: int) -> list[Page]:
    space = Space()
    return [Page(space, number.to_bytes(32, "big"), 0) for number in range(count)]  # type: ignore[arg-type]


def test_new_pages_are_no_reason_for_a_full_collection() -> None:
    """Python alone would have one for each quarter more."""
    gc.collect()
    gc.freeze()  # a quarter of nothing: what the tests before this one keep is not counted
    gc.collect()
    before = full_count()
    kept = many_pages(200_000)
    # Which collects in increments, and has full collections only when asked
    if sys.version_info < (
        3,
        14,
    ):
        assert full_count() > before, "this test shows nothing: Python collects differently now"
    seldom = SeldomCollections()
    try:
        before = full_count()
        kept += many_pages(200_000)
        assert full_count() == before
    finally:
        seldom.stop()


def test_cycles_are_freed_all_the_same() -> None:
    thresholds = gc.get_threshold()
    ring = Ring()
    gc.collect()  # it is old now
    gone = threading.Event()
    weakref.finalize(ring, gone.set)
    seldom = SeldomCollections(interval_s_min=0.01)
    try:
        del ring
        assert gone.wait(30.0)
    finally:
        seldom.stop()
    assert gc.get_threshold() == thresholds


def test_a_slow_collection_puts_the_next_one_off_for_two_minutes_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand times as long as it took was an hour, in which calls that fail left hundreds of
    MiB.
    """
    assert process.INTERVAL_S_MAX == 120.0
    monkeypatch.setattr(process, "INTERVAL_S_MAX", 0.01)
    again = threading.Semaphore(0)
    monkeypatch.setattr(
        "node.process.gc.collect", lambda: (threading.Event().wait(0.03), again.release())
    )
    seldom = SeldomCollections(interval_s_min=0.001)
    try:
        assert all(again.acquire(timeout=10.0) for _ in range(3))
    finally:
        seldom.stop()


def test_memory_freed_by_a_collection_returns_to_the_system() -> None:
    trimmed = threading.Event()
    seldom = SeldomCollections(interval_s_min=0.1)
    seldom._trim = lambda pad: trimmed.set()
    try:
        assert trimmed.wait(30.0)
    finally:
        seldom.stop()


def test_full_collections_take_a_thousandth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes 30 ms is not followed by another before 30 s."""
    times: list[float] = []

    def slow() -> None:
        times.append(time.monotonic())
        threading.Event().wait(0.03)

    monkeypatch.setattr("node.process.gc.collect", slow)
    seldom = SeldomCollections(interval_s_min=0.001)
    threading.Event().wait(0.5)
    seldom.stop()
    assert len(times) == 1
