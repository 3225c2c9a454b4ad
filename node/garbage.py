"""Python's full garbage collections, made seldom.

A full collection looks at every page there is, with the GIL: 100 ms for 262,144 pages, and Python runs one
whenever a quarter of them is new. Pages are in no cycles and are freed without it; what is left for it is
little (a closed connection and its socket, an exception and its frame) and can wait. Where calls fail as fast
as they can it adds up, so it does not wait for long, and less if their requests were large.
"""

import ctypes
import gc
import threading
import time

PAUSE_SHARE = 1e-3  # of the time, at most, goes to full collections, unless they were rarer than
INTERVAL_S_MAX = 120.0
INTERVAL_S_MIN = 60.0
REFUSED_NBYTES_MAX = 512 << 20  # what requests that were refused since the last one may have taken; then at most
PAUSE_SHARE_REFUSED = 0.05
_NEVER = 1 << 30  # collections of the middle generation between two full ones

_refused_nbytes = 0
_refused_much = threading.Event()


def refused(nbytes: int) -> None:
    """A request that took `nbytes` was refused: an exception may have kept it. Only counts; costs no lock, so one that
    is counted at the same moment in another thread may be lost."""
    global _refused_nbytes
    _refused_nbytes += nbytes
    if _refused_nbytes >= REFUSED_NBYTES_MAX:
        _refused_much.set()


class SeldomCollections:
    """From the constructor on until `stop`, in the whole process. Young objects are collected as ever."""

    def __init__(self, interval_s_min: float = INTERVAL_S_MIN) -> None:
        self._interval_s_min = interval_s_min
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
        self._stopping = threading.Event()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*self._thresholds[:2], _NEVER)
        self._thread = threading.Thread(target=self._run, name="garbage", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        global _refused_nbytes
        pause_s, interval_s = 0.0, self._interval_s_min
        while not self._stopping.wait(pause_s / PAUSE_SHARE_REFUSED):
            _refused_much.wait(interval_s - pause_s / PAUSE_SHARE_REFUSED)
            if self._stopping.is_set():
                return
            _refused_nbytes = 0
            _refused_much.clear()
            start = time.monotonic()
            gc.collect()
            pause_s = time.monotonic() - start
            interval_s = min(INTERVAL_S_MAX, max(self._interval_s_min, pause_s / PAUSE_SHARE))
            if self._trim is not None:
                self._trim(ctypes.c_size_t(0))  # what was freed goes back to the system; others run meanwhile

    def stop(self) -> None:
        self._stopping.set()
        _refused_much.set()  # it may wait for that
        self._thread.join()
        _refused_much.clear()
        gc.set_threshold(*self._thresholds)
