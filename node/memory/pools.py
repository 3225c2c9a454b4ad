"""Keep the eviction order in one pool per tenant with a quota, and one for all others.

Each pool has, for each slot size, copies and then other pages in LRU order, and knows which size
has the oldest page. Pages of another class than the normal one (`classes.py`) are in pools beside
it, its layers, which are evicted from one after the other. Not thread-safe: the tier's lock guards
it. No call takes longer the more pages, sizes, holds or pins there are.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from operator import attrgetter

from kvstore.keys import short
from node.memory.classes import CLASSES, HIGHEST, LAPSED, LOW, NORMAL, Kept, KeptPages
from node.memory.lazy_heap import OldestBySize
from node.memory.lock_slices import StepBudget
from node.memory.lru import LruList, rank_ms
from node.memory.page import Page, State
from node.memory.pins import Pins
from node.memory.tenant_usage import Limits, TenantAccount, TenantUsage
from node.slab import SlotAllocator

PINS_ENDED = 256  # at a time


class SizeOrder:
    """LRU order of a pool's pages of one slot size: copies are evicted first, then the node's own.

    Not thread-safe.
    """

    __slots__ = ("_copies", "_own", "is_known", "pool")

    def __init__(self, pool: "EvictionPool") -> None:
        self.pool = pool
        self._copies = LruList()
        self._own = LruList()
        self.is_known = False  # to the comparison of sizes

    @property
    def count(self) -> int:
        """Return the number of pages."""
        return self._copies.count + self._own.count

    def _list(self, page: Page) -> LruList:
        return self._copies if page.is_copy else self._own

    def push_newest(self, pages: Sequence[Page]) -> None:
        """Add pages, the newest last."""
        copies, own = self._copies, self._own
        for page in pages:
            (copies if page.is_copy else own).push_newest(page)

    def push_oldest(self, page: Page) -> None:
        """Add a page as the oldest."""
        self._list(page).push_oldest(page)

    def unlink(self, page: Page) -> None:
        """Remove a page."""
        self._list(page).unlink(page)

    def use(self, pages: Iterable[Page]) -> None:
        """Note that the pages are used now, one after the other."""
        copies, own = self._copies, self._own
        for page in pages:
            was_aside = page.newer is None  # it was held when it was the oldest
            (copies if page.is_copy else own).move_newest(page)
            if was_aside:
                self.pool.came_back(page)

    def oldest_copy(self, budget: StepBudget) -> Page | None:
        """Return the oldest copy that is not held; None if there is none, or the slice is over."""
        return self._copies.oldest(budget) if self._copies.count else None

    def oldest(self, budget: StepBudget) -> Page | None:
        """Return the oldest page that is not held; None if there is none, or the slice is over."""
        copy = self.oldest_copy(budget)
        if copy is not None or (self._copies.count and budget.over):
            return copy
        return self._own.oldest(budget)

    def oldest_run(self, budget: StepBudget, count: int) -> list[Page]:
        """Return the next pages to evict; see `LruList.oldest_run`."""
        copies = self._copies.oldest_run(budget, count) if self._copies.count else []
        if copies or (self._copies.count and budget.over):
            return copies
        return self._own.oldest_run(budget, count)

    def give_back(self, page: Page) -> bool:
        """End the last hold of a page.

        Return whether it was set aside, and may be the oldest now.
        """
        return self._list(page).give_back(page)

    def oldest_first(self) -> Iterator[Page]:
        """Yield all pages but set-aside ones.

        Meanwhile only the page being visited may be unlinked.
        """
        yield from self._copies.oldest_first()
        yield from self._own.oldest_first()

    def pages(self) -> list[Page]:
        """Return all pages."""
        return self._copies.pages() + self._own.pages()

    def __contains__(self, page: Page) -> bool:
        return page in self._list(page)

    def check(self) -> list[str]:
        """Return violations of what must always hold; empty if all is well."""
        strange = [page for page in self._copies.pages() if not page.is_copy]
        strange += [page for page in self._own.pages() if page.is_copy]
        wrong = self._copies.check() + self._own.check()
        return wrong + [
            f"page {short(page.prefix_hash)} is among the wrong ones" for page in strange
        ]


class EvictionPool:
    """The pages of one tenant that has a quota, or of all without one, in one class.

    `budget` is that of the current slice. `base`: the pool of the normal class; None for itself.
    """

    def __init__(
        self, budget: StepBudget, base: "EvictionPool | None" = None, rank: int = NORMAL
    ) -> None:
        self._budget = budget
        self.base = base or self
        self.rank = rank
        self._layers: dict[int, EvictionPool] = {}  # of a base, by class; made when first needed
        self._lists: dict[int, SizeOrder] = {}  # by slot size
        self._ages = OldestBySize(self._oldest_ms, lambda: budget.over)

    # ---- classes -------------------------------------------------------------------------------

    def layer(self, rank: int) -> "EvictionPool":
        """Return the pool of a class beside this one, which is a base."""
        if rank == NORMAL:
            return self
        if rank not in self._layers:
            self._layers[rank] = EvictionPool(self._budget, self, rank)
        return self._layers[rank]

    @property
    def has_layers(self) -> bool:
        """Return whether a page was ever in another class."""
        return bool(self._layers)

    def layers(self) -> "Sequence[EvictionPool]":
        """Return the pools of all classes that have pages, or only this one, lowest first."""
        if not self._layers:
            return (self,)
        pools = (self if rank == NORMAL else self._layers.get(rank) for rank in CLASSES)
        return [pool for pool in pools if pool is not None and pool._lists] or (self,)

    def all_layers(self) -> "Sequence[EvictionPool]":
        """Return this pool and those of other classes, with or without pages."""
        return [self, *self._layers.values()]

    # ---- life of a page ------------------------------------------------------------------------

    def admit(self, pages: Sequence[Page]) -> None:
        """Add pages of one size, the newest last.

        From now on they may be evicted.
        """
        lru = self._list(pages)
        lru.push_newest(pages)
        for page in pages:
            if page.is_copy or not lru.is_known:
                self._make_known(lru, page)

    def admit_oldest(self, page: Page) -> None:
        """Add a page as the oldest."""
        lru = self._list([page])
        lru.push_oldest(page)
        self._make_known(lru, page)

    def _list(self, pages: Sequence[Page]) -> SizeOrder:
        """Return the order of these pages' size, to which they are added."""
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
        """Note that a page that was held when it was the oldest is the newest now."""
        lru = self._lists[page.namespace.slot_nbytes]
        if page.is_copy or not lru.is_known:
            self._make_known(lru, page)

    def withdraw(self, page: Page) -> None:
        """Remove a page that may not be evicted any more, or was."""
        lru: SizeOrder = page.order
        lru.unlink(page)
        page.order = None
        if not lru.count:
            size = page.namespace.slot_nbytes
            del self._lists[size]
            self._ages.discard(size)

    def give_back(self, page: Page) -> None:
        """Make a page evictable whose last hold has ended."""
        lru = self._lists[page.namespace.slot_nbytes]
        if lru.give_back(page):
            self._make_known(lru, page)

    # ---- oldest pages --------------------------------------------------------------------------

    def oldest_first(self, slot_nbytes: int) -> Iterator[Page]:
        """Yield pages of this size, except set-aside ones.

        Nothing may change meanwhile.
        """
        lru = self._lists.get(slot_nbytes)
        return lru.oldest_first() if lru is not None else iter(())

    def oldest(self, slot_nbytes: int) -> Page | None:
        """Return the oldest page of a slot size that is not held.

        Return None if there is none, or the slice is over.
        """
        lru = self._lists.get(slot_nbytes)
        return lru.oldest(self._budget) if lru is not None else None

    def oldest_run(self, slot_nbytes: int, count: int) -> list[Page]:
        """Return the next pages of a slot size to evict; see `LruList.oldest_run`."""
        lru = self._lists.get(slot_nbytes)
        return lru.oldest_run(self._budget, count) if lru is not None else []

    def is_only(self, slot_nbytes: int) -> bool:
        """Return whether there are no pages of other sizes."""
        return not self._lists or (len(self._lists) == 1 and slot_nbytes in self._lists)

    def is_younger(self, slot_nbytes: int) -> bool:
        """Return whether another size has an older page than this size's oldest."""
        if self.is_only(slot_nbytes):
            return False
        ours = self.oldest(slot_nbytes)
        return ours is None or bool(self._ages.older(rank_ms(ours), slot_nbytes, 1))

    def eldest(self, slot_nbytes: int, count: int) -> list[Page]:
        """Return some of the oldest pages of a slot size that are not held, the oldest first."""
        first = self.oldest(slot_nbytes)
        if first is None:
            return []
        following = islice(self._lists[slot_nbytes].oldest_first(), count)
        return [first, *(page for page in following if page is not first and not page.holds)]

    def _oldest_ms(self, size: int) -> int | None:
        page = self.oldest(size)
        # All are held: the first one released reports it
        if page is None and not self._budget.over:
            self._lists[size].is_known = False
        return rank_ms(page) if page is not None else None

    def oldest_copy(self, slot_nbytes: int) -> Page | None:
        """Return the oldest copy of a slot size that is not held; None within the budget."""
        lru = self._lists.get(slot_nbytes)
        return lru.oldest_copy(self._budget) if lru is not None else None

    def eldest_ms(self, slot_nbytes: int) -> float:
        """Return when the oldest page was used, of this size or another one; infinity if none."""
        sizes = [slot_nbytes, *self.older_sizes(None, slot_nbytes, 1)]
        pages = (self.oldest(size) for size in sizes)
        return min((rank_ms(page) for page in pages if page is not None), default=math.inf)

    def older_sizes(self, than_ms: int | None, but: int, count: int) -> list[int]:
        """Return other sizes with an older evictable page (None: any; 0: a copy), oldest first."""
        if self.is_only(but):
            return []
        return self._ages.older(than_ms, but, count)

    # ---- check ---------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Return violations of what must always hold; empty if all is well."""
        wrong: list[str] = []
        for size, lru in self._lists.items():
            wrong += [f"LRU of {size}: {problem}" for problem in lru.check()]
            if lru.is_known != (size in self._ages) or not lru.count:
                wrong.append(f"LRU of {size}: {lru.count} pages, known is {lru.is_known}")
            for page in lru.pages():
                if (
                    page.state is not State.VISIBLE
                    or page.namespace.slot_nbytes != size
                    or page.order is not lru
                ):
                    wrong.append(
                        f"LRU of {size}: page {short(page.prefix_hash)} does not belong there"
                    )
        return wrong

    def pages(self) -> list[Page]:
        """Return all pages."""
        return [page for lru in self._lists.values() for page in lru.pages()]

    def __contains__(self, page: Page) -> bool:
        lru = self._lists.get(page.namespace.slot_nbytes)
        return lru is not None and page.order is lru and page in lru


