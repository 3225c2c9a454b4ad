"""In which order pages may go: of each slot size copies, then others, in order of use; and which size has the oldest.

Visible pages are in the order of their size, pinned ones in none. Not thread-safe: the tier's lock
guards it. No call takes longer the more pages, sizes, holds or pins there are.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

from node.ram.ages import Ages
from node.ram.page import Page, State
from node.ram.pins import Pins
from node.ram.sizes import SizeOrder, rank_ms
from node.ram.turn import Turn
from node.slots import SlotAllocator

PINS_ENDED = 256  # at a time


class UseOrder:
    """`turn` is that of whoever has the lock."""

    def __init__(self, slots: SlotAllocator, turn: Turn) -> None:
        self._slots = slots
        self._turn = turn
        self._lists: dict[int, SizeOrder] = {}  # by slot size
        self._ages = Ages(self._oldest_ms, lambda: turn.over)
        self.pins = Pins(slots)

    # ---- a page's life -------------------------------------------------------------------

    def admit(self, page: Page) -> None:
        """A page became visible, or is not pinned any more: from now on it may be evicted, as the newest."""
        size = page.namespace.slot_nbytes
        lru = self._lists.get(size)
        if lru is None:
            lru = self._lists[size] = SizeOrder()
        lru.push_newest(page)
        if page.is_copy or not lru.is_known:
            self._make_known(lru, page)

    def _make_known(self, lru: SizeOrder, page: Page) -> None:
        lru.is_known = True
        self._ages.add(page.namespace.slot_nbytes, rank_ms(page))

    def touch(self, chain: Iterable[Page | None], now_ms: int) -> None:
        """Visible pages are used now, one after the other."""
        block_of, lists, visible = self._slots.block_of, self._lists, State.VISIBLE
        for page in chain:
            if page is None or page.state is not visible:
                continue
            block_of(page.offset).used_sum += now_ms - page.used_ms
            page.used_ms = now_ms
            if page.newer is not None:
                lists[page.namespace.slot_nbytes].move_newest(page)
            elif page not in self.pins:  # it was held when it was the oldest
                lru = lists[page.namespace.slot_nbytes]
                lru.move_newest(page)
                if page.is_copy or not lru.is_known:
                    self._make_known(lru, page)

    def withdraw(self, page: Page) -> None:
        """A page is not visible any more: it is in no list and has no pin."""
        if page.newer is not None or not self.pins.discard(page):
            self._unlink(page)

    def _unlink(self, page: Page) -> None:
        size = page.namespace.slot_nbytes
        lru = self._lists[size]
        lru.unlink(page)
        if not lru.count:
            del self._lists[size]
            self._ages.discard(size)

    def give_back(self, page: Page) -> None:
        """Nobody holds a visible page any more."""
        lru = self._lists.get(page.namespace.slot_nbytes)
        if lru is not None and lru.give_back(page):
            self._make_known(lru, page)

    def own(self, page: Page) -> None:
        """A visible copy is none any more: it counts as others of its age do, and as the newest of them."""
        in_order = page not in self.pins
        if in_order:
            self._unlink(page)
        page.is_copy = False
        if in_order:
            self.admit(page)

    # ---- pins ----------------------------------------------------------------------------

    def pin(self, page: Page, expiry_ms: int) -> None:
        if page not in self.pins:
            self._unlink(page)
        self.pins.add(page, expiry_ms)

    def unpin(self, page: Page) -> bool:
        """The page may be evicted again, as the newest. False if it was not pinned."""
        if not self.pins.discard(page):
            return False
        self.admit(page)
        return True

    def expire_pins(self, now_ms: int) -> int:
        """Ends pins whose time is over; so many of them. The rest follows with the next calls."""
        ended = self.pins.ended(now_ms, PINS_ENDED)
        for page in ended:
            self.admit(page)
        return len(ended)

    # ---- who is oldest -------------------------------------------------------------------

    def oldest_first(self, slot_nbytes: int) -> Iterator[Page]:
        """Pages of this size that are not pinned, but for those held that were in the way. Nothing may change
        meanwhile."""
        lru = self._lists.get(slot_nbytes)
        return lru.oldest_first() if lru is not None else iter(())

    def oldest(self, slot_nbytes: int) -> Page | None:
        """Oldest page of a slot size that nobody holds. None: there is none, or the turn is over."""
        lru = self._lists.get(slot_nbytes)
        return lru.oldest(self._turn) if lru is not None else None

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
        if len(self._lists) == 1 and but in self._lists:
            return []
        return self._ages.older(than_ms, but, count)

    # ---- check ---------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        wrong = []
        for size, lru in self._lists.items():
            wrong += [f"LRU of {size}: {problem}" for problem in lru.check()]
            if lru.is_known != (size in self._ages) or not lru.count:
                wrong.append(f"LRU of {size}: {lru.count} pages, known is {lru.is_known}")
            for page in lru.pages():
                if page.state is not State.VISIBLE or page in self.pins or page.namespace.slot_nbytes != size:
                    wrong.append(f"LRU of {size}: page {page.prefix_hash.hex()} does not belong there")
        for block in self._slots.blocks():
            for page in block.owners:
                if page is None:
                    continue
                of_size = self._lists.get(page.namespace.slot_nbytes)
                evictable = of_size is not None and page in of_size
                if evictable != (page.state is State.VISIBLE and page not in self.pins):
                    wrong.append(f"page {page.prefix_hash.hex()} is {page.state.name}, but evictable is {evictable}")
        return wrong
