"""Order pages by use: an intrusive doubly linked list, O(1) per use, 16 bytes per page.

oldest -> ... -> newest          (a batch is touched tail -> head: its head ends up newest)
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from node.memory.lock_slices import StepBudget
from node.memory.page import Page

# Held pages found at the LRU end, set aside so that eviction skips each only once.
#
#     aside (in use)        returned            oldest -> ... -> newest
#       1  3  4               2  5                 pages in their usual order
#
# A search for the oldest page sets held ones aside, with a number. When its use ends, a page is
# returned: older than all in the usual order, and sorted by number among the returned ones. So the
# order stays exact, however many pages are held.

T = TypeVar("T")


class HeldEntries(Generic[T]):
    """Entries set aside by a search for the oldest. Not thread-safe."""

    __slots__ = ("_number", "_numbers", "_returned")

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}  # negative once returned
        self._returned: list[tuple[int, T]] = []  # a heap; entries that were removed are outdated
        self._number = 0

    def __contains__(self, thing: T) -> bool:
        return thing in self._numbers

    def __iter__(self) -> Iterator[T]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def put(self, thing: T) -> None:
        """Set aside the oldest page, which may not be evicted now."""
        self._number += 1
        self._numbers[thing] = self._number

    def give_back(self, thing: T) -> bool:
        """Make a page evictable again.

        Return False if it was not set aside.
        """
        number = self._numbers.get(thing, 0)
        if number <= 0:
            return False
        self._numbers[thing] = -number
        heapq.heappush(self._returned, (number, thing))
        return True

    def discard(self, thing: T) -> bool:
        """Forget a page that is in the usual order again, or removed.

        Return False if it was not set aside.
        """
        return self._numbers.pop(thing, None) is not None

    def oldest(self, is_evictable: Callable[[T], bool], looked_at: Callable[[], bool]) -> T | None:
        """Return the oldest returned entry that may be evicted; `looked_at` limits the search."""
        while self._returned:
            number, thing = self._returned[0]
            is_here = self._numbers.get(thing) == -number
            if is_here and is_evictable(thing):
                return thing
            if not looked_at():
                return None
            if is_here:
                self._numbers[thing] = number
            heapq.heappop(self._returned)
        return None

    def check(self, is_evictable: Callable[[T], bool]) -> list[str]:
        """Return violations of what must always hold; empty if all is well."""
        returned = {(-number, thing) for number, thing in self._returned}
        wrong = []
        for thing, number in self._numbers.items():
            if (number < 0) != ((number, thing) in returned) or (
                number > 0 and is_evictable(thing)
            ):
                wrong.append(f"{thing} is aside, may go, and is not returned")
        return wrong


class LruList:
    """Pages of one slot size that may be evicted once they are not held.

    A page is in at most one list.
    """

    __slots__ = ("_aside", "_root", "count")

    def __init__(self) -> None:
        self._root = root = Page.__new__(Page)  # sentinel: root.newer is the oldest page
        root.newer = root.older = root
        # Held pages that a search for the oldest would visit again and again
        self._aside: HeldEntries[Page] = HeldEntries()
        self.count = 0  # including set-aside pages

    def push_newest(self, page: Page) -> None:
        """Add a page as the newest."""
        assert page.newer is None
        root, newest = self._root, self._root.older
        assert newest is not None
        page.older, page.newer = newest, root
        newest.newer = root.older = page
        self.count += 1

    def push_oldest(self, page: Page) -> None:
        """Add a page as the oldest."""
        assert page.newer is None
        root, oldest = self._root, self._root.newer
        assert oldest is not None
        page.older, page.newer = root, oldest
        oldest.older = root.newer = page
        self.count += 1

    def unlink(self, page: Page) -> None:
        """Remove a page."""
        older, newer = page.older, page.newer
        if newer is None:
            was_aside = self._aside.discard(page)
            assert was_aside
        else:
            assert older is not None
            older.newer, newer.older = newer, older
            page.older = page.newer = None
        self.count -= 1

    def move_newest(self, page: Page) -> None:
        """Make a page the newest."""
        older, newer = page.older, page.newer
        if newer is None:
            self.unlink(page)
            self.push_newest(page)
            return
        assert older is not None
        older.newer, newer.older = newer, older
        root = self._root
        newest = root.older
        assert newest is not None
        page.older, page.newer = newest, root
        newest.newer = root.older = page

    def oldest(self, budget: StepBudget) -> Page | None:
        """Return the oldest page that is not held; None if there is none, or the slice is over."""
        if self._aside and (page := self._aside.oldest(_is_evictable, budget.take)) is not None:
            return page
        root = self._root
        while budget.left > 0 and (first := root.newer) is not root:
            assert first is not None
            if not first.holds:
                return first
            budget.left -= 1
            self.unlink(first)
            self.count += 1
            self._aside.put(first)
        return None

    def oldest_run(self, budget: StepBudget, count: int) -> list[Page]:
        """Return `oldest` and those after it up to the first that is held, at most `count`."""
        run: list[Page] = []
        page = self.oldest(budget)
        while page is not None and page is not self._root and not page.holds and len(run) < count:
            run.append(page)
            page = page.newer  # None if it was set aside
        return run

    def give_back(self, page: Page) -> bool:
        """End the last hold of a page.

        Return whether it was set aside, and may be the oldest now.
        """
        return self._aside.give_back(page)

    def oldest_first(self) -> Iterator[Page]:
        """Yield all pages but set-aside ones.

        Meanwhile only the page being visited may be unlinked.
        """
        page = self._root.newer
        while page is not self._root:
            assert page is not None
            following = page.newer
            yield page
            page = following

    def pages(self) -> list[Page]:
        """Return all pages; set-aside ones first, in no order."""
        return [*self._aside, *self.oldest_first()]

    def __contains__(self, page: Page) -> bool:
        return page.newer is not None or page in self._aside

    def check(self) -> list[str]:
        """Return violations of what must always hold; empty if all is well."""
        pages = self.pages()
        wrong = [] if len(pages) == self.count else [f"{len(pages)} pages, {self.count} counted"]
        return wrong + self._aside.check(_is_evictable)


def _is_evictable(page: Page) -> bool:
    return not page.holds


COPIES_FIRST_MS = 1 << 62  # added to a copy's age


def rank_ms(page: Page) -> int:
    """Return the number by which pages of different sizes are compared."""
    return page.used_ms - COPIES_FIRST_MS if page.is_copy else page.used_ms
