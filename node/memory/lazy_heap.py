"""Order things by a number that may change, such as the end of a pin, without any I/O."""

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

SPARE = 64  # outdated entries kept beside as many as there are things
# entries visited with each change, so that an old heap is empty before the next one is old
SWEPT = 4


class LazyHeap(Generic[T]):
    """A heap with changeable keys.

    It keeps entries of replaced keys; once they are the greater part, the heap is swept a few
    entries at a time, so that no call takes longer the more things there are. Not thread-safe.
    """

    def __init__(self) -> None:
        self._entries: dict[
            T, tuple[int, int, T]
        ] = {}  # (key, number, thing); the number breaks ties
        self._heap: list[tuple[int, int, T]] = []
        self._swept: list[tuple[int, int, T]] = []  # a heap too: the rest of the previous one
        self._number = 0

    def __contains__(self, thing: T) -> bool:
        return thing in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return iter(self._entries)

    def key(self, thing: T) -> int | None:
        """Return a thing's key; None if it is not there."""
        entry = self._entries.get(thing)
        return None if entry is None else entry[0]

    def put(self, thing: T, key: int) -> None:
        """Add a thing, or replace its key."""
        self._number += 1
        entry = self._entries[thing] = (key, self._number, thing)
        heapq.heappush(self._heap, entry)
        self._sweep()

    def discard(self, thing: T) -> bool:
        """Remove a thing; return False if it was not there."""
        if self._entries.pop(thing, None) is None:
            return False
        self._sweep()
        return True

    def first(self, entries_max: int) -> tuple[int, T] | None:
        """Return (key, thing) of the smallest key; None if there is none, or more outdated entries.

        After a None, another call continues behind them.
        """
        for _ in range(entries_max):
            heap = self._top()
            if not heap:
                return None
            key, _number, thing = heap[0]
            if self._entries.get(thing) is heap[0]:
                return key, thing
            heapq.heappop(heap)
        return None

    def take(self, key_max: int, entries_max: int) -> list[T]:
        """Remove and return things with at most this key.

        It visits so many entries; another call continues.
        """
        things: list[T] = []
        for _ in range(entries_max):
            heap = self._top()
            if not heap:
                break
            entry = heap[0]
            is_current = self._entries.get(entry[2]) is entry
            if is_current and entry[0] > key_max:
                break
            heapq.heappop(heap)
            if is_current:
                del self._entries[entry[2]]
                things.append(entry[2])
        return things

    def _top(self) -> list[tuple[int, int, T]]:
        """Return the heap with the smallest first entry; empty if there is none."""
        return (
            self._swept
            if self._swept and self._swept < self._heap[:1]
            else self._heap or self._swept
        )

    def _sweep(self) -> None:
        if not self._swept and len(self._heap) > 2 * len(self._entries) + SPARE:
            self._swept, self._heap = self._heap, []
        for _ in range(min(SWEPT, len(self._swept))):
            entry = self._swept.pop()  # the last entry of a heap may be removed: the rest is a heap
            if self._entries.get(entry[2]) is entry:
                heapq.heappush(self._heap, entry)

    @property
    def entry_count(self) -> int:
        """Return the number of entries, outdated ones included."""
        return len(self._heap) + len(self._swept)


LOOKED_AT = 64  # sizes checked for the oldest page; results stay known


class OldestBySize:
    """Slot sizes by the last use of their oldest page, as far as known.

    A use of that page is noticed when the size is visited next, so uses cost nothing here.
    `oldest(size)` returns when the oldest evictable page was used, None if there is none; `paused`
    says that the search must stop. Not thread-safe.
    """

    def __init__(self, oldest: Callable[[int], int | None], paused: Callable[[], bool]) -> None:
        self._oldest = oldest
        self._paused = paused
        self._ages: LazyHeap[int] = LazyHeap()

    def __contains__(self, size: int) -> bool:
        return size in self._ages

    def add(self, size: int, used: int) -> None:
        """Note that a size has an evictable page with this last use."""
        known = self._ages.key(size)
        if known is None or used < known:
            self._ages.put(size, used)

    def discard(self, size: int) -> None:
        """Forget a size."""
        self._ages.discard(size)

    def older(self, than: int | None, but: int, count: int) -> list[int]:
        """Return other sizes whose oldest page is older than `than` (None: any), oldest first.

        A size without evictable pages is forgotten; the caller adds it when a page becomes
        evictable.
        """
        found: list[tuple[int, int]] = []
        for _ in range(LOOKED_AT):
            first = self._ages.first(LOOKED_AT)
            if first is None or (than is not None and first[0] >= than) or len(found) > count:
                break
            used, size = first
            actual = self._oldest(size)
            if actual is None and self._paused():
                break
            self._ages.discard(size)
            if actual == used:
                found.append(first)
            elif actual is not None:
                self._ages.put(size, actual)
        for used, size in found:
            self._ages.put(size, used)
        return [size for _, size in found if size != but][:count]
