"""The times of full collections, on a fake clock, and the return of memory to the system."""

import ctypes
import platform
import threading
from types import SimpleNamespace

import pytest

from node import process
from node.process import SeldomCollections


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has it")
def test_glibc_trim_function_is_found() -> None:
    """Regression: the function was looked up under a wrong name, so that no memory was returned."""
    seldom = SeldomCollections()
    try:
        assert seldom._trim is not None
        seldom._trim(ctypes.c_size_t(0))
    finally:
        seldom.stop()


@pytest.mark.parametrize(("took_s", "interval_s"), [(0.01, 60.0), (0.1, 100.0), (1.0, 120.0)])
def test_pause_is_a_thousand_times_the_last_collection(
    took_s: float, interval_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause between collections is 1000 times the duration, but at least 1 and at most 2
    minutes.
    """
    now, began = [0.0], list[float]()

    class Event:
        """A fake event: `wait` moves the clock, and two collections set it."""

        def wait(self, seconds: float) -> bool:
            now[0] += seconds
            return self.is_set()

        def is_set(self) -> bool:
            return len(began) == 2

        def set(self) -> None:
            pass

        clear = set

    def collect() -> None:
        began.append(now[0])
        now[0] += took_s

    monkeypatch.setattr(process, "threading", SimpleNamespace(Event=Event, Thread=threading.Thread))
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("node.process.gc.collect", collect)
    seldom = SeldomCollections()
    seldom._thread.join(60.0)
    seldom.stop()
    assert began == pytest.approx([60.0, 60.0 + took_s + interval_s])
