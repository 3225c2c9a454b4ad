"""Reads from disk that are under way, and whether one of them hangs.

Nobody can end a read that hangs, and whoever began it waits for it. Others need not begin one: as long as it hangs,
what is on disk only is not there, and is computed anew, which is sooner done.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

HANGS_S = 2.0  # a read of a page takes milliseconds, and on a disk with much to do tenths of a second


class Reads:
    """Thread-safe. `ended(record)` is called behind each."""

    def __init__(self, ended: Callable[[int], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._ended = ended
        self._clock = clock
        self._lock = threading.Lock()
        self._begun: dict[object, float] = {}  # oldest first
        self._told: object = None

    @contextlib.contextmanager
    def of(self, record: int) -> Iterator[None]:
        this = object()
        with self._lock:
            self._begun[this] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                del self._begun[this]
            self._ended(record)

    @property
    def hang(self) -> bool:
        with self._lock:
            oldest = next(iter(self._begun), None)
            if oldest is None or self._clock() - self._begun[oldest] < HANGS_S:
                return False
            first, self._told = oldest is not self._told, oldest
        if first:
            log.error("a read from disk has taken %g s: until it ends, pages on disk are misses", HANGS_S)
        return True
