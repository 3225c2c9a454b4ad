"""Choose the page that is evicted for a new one.

Tenants are chosen as in `tenant_usage.py`. Within one tenant, or all without a quota, the order is
exact LRU within one slot size, and LRU across sizes by whole blocks.

    same size      evict the oldest page that is not held; exactly as many as needed
    other sizes    if another slot size has an older page, or no page of ours may be evicted: clear
                   the coldest block among those with that size's oldest pages, and use it for ours

    copies         of pages that other members own: evicted before all others; once copies have
                   their share, one is evicted for each new one

Evicting only what is needed, and a chain's tail before its head, gives better hit rates on public
traces than most cleverer policies (docs/decisions/0005). Pinned pages in a block that is cleared,
and pages of tenants that must not be evicted from, move to another slot. Not thread-safe: the
tier's lock guards it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from kvstore.keys import short
from node.memory.lock_slices import SlicedWork, StepBudget, Work
from node.memory.lru import rank_ms
from node.memory.page import Page, PageNamespace, State
from node.memory.pins import Pins
from node.memory.pools import EvictionPool, UseOrder
from node.memory.tenant_usage import TenantAccount
from node.slab import Block, SlotAllocator

# Clear a block, so that it can serve another page size.
#
#     look     no page in it is being read or written, and pages that stay have slots elsewhere
#     close    no slot in it is allocated any more
#     move     pages that stay, one at a time: held, copied without the lock, then re-pointed
#     evict    the others, so many per slice
#     reopen   an empty block is free
#
# Pinned pages stay, and all pages that are not in the pool to evict from. If a read of one of them
# begins meanwhile, clearing ends; pages evicted by then are gone, and the rest stays.

LOOKED_AT = 4096  # pages checked for ones that pinned pages can replace
LOOKED_AT_LEAST = 64


class Compaction:
    """Clear blocks for other slot sizes.

    `forget(page, reason, None)` removes a page from its namespace, `hold(pages)` keeps them until
    they are moved, `zero(offset, nbytes)` clears a slot. `free_slot(size, pool)` frees a slot of
    this size elsewhere without moving a page, by evicting from other sizes in this pool.
    """

    def __init__(
        self,
        slots: SlotAllocator,
        budget: StepBudget,
        forget: Callable[[Page, str, Page | None], None],
        hold: Callable[[Sequence[Page]], None],
        zero: Callable[[int, int], None],
        free_slot: Callable[[int, EvictionPool], Work[bool]],
    ) -> None:
        self._slots = slots
        self._budget = budget
        self._forget = forget
        self._hold = hold
        self._zero = zero
        self._free_slot = free_slot
        self.watchers: list[list[Page]] = []  # lists that receive the pages that are moved

    def clear(
        self, area: range, pool: EvictionPool, may_evict: bool = True, may_move: bool = True
    ) -> Work[bool]:
        """Free an area by evicting pages of this pool and moving others; return whether it is free.

        The result holds until the next yield.
        """
        blocks = self._slots.blocks_in(area)
        staying: list[Page] = []
        evictable: dict[int, int] = {}  # by slot size: evictable pages in the area
        for block in blocks:
            if self._budget.over:
                yield None
            self._budget.left -= 1 + len(block.owners) // 16
            if (
                not _sort_pages(block, pool, staying, evictable)
                or (evictable and not may_evict)
                or (staying and not may_move)
            ):
                return False
        if self._slots.is_free(area):  # another thread emptied it meanwhile
            return True
        if not self._slots.close(area):
            return False
        try:
            emptied = yield from self._empty(self._slots.blocks_in(area), pool, staying, evictable)
            return emptied and not self._slots.blocks_in(area)
        finally:
            self._slots.reopen(area)

    def _empty(
        self,
        blocks: list[Block],
        pool: EvictionPool,
        staying: list[Page],
        evictable: dict[int, int],
    ) -> Work[bool]:
        targets: dict[Page, int] = {}
        waiting: list[Page] = []  # waiting for slots of pages elsewhere that are evicted for them
        wanted = Counter(page.namespace.slot_nbytes for page in staying)
        elsewhere = {
            size: self._count_elsewhere(size, pool, count, evictable.get(size, 0))
            for size, count in wanted.items()
        }
        try:
            for page in staying:
                size = page.namespace.slot_nbytes
                target = self._target(page)
                if target is None and elsewhere[size] > 0:
                    elsewhere[size] -= 1
                    waiting.append(page)
                    continue
                if target is None and (yield from self._free_slot(size, pool)):
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

    def _count_elsewhere(self, size: int, pool: EvictionPool, wanted: int, evictable: int) -> int:
        """Count evictable pages of this size outside the area, up to `wanted`."""
        looked_at = islice(
            pool.oldest_first(size), min(evictable + 2 * wanted, LOOKED_AT) + LOOKED_AT_LEAST
        )
        free = (
            page
            for page in looked_at
            if not page.holds and not self._slots.block_of(page.offset).closed
        )
        return len(list(islice(free, wanted)))

    def _target(self, page: Page) -> int | None:
        """Take a slot outside the area.

        Until the page is copied, the slot belongs to a page that can not be found.
        """
        return self._slots.allocate(
            page.namespace.slot_nbytes, Page(page.namespace, page.prefix_hash, 0)
        )

    def _target_of_oldest(self, page: Page, pool: EvictionPool) -> int | None:
        oldest = pool.oldest(page.namespace.slot_nbytes)
        if oldest is None:
            return None
        self._forget(oldest, "evicted", None)
        return self._target(page)

    def _evict(self, blocks: list[Block], pool: EvictionPool) -> Work[bool]:
        """Evict all pages of the blocks that do not stay."""
        for block in blocks:
            for slot in range(len(block.owners)):
                if self._budget.over:
                    yield None
                page: Any = block.owners[slot]
                if page is None or (page.state is State.VISIBLE and _stays(page, pool)):
                    continue
                if not _is_evictable(page):
                    return False
                self._forget(page, "evicted", None)
                self._budget.left -= 1
        return True

    def _move(self, targets: dict[Page, int]) -> Work[bool]:
        """Move pages that have a target and still exist."""
        for page in list(targets):
            if page.state is not State.VISIBLE:
                continue
            if page.holds:
                return False
            self._hold([page])
            yield SlicedWork(page, targets[page])
            if not _is_evictable(page):
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
        """Zero the copy of a page that was removed meanwhile: its tenant may be erased."""
        if page.state is State.DOOMED:
            self._zero(target, page.namespace.slot_nbytes)


def _sort_pages(
    block: Block, pool: EvictionPool, staying: list[Page], evictable: dict[int, int]
) -> bool:
    """Return whether no page in a block is read or written; count staying and movable pages."""
    if block.closed:
        return False
    for page in block.owners:
        if page is None:
            continue
        if not _is_evictable(page):
            return False
        if _stays(page, pool):
            staying.append(page)
        else:
            evictable[block.kind.slot_nbytes] = evictable.get(block.kind.slot_nbytes, 0) + 1
    return True


def _stays(page: Page, pool: EvictionPool) -> bool:
    return page.order is None or page.order.pool is not pool


def _is_evictable(page: Page) -> bool:
    return page.state is State.VISIBLE and not page.holds


SIZES_TRIED = 4  # other sizes that are checked for older pages
SPARSE_SIZES_TRIED = 64  # sizes whose blocks could be packed closer
AREAS_TRIED = 4  # areas of one size, the coldest first
PAGES_LOOKED_AT = 16  # oldest pages checked to find them


class Eviction:
    """Free slots for new pages.

    `forget(page, reason, successor)` removes a page from its namespace and calls `release` and its
    order's `withdraw`. `hold(pages)` keeps pages in place, `zero(offset, nbytes)` clears a slot.
    """

    def __init__(
        self,
        slots: SlotAllocator,
        forget: Callable[[Page, str, Page | None], None],
        hold: Callable[[Sequence[Page]], None],
        zero: Callable[[int, int], None],
    ) -> None:
        self._slots = slots
        self._forget = forget
        self._zero = zero
        # Removed pages: their slots are zeroed before other pages get them
        self.to_zero: set[Page] = set()
        self.zeroed_nbytes = 0
        self.budget = StepBudget()
        self.order = UseOrder(slots, self.budget)
        self._accounts = self.order.accounts
        self._clearing = Compaction(slots, self.budget, forget, hold, zero, self._free_slot)
        self.watchers = self._clearing.watchers
        self.copy_count = self.copy_nbytes = 0  # copies with a slot
        self.copy_nbytes_max = slots.region_nbytes
        self._sizes_tried = 0
        # Bytes of all slots ever allocated, without temporary ones: measures how fast RAM turns
        # over
        self.placed_nbytes = 0

    @property
    def pins(self) -> Pins:
        """Return the pins."""
        return self.order.pins

    def allocate(self, pages: Sequence[Page], temporary: bool = False) -> int:
        """Give new pages of a namespace slots, from the first on.

        Return how many got one: `make_room` may help the next one.

        The slots are free ones, or those of the oldest pages of the same size. All pages are
        copies, or none is. `temporary`: the slots are returned after a read, so RAM does not turn
        over by it.
        """
        if not pages:
            return 0
        size, account, is_copy = (
            pages[0].namespace.slot_nbytes,
            pages[0].namespace.account,
            pages[0].is_copy,
        )
        if is_copy:
            pages = pages[: (self.copy_nbytes_max - self.copy_nbytes) // size]
        room = len(pages)
        if account.nbytes_max:
            room = 0 if account.full_for(size) else account.room(size)
        offsets = self._slots.allocate_all(size, pages[:room])
        for page, offset in zip(pages, offsets, strict=False):
            page.offset = offset
            self._slots.block_of(offset).used_sum += page.used_ms
        account.take(size, len(offsets))
        count = len(offsets)
        try:
            while count < len(pages) and (more := self._succeed_oldest(pages[count:], size)):
                count += more
        except BaseException:  # a caller that gets no result can not release them
            for page in pages:
                if page.offset >= 0:
                    self._free(page)
            raise
        if not temporary:
            self.placed_nbytes += size * count
        if is_copy:
            self._count_copies(size, count)
        return count

    def copies_full(self, size: int) -> bool:
        """Return whether a copy of this size must wait until another one is evicted."""
        return self.copy_nbytes + size > self.copy_nbytes_max

    def _count_copies(self, size: int, more: int) -> None:
        self.copy_count += more
        self.copy_nbytes += more * size

    def own_copies(self, pages: Sequence[Page]) -> list[Page]:
        """Make the copies among visible pages the node's own, and return them."""
        copies = [page for page in pages if page.is_copy]
        for page in copies:
            self._count_copies(page.namespace.slot_nbytes, -1)
            self.order.own(page)
        return copies

    def _free(self, page: Page) -> None:
        page.namespace.account.give(page.namespace.slot_nbytes)
        self._slots.free(page.offset).used_sum -= page.used_ms
        page.offset = -1

    def release(self, page: Page, successor: Page | None = None) -> None:
        """Free the slot of a page that is neither visible nor held, or give it to a successor."""
        if self.to_zero and page in self.to_zero:
            self.to_zero.discard(page)
            self.zero_slot(page)
        account, size = page.namespace.account, page.namespace.slot_nbytes
        if page.is_copy:
            self._count_copies(size, -1)
        if successor is None:
            self._free(page)
            return
        if successor.namespace.account is not account:
            account.give(size)
            successor.namespace.account.take(size)
        successor.offset, page.offset = page.offset, -1
        self._slots.hand_over(successor.offset, successor).used_sum += (
            successor.used_ms - page.used_ms
        )

    def zero_slot(self, page: Page) -> None:
        """Overwrite the slot of a page with zeros."""
        self._zero(page.offset, page.namespace.slot_nbytes)
        self.zeroed_nbytes += page.namespace.slot_nbytes

    def _succeed_oldest(self, pages: Sequence[Page], size: int) -> int:
        """Give some new pages, from the first on, the oldest ones' slots; return how many."""
        account = pages[0].namespace.account
        is_full = account.full_for(size)
        if (is_full and account.is_over) or self.order.pins.nbytes:
            return 0
        pool = account.pool if is_full else self._accounts.first(account)
        # otherwise a quota may be reached, or the next page to evict be in another order
        limited = account.nbytes_max or self._accounts.any_limited
        in_a_row = pool.is_only(size) and not (limited or pool.has_layers)
        if pool.has_layers:
            pool = self.order.layers(pool, size)[0]
        count = 0
        for ours in pool.oldest_run(size, len(pages) if in_a_row else 1):
            if (
                self.budget.left <= 0
                or self._slots.block_of(ours.offset).closed
                or (not in_a_row and pool.is_younger(size))
            ):
                break
            self.budget.left -= 1
            self._forget(ours, "evicted", pages[count])
            count += 1
        return count

    def make_room(self, space: PageNamespace, now_ms: int, for_copy: bool = False) -> Work[bool]:
        """Free a slot for a page of this namespace, in slices; False if nothing may be evicted.

        Another thread may take the slot first: place the page, or call again.
        """
        if self.budget.over:
            yield None
        size, account = space.slot_nbytes, space.account
        if for_copy and self.copies_full(size):
            return (yield from self._drop_copy(size, account))
        if account.full_for(size):
            return (yield from self._shrink(size, account, now_ms))
        for area in self._sparse_areas(size):
            if (
                yield from self._clearing.clear(
                    area, self._accounts.first(account), may_evict=False
                )
            ):
                return True
        for base in self._accounts.victims(account):
            for pool in self.order.layers(base, size):
                if (yield from self._evict(size, pool)):
                    return True
        if self.order.expire_pins(now_ms):
            return True
        for base in dict.fromkeys((self._accounts.shared, account.pool)):
            for pool in self.order.layers(base, size):
                # The last resort, in slices like everything else
                for area in self._slots.areas(self._slots.level(size)):
                    if (yield from self._clearing.clear(area, pool)):
                        return True
        return False

    def _evict(self, size: int, pool: EvictionPool) -> Work[bool]:
        """Evict a page of this size, or clear a block where older pages of other sizes lie."""
        ours = yield from self._oldest(size, pool)
        for other in (yield from self._older_sizes(rank_ms(ours) if ours else None, size, pool)):
            for area in self._areas(other, size, pool):
                if (yield from self._clearing.clear(area, pool)):
                    return True
        ours = yield from self._oldest(size, pool)  # other threads may have run in between
        if ours is None:
            return False
        self.budget.left -= 1
        self._forget(ours, "evicted", None)
        return True

    def _shrink(self, size: int, account: TenantAccount[EvictionPool], now_ms: int) -> Work[bool]:
        """Evict the oldest page of a tenant at its quota; none for a page that never fits it."""
        if account.too_small_for(size):
            return False
        ours = None
        for pool in self.order.layers(account.pool, size):
            ours = yield from self._oldest(size, pool)
            for other in (
                yield from self._older_sizes(rank_ms(ours) if ours else None, size, pool)
            ):
                if (older := (yield from self._oldest(other, pool))) is not None:
                    ours = older
                    break
            if ours is not None:
                break
        if ours is None:
            return self.order.expire_pins(now_ms) > 0
        if ours.order is not None and not ours.holds:  # unchanged after other threads ran
            self.budget.left -= 1
            self._forget(ours, "evicted", None)
        return True

    def _drop_copy(self, size: int, account: TenantAccount[EvictionPool]) -> Work[bool]:
        """Evict the oldest copy, of this size or else of any.

        Return False if all are in use.
        """
        for pool in self._accounts.with_copies(account):
            copy = yield from self._oldest_copy(size, pool)
            if copy is None:
                for other in (yield from self._older_sizes(0, size, pool)):
                    if (copy := (yield from self._oldest_copy(other, pool))) is not None:
                        break
            if copy is not None:
                self.budget.left -= 1
                self._forget(copy, "evicted", None)
                return True
        return False

    def _oldest_copy(self, size: int, pool: EvictionPool) -> Work[Page | None]:
        while (copy := pool.oldest_copy(size)) is None and self.budget.over:
            yield None
        return copy

    def _oldest(self, size: int, pool: EvictionPool) -> Work[Page | None]:
        """Return the oldest page of this size that nobody holds, however many are held."""
        while (page := pool.oldest(size)) is None and self.budget.over:
            yield None
        return page

    def _older_sizes(self, than_ms: int | None, but: int, pool: EvictionPool) -> Work[list[int]]:
        while not (sizes := pool.older_sizes(than_ms, but, SIZES_TRIED)) and self.budget.over:
            yield None
        return sizes

    def _free_slot(self, size: int, pool: EvictionPool) -> Work[bool]:
        """Free a slot for a page that has to move, without moving another one."""
        for other in (yield from self._older_sizes(None, size, pool)):
            for area in self._areas(other, size, pool):
                if (yield from self._clearing.clear(area, pool, may_move=False)):
                    return True
        return False

    def _areas(self, other: int, size: int, pool: EvictionPool) -> list[range]:
        """Return areas for a block of our size with another size's oldest pages, coldest first."""
        level = self._slots.level(size)
        areas: dict[int, range] = {}
        for page in pool.eldest(other, PAGES_LOOKED_AT):
            area = self._slots.area(page.offset, level)
            areas.setdefault(area.start, area)
            if len(areas) == AREAS_TRIED:
                break
        return sorted(areas.values(), key=self._slots.mean_use)

    def _sparse_areas(self, size: int) -> Iterator[range]:
        """Yield areas that hold only a few movable pages: packing them closer evicts nothing."""
        if not (self.order.pins.nbytes or self._accounts.any_limited):
            return
        level = self._slots.level(size)
        yield from self._slots.sparse_areas(level, AREAS_TRIED)
        sizes = self.order.pins.some_sizes(SIZES_TRIED)
        if self._accounts.any_limited:
            kinds = self._slots.kinds()
            start = self._sizes_tried % len(kinds) if kinds else 0
            sizes += [
                kind.slot_nbytes for kind in (kinds[start:] + kinds[:start])[:SPARSE_SIZES_TRIED]
            ]
            self._sizes_tried = start + SPARSE_SIZES_TRIED
            self.budget.left -= len(sizes)
        for other in sizes:
            if other != size and (offset := self._slots.sparse(other)) is not None:
                yield self._slots.area(offset, level)

    def refusal(self, space: PageNamespace, held_count: int, writing_count: int) -> str:
        """Return why `make_room` found nothing, for the tenant of this namespace."""
        return space.account.refusal(space.slot_nbytes, "ram") or (
            f"no slot of {space.slot_nbytes} bytes can be freed: all pages are pinned or in use "
            f"({len(self.order.pins)} pinned, {held_count} being read, {writing_count} being "
            "written)"
            + (", or kept for tenants within their quotas" if self._accounts.any_limited else "")
        )

    # ---- check ---------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Return violations of what must always hold; empty if all is well."""
        wrong = self._slots.check() + self.order.check()
        copies = [
            page
            for block in self._slots.blocks()
            for page in block.owners
            if page is not None and page.is_copy
        ]
        nbytes = sum(page.namespace.slot_nbytes for page in copies)
        if (len(copies), nbytes) != (
            self.copy_count,
            self.copy_nbytes,
        ) or nbytes > self.copy_nbytes_max:
            counted = f"{self.copy_count} with {self.copy_nbytes} bytes"
            wrong.append(
                f"{len(copies)} copies with {nbytes} bytes, counted are {counted}, "
                f"{self.copy_nbytes_max} may be"
            )
        for block in self._slots.blocks():
            pages = [page for page in block.owners if page is not None]
            total = sum(page.used_ms for page in pages)
            if total != block.used_sum:
                wrong.append(
                    f"block {block.start}: last uses sum to {total}, recorded {block.used_sum}"
                )
            for slot, page in enumerate(block.owners):
                if page is not None and page.offset != block.offset + slot * block.kind.slot_nbytes:
                    wrong.append(
                        f"page {short(page.prefix_hash)} owns slot {slot} of block {block.start}, "
                        "lies elsewhere"
                    )
        return wrong
