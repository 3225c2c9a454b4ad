"""When full collections are made, with a clock that is moved by hand; and that there is a way to
give memory back.
"""

import ctypes
import platform
import threading
from types import SimpleNamespace

import pytest

from node import process
from node.process import SeldomCollections


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has it")
def test_this_system_has_a_way_to_take_memory_back() -> None:
    """A function that is looked for under a wrong name is as one that is not there: nothing went
    back to the system.
    """
    seldom = SeldomCollections()
    try:
        assert seldom._trim is not None
        seldom._trim(ctypes.c_size_t(0))
    finally:
        seldom.stop()


@pytest.mark.parametrize(("took_s", "interval_s"), [(0.01, 60.0), (0.1, 100.0), (1.0, 120.0)])
def test_a_collection_is_followed_by_a_thousand_times_its_length(
    took_s: float, interval_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a minute and two.

    A node whose collections take a hundredth of the time passed for one.
    """
    now, began = [0.0], list[float]()

    class Event:
        """Nothing happens but time, until two collections were made."""

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
    seldom._thread.join(10.0)
    seldom.stop()
    assert began == pytest.approx([60.0, 60.0 + took_s + interval_s])
