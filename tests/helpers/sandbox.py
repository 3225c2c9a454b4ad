"""A RAM tier without a node."""

from collections.abc import Sequence
from typing import Any

from known_pages import Pages

from node.memory.inventory import Inventory, PageInfo
from node.memory.page import Namespaces, Page, Reservation
from node.memory.tenant_usage import Limits
from node.memory.tier import RamTier
from node.slab import SlotAllocator


class Sandbox:
    """A RAM tier with a bytearray as its arena and a clock that is moved by hand."""

    def __init__(self, ram_nbytes: int, extent_nbytes: int) -> None:
        self.arena = bytearray(ram_nbytes)
        self.now_ms = 1
        self.slots = SlotAllocator(ram_nbytes, extent_nbytes)
        self.tier = RamTier(
            Namespaces(64, extent_nbytes), self.slots, self._copy, self._zero, lambda: self.now_ms
        )

    def _copy(self, source: int, target: int, nbytes: int) -> None:
        self.arena[target : target + nbytes] = self.arena[source : source + nbytes]

    def _zero(self, offset: int, nbytes: int) -> None:
        self.arena[offset : offset + nbytes] = bytes(nbytes)

    def open(self, name: str, page_nbytes: int, **fields: Any) -> Pages:
        pages = Pages(name, page_nbytes, **fields)
        self.tier.open_namespace(pages.namespace, pages.namespace.digest)
        return pages

    def limit(self, pins: int = 0, **quotas: int) -> None:
        """Set the bytes of RAM by tenant (others have no quota), and the pins of each tenant."""
        self.tier.set_limits(
            lambda tenant: Limits(quotas.get(tenant, 0), pins), sum(quotas.values())
        )

    def nbytes(self, tenant: str) -> int:
        return self.tier.eviction.order.accounts.of(tenant).nbytes

    def reserve(self, pages: Pages, keys: Sequence[bytes]) -> Reservation:
        return self.tier.reserve(pages.namespace.digest, keys, pages.nbytes)

    def write(self, pages: Pages, reservation: Reservation) -> None:
        for page in reservation.pages:
            self.arena[page.offset : page.offset + pages.nbytes] = pages.content(page.prefix_hash)

    def hold(self, pages: Pages, keys: Sequence[bytes]) -> list[Page | None]:
        """Hold pages as a reader does; this does not count as a use yet."""
        tier = self.tier
        with tier.lock:
            found = tier.live_all(tier.namespace(pages.namespace.digest), keys)
            tier.hold_all([page for page in found if page is not None])
        return found

    def commit(self, reservation: Reservation) -> int:
        return self.tier.commit(reservation, [b"checksum"] * len(reservation.pages))

    def put(self, pages: Pages, keys: Sequence[bytes]) -> list[int]:
        reservation = self.reserve(pages, keys)
        self.write(pages, reservation)
        self.commit(reservation)
        return reservation.verdicts

    def acquire(self, pages: Pages, keys: Sequence[bytes]) -> list[Page | None]:
        return self.tier.acquire(pages.namespace.digest, keys, False, pages.nbytes).pages

    def read(self, pages: Pages, keys: Sequence[bytes]) -> list[Page]:
        """Acquire pages, which must all be present; the caller releases them."""
        found = [page for page in self.acquire(pages, keys) if page is not None]
        assert len(found) == len(keys)
        return found

    def intact(self, pages: Pages, page: Page) -> bool:
        return self.arena[page.offset : page.offset + pages.nbytes] == pages.content(
            page.prefix_hash
        )

    def get(self, pages: Pages, keys: Sequence[bytes]) -> list[bool]:
        """Read pages and compare every byte of every hit."""
        found = self.acquire(pages, keys)
        held = [page for page in found if page is not None]
        assert all(self.intact(pages, page) for page in held)
        self.tier.release(held)
        return [page is not None for page in found]

    def present(self, pages: Pages, keys: Sequence[bytes]) -> set[bytes]:
        """Return the keys that are visible, without counting a use."""
        return {info.prefix_hash for info in self.stat(pages, keys) if info.present}

    def stat(self, pages: Pages, keys: Sequence[bytes]) -> list[PageInfo]:
        return Inventory(self.tier).stat(pages.namespace.digest, keys)

    def pin(self, pages: Pages, keys: Sequence[bytes], ttl_ms: int = 1 << 30) -> list[bool]:
        return self.tier.pin(pages.namespace.digest, keys, ttl_ms)

    def unpin(self, pages: Pages, keys: Sequence[bytes]) -> list[bool]:
        return self.tier.unpin(pages.namespace.digest, keys)

    def remove(self, pages: Pages, keys: Sequence[bytes]) -> list[bool]:
        return self.tier.remove(pages.namespace.digest, keys)


def fill(box: Any, space: Any, *numbers: int) -> list[bytes]:
    """Put the pages one after the other, each 1 ms later; return their keys."""
    keys: list[bytes] = space.keys(*numbers)
    for key in keys:
        box.now_ms += 1
        box.put(space, [key])
    return keys