class UseOrder:
    """Evictable pages by tenant's pool, and pinned pages.

    A visible page is in the pool of its tenant, a pinned one in none.
    """

    def __init__(self, slots: SlotAllocator, budget: StepBudget) -> None:
        self._slots = slots
        self.accounts: TenantUsage[EvictionPool] = TenantUsage(slots, lambda: EvictionPool(budget))
        self.pins = Pins(slots)
        self.kept = KeptPages(slots.region_nbytes)

    # ---- life of a page ------------------------------------------------------------------------

    def admit(self, page: Page) -> None:
        """Add a page that became visible, or is not pinned any more, as the newest."""
        kept = self.kept.get(page) if self.kept else None
        pool: EvictionPool = page.namespace.account.pool
        (pool.layer(kept.rank) if kept else pool).admit([page])

    def admit_new(self, pages: Sequence[Page], chain: Sequence[Page], now_ms: int) -> None:
        """Add new pages of a chain.

        The whole chain, of which some pages may exist already, is used now, tail first.
        """
        if not pages:
            self.touch(reversed(chain), now_ms)
            return
        pool: EvictionPool = pages[0].namespace.account.pool
        if len(chain) == len(pages):
            self._date(pages, now_ms)
            pool.admit(pages[::-1])
        else:
            pool.admit(pages)
            self.touch(reversed(chain), now_ms)

    def touch(self, chain: Iterable[Page | None], now_ms: int) -> None:
        """Mark visible pages as used now, in order.

        Pass a chain tail first: its head becomes the newest page and is evicted last.
        """
        visible = State.VISIBLE
        pages = [page for page in chain if page is not None and page.state is visible]
        if not pages:
            return
        self._date(pages, now_ms)
        for order, some in groupby(pages, attrgetter("order")):
            if order is not None:
                order.use(some)

    def _date(self, pages: Sequence[Page], now_ms: int) -> None:
        """Set the pages' last use to now."""
        block_of = self._slots.block_of
        for page in pages:
            if page.used_ms != now_ms:
                block_of(page.offset).used_sum += now_ms - page.used_ms
                page.used_ms = now_ms

    def withdraw(self, page: Page) -> None:
        """Remove a page that is not visible any more, its pin and its class."""
        order: SizeOrder | None = page.order
        if self.kept:
            self.kept.discard(page)
        if order is not None:
            order.pool.withdraw(page)
        else:
            self.pins.discard(page)

    def give_back(self, page: Page) -> None:
        """Make a visible page evictable whose last hold has ended."""
        order: SizeOrder | None = page.order
        if order is not None:
            order.pool.give_back(page)

    def own(self, page: Page) -> None:
        """Make a visible copy the node's own, and the newest of those."""
        in_order = page.order is not None
        if in_order:
            self.withdraw(page)
        page.is_copy = False
        if in_order:
            self.admit(page)

    def regroup(self, moving: Sequence[tuple[int, Page]]) -> Sequence[None]:
        """Move pages to the pool that their tenants have got since they were used.

        A page becomes the oldest there, or the newest if it was used meanwhile.
        """
        for used_ms, page in moving:
            base: EvictionPool = page.namespace.account.pool
            order: SizeOrder | None = page.order
            if order is None or order.pool.base is base:
                continue
            pool = base.layer(order.pool.rank)
            order.pool.withdraw(page)
            if page.used_ms == used_ms:
                pool.admit_oldest(page)
            else:
                pool.admit([page])
        return ()

    def pools(self) -> list[EvictionPool]:
        """Return all pools."""
        bases = (self.accounts.shared, *(account.pool for account in self.accounts.all()))
        return [pool for base in dict.fromkeys(bases) for pool in base.all_layers()]

    def layers(self, base: EvictionPool, slot_nbytes: int) -> Sequence[EvictionPool]:
        """Return the pools of a base's classes in the order in which pages are evicted.

        Tenants without a quota share one base, and a class of one must not cost another its pages:
        where there are several, the age decides between raised pages and others, too. So it does
        while a tenant has raised more than its new quota allows.
        """
        layers = base.layers()
        if len(layers) == 1:
            return layers
        is_shared = base is self.accounts.shared and self.is_shared
        last = HIGHEST if is_shared or base in self.kept.crowded else LAPSED
        by_age = [pool for pool in layers if LOW < pool.rank <= last]
        if len(by_age) < 2:
            return layers
        by_age.sort(key=lambda pool: pool.eldest_ms(slot_nbytes))
        others = [pool for pool in layers if pool not in by_age]
        return (
            [pool for pool in others if pool.rank == LOW]
            + by_age
            + [pool for pool in others if pool.rank != LOW]
        )

    @property
    def is_shared(self) -> bool:
        """Return whether several tenants without a quota have pages."""
        return self.accounts.sharing_count > 1

    def set_limits(
        self, limits: Callable[[str], Limits], promised_nbytes: int
    ) -> "list[TenantAccount[EvictionPool]]":
        """Set the tenants' limits, as `TenantUsage.set_limits` does."""
        changed = self.accounts.set_limits(limits, promised_nbytes)
        self.kept.limits_changed()
        return changed

    # ---- classes -------------------------------------------------------------------------------

    def keep(self, page: Page, rank: int, end_ms: int, holder: bytes) -> None:
        """Give a visible page a class; `settle` moves it there."""
        self.kept.put(page, Kept(rank, holder), end_ms)

    def settle(self, pages: Iterable[Page]) -> None:
        """Move pages into their class, each as the newest: pass a chain tail first."""
        for page in pages:
            kept = self.kept.get(page)
            if kept:  # again, so that a chain's classes end tail first
                self.kept.put(page, kept, self.kept.end_ms(page))
            self._reorder(page, kept.rank if kept else NORMAL)

    def _reorder(self, page: Page, rank: int) -> None:
        order: SizeOrder | None = page.order
        if order is None or order.pool.rank == rank:  # pinned or gone, or there already
            return
        if rank == NORMAL:
            if order.pool.rank == LAPSED:
                return
            rank = LAPSED
        pool = order.pool.base.layer(rank)
        order.pool.withdraw(page)
        pool.admit([page])

    def end_classes(self, now_ms: int) -> None:
        """End the classes of some pages whose time is over; the next calls take the rest."""
        for page in self.kept.ended(now_ms, PINS_ENDED):
            self._reorder(page, NORMAL)

    # ---- pins ----------------------------------------------------------------------------

    def pin(self, page: Page, expiry_ms: int) -> None:
        """Pin a page."""
        order: SizeOrder | None = page.order
        if order is not None:
            order.pool.withdraw(page)
        self.pins.add(page, expiry_ms)

    def unpin(self, page: Page) -> bool:
        """End a pin: the page may be evicted, as the newest.

        Return False if it was not pinned.
        """
        if not self.pins.discard(page):
            return False
        self.admit(page)
        return True

    def expire_pins(self, now_ms: int) -> int:
        """End some of the expired pins, and return how many; and of the classes whose time ended.

        The next calls end the rest.
        """
        if self.kept:
            self.end_classes(now_ms)
        ended = self.pins.ended(now_ms, PINS_ENDED) if self.pins.nbytes else []
        for page in ended:
            self.admit(page)
        return len(ended)

    # ---- check ---------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Return violations of what must always hold; empty if all is well."""
        wrong = []
        found: dict[str, dict[int, int]] = {}
        pinned: dict[str, int] = {}
        for pool in self.pools():
            wrong += pool.check()
        for block in self._slots.blocks():
            for page in block.owners:
                if page is None:
                    continue
                tenant, size = page.namespace.account.tenant, page.namespace.slot_nbytes
                counts = found.setdefault(tenant, {})
                counts[size] = counts.get(size, 0) + 1
                is_pinned = page in self.pins
                pinned[tenant] = pinned.get(tenant, 0) + is_pinned
                order: SizeOrder | None = page.order
                evictable = order is not None and page in order.pool
                if evictable != (page.state is State.VISIBLE and not is_pinned):
                    wrong.append(
                        f"page {short(page.prefix_hash)} is {page.state.name}, but evictable is "
                        f"{evictable}"
                    )
        for account in self.accounts.all():
            if account.pins != pinned.get(account.tenant, 0):
                wrong.append(
                    f"tenant {account.tenant} has {pinned.get(account.tenant, 0)} pins, counted "
                    f"{account.pins}"
                )
        for page in self.kept:
            kept = self.kept.get(page)
            if page.state is not State.VISIBLE or page.is_copy or kept is None:
                wrong.append(f"page {short(page.prefix_hash)} is in a class, but not visible")
            elif page.order is not None and page.order.pool.rank != kept.rank:
                wrong.append(f"page {short(page.prefix_hash)} is in another class than it should")
        for pool in self.pools():
            if pool.rank not in (NORMAL, LAPSED) and not all(map(self.kept.get, pool.pages())):
                wrong.append(f"pages of class {pool.rank} are there without an end")
        return wrong + self.kept.check() + self.accounts.check(found)
