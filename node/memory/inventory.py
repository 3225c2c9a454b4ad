"""Describe pages in all tiers, one by one and in sums.

Changes nothing but expired pins.
"""

import contextlib
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, TypeVar

from node.memory.lock_slices import split_in_slices
from node.memory.page import Counters, NamespaceIndex, Page, State
from node.memory.tier import RamTier

Read = TypeVar("Read")

SPACES = 64  # namespaces whose counters are copied under one lock
HASHES = 64  # hashes from disk, described together


class PageInfo(NamedTuple):
    """Fields as in the PageStat message."""

    prefix_hash: bytes
    present: bool
    nbytes: int = 0
    checksum: bytes = b""
    age_ms: int = 0
    idle_ms: int = 0
    pin_ttl_ms: int = 0
    holds: int = 0
    writing: bool = False
    in_ram: bool = False
    on_disk: bool = False
    ttl_ms: int = 0
    is_copy: bool = False


class Inventory:
    """Describe pages. Thread-safe: takes the RAM tier's lock."""

    def __init__(self, tier: RamTier) -> None:
        self._tier = tier

    def stat(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[PageInfo]:
        """Describe pages, each as it is at that moment."""
        tier = self._tier

        def some(hashes: Sequence[bytes]) -> list[PageInfo]:
            # Not before: others use pages while this thread waits for the lock
            now_ms = tier.clock_ms()
            index = tier.namespaces.find(digest)
            tier.eviction.order.expire_pins(now_ms)
            return [self._info(index, prefix_hash, now_ms) for prefix_hash in hashes]

        return split_in_slices(tier.lock, some, prefix_hashes)

    def _info(self, index: NamespaceIndex, prefix_hash: bytes, now_ms: int) -> PageInfo:
        page = self._tier.live(index, prefix_hash)
        below = self._tier.below.info(index.digest, prefix_hash)
        if page is not None:
            return self._ram_info(page, now_ms, below is not None)
        if below is None:
            return PageInfo(prefix_hash, False, writing=prefix_hash in index.pages)
        return PageInfo(
            prefix_hash,
            True,
            index.page_nbytes,
            below.checksum,
            idle_ms=below.idle_s * 1000,
            pin_ttl_ms=below.pin_ttl_s * 1000,
            on_disk=True,
            ttl_ms=below.ttl_s * 1000,
        )

    def _ram_info(self, page: Page, now_ms: int, on_disk: bool) -> PageInfo:
        pin_ms = self._tier.eviction.pins.expiry_ms(page)
        return PageInfo(
            page.prefix_hash,
            True,
            page.namespace.page_nbytes,
            page.checksum,
            age_ms=now_ms - page.stored_ms,
            idle_ms=now_ms - page.used_ms,
            pin_ttl_ms=pin_ms - now_ms if pin_ms else 0,
            holds=page.holds,
            in_ram=True,
            on_disk=on_disk,
            ttl_ms=(page.expiry_s - self._tier.clock_s()) * 1000 if page.expiry_s else 0,
            is_copy=page.is_copy,
        )

    @contextlib.contextmanager
    def inspected(self, digest: bytes, prefix_hash: bytes) -> Iterator[Page | None]:
        """Yield the held page if it is visible in RAM; it is neither a use nor a load."""
        with self._tier.lock:
            page = self._tier.live(self._tier.namespaces.find(digest), prefix_hash)
            if page is not None:
                self._tier.hold_all([page])
        try:
            yield page
        finally:
            if page is not None:
                self._tier.release([page])

    def list_pages(
        self,
        digest: bytes,
        key_prefix: bytes,
        after: bytes,
        limit: int,
        wanted: Callable[[list[bytes]], list[bytes]] = list,
    ) -> tuple[list[PageInfo], bytes]:
        """List pages whose hash starts so and is above `after`; return also the next `after`.

        `wanted` filters hashes that are requested.
        """
        hashes: list[bytes] = []

        def collect(pages: list[Page]) -> None:
            found = (page.prefix_hash for page in pages)
            hashes.extend(h for h in found if h > after and h.startswith(key_prefix))

        self._tier.scan(self._tier.namespace(digest), collect)
        # Outside the lock: finding an owner may take half a millisecond
        hashes = list(_sifted(iter(hashes), wanted))
        # Sorting happens outside the lock; a page that is removed meanwhile, or not committed yet,
        # is left out below. It still counts here, or the reply would look like the last one.
        in_ram = heapq.nsmallest(limit + 1, set(hashes))
        on_disk = islice(
            _sifted(self._tier.below.list_hashes(digest, key_prefix, after), wanted), limit + 1
        )
        chosen = sorted({*in_ram, *on_disk})[: limit + 1]
        rest_after = chosen[limit - 1] if len(chosen) > limit else b""
        return [info for info in self.stat(digest, chosen[:limit]) if info.present], rest_after

    def room(self, digest: bytes, count: int) -> list[float]:
        """Return for how long the slots of so many new pages were unused, in ms; infinity if free.

        The list is shorter if no more may be evicted.
        """
        tier = self._tier
        with tier.lock:
            index = tier.namespaces.find(digest)
            slot_nbytes, account = index.slot_nbytes, index.account
            free_count = min(count, tier.slots.free_count(slot_nbytes))
            if account.nbytes_max:
                free_count = min(free_count, account.room(slot_nbytes))
            pool = (
                account.pool
                if account.full_for(slot_nbytes)
                else tier.eviction.order.accounts.first(account)
            )
            evictable = (
                page
                for layer in tier.eviction.order.layers(pool, slot_nbytes)
                for page in layer.oldest_first(slot_nbytes)
                if not page.holds
            )
            now_ms = tier.clock_ms()
            return [math.inf] * free_count + [
                now_ms - page.used_ms for page in islice(evictable, count - free_count)
            ]

    def unsaved(self, until_ms: float = math.inf) -> list[tuple[bytes, list[bytes]]]:
        """Return pages in RAM that are not durable below, by namespace digest.

        Copies are left out, and pages that were stored after `until_ms`, by the tier's clock.
        """
        found: dict[bytes, list[bytes]] = {}

        def collect(pages: list[Page]) -> None:
            hashes: dict[bytes, list[bytes]] = {}
            for page in pages:
                is_old = page.stored_ms <= until_ms
                if page.state is State.VISIBLE and is_old and not page.is_copy:
                    hashes.setdefault(page.namespace.digest, []).append(page.prefix_hash)
            for digest, visible in hashes.items():
                safe = self._tier.below.safe(digest, visible)
                missing = [h for h, is_safe in zip(visible, safe, strict=True) if not is_safe]
                if missing:
                    found.setdefault(digest, []).extend(missing)

        self._tier.scan(None, collect)
        return list(found.items())

    def size_classes(self) -> list[tuple[int, int, int, int]]:
        """Return (slot_nbytes, blocks, slots, slots in use) of each slot size."""
        with self._tier.lock:
            self._tier.eviction.order.expire_pins(self._tier.clock_ms())
            kinds = self._tier.slots.kinds()
            return sorted(
                (kind.slot_nbytes, kind.block_count, kind.slot_count, kind.used_count)
                for kind in kinds
            )

    def counters(self) -> tuple[Counters, list[tuple[NamespaceIndex, Counters, int]]]:
        """Return total counters, and (namespace, counters, pages) of each."""
        totals, each = self.counted(replace)
        for _, counters, _ in each:
            totals.add(counters)
        return totals, each

    def counted(
        self, read: Callable[[Counters], Read]
    ) -> tuple[Read, list[tuple[NamespaceIndex, Read, int]]]:
        """Return `read` of forgotten namespaces' counters, and of each present namespace's."""
        with self._tier.lock:
            spaces = self._tier.namespaces.all()
            forgotten = read(self._tier.namespaces.forgotten)
        each: list[tuple[NamespaceIndex, Read, int]] = []
        for start in range(0, len(spaces), SPACES):
            with self._tier.lock:
                some = spaces[start : start + SPACES]
                each += [(index, read(index.counters), len(index.pages)) for index in some]
        return forgotten, each


def _sifted(
    hashes: Iterator[bytes], wanted: Callable[[list[bytes]], list[bytes]]
) -> Iterator[bytes]:
    while some := list(islice(hashes, HASHES)):
        yield from wanted(some)
