"""The RAM tier: which page is in which slot of the arena, who may not lose it, who goes next.

It deals in offsets, never in bytes (`copy` moves a slot for it) and takes its clock as an argument,
so the same code runs in a simulation. One lock, held for the length of a batch's bookkeeping and
never for a transfer: between `reserve` and `commit` the writer alone may touch a slot, between
`acquire` and `release` the slot can not change or go, whatever is removed or evicted meanwhile.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvstore.errors import Exhausted, LayoutMismatch
from kvstore.keys import Namespace
from node.ram.audit import Counted, violations
from node.ram.below import Below, Nothing
from node.ram.eviction import Eviction
from node.ram.ghosts import Ghosts
from node.ram.loads import Loads
from node.ram.namespace import NamespaceIndex, Namespaces
from node.ram.page import Page, State
from node.ram.reservation import Acquired, Reservation, Verdict
from node.slots import SlotAllocator


class RamTier:
    """Thread-safe. `clock_ms` gives whole milliseconds that never go back, `clock_s` whole seconds
    since the epoch, for times to live that outlast the process."""

    def __init__(
        self,
        namespaces: Namespaces,
        slots: SlotAllocator,
        copy: Callable[[int, int, int], None],
        clock_ms: Callable[[], int],
        clock_s: Callable[[], int] = lambda: int(time.time()),
    ) -> None:
        self.slots = slots
        self.below: Below = Nothing()
        self.clock_s = clock_s
        self.namespaces = namespaces
        self.clock_ms = clock_ms
        self.lock = threading.Lock()
        self.loads = Loads(
            self.lock, lambda index, prefix_hash: self._place(index, prefix_hash, clock_ms()), self._settle
        )
        self._ghosts = Ghosts()
        self.eviction = Eviction(slots, copy, self._forget)
        self.writing_count = 0
        self.held_count = 0
        self.visible_count = 0

    @property
    def pinned_count(self) -> int:
        return len(self.eviction.pins)

    # ---- namespaces ----------------------------------------------------------------------

    def open_namespace(self, value: Namespace, digest: bytes, peer: str = "") -> tuple[NamespaceIndex, bool]:
        with self.lock:
            return self.namespaces.open(value, digest, peer)

    def namespace(self, digest: bytes) -> NamespaceIndex:
        with self.lock:
            return self.namespaces.find(digest)

    # ---- lookup --------------------------------------------------------------------------

    def lookup(self, digest: bytes, prefix_hashes: Sequence[bytes], touch: bool) -> list[bool]:
        """Presence per key. Without `touch` nothing is kept alive by it; with it, it is a use and
        not a question, so hits and misses are not counted."""
        visible = State.VISIBLE
        with self.lock:
            index = self.namespaces.find(digest)
            pages = list(map(index.pages.get, prefix_hashes))
            present = [page is not None and page.state is visible and not page.expiry_s for page in pages]
            if False in present:
                self._look_closer(index, prefix_hashes, pages, present)
            if touch:
                self._touch_chain(pages)
                self.below.touch(digest, prefix_hashes)
            else:
                there = zip(prefix_hashes, present, pages, strict=True)
                absent = [h for h, here, page in there if not here and page is None]
                index.count_lookup(present, absent, self._ghosts)
            return present

    def _look_closer(
        self, index: NamespaceIndex, prefix_hashes: Sequence[bytes], pages: list[Page | None], present: list[bool]
    ) -> None:
        """For those that are not simply visible: pages with a time to live, and the tier below."""
        missing = [i for i, here in enumerate(present) if not here]
        below = self.below.present(index.digest, [prefix_hashes[i] for i in missing])
        for i, is_below in zip(missing, below, strict=True):
            if is_below:
                present[i] = True
            elif pages[i] is not None:
                present[i] = self.live(index, prefix_hashes[i]) is not None
                pages[i] = index.pages.get(prefix_hashes[i])

    def live(self, index: NamespaceIndex, prefix_hash: bytes) -> Page | None:
        """The page if it is visible and its time to live, if it has one, is not over. The caller has
        the lock."""
        page = index.pages.get(prefix_hash)
        if page is None or page.state is not State.VISIBLE:
            return None
        if page.expiry_s and page.expiry_s <= self.clock_s():
            self._forget(page, "expired")
            return None
        return page

    def _touch_chain(self, chain: Sequence[Page | None]) -> None:
        """Tail first, so that the head of a chain is its newest page and the last to go."""
        now_ms = self.clock_ms()
        for page in reversed(chain):
            if page is not None and page.state is State.VISIBLE:
                self.eviction.touch(page, now_ms)

    # ---- write ---------------------------------------------------------------------------

    def reserve(self, digest: bytes, prefix_hashes: Sequence[bytes], page_nbytes: int) -> Reservation:
        """Slots for the pages that are not here. Raises Exhausted if there is space for none."""
        now_ms = self.clock_ms()
        with self.lock:
            index = self.namespaces.find(digest)
            if page_nbytes != index.page_nbytes:
                raise LayoutMismatch(f"pages of {page_nbytes} bytes; namespace {digest.hex()} has {index.page_nbytes}")
            self.eviction.expire_pins(now_ms)
            known = [page for h in prefix_hashes if (page := self.live(index, h)) is not None]
            self._touch_chain(known)
            below = self.below.present(digest, prefix_hashes)
            for page in known:  # making room for the batch must not evict the batch
                page.holds += 1
            try:
                return self._reserve(index, prefix_hashes, below, now_ms)
            finally:
                for page in known:
                    page.holds -= 1

    def _reserve(
        self, index: NamespaceIndex, prefix_hashes: Sequence[bytes], below: list[bool], now_ms: int
    ) -> Reservation:
        result = Reservation(index, list(prefix_hashes), [], [], [])
        full = False
        for prefix_hash, is_below in zip(prefix_hashes, below, strict=True):
            page = index.pages.get(prefix_hash)
            if page is None and is_below:
                result.verdicts.append(Verdict.EXISTS)
            elif page is None:
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
        if not result.pages:
            self.below.touch(index.digest, prefix_hashes)
        if result.verdicts.count(Verdict.FULL) == len(prefix_hashes):
            raise Exhausted(
                f"no slot of {index.slot_nbytes} bytes can be freed: all pages are pinned or in use "
                f"({self.pinned_count} pinned, {self.held_count} being read, {self.writing_count} being written)"
            )
        return result

    def _place(self, index: NamespaceIndex, prefix_hash: bytes, now_ms: int) -> Page | None:
        page = Page(index, prefix_hash, now_ms)
        if not self.eviction.place(page):
            return None
        index.pages[prefix_hash] = page
        self.writing_count += 1
        return page

    def _settle(self, page: Page, visible: bool) -> None:
        """A page whose load is over is visible, or forgotten: then its slot waits for its readers."""
        self.writing_count -= 1
        if visible:
            page.state = State.VISIBLE
            self.visible_count += 1
            self.eviction.admit(page)
        else:
            page.state = State.DOOMED
            del page.namespace.pages[page.prefix_hash]

    def commit(self, reservation: Reservation, checksums: Sequence[bytes], ttl_s: int = 0) -> int:
        """Makes the reserved pages visible; the whole chain becomes the newest, head last.

        `ttl_s`: seconds until the new pages are forgotten; 0: no time to live.
        """
        now_ms = self.clock_ms()
        with self.lock:
            for page, checksum in zip(reservation.pages, checksums, strict=True):
                assert page.state is State.WRITING
                page.checksum = checksum
                page.expiry_s = self.clock_s() + ttl_s if ttl_s else 0
                page.state = State.VISIBLE
                page.stored_ms = now_ms
                self.eviction.admit(page)
            stored = len(reservation.pages)
            self.writing_count -= stored
            self.visible_count += stored
            counters = reservation.namespace.counters
            counters.pages_put += stored
            counters.nbytes_put += stored * reservation.namespace.page_nbytes
            self._touch_chain(reservation.chain)
            self.below.touch(reservation.namespace.digest, reservation.prefix_hashes)
            self._offer(reservation.pages, urgent=False)
            return stored

    def offer(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bytes]:
        """Offers those of the pages that are in RAM only to the tier below; those that it did not take."""
        with self.lock:
            index = self.namespaces.find(digest)
            below = self.below.present(digest, prefix_hashes)
            live = [self.live(index, h) for h, is_below in zip(prefix_hashes, below, strict=True) if not is_below]
            pages = [page for page in live if page is not None]
            return [page.prefix_hash for page in pages[self._offer(pages, urgent=True) :]]

    def hold_visible(self, pages: Sequence[Page]) -> list[Page]:
        """Holds those of the pages that are still visible, for the tier below."""
        with self.lock:
            held = [page for page in pages if page.state is State.VISIBLE]
            for page in held:
                self._hold_page(page)
            return held

    def _offer(self, pages: list[Page], urgent: bool) -> int:
        taken = self.below.offer(pages, urgent)
        for page in pages[:taken]:
            self._hold_page(page)
        return taken

    def abort(self, reservation: Reservation) -> None:
        """Gives the reserved slots back; nothing of them was ever visible."""
        with self.lock:
            for page in reservation.pages:
                assert page.state is State.WRITING
                del page.namespace.pages[page.prefix_hash]
                self.eviction.release(page)
            self.writing_count -= len(reservation.pages)
            reservation.namespace.counters.pages_put_aborted += len(reservation.pages)

    # ---- read ----------------------------------------------------------------------------

    def acquire(self, digest: bytes, prefix_hashes: Sequence[bytes], prefix_only: bool, wanted_nbytes: int) -> Acquired:
        """A page or None per key; each page is held until `release`. Counts as a use.

        `wanted_nbytes`: bytes of each page that the caller is going to read, for the counters.
        """
        with self.lock:
            index = self.namespaces.find(digest)
            acquired = self._acquire(index, prefix_hashes, prefix_only)
            self._touch_chain(acquired.pages)
            self.below.touch(digest, prefix_hashes)
            misses = acquired.pages.count(None)
            hits = len(prefix_hashes) - misses
            index.counters.pages_got += hits
            index.counters.nbytes_got += hits * wanted_nbytes
            index.counters.pages_get_missed += misses
            return acquired

    def count_lost(self, digest: bytes, count: int, wanted_nbytes: int) -> None:
        """Of the pages that were acquired, `count` could not be read from the tier below after all."""
        with self.lock:
            counters = self.namespaces.find(digest).counters
            counters.pages_got -= count
            counters.nbytes_got -= count * wanted_nbytes
            counters.pages_get_missed += count

    @contextlib.contextmanager
    def inspected(self, digest: bytes, prefix_hash: bytes) -> Iterator[Page | None]:
        """The page, held, if it is visible in RAM. Neither a use nor counted, and nothing is loaded for it."""
        with self.lock:
            page = self.live(self.namespaces.find(digest), prefix_hash)
            if page is not None:
                self._hold_page(page)
        try:
            yield page
        finally:
            if page is not None:
                self.release([page])

    def _acquire(self, index: NamespaceIndex, prefix_hashes: Sequence[bytes], prefix_only: bool) -> Acquired:
        acquired = Acquired([None] * len(prefix_hashes), [])
        for position, prefix_hash in enumerate(prefix_hashes):
            page = self.live(index, prefix_hash)
            if page is None:
                page = index.pages.get(prefix_hash)
                if page is None:
                    page = self.loads.begin(self.below, index, prefix_hash, acquired.loads)
                elif page.state is not State.LOADING:
                    page = None
            if page is not None:
                self._hold_page(page)
                acquired.pages[position] = page
            elif prefix_only:
                break
        return acquired

    def _hold_page(self, page: Page) -> None:
        page.holds += 1
        self.held_count += page.holds == 1

    def release(self, pages: Sequence[Page]) -> None:
        with self.lock:
            for page in pages:
                assert page.holds > 0
                page.holds -= 1
                if page.holds == 0:
                    self.held_count -= 1
                    if page.state is State.DOOMED:
                        self.eviction.release(page)

    # ---- forget --------------------------------------------------------------------------

    def remove(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Forgets pages, pinned ones too. True for each that was visible."""
        with self.lock:
            index = self.namespaces.find(digest)
            removed = []
            for prefix_hash in prefix_hashes:
                page = self.live(index, prefix_hash) or index.pages.get(prefix_hash)
                if page is not None and page.state is State.LOADING:
                    self.loads.forget(page)
                removed.append(page is not None and page.state is State.VISIBLE)
                if removed[-1] and page is not None:
                    self._forget(page, "removed")
            below = self.below.remove(digest, prefix_hashes)
            return [here or there for here, there in zip(removed, below, strict=True)]

    def remove_namespace(self, digest: bytes) -> int:
        """Forgets all visible pages of a namespace in every tier; how many there were, a page that
        was in RAM and below counting once for each."""
        with self.lock:
            hashes = list(self.namespaces.find(digest).pages)
        removed = sum(self.remove(digest, hashes)) if hashes else 0
        return removed + self.below.remove_namespace(digest)

    def drop_corrupt(self, page: Page) -> None:
        """Forgets a page whose bytes do not match its checksum (the caller holds it)."""
        with self.lock:
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
        self.eviction.withdraw(page)
        if page.holds == 0:
            self.eviction.release(page)

    # ---- pins ----------------------------------------------------------------------------

    def pin(self, digest: bytes, prefix_hashes: Sequence[bytes], ttl_ms: int) -> list[bool]:
        """Keeps visible pages from eviction for `ttl_ms`; a new pin replaces the old one."""
        now_ms = self.clock_ms()
        with self.lock:
            index = self.namespaces.find(digest)
            self.eviction.expire_pins(now_ms)
            pinned = []
            for prefix_hash in prefix_hashes:
                page = self.live(index, prefix_hash)
                pinned.append(page is not None)
                if page is not None:
                    self.eviction.pin(page, now_ms + ttl_ms)
            below = self.below.pin(digest, prefix_hashes, -(-ttl_ms // 1000))
            return [here or there for here, there in zip(pinned, below, strict=True)]

    def unpin(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        with self.lock:
            index = self.namespaces.find(digest)
            pages = [index.pages.get(prefix_hash) for prefix_hash in prefix_hashes]
            unpinned = [page is not None and self.eviction.unpin(page) for page in pages]
            below = self.below.pin(digest, prefix_hashes, 0)
            return [here or there for here, there in zip(unpinned, below, strict=True)]

    # ---- check ---------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        with self.lock:
            counted = Counted(self.writing_count, self.visible_count, self.held_count)
            return self.eviction.check() + violations(self.namespaces.all(), self.slots, counted)
