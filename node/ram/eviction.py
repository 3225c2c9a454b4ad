"""Who gives up a slot: exact LRU over all pages of one size, and across sizes by whole blocks.

    same size      the oldest page that nobody holds goes; exactly as many as are needed
    other sizes    if the oldest page of another slot size is older than ours, or none of ours may be
                   evicted, the coldest of the places where that size's oldest pages lie is cleared
                   and serves our size from now on

    copies         of pages that other members own; they go before all others, and one goes for a new one
                   where they have their share

Evicting only what is needed, and a chain's tail before its head, is worth more on public traces
than any cleverer policy (docs/decisions/0005). Pinned pages are in no list; those in a place that is
cleared move to another slot. Not thread-safe: the tier's lock guards it.
"""

from collections.abc import Callable, Iterator

from node.ram.clearing import Clearing
from node.ram.order import UseOrder
from node.ram.page import Page
from node.ram.pins import Pins
from node.ram.sizes import rank_ms
from node.ram.turn import Turn, Work
from node.slots import SlotAllocator

SIZES_TRIED = 4  # other sizes that are asked for room
AREAS_TRIED = 4  # places of one size, the coldest first
PAGES_LOOKED_AT = 16  # in search of them


class Eviction:
    """`forget(page, reason, successor)` takes a page out of its namespace and calls back `release`, and its
    order's `withdraw`; `hold(page)` keeps it where it is."""

    def __init__(
        self, slots: SlotAllocator, forget: Callable[[Page, str, Page | None], None], hold: Callable[[Page], None]
    ) -> None:
        self._slots = slots
        self._forget = forget
        self.turn = Turn()
        self.order = UseOrder(slots, self.turn)
        self._clearing = Clearing(slots, self.order, self.turn, forget, hold, self._make_place)
        self.watchers = self._clearing.watchers
        self.copy_count = self.copy_nbytes = 0  # that have a slot
        self.copy_nbytes_max = slots.region_nbytes
        self.placed_nbytes = 0  # of all slots ever given out, but for those lent: the clock of how fast RAM turns over

    @property
    def pins(self) -> Pins:
        return self.order.pins

    def place(self, page: Page) -> bool:
        """Gives a new page a slot: a free one, or that of the oldest page if that is of the same size.
        False: `make_room` may help."""
        size = page.namespace.slot_nbytes
        if (page.is_copy and self.copies_full(size)) or not self.lend(page):
            return False
        self.placed_nbytes += size
        if page.is_copy:
            self._count_copy(page, 1)
        return True

    def copies_full(self, size: int) -> bool:
        """Whether a copy of this size has to wait until another one goes."""
        return self.copy_nbytes + size > self.copy_nbytes_max

    def _count_copy(self, page: Page, more: int) -> None:
        self.copy_count += more
        self.copy_nbytes += more * page.namespace.slot_nbytes

    def own(self, page: Page) -> None:
        """A visible copy is none any more."""
        self._count_copy(page, -1)
        self.order.own(page)

    def lend(self, page: Page) -> bool:
        """The same for a page that is given back when it is read: RAM does not turn over by it."""
        size = page.namespace.slot_nbytes
        offset = self._slots.allocate(size, page)
        if offset is not None:
            page.offset = offset
            self._slots.block_of(offset).used_sum += page.used_ms
            return True
        return self._succeed_oldest(page, size)

    def release(self, page: Page, successor: Page | None = None) -> None:
        """Frees the slot of a page that is neither visible nor held, or gives it to another of its size."""
        offset, page.offset = page.offset, -1
        if page.is_copy:
            self._count_copy(page, -1)
        if successor is None:
            self._slots.free(offset).used_sum -= page.used_ms
        else:
            successor.offset = offset
            self._slots.hand_over(offset, successor).used_sum += successor.used_ms - page.used_ms

    def _succeed_oldest(self, page: Page, size: int) -> bool:
        ours = self.order.oldest(size)
        if ours is None or self.turn.left <= 0 or self.order.pins.nbytes:
            return False
        if self._slots.block_of(ours.offset).closed or self.order.older_sizes(rank_ms(ours), but=size, count=1):
            return False
        self.turn.left -= 1
        self._forget(ours, "evicted", page)
        return True

    def make_room(self, size: int, now_ms: int, for_copy: bool = False) -> Work[bool]:
        """Frees a slot of this size if that can be, in turns. False: nothing may go. After True another
        may have been quicker, so place the page or ask again."""
        if self.turn.over:
            yield None
        if for_copy and self.copies_full(size):
            return (yield from self._drop_copy(size))
        for area in self._loose_areas(size):
            if (yield from self._clearing.clear(area, may_evict=False)):
                return True
        ours = yield from self._oldest(size)
        for other in (yield from self._older_sizes(rank_ms(ours) if ours else None, size)):
            for area in self._areas(other, size):
                if (yield from self._clearing.clear(area)):
                    return True
        ours = yield from self._oldest(size)
        if ours is not None:
            self.turn.left -= 1
            self._forget(ours, "evicted", None)
            return True
        if self.order.expire_pins(now_ms):
            return True
        for area in self._slots.areas(self._slots.level(size)):  # the last resort, in turns like all the rest
            if (yield from self._clearing.clear(area)):
                return True
        return False

    def _drop_copy(self, size: int) -> Work[bool]:
        """The oldest copy goes: of this size, or else of the one that has the oldest. False: all are in use."""
        copy = yield from self._oldest_copy(size)
        if copy is None:
            for other in (yield from self._older_sizes(0, size)):
                if (copy := (yield from self._oldest_copy(other))) is not None:
                    break
        if copy is None:
            return False
        self.turn.left -= 1
        self._forget(copy, "evicted", None)
        return True

    def _oldest_copy(self, size: int) -> Work[Page | None]:
        while (copy := self.order.oldest_copy(size)) is None and self.turn.over:
            yield None
        return copy

    def _oldest(self, size: int) -> Work[Page | None]:
        """Of this size, however many are held."""
        while (page := self.order.oldest(size)) is None and self.turn.over:
            yield None
        return page

    def _older_sizes(self, than_ms: int | None, but: int) -> Work[list[int]]:
        while not (sizes := self.order.older_sizes(than_ms, but, SIZES_TRIED)) and self.turn.over:
            yield None
        return sizes

    def _make_place(self, size: int) -> Work[bool]:
        """For a pinned page that has to move: only what costs no pinned page its place."""
        for other in (yield from self._older_sizes(None, size)):
            for area in self._areas(other, size):
                if (yield from self._clearing.clear(area, may_move=False)):
                    return True
        return False

    def _areas(self, other: int, size: int) -> list[range]:
        """Places for a block of our size where the oldest pages of another size lie, the coldest first."""
        level = self._slots.level(size)
        areas: dict[int, range] = {}
        for page in self.order.eldest(other, PAGES_LOOKED_AT):
            area = self._slots.area(page.offset, level)
            areas.setdefault(area.start, area)
            if len(areas) == AREAS_TRIED:
                break
        return sorted(areas.values(), key=self._slots.mean_use)

    def _loose_areas(self, size: int) -> Iterator[range]:
        """Places that hold nothing but a few pinned pages, perhaps: these can lie closer together, which
        costs nobody anything."""
        if not self.order.pins.nbytes:
            return
        level = self._slots.level(size)
        yield from self._slots.loose_areas(level, AREAS_TRIED)
        for other in self.order.pins.some_sizes(SIZES_TRIED):
            if other != size and (offset := self._slots.sparse(other)) is not None:
                yield self._slots.area(offset, level)

    # ---- check ---------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        wrong = self._slots.check() + self.order.check()
        copies = [page for block in self._slots.blocks() for page in block.owners if page is not None and page.is_copy]
        nbytes = sum(page.namespace.slot_nbytes for page in copies)
        if (len(copies), nbytes) != (self.copy_count, self.copy_nbytes) or nbytes > self.copy_nbytes_max:
            counted = f"{self.copy_count} with {self.copy_nbytes} bytes"
            wrong.append(
                f"{len(copies)} copies with {nbytes} bytes, counted are {counted}, {self.copy_nbytes_max} may be"
            )
        for block in self._slots.blocks():
            pages = [page for page in block.owners if page is not None]
            total = sum(page.used_ms for page in pages)
            if total != block.used_sum:
                wrong.append(f"block {block.start}: last uses sum to {total}, recorded {block.used_sum}")
            for slot, page in enumerate(block.owners):
                if page is not None and page.offset != block.offset + slot * block.kind.slot_nbytes:
                    wrong.append(
                        f"page {page.prefix_hash.hex()} owns slot {slot} of block {block.start}, lies elsewhere"
                    )
        return wrong
