"""Track pins: when they end, and how much RAM they keep from other pages.

No clock of its own.
"""

from collections.abc import Sequence
from itertools import islice

from kvstore.errors import Exhausted
from node.memory.lazy_heap import LazyHeap
from node.memory.page import Page
from node.memory.tenant_usage import Packed
from node.slab import SlotAllocator

# Share of the RAM for the blocks of pinned pages. The rest follows the traffic.
PINNED_SHARE = 0.5


class Pins:
    """Pages with the time until which they may not be evicted.

    Not thread-safe.
    """

    def __init__(self, slots: SlotAllocator) -> None:
        self._slots = slots
        self._ends: LazyHeap[Page] = LazyHeap()
        self._sizes: dict[int, Packed] = {}
        self.nbytes = 0  # of the blocks that they need
        self.nbytes_max = int(slots.region_nbytes * PINNED_SHARE)

    def __contains__(self, page: Page) -> bool:
        return page in self._ends

    def __len__(self) -> int:
        return len(self._ends)

    def expiry_ms(self, page: Page) -> int | None:
        """Return when a page's pin ends; None if it has none."""
        return self._ends.key(page)

    def check_room(self, pages: Sequence[Page]) -> None:
        """Raise Exhausted if these pages of one size cannot be pinned, too."""
        more_count = sum(page not in self._ends for page in pages)
        if not more_count:
            return
        nbytes = self._nbytes_with(pages[0].namespace.slot_nbytes, more_count)
        if nbytes > self.nbytes_max:
            raise Exhausted(
                f"with {more_count} more, pinned pages would occupy more than {self.nbytes_max} "
                "bytes of RAM (half of ram_nbytes); unpin some, or wait until their pins end"
            )

    def _nbytes_with(self, slot_nbytes: int, more_count: int) -> int:
        """Return `nbytes` with so many more pinned pages of this size."""
        size = self._sizes.get(slot_nbytes) or Packed(self._slots, slot_nbytes)
        return self.nbytes - size.need(size.count) + size.need(size.count + more_count)

    def some_sizes(self, count: int) -> list[int]:
        """Return some slot sizes of pinned pages, different ones with each call."""
        sizes = list(islice(self._sizes, count))
        for size in sizes:
            self._sizes[size] = self._sizes.pop(size)
        return sizes

    def add(self, page: Page, expiry_ms: int) -> None:
        """Pin a page, or replace its pin."""
        if page not in self._ends:
            self._count(page, 1)
        self._ends.put(page, expiry_ms)

    def discard(self, page: Page) -> bool:
        """Unpin a page; return False if it was not pinned."""
        if not self._ends.discard(page):
            return False
        self._count(page, -1)
        return True

    def _count(self, page: Page, more_count: int) -> None:
        slot_nbytes = page.namespace.slot_nbytes
        page.namespace.account.pins += more_count
        self.nbytes = self._nbytes_with(slot_nbytes, more_count)
        size = self._sizes.get(slot_nbytes)
        if size is None:
            size = self._sizes[slot_nbytes] = Packed(self._slots, slot_nbytes)
        size.count += more_count
        if not size.count:
            del self._sizes[slot_nbytes]

    def ended(self, now_ms: int, entries_max: int) -> list[Page]:
        """Unpin and return pages whose pin has ended.

        It visits so many entries; another call continues.
        """
        pages = self._ends.take(now_ms, entries_max)
        for page in pages:
            self._count(page, -1)
        return pages

    @property
    def entry_count(self) -> int:
        """Return the number of entries, outdated ones included."""
        return self._ends.entry_count
