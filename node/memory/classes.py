"""Keep pages in classes of eviction, each until a time.

    LOW      evicted before all other pages of the tenant, whatever their age
    NORMAL   pages that nobody has said anything about
    LAPSED   pages whose time in another class has ended: the age decides between them and NORMAL
    HIGH     after them
    HIGHEST  last

A class orders a tenant's own pages. The tenant's share of the RAM stays what its quota says, and
raised pages have at most half of it, so that new ones find a place. No clock of its own.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from node.memory.lazy_heap import LazyHeap
from node.memory.page import Page
from node.memory.tenant_usage import TenantAccount

LOW, NORMAL, LAPSED, HIGH, HIGHEST = CLASSES = range(5)
RAISED_SHARE = 0.5  # of a tenant's quota, or of the RAM
SHARED = b"\xff" * 65  # a holder that no session can be: several retain the page


class Kept(NamedTuple):
    """A page's class, and who gave it."""

    rank: int
    holder: bytes


class KeptPages:
    """Pages in another class than the normal one, with the time at which that ends.

    Not thread-safe.
    """

    def __init__(self, region_nbytes: int) -> None:
        self._region_nbytes = region_nbytes
        self._ends: LazyHeap[Page] = LazyHeap()
        self._kept: dict[Page, Kept] = {}
        self._raised: dict[TenantAccount[Any], int] = {}  # bytes of slots of raised pages
        # Pools of tenants whose quota was lowered, and that have raised more than half of it since
        self.crowded: set[Any] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Page]:
        return iter(self._kept)

    def get(self, page: Page) -> Kept | None:
        """Return what is known of a page in another class; None for a normal one."""
        return self._kept.get(page)

    def end_ms(self, page: Page) -> int:
        """Return when a page becomes normal again; 0 for a normal one."""
        return self._ends.key(page) or 0

    def has_room(self, page: Page) -> bool:
        """Return whether the page's tenant may raise one more page of this size."""
        account = page.namespace.account
        return self._raised.get(account, 0) + page.namespace.slot_nbytes <= self._share(account)

    def _share(self, account: TenantAccount[Any]) -> float:
        return RAISED_SHARE * (account.nbytes_max or self._region_nbytes)

    def limits_changed(self) -> None:
        """Note which tenants have raised more than their new quotas allow."""
        self.crowded = {
            account.pool
            for account, nbytes in self._raised.items()
            if account.nbytes_max and nbytes > self._share(account)
        }

    def put(self, page: Page, kept: Kept, end_ms: int) -> None:
        """Put a page into a class, or replace its class."""
        self._count(page, -1)
        self._kept[page] = kept
        self._count(page, 1)
        self._ends.put(page, end_ms)

    def discard(self, page: Page) -> bool:
        """Make a page normal; return False if it was."""
        if not self._ends.discard(page):
            return False
        self._count(page, -1)
        del self._kept[page]
        return True

    def _count(self, page: Page, more: int) -> None:
        kept, account = self._kept.get(page), page.namespace.account
        if kept is not None and kept.rank > NORMAL:
            nbytes = self._raised.get(account, 0) + more * page.namespace.slot_nbytes
            if nbytes:
                self._raised[account] = nbytes
            else:
                del self._raised[account]
            if self.crowded and nbytes <= self._share(account):
                self.crowded.discard(account.pool)

    def ended(self, now_ms: int, entries_max: int) -> list[Page]:
        """Forget and return pages whose time has ended, in the order of their ends and `put`s.

        It visits so many entries; another call continues.
        """
        pages = self._ends.take(now_ms, entries_max)
        for page in pages:
            self._count(page, -1)
            del self._kept[page]
        return pages

    def check(self) -> list[str]:
        """Return violations of what must always hold; empty if all is well."""
        raised: dict[Any, int] = {}
        for page, kept in self._kept.items():
            if kept.rank > NORMAL:
                account = page.namespace.account
                raised[account] = raised.get(account, 0) + page.namespace.slot_nbytes
        wrong = [] if raised == self._raised else ["bytes of raised pages are counted wrongly"]
        if set(self._ends) != self._kept.keys():
            wrong.append("pages in a class have no end, or normal ones have one")
        return wrong
