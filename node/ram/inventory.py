"""What is in which tier, told page by page and in sums. Changes nothing but pins that are over."""

import heapq
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from node.ram.counters import Counters
from node.ram.namespace import NamespaceIndex
from node.ram.page import Page, State
from node.ram.tier import RamTier


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


class Inventory:
    """Thread-safe: takes the RAM tier's lock."""

    def __init__(self, tier: RamTier) -> None:
        self._tier = tier

    def stat(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[PageInfo]:
        tier = self._tier
        with tier.lock:
            now_ms = tier.clock_ms()  # not before: others use pages while this one waits for the lock
            index = tier.namespaces.find(digest)
            tier.eviction.expire_pins(now_ms)
            return [self._info(index, prefix_hash, now_ms) for prefix_hash in prefix_hashes]

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
        )

    def list_pages(self, digest: bytes, key_prefix: bytes, after: bytes, limit: int) -> tuple[list[PageInfo], bytes]:
        """Up to `limit` pages whose hash starts with `key_prefix` and is above `after`, and the `after`
        of the rest; empty if that was all."""
        with self._tier.lock:
            hashes = list(self._tier.namespaces.find(digest).pages)
        # Sorting happens outside the lock; a page that goes meanwhile, or that is not committed yet, is
        # left out below. It still counts here, or the reply would look like the last one.
        in_ram = heapq.nsmallest(limit + 1, (h for h in hashes if h > after and h.startswith(key_prefix)))
        on_disk = islice(self._tier.below.list_hashes(digest, key_prefix, after), limit + 1)
        chosen = sorted({*in_ram, *on_disk})[: limit + 1]
        rest_after = chosen[limit - 1] if len(chosen) > limit else b""
        return [info for info in self.stat(digest, chosen[:limit]) if info.present], rest_after

    def unsaved(self, locked_pages: int) -> list[tuple[bytes, list[bytes]]]:
        """Pages in RAM that are not safe below: (namespace digest, prefix hashes). Looks at `locked_pages`
        under one lock."""
        tier = self._tier
        with tier.lock:
            known = [(index, list(index.pages)) for index in tier.namespaces.all()]
        found: list[tuple[bytes, list[bytes]]] = []
        for index, hashes in known:
            missing: list[bytes] = []
            for start in range(0, len(hashes), locked_pages):
                some = hashes[start : start + locked_pages]
                with tier.lock:
                    pages = map(index.pages.get, some)
                    visible = [page.prefix_hash for page in pages if page is not None and page.state is State.VISIBLE]
                    safe = tier.below.safe(index.digest, visible)
                missing += [h for h, is_safe in zip(visible, safe, strict=True) if not is_safe]
            if missing:
                found.append((index.digest, missing))
        return found

    def size_classes(self) -> list[tuple[int, int, int, int]]:
        """(slot_nbytes, extents, slots, slots in use) of each slot size that has extents."""
        classes: dict[int, list[int]] = {}
        with self._tier.lock:
            self._tier.eviction.expire_pins(self._tier.clock_ms())
            for extent in self._tier.slots.extents():
                sums = classes.setdefault(extent.slot_nbytes, [0, 0, 0])
                for i, value in enumerate((1, len(extent.owners), extent.used_count)):
                    sums[i] += value
        return [(size, extents, slots, used) for size, (extents, slots, used) in sorted(classes.items())]

    def counters(self) -> tuple[Counters, list[tuple[NamespaceIndex, Counters, int]]]:
        """Copies: totals, and (namespace, counters, pages) of each."""
        with self._tier.lock:
            each = [(index, replace(index.counters), len(index.pages)) for index in self._tier.namespaces.all()]
            return self._tier.namespaces.totals(), each
