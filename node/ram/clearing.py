"""Emptying the place of a block, so that it can serve another page size.

    look     nobody may read or write there, and pages that stay must find a place elsewhere
    close    nothing in there is given out any more
    move     these, one at a time: held, copied without the lock, then they change their slot
    evict    the others, so many in a turn
    reopen   what is empty is free

Those that stay are pinned ones, and all that are not in the pool whose turn it is to give. A page that somebody began
to read meanwhile ends it; then what has gone is gone, and the rest stays.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from node.blocks import Block
from node.ram.page import Page, State
from node.ram.pool import Pool
from node.ram.turn import Move, Turn, Work
from node.slots import SlotAllocator

LOOKED_AT = 4096  # pages, in search of those that pinned ones can take the place of
LOOKED_AT_LEAST = 64


class Clearing:
    """Part of eviction. `forget(page, reason, None)` takes a page out of its namespace, `hold(pages)` keeps them until
    they are moved, `zero(offset, nbytes)` clears a slot. `make_place(size, pool)` frees a slot of this size elsewhere
    without moving anything, at the cost of other sizes in this pool."""

    def __init__(
        self,
        slots: SlotAllocator,
        turn: Turn,
        forget: Callable[[Page, str, Page | None], None],
        hold: Callable[[Sequence[Page]], None],
        zero: Callable[[int, int], None],
        make_place: Callable[[int, Pool], Work[bool]],
    ) -> None:
        self._slots = slots
        self._turn = turn
        self._forget = forget
        self._hold = hold
        self._zero = zero
        self._make_place = make_place
        self.watchers: list[list[Page]] = []  # of those who want to know which pages are moved

    def clear(self, area: range, pool: Pool, may_evict: bool = True, may_move: bool = True) -> Work[bool]:
        """Whether the area is free now: pages in this pool may go for it, here or where others move. The caller can be
        sure of it until he yields."""
        blocks = self._slots.blocks_in(area)
        staying: list[Page] = []
        loose: dict[int, int] = {}  # by slot size: pages in the area that may go
        for block in blocks:
            if self._turn.over:
                yield None
            self._turn.left -= 1 + len(block.owners) // 16
            if not _look(block, pool, staying, loose) or (loose and not may_evict) or (staying and not may_move):
                return False
        if self._slots.is_free(area):  # others emptied it meanwhile
            return True
        if not self._slots.close(area):
            return False
        try:
            emptied = yield from self._empty(self._slots.blocks_in(area), pool, staying, loose)
            return emptied and not self._slots.blocks_in(area)
        finally:
            self._slots.reopen(area)

    def _empty(self, blocks: list[Block], pool: Pool, staying: list[Page], loose: dict[int, int]) -> Work[bool]:
        targets: dict[Page, int] = {}
        waiting: list[Page] = []  # for the slots of pages elsewhere that are evicted for them
        wanted = Counter(page.namespace.slot_nbytes for page in staying)
        elsewhere = {
            size: self._count_elsewhere(size, pool, count, loose.get(size, 0)) for size, count in wanted.items()
        }
        try:
            for page in staying:
                size = page.namespace.slot_nbytes
                target = self._target(page)
                if target is None and elsewhere[size] > 0:
                    elsewhere[size] -= 1
                    waiting.append(page)
                    continue
                if target is None and (yield from self._make_place(size, pool)):
                    target = self._target(page)
                if target is None:
                    return False
                targets[page] = target
            if not (yield from self._evict(blocks, pool)):
                return False
            for page in waiting:
                target = self._target(page)
                if target is None:
                    target = self._target_of_oldest(page, pool)
                if target is None:
                    return False
                targets[page] = target
            return (yield from self._move(targets))
        finally:
            for target in targets.values():
                self._slots.free(target)

    def _count_elsewhere(self, size: int, pool: Pool, wanted: int, loose: int) -> int:
        """Pages of this size outside the area that may go, as far as so many are wanted and a look shows."""
        looked_at = islice(pool.oldest_first(size), min(loose + 2 * wanted, LOOKED_AT) + LOOKED_AT_LEAST)
        free = (page for page in looked_at if not page.holds and not self._slots.block_of(page.offset).closed)
        return len(list(islice(free, wanted)))

    def _target(self, page: Page) -> int | None:
        """A slot outside the area; until the page is there it belongs to one that nobody can find."""
        return self._slots.allocate(page.namespace.slot_nbytes, Page(page.namespace, page.prefix_hash, 0))

    def _target_of_oldest(self, page: Page, pool: Pool) -> int | None:
        oldest = pool.oldest(page.namespace.slot_nbytes)
        if oldest is None:
            return None
        self._forget(oldest, "evicted", None)
        return self._target(page)

    def _evict(self, blocks: list[Block], pool: Pool) -> Work[bool]:
        """All that does not stay."""
        for block in blocks:
            for slot in range(len(block.owners)):
                if self._turn.over:
                    yield None
                page: Any = block.owners[slot]
                if page is None or (page.state is State.VISIBLE and _stays(page, pool)):
                    continue
                if not _may_go(page):
                    return False
                self._forget(page, "evicted", None)
                self._turn.left -= 1
        return True

    def _move(self, targets: dict[Page, int]) -> Work[bool]:
        """Those that have a target and are still here."""
        for page in list(targets):
            if page.state is not State.VISIBLE:
                continue
            if page.holds:
                return False
            self._hold([page])
            yield Move(page, targets[page])
            if not _may_go(page):
                self._zero_copy(page, targets[page])
                return False
            target = targets.pop(page)
            self._slots.free(page.offset).used_sum -= page.used_ms
            self._slots.hand_over(target, page)
            self._slots.block_of(target).used_sum += page.used_ms
            page.offset = target
            for watcher in self.watchers:
                watcher.append(page)
        return True

    def _zero_copy(self, page: Page, target: int) -> None:
        """Zeroes the copy of a page that was removed meanwhile: its tenant may be erased."""
        if page.state is State.DOOMED:
            self._zero(target, page.namespace.slot_nbytes)


def _look(block: Block, pool: Pool, staying: list[Page], loose: dict[int, int]) -> bool:
    """Whether nobody reads or writes in a block; which of its pages stay, and how many do not."""
    if block.closed:
        return False
    for page in block.owners:
        if page is None:
            continue
        if not _may_go(page):
            return False
        if _stays(page, pool):
            staying.append(page)
        else:
            loose[block.kind.slot_nbytes] = loose.get(block.kind.slot_nbytes, 0) + 1
    return True


def _stays(page: Page, pool: Pool) -> bool:
    return page.order is None or page.order.pool is not pool


def _may_go(page: Page) -> bool:
    return page.state is State.VISIBLE and not page.holds
