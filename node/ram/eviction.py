"""Who gives up a slot: exact LRU over all pages of one size, and across sizes by whole extents.

    same size      the oldest page that nobody holds goes; exactly as many as are needed
    other sizes    if the oldest page of another slot size is older than ours, or none of its pages
                   may be evicted, that size's coldest extent is vacated and serves our size from
                   now on

Evicting only what is needed, and a chain's tail before its head, is worth more on public traces
than any cleverer policy (docs/decisions/0005). Pinned pages are in no list; those in an extent that
is vacated move to another slot. Not thread-safe: the tier's lock guards it.
"""

from collections.abc import Callable

from node.ram.lru import LruList
from node.ram.page import Page, State
from node.ram.pins import Pins
from node.slots import Extent, SlotAllocator


class Eviction:
    """`copy(source, target, nbytes)` moves a slot's bytes; `forget(page, reason)` takes a page out of
    its namespace and calls back `withdraw` and `release`."""

    def __init__(
        self,
        slots: SlotAllocator,
        copy: Callable[[int, int, int], None],
        forget: Callable[[Page, str], None],
    ) -> None:
        self._slots = slots
        self._copy = copy
        self._forget = forget
        self._lists: dict[int, LruList] = {}  # by slot size: visible pages that are not pinned
        self.pins = Pins()
        self.placed_nbytes = 0  # of all slots ever given out: the clock of how fast RAM turns over

    # ---- a page's life -------------------------------------------------------------------

    def place(self, page: Page) -> bool:
        """Gives a new page a slot, making room if there is none. False: nothing may be evicted."""
        size = page.namespace.slot_nbytes
        offset = self._slots.allocate(size, page)
        if offset is None and self._make_room(size):
            offset = self._slots.allocate(size, page)
            assert offset is not None
        if offset is None:
            return False
        page.offset = offset
        self._slots.extent_of(offset).used_sum += page.used_ms
        self.placed_nbytes += size
        return True

    def admit(self, page: Page) -> None:
        """A page became visible: from now on it may be evicted."""
        self._list(page).push_newest(page)

    def touch(self, page: Page, now_ms: int) -> None:
        self._slots.extent_of(page.offset).used_sum += now_ms - page.used_ms
        page.used_ms = now_ms
        if page.newer is not None:
            self._list(page).move_newest(page)

    def withdraw(self, page: Page) -> None:
        """A page is not visible any more: it is in no list and has no pin."""
        if not self.pins.discard(page):
            self._list(page).unlink(page)

    def release(self, page: Page) -> None:
        """Frees the slot of a page that is neither visible nor held."""
        self._slots.extent_of(page.offset).used_sum -= page.used_ms
        self._slots.free(page.offset)
        page.offset = -1

    # ---- pins ----------------------------------------------------------------------------

    def pin(self, page: Page, expiry_ms: int) -> None:
        if page not in self.pins:
            self._list(page).unlink(page)
        self.pins.add(page, expiry_ms)

    def unpin(self, page: Page) -> bool:
        """The page may be evicted again, as the newest. False if it was not pinned."""
        if not self.pins.discard(page):
            return False
        self._list(page).push_newest(page)
        return True

    def expire_pins(self, now_ms: int) -> None:
        for page in self.pins.ended(now_ms):
            self.unpin(page)

    # ---- making room ---------------------------------------------------------------------

    def _list(self, page: Page) -> LruList:
        size = page.namespace.slot_nbytes
        found = self._lists.get(size)
        if found is None:
            found = self._lists[size] = LruList()
        return found

    def _oldest(self, size: int, outside: Extent | None = None) -> Page | None:
        """Oldest page of a slot size that nobody holds. Held ones were just used, so few are met."""
        lru = self._lists.get(size)
        if lru is None:
            return None
        for page in lru.oldest_first():
            if page.holds == 0 and (outside is None or self._slots.extent_of(page.offset) is not outside):
                return page
        return None

    def _make_room(self, size: int) -> bool:
        ours = self._oldest(size)
        for used_ms, other in self._others(size):
            if ours is not None and ours.used_ms <= used_ms:
                break
            if size <= self._slots.extent_nbytes and self._vacate_coldest(other):
                return True
        if ours is None:
            return False
        self._forget(ours, "evicted")
        return True

    def _others(self, size: int) -> list[tuple[int, int]]:
        """(last use of its oldest page, slot size) of the other sizes that can give room, oldest first.

        First of all come sizes with nothing to evict, but with pinned pages so thinly spread that
        moving them closer together frees an extent and costs nobody anything.
        """
        others = []
        for other in self._lists:
            if other == size:
                continue
            if (oldest := self._oldest(other)) is not None:
                others.append((oldest.used_ms, other))
            elif any(extent.used_count <= self._free_outside(extent) for extent in self._extents(other)):
                others.append((-1, other))
        return sorted(others)

    def _extents(self, size: int) -> list[Extent]:
        return [extent for extent in self._slots.extents() if extent.slot_nbytes == size]

    def _free_outside(self, extent: Extent) -> int:
        """Free slots of this extent's size in other extents."""
        return sum(len(other.free) for other in self._extents(extent.slot_nbytes) if other is not extent)

    def _vacate_coldest(self, size: int) -> bool:
        """Empties the extent of this slot size whose pages were used longest ago on average."""
        extents = sorted(self._extents(size), key=lambda extent: extent.used_sum / extent.used_count)
        return any(self._vacate(extent) for extent in extents)

    def _vacate(self, extent: Extent) -> bool:
        pages: list[Page] = [page for page in extent.owners if page is not None]
        if any(page.holds or page.state is not State.VISIBLE for page in pages):
            return False
        pinned = [page for page in pages if page in self.pins]
        if pinned:  # find out before anything is evicted or moved in vain
            evictable_outside = self._lists[extent.slot_nbytes].count - (len(pages) - len(pinned))
            if len(pinned) > self._free_outside(extent) + evictable_outside:
                return False
        if not all(self._move(page, extent) for page in pinned):
            return False
        for page in pages:
            if page not in self.pins:
                self._forget(page, "evicted")
        return True

    def _move(self, page: Page, extent: Extent) -> bool:
        """Moves a pinned page out of an extent, at the cost of the oldest page elsewhere."""
        size = extent.slot_nbytes
        target = self._slots.allocate(size, page, avoid=extent)
        if target is None:
            oldest = self._oldest(size, outside=extent)
            if oldest is None:
                return False
            self._forget(oldest, "evicted")
            target = self._slots.allocate(size, page, avoid=extent)
            assert target is not None
        self._copy(page.offset, target, page.namespace.page_nbytes)
        self.release(page)
        page.offset = target
        self._slots.extent_of(target).used_sum += page.used_ms
        return True

    # ---- check ---------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        wrong = self._slots.check()
        for extent in self._slots.extents():
            pages = [page for page in extent.owners if page is not None]
            total = sum(page.used_ms for page in pages)
            if total != extent.used_sum:
                wrong.append(f"extent {extent.number}: last uses sum to {total}, recorded {extent.used_sum}")
            for slot, page in enumerate(extent.owners):
                if page is None:
                    continue
                if page.offset != extent.number * self._slots.extent_nbytes + slot * extent.slot_nbytes:
                    wrong.append(
                        f"page {page.prefix_hash.hex()} owns slot {slot} of extent {extent.number}, lies elsewhere"
                    )
                evictable = page.newer is not None
                if evictable != (page.state is State.VISIBLE and page not in self.pins):
                    wrong.append(f"page {page.prefix_hash.hex()} is {page.state.name}, but evictable is {evictable}")
        for size, lru in self._lists.items():
            listed = list(lru.oldest_first())
            if len(listed) != lru.count:
                wrong.append(f"LRU of {size}: {len(listed)} pages linked, {lru.count} counted")
            for page in listed:
                if page.state is not State.VISIBLE or page in self.pins or page.namespace.slot_nbytes != size:
                    wrong.append(f"LRU of {size}: page {page.prefix_hash.hex()} does not belong there")
        return wrong
