"""The RAM tier: which page is in which slot of the arena, who may not lose it, who goes next.

It deals in offsets, never in bytes (`copy` moves a slot for it) and takes its clock as an argument,
so the same code runs in a simulation. One lock, held for the length of a batch's bookkeeping and
never for a transfer: between `reserve` and `commit` the writer alone may touch a slot, between
`acquire` and `release` the slot can not change or go, whatever is removed or evicted meanwhile.
"""

import heapq
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvstore.errors import Exhausted, LayoutMismatch
from kvstore.keys import Namespace
from node.eviction import Eviction
from node.ghosts import Ghosts
from node.namespace import Counters, NamespaceIndex, Namespaces
from node.page import Page, State
from node.reservation import Reservation, Verdict
from node.slots import SlotAllocator


class PageInfo(NamedTuple):
    """What `stat` and `list` tell about a page."""

    prefix_hash: bytes
    present: bool
    nbytes: int = 0
    checksum: bytes = b""
    age_ms: int = 0
    idle_ms: int = 0
    pin_ttl_ms: int = 0
    holds: int = 0
    writing: bool = False


class RamTier:
    """Thread-safe. `clock_ms` gives whole milliseconds that never go back."""

    def __init__(
        self,
        namespaces: Namespaces,
        slots: SlotAllocator,
        copy: Callable[[int, int, int], None],
        clock_ms: Callable[[], int],
    ) -> None:
        self.slots = slots
        self._namespaces = namespaces
        self._clock_ms = clock_ms
        self._lock = threading.Lock()
        self._ghosts = Ghosts()
        self._eviction = Eviction(slots, copy, self._forget)
        self._pins: list[tuple[int, int, Page]] = []  # heap of (expiry_ms, number, page); may be outdated
        self._pin_number = 0
        self.writing_count = 0
        self.held_count = 0
        self.visible_count = 0

    @property
    def pinned_count(self) -> int:
        return self._eviction.pinned_count

    # ---- namespaces ----------------------------------------------------------------------

    def open_namespace(self, value: Namespace, digest: bytes) -> tuple[NamespaceIndex, bool]:
        with self._lock:
            return self._namespaces.open(value, digest)

    def namespace(self, digest: bytes) -> NamespaceIndex:
        with self._lock:
            return self._namespaces.find(digest)

    # ---- lookup --------------------------------------------------------------------------

    def lookup(self, digest: bytes, prefix_hashes: Sequence[bytes], touch: bool) -> list[bool]:
        """Presence per key. Without `touch` nothing is kept alive by it; with it, it is a use and
        not a question, so hits and misses are not counted."""
        with self._lock:
            index = self._namespaces.find(digest)
            pages, visible = list(map(index.pages.get, prefix_hashes)), State.VISIBLE
            present = [page is not None and page.state is visible for page in pages]
            if touch:
                self._touch_chain(pages)
            else:
                absent = [h for h, page in zip(prefix_hashes, pages, strict=True) if page is None]
                self._count_lookup(index, present, absent)
            return present

    def _count_lookup(self, index: NamespaceIndex, present: list[bool], absent: list[bytes]) -> None:
        """`absent`: keys that are not here in any state; what else is not present is being written."""
        counters, count, hits = index.counters, len(present), present.count(True)
        counters.pages_asked += count
        counters.pages_hit += hits
        counters.prefix_hits += present.index(False) if hits < count else count
        counters.miss_writing += count - hits - len(absent)
        for reason, missed in self._ghosts.reasons(index.digest, absent).items():
            name = f"miss_{reason}"
            setattr(counters, name, getattr(counters, name) + missed)

    def _touch_chain(self, chain: Sequence[Page | None]) -> None:
        """Tail first, so that the head of a chain is its newest page and the last to go."""
        now_ms = self._clock_ms()
        for page in reversed(chain):
            if page is not None and page.state is State.VISIBLE:
                self._eviction.touch(page, now_ms)

    # ---- write ---------------------------------------------------------------------------

    def reserve(self, digest: bytes, prefix_hashes: Sequence[bytes], page_nbytes: int) -> Reservation:
        """Slots for the pages that are not here. Raises Exhausted if there is space for none."""
        now_ms = self._clock_ms()
        with self._lock:
            index = self._namespaces.find(digest)
            if page_nbytes != index.page_nbytes:
                raise LayoutMismatch(f"pages of {page_nbytes} bytes; namespace {digest.hex()} has {index.page_nbytes}")
            self._expire_pins(now_ms)
            known = [page for h in prefix_hashes if (page := index.pages.get(h)) is not None]
            self._touch_chain(known)
            for page in known:  # making room for the batch must not evict the batch
                page.holds += 1
            try:
                return self._reserve(index, prefix_hashes, now_ms)
            finally:
                for page in known:
                    page.holds -= 1

    def _reserve(self, index: NamespaceIndex, prefix_hashes: Sequence[bytes], now_ms: int) -> Reservation:
        result = Reservation(index, [], [], [])
        full = False
        for prefix_hash in prefix_hashes:
            page = index.pages.get(prefix_hash)
            if page is None:
                page = None if full else self._place(index, prefix_hash, now_ms)
                full = page is None
                result.verdicts.append(Verdict.FULL if page is None else Verdict.WRITE)
                if page is not None:
                    result.pages.append(page)
                    result.chain.append(page)
            elif page.state is State.VISIBLE:
                result.verdicts.append(Verdict.EXISTS)
                result.chain.append(page)
            else:
                result.verdicts.append(Verdict.BUSY)
        counters = index.counters
        counters.pages_put_exists += result.verdicts.count(Verdict.EXISTS)
        counters.pages_put_busy += result.verdicts.count(Verdict.BUSY)
        counters.pages_put_full += result.verdicts.count(Verdict.FULL)
        if result.verdicts.count(Verdict.FULL) == len(prefix_hashes):
            raise Exhausted(
                f"no slot of {index.slot_nbytes} bytes can be freed: all pages are pinned or in use "
                f"({self.pinned_count} pinned, {self.held_count} being read, {self.writing_count} being written)"
            )
        return result

    def _place(self, index: NamespaceIndex, prefix_hash: bytes, now_ms: int) -> Page | None:
        page = Page(index, prefix_hash, now_ms)
        if not self._eviction.place(page):
            return None
        index.pages[prefix_hash] = page
        self.writing_count += 1
        return page

    def commit(self, reservation: Reservation, checksums: Sequence[bytes]) -> int:
        """Makes the reserved pages visible; the whole chain becomes the newest, head last."""
        now_ms = self._clock_ms()
        with self._lock:
            for page, checksum in zip(reservation.pages, checksums, strict=True):
                assert page.state is State.WRITING
                page.checksum = checksum
                page.state = State.VISIBLE
                page.stored_ms = now_ms
                self._eviction.admit(page)
            stored = len(reservation.pages)
            self.writing_count -= stored
            self.visible_count += stored
            counters = reservation.namespace.counters
            counters.pages_put += stored
            counters.nbytes_put += stored * reservation.namespace.page_nbytes
            self._touch_chain(reservation.chain)
            return stored

    def abort(self, reservation: Reservation) -> None:
        """Gives the reserved slots back; nothing of them was ever visible."""
        with self._lock:
            for page in reservation.pages:
                assert page.state is State.WRITING
                del page.namespace.pages[page.prefix_hash]
                self._eviction.release(page)
            self.writing_count -= len(reservation.pages)
            reservation.namespace.counters.pages_put_aborted += len(reservation.pages)

    # ---- read ----------------------------------------------------------------------------

    def acquire(
        self, digest: bytes, prefix_hashes: Sequence[bytes], prefix_only: bool, wanted_nbytes: int
    ) -> list[Page | None]:
        """A page or None per key; each page is held until `release`. Counts as a use.

        `wanted_nbytes`: bytes of each page that the caller is going to read, for the counters.
        """
        with self._lock:
            index = self._namespaces.find(digest)
            found = self._hold(index, prefix_hashes, prefix_only)
            self._touch_chain(found)
            hits = len(found) - found.count(None)
            index.counters.pages_got += hits
            index.counters.nbytes_got += hits * wanted_nbytes
            index.counters.pages_get_missed += len(found) - hits
            return found

    def inspect(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[Page | None]:
        """Like `acquire`, but neither a use nor counted."""
        with self._lock:
            return self._hold(self._namespaces.find(digest), prefix_hashes, prefix_only=False)

    def _hold(self, index: NamespaceIndex, prefix_hashes: Sequence[bytes], prefix_only: bool) -> list[Page | None]:
        found: list[Page | None] = [None] * len(prefix_hashes)
        for position, prefix_hash in enumerate(prefix_hashes):
            page = index.pages.get(prefix_hash)
            if page is not None and page.state is State.VISIBLE:
                page.holds += 1
                self.held_count += page.holds == 1
                found[position] = page
            elif prefix_only:
                break
        return found

    def release(self, pages: Sequence[Page]) -> None:
        with self._lock:
            for page in pages:
                assert page.holds > 0
                page.holds -= 1
                if page.holds == 0:
                    self.held_count -= 1
                    if page.state is State.DOOMED:
                        self._eviction.release(page)

    # ---- forget --------------------------------------------------------------------------

    def remove(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Forgets pages, pinned ones too. True for each that was visible."""
        with self._lock:
            index = self._namespaces.find(digest)
            removed = []
            for prefix_hash in prefix_hashes:
                page = index.pages.get(prefix_hash)
                removed.append(page is not None and page.state is State.VISIBLE)
                if removed[-1] and page is not None:
                    self._forget(page, "removed")
            return removed

    def drop_corrupt(self, page: Page) -> None:
        """Forgets a page whose bytes do not match its checksum (the caller holds it)."""
        with self._lock:
            if page.state is State.VISIBLE:
                self._forget(page, "corrupt")

    def _forget(self, page: Page, reason: str) -> None:
        """Takes a visible page out; its slot follows at once or with its last reader."""
        index = page.namespace
        del index.pages[page.prefix_hash]
        self._ghosts.remember(index.digest, page.prefix_hash, reason)
        if reason == "evicted":
            index.counters.pages_evicted += 1
        self.visible_count -= 1
        page.state = State.DOOMED
        self._eviction.withdraw(page)
        if page.holds == 0:
            self._eviction.release(page)

    # ---- pins ----------------------------------------------------------------------------

    def pin(self, digest: bytes, prefix_hashes: Sequence[bytes], ttl_ms: int) -> list[bool]:
        """Keeps visible pages from eviction for `ttl_ms`; a new pin replaces the old one."""
        now_ms = self._clock_ms()
        with self._lock:
            index = self._namespaces.find(digest)
            self._expire_pins(now_ms)
            pinned = []
            for prefix_hash in prefix_hashes:
                page = index.pages.get(prefix_hash)
                pinned.append(page is not None and page.state is State.VISIBLE)
                if pinned[-1] and page is not None:
                    self._pin(page, now_ms + ttl_ms)
            return pinned

    def _pin(self, page: Page, expiry_ms: int) -> None:
        self._eviction.pin(page, expiry_ms)
        self._pin_number += 1
        heapq.heappush(self._pins, (expiry_ms, self._pin_number, page))
        if len(self._pins) > 2 * self._eviction.pinned_count + 64:  # mostly renewed or removed ones
            self._pins = [pin for pin in self._pins if self._eviction.pin_expiry_ms(pin[2]) == pin[0]]
            heapq.heapify(self._pins)

    def unpin(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        with self._lock:
            index = self._namespaces.find(digest)
            pages = [index.pages.get(prefix_hash) for prefix_hash in prefix_hashes]
            return [page is not None and self._eviction.unpin(page) for page in pages]

    def _expire_pins(self, now_ms: int) -> None:
        while self._pins and self._pins[0][0] <= now_ms:
            expiry_ms, _, page = heapq.heappop(self._pins)
            if self._eviction.pin_expiry_ms(page) == expiry_ms:  # else: unpinned, renewed or gone
                self._eviction.unpin(page)

    # ---- tell ----------------------------------------------------------------------------

    def stat(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[PageInfo]:
        now_ms = self._clock_ms()
        with self._lock:
            index = self._namespaces.find(digest)
            self._expire_pins(now_ms)
            pages = [(h, index.pages.get(h)) for h in prefix_hashes]
            return [PageInfo(h, False) if page is None else self._info(page, now_ms) for h, page in pages]

    def list_pages(self, digest: bytes, key_prefix: bytes, after: bytes, limit: int) -> tuple[list[PageInfo], bytes]:
        """Up to `limit` visible pages whose hash starts with `key_prefix` and is above `after`, and the
        `after` of the rest; empty if that was all."""
        with self._lock:
            hashes = list(self._namespaces.find(digest).pages)
        # Sorting happens outside the lock; a page that goes meanwhile, or that is not committed yet, is
        # left out below. It still counts here, or the reply would look like the last one.
        chosen = heapq.nsmallest(limit + 1, (h for h in hashes if h > after and h.startswith(key_prefix)))
        rest_after = chosen[limit - 1] if len(chosen) > limit else b""
        return [info for info in self.stat(digest, chosen[:limit]) if info.present], rest_after

    def _info(self, page: Page, now_ms: int) -> PageInfo:
        if page.state is State.WRITING:
            return PageInfo(page.prefix_hash, False, writing=True)
        expiry_ms = self._eviction.pin_expiry_ms(page)
        return PageInfo(
            page.prefix_hash,
            True,
            page.namespace.page_nbytes,
            page.checksum,
            now_ms - page.stored_ms,
            now_ms - page.used_ms,
            expiry_ms - now_ms if expiry_ms else 0,
            page.holds,
        )

    def size_classes(self) -> list[tuple[int, int, int, int]]:
        """(slot_nbytes, extents, slots, slots in use) of each slot size that has extents."""
        classes: dict[int, list[int]] = {}
        with self._lock:
            self._expire_pins(self._clock_ms())
            for extent in self.slots.extents():
                sums = classes.setdefault(extent.slot_nbytes, [0, 0, 0])
                for i, value in enumerate((1, len(extent.owners), extent.used_count)):
                    sums[i] += value
        return [(size, extents, slots, used) for size, (extents, slots, used) in sorted(classes.items())]

    def counters(self) -> tuple[Counters, list[tuple[NamespaceIndex, Counters, int]]]:
        """Copies: totals, and (namespace, counters, pages) of each."""
        with self._lock:
            each = [(index, replace(index.counters), len(index.pages)) for index in self._namespaces.all()]
            return self._namespaces.totals(), each

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        with self._lock:
            wrong = self._eviction.check()
            pages = [page for index in self._namespaces.all() for page in index.pages.values()]
            writing = sum(page.state is State.WRITING for page in pages)
            owned = [page for extent in self.slots.extents() for page in extent.owners if page is not None]
            doomed = [page for page in owned if page.state is State.DOOMED]
            held = sum(page.holds > 0 for page in owned)
            for name, counted, found in (
                ("writing", self.writing_count, writing),
                ("visible", self.visible_count, len(pages) - writing),
                ("held", self.held_count, held),
                ("slots", len(owned), len(pages) + len(doomed)),
            ):
                if counted != found:
                    wrong.append(f"{name}: {counted} counted, {found} found")
            wrong += [
                f"page {page.prefix_hash.hex()} is forgotten, unread, but keeps its slot"
                for page in doomed
                if not page.holds
            ]
            if len({id(page) for page in owned}) != len(owned):
                wrong.append("a page owns two slots")
            return wrong
