"""Pages of which one goes when room is needed: of one tenant that has a quota, or of all who have none.

Of each slot size copies, then others, in order of use; and which size has the oldest. Not thread-safe: the tier's lock
guards it. No call takes longer the more pages, sizes or holds there are.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from kvstore.keys import short
from node.ram.ages import Ages
from node.ram.page import Page, State
from node.ram.sizes import SizeOrder, rank_ms
from node.ram.turn import Turn


class Pool:
    """`turn` is that of whoever has the lock."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._lists: dict[int, SizeOrder] = {}  # by slot size
        self._ages = Ages(self._oldest_ms, lambda: turn.over)

    # ---- a page's life -------------------------------------------------------------------

    def admit(self, pages: Sequence[Page]) -> None:
        """From now on they may go, as the newest, one after the other. All have one size."""
        lru = self._list(pages)
        lru.push_newest(pages)
        for page in pages:
            if page.is_copy or not lru.is_known:
                self._make_known(lru, page)

    def admit_oldest(self, page: Page) -> None:
        """The same, as the oldest."""
        lru = self._list([page])
        lru.push_oldest(page)
        self._make_known(lru, page)

    def _list(self, pages: Sequence[Page]) -> SizeOrder:
        """For these, which are going to be in it."""
        size = pages[0].namespace.slot_nbytes
        lru = self._lists.get(size)
        if lru is None:
            lru = self._lists[size] = SizeOrder(self)
        for page in pages:
            page.order = lru
        return lru

    def _make_known(self, lru: SizeOrder, page: Page) -> None:
        lru.is_known = True
        self._ages.add(page.namespace.slot_nbytes, rank_ms(page))

    def came_back(self, page: Page) -> None:
        """One that was held when it was the oldest is the newest."""
        lru = self._lists[page.namespace.slot_nbytes]
        if page.is_copy or not lru.is_known:
            self._make_known(lru, page)

    def withdraw(self, page: Page) -> None:
        """It may not go any more, or has gone."""
        size = page.namespace.slot_nbytes
        lru = self._lists[size]
        lru.unlink(page)
        page.order = None
        if not lru.count:
            del self._lists[size]
            self._ages.discard(size)

    def give_back(self, page: Page) -> None:
        """Nobody holds it any more."""
        lru = self._lists[page.namespace.slot_nbytes]
        if lru.give_back(page):
            self._make_known(lru, page)

    # ---- who is oldest -------------------------------------------------------------------

    def oldest_first(self, slot_nbytes: int) -> Iterator[Page]:
        """Pages of this size, but for those held that were in the way. Nothing may change meanwhile."""
        lru = self._lists.get(slot_nbytes)
        return lru.oldest_first() if lru is not None else iter(())

    def oldest(self, slot_nbytes: int) -> Page | None:
        """Oldest page of a slot size that nobody holds. None: there is none, or the turn is over."""
        lru = self._lists.get(slot_nbytes)
        return lru.oldest(self._turn) if lru is not None else None

    def is_younger(self, slot_nbytes: int) -> bool:
        """Whether another size has a page that is older than the oldest of this one, which may be held."""
        if not self._lists or (len(self._lists) == 1 and slot_nbytes in self._lists):
            return False
        ours = self.oldest(slot_nbytes)
        return ours is None or bool(self._ages.older(rank_ms(ours), slot_nbytes, 1))

    def eldest(self, slot_nbytes: int, count: int) -> list[Page]:
        """Some of the oldest pages of a slot size that nobody holds, the oldest first."""
        first = self.oldest(slot_nbytes)
        if first is None:
            return []
        following = islice(self._lists[slot_nbytes].oldest_first(), count)
        return [first, *(page for page in following if page is not first and not page.holds)]

    def _oldest_ms(self, size: int) -> int | None:
        page = self.oldest(size)
        if page is None and not self._turn.over:  # all are held: the first that is given back says so
            self._lists[size].is_known = False
        return rank_ms(page) if page is not None else None

    def oldest_copy(self, slot_nbytes: int) -> Page | None:
        """The same of copies."""
        lru = self._lists.get(slot_nbytes)
        return lru.oldest_copy(self._turn) if lru is not None else None

    def older_sizes(self, than_ms: int | None, but: int, count: int) -> list[int]:
        """Other slot sizes that have a page that may go and is older by its rank (None: any; 0: a copy), that with the
        oldest first. May be short if the turn is over."""
        if not self._lists or (len(self._lists) == 1 and but in self._lists):
            return []
        return self._ages.older(than_ms, but, count)

    # ---- check ---------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        wrong: list[str] = []
        for size, lru in self._lists.items():
            wrong += [f"LRU of {size}: {problem}" for problem in lru.check()]
            if lru.is_known != (size in self._ages) or not lru.count:
                wrong.append(f"LRU of {size}: {lru.count} pages, known is {lru.is_known}")
            for page in lru.pages():
                if page.state is not State.VISIBLE or page.namespace.slot_nbytes != size or page.order is not lru:
                    wrong.append(f"LRU of {size}: page {short(page.prefix_hash)} does not belong there")
        return wrong

    def __contains__(self, page: Page) -> bool:
        lru = self._lists.get(page.namespace.slot_nbytes)
        return lru is not None and page.order is lru and page in lru
