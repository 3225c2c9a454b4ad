"""Python's full garbage collections, made seldom.

A full collection looks at every page there is, with the GIL: 100 ms for 262,144 pages, and Python runs one
whenever a quarter of them is new. Pages are in no cycles and are freed without it; what is left for it is
little (a closed connection and its socket, an exception and its frame) and can wait. Where calls fail as fast
as they can it adds up, so it does not wait for long.
"""

import ctypes
import gc
import threading
import time

PAUSE_SHARE = 1e-3  # of the time, at most, goes to full collections, unless they were rarer than
INTERVAL_S_MAX = 120.0
INTERVAL_S_MIN = 60.0
_NEVER = 1 << 30  # collections of the middle generation between two full ones


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
        interval_s = self._interval_s_min
        while not self._stopping.wait(interval_s):
            start = time.monotonic()
            gc.collect()
            pause_s = time.monotonic() - start
            interval_s = min(INTERVAL_S_MAX, max(self._interval_s_min, pause_s / PAUSE_SHARE))
            if self._trim is not None:
                self._trim(ctypes.c_size_t(0))  # what was freed goes back to the system; others run meanwhile

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        gc.set_threshold(*self._thresholds)
