"""Which pages may go, and in whose pool they wait for it; which are pinned.

A visible page is in the pool of its tenant, a pinned one in none. Not thread-safe: the tier's lock guards it. No call
takes longer the more pages, sizes, holds or pins there are.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter

from kvstore.keys import short
from node.ram.accounts import Accounts
from node.ram.page import Page, State
from node.ram.pins import Pins
from node.ram.pool import Pool
from node.ram.turn import Turn
from node.slots import SlotAllocator

PINS_ENDED = 256  # at a time


class UseOrder:
    """`turn` is that of whoever has the lock."""

    def __init__(self, slots: SlotAllocator, turn: Turn) -> None:
        self._slots = slots
        self.accounts: Accounts[Pool] = Accounts(slots, lambda: Pool(turn))
        self.pins = Pins(slots)

    # ---- a page's life -------------------------------------------------------------------

    def admit(self, page: Page) -> None:
        """A page became visible, or is not pinned any more: from now on it may be evicted, as the newest."""
        page.namespace.account.pool.admit([page])

    def admit_new(self, pages: Sequence[Page], chain: Sequence[Page], now_ms: int) -> None:
        """The same of new pages of a chain, of which others may be here; all of it is used now, tail first."""
        if not pages:
            self.touch(reversed(chain), now_ms)
            return
        pool: Pool = pages[0].namespace.account.pool
        if len(chain) == len(pages):
            self._date(pages, now_ms)
            pool.admit(pages[::-1])
        else:
            pool.admit(pages)
            self.touch(reversed(chain), now_ms)

    def touch(self, chain: Iterable[Page | None], now_ms: int) -> None:
        """Visible pages are used now, one after the other.

        Pass a chain tail first: its head is the newest page then, and the last to go.
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
        """They are used now."""
        block_of = self._slots.block_of
        for page in pages:
            if page.used_ms != now_ms:
                block_of(page.offset).used_sum += now_ms - page.used_ms
                page.used_ms = now_ms

    def withdraw(self, page: Page) -> None:
        """A page is not visible any more: it is in no pool and has no pin."""
        if page.order is not None:
            page.order.pool.withdraw(page)
        else:
            self.pins.discard(page)

    def give_back(self, page: Page) -> None:
        """Nobody holds a visible page any more."""
        if page.order is not None:
            page.order.pool.give_back(page)

    def own(self, page: Page) -> None:
        """A visible copy is none any more: it counts as others of its age do, and as the newest of them."""
        in_order = page.order is not None
        if in_order:
            self.withdraw(page)
        page.is_copy = False
        if in_order:
            self.admit(page)

    def regroup(self, page: Page, used_ms: int) -> None:
        """Its tenant has got another pool since it was used: it goes there as the oldest, or as the newest if it was
        used meanwhile."""
        pool = page.namespace.account.pool
        if page.order is None or page.order.pool is pool:
            return
        page.order.pool.withdraw(page)
        if page.used_ms == used_ms:
            pool.admit_oldest(page)
        else:
            pool.admit(page)

    def pools(self) -> list[Pool]:
        return list(dict.fromkeys((self.accounts.shared, *(account.pool for account in self.accounts.all()))))

    # ---- pins ----------------------------------------------------------------------------

    def pin(self, page: Page, expiry_ms: int) -> None:
        if page.order is not None:
            page.order.pool.withdraw(page)
        self.pins.add(page, expiry_ms)

    def unpin(self, page: Page) -> bool:
        """The page may be evicted again, as the newest. False if it was not pinned."""
        if not self.pins.discard(page):
            return False
        self.admit(page)
        return True

    def expire_pins(self, now_ms: int) -> int:
        """Ends pins whose time is over; so many of them. The rest follows with the next calls."""
        ended = self.pins.ended(now_ms, PINS_ENDED) if self.pins.nbytes else []
        for page in ended:
            self.admit(page)
        return len(ended)

    # ---- check ---------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
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
                evictable = page.order is not None and page in page.order.pool
                if evictable != (page.state is State.VISIBLE and not is_pinned):
                    wrong.append(f"page {short(page.prefix_hash)} is {page.state.name}, but evictable is {evictable}")
        for account in self.accounts.all():
            if account.pins != pinned.get(account.tenant, 0):
                wrong.append(
                    f"tenant {account.tenant} has {pinned.get(account.tenant, 0)} pins, counted {account.pins}"
                )
        return wrong + self.accounts.check(found)
