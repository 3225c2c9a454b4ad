"""Find the most requested prefixes: a sketch of bounded size over sampled lookups.

About one lookup in `every` is sampled, at random intervals, so that no pattern of requests hides
from it. The first found page, the head of the chain, is counted. When the table is full, a new head
replaces the least counted one and takes over its count (space-saving): a count is too high by at
most `error`, and prefixes found in more than one of `size` lookups are always present. Counts are
halved now and then.
"""

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

EVERY = 64
SIZE = 256
HALVED_S = 600.0
HEAD_NBYTES = 8  # of a prefix hash: enough to distinguish heads, too few to request a page


class HotPrefix(NamedTuple):
    """A frequently requested prefix.

    `lookups` is estimated, of which `error` may belong to others; `pages` is the mean number found.
    """

    namespace: bytes
    head: bytes
    lookups: int
    error: int
    pages: float


class _Entry:
    __slots__ = ("count", "error", "pages")

    def __init__(self, count: float) -> None:
        self.count = count
        self.error = count
        self.pages = 0.0


class HotPrefixes:
    """The sketch. Thread-safe; unsampled lookups take no lock."""

    def __init__(
        self,
        every: int = EVERY,
        size: int = SIZE,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        self._every = every
        self._size = size
        self._clock = clock
        self._random = random.Random(seed)
        self._left = every
        self._lock = threading.Lock()
        self._entries: dict[tuple[bytes, bytes], _Entry] = {}
        self._halved_s = clock()

    def observe(
        self, namespace: bytes, prefix_hashes: Sequence[bytes], present: Sequence[bool]
    ) -> None:
        """Sample a lookup."""
        self._left -= 1
        if self._left <= 0:
            self._left = self._random.randrange(1, 2 * self._every)
            if prefix_hashes and present[0]:
                found = present.index(False) if False in present else len(present)
                self._add((namespace, bytes(prefix_hashes[0][:HEAD_NBYTES])), found)

    def _add(self, key: tuple[bytes, bytes], pages: int) -> None:
        with self._lock:
            self._halve()
            entry = self._entries.get(key)
            if entry is None:
                least = 0.0
                if len(self._entries) >= self._size:
                    goes = min(self._entries, key=lambda some: self._entries[some].count)
                    least = self._entries.pop(goes).count
                entry = self._entries[key] = _Entry(least)
            entry.count += 1
            entry.pages += pages

    def _halve(self) -> None:
        now_s = self._clock()
        if now_s - self._halved_s < HALVED_S:
            return
        times = int((now_s - self._halved_s) / HALVED_S)
        self._halved_s += times * HALVED_S
        for key, entry in list(self._entries.items()):
            entry.count, entry.error, entry.pages = (
                math.ldexp(value, -times) for value in (entry.count, entry.error, entry.pages)
            )
            if entry.count < 0.1:
                del self._entries[key]

    def hottest(self) -> list[HotPrefix]:
        """Return the prefixes with most lookups, most first."""
        with self._lock:
            self._halve()
            entries = list(self._entries.items())
        told = [
            HotPrefix(
                namespace,
                head,
                round(entry.count * self._every),
                round(entry.error * self._every),
                entry.pages / max(1e-9, entry.count - entry.error),
            )
            for (namespace, head), entry in entries
        ]
        return sorted(told, key=lambda hot: -hot.lookups)
