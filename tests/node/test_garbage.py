"""Full collections of Python's garbage collector: rare, and independent of the number of pages."""

import gc
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
from waiting import wait_until

from node import process
from node.memory.page import Page
from node.process import SeldomCollections


class Space:
    """The part of a namespace that a page refers to."""


class Ring:
    """An object in a reference cycle, which only a collection frees."""

    def __init__(self) -> None:
        self.ring = self


def full_count() -> int:
    return gc.get_stats()[2]["collections"]


def many_pages(count: int) -> list[Page]:
    space = Space()
    return [Page(space, number.to_bytes(32, "big"), 0) for number in range(count)]  # type: ignore[arg-type]


def test_new_pages_cause_no_full_collection() -> None:
    """Python alone would run a full collection for each growth by a quarter."""
    gc.collect()
    gc.freeze()  # so that objects of earlier tests do not count
    gc.collect()
    before = full_count()
    kept = many_pages(200_000)
    # Newer versions collect in increments, and run full collections only on request
    if sys.version_info < (
        3,
        14,
    ):
        assert full_count() > before, "Python ran no full collection, so this test shows nothing"
    seldom = SeldomCollections()
    try:
        before = full_count()
        kept += many_pages(200_000)
        assert full_count() == before
    finally:
        seldom.stop()


def test_reference_cycles_are_still_freed() -> None:
    thresholds = gc.get_threshold()
    ring = Ring()
    gc.collect()  # moves it to the oldest generation
    gone = threading.Event()
    weakref.finalize(ring, gone.set)
    seldom = SeldomCollections(interval_s_min=0.01)
    try:
        del ring
        assert gone.wait(30.0)
    finally:
        seldom.stop()
    assert gc.get_threshold() == thresholds


def test_slow_collection_delays_the_next_by_two_minutes_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a delay of 1000 times the duration was an hour, in which failing calls left
    hundreds of MiB.
    """
    assert process.INTERVAL_S_MAX == 120.0
    monkeypatch.setattr(process, "INTERVAL_S_MAX", 0.01)
    again = threading.Semaphore(0)
    monkeypatch.setattr(
        "node.process.gc.collect", lambda: (threading.Event().wait(0.03), again.release())
    )
    seldom = SeldomCollections(interval_s_min=0.001)
    try:
        assert all(again.acquire(timeout=60.0) for _ in range(3))
    finally:
        seldom.stop()


def test_memory_freed_by_a_collection_returns_to_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trimmed = threading.Event()
    libc = SimpleNamespace(malloc_trim=lambda pad: trimmed.set())
    monkeypatch.setattr("node.process.ctypes.CDLL", lambda name: libc)
    seldom = SeldomCollections(interval_s_min=0.01)
    try:
        assert trimmed.wait(30.0)
    finally:
        seldom.stop()


def test_full_collections_take_a_thousandth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection that takes 30 ms is not followed by another for 30 s."""
    times: list[float] = []

    def slow() -> None:
        times.append(time.monotonic())
        threading.Event().wait(0.03)

    monkeypatch.setattr("node.process.gc.collect", slow)
    seldom = SeldomCollections(interval_s_min=0.001)
    wait_until(lambda: times)
    threading.Event().wait(0.5)
    seldom.stop()
    assert len(times) == 1
