"""Keep pages in RAM: which page is in which slot, which are held, which is evicted next.

It works with offsets, never with bytes (`copy` moves a slot for it, `zero` clears one), and takes
its clock as an argument, so the same code runs in a simulation. One lock, held for the bookkeeping
of a batch, never for a transfer: between `reserve` and `commit` only the writer may touch a slot,
between `acquire` and `release` it can not change or be freed. Long work: docs/decisions/0015.

    put    reserve (slots, WRITING) -> bytes -> commit (VISIBLE) or abort
    get    acquire (held) -> `promotion.read`, if a lower tier has it -> bytes -> release
"""

import threading
from collections.abc import Callable, Collection, Container, Sequence
from functools import partial
from itertools import groupby

from kvstore.deadline import Deadline
from kvstore.errors import Exhausted, LayoutMismatch
from kvstore.keys import Namespace
from node.clock import unix_s
from node.memory.changes import ChangeRing
from node.memory.eviction import Eviction
from node.memory.lock_slices import STEPS, SlicedWork, Work, run_in_slices, split_in_slices
from node.memory.lower_tier import LocalTier, LowerTier, add_below
from node.memory.page import (
    MissReasons,
    NamespaceIndex,
    Namespaces,
    Page,
    PutStatus,
    Reservation,
    State,
)
from node.memory.promotion import Acquired, PartialPage, Promotion, release
from node.memory.scan import Counted, PageScan, violations
from node.memory.tenant_usage import Limits
from node.slab import SlotAllocator

# Each may need more steps: an eviction, a search for a block
KEYS_A_SLICE = STEPS // 4


class RamTier:
    """The RAM tier. Thread-safe.

    `clock_ms` gives whole monotonic milliseconds, `clock_s` whole seconds since the epoch without
    jumps, for times to live that outlast the process.
    """

    def __init__(
        self,
        namespaces: Namespaces,
        slots: SlotAllocator,
        copy: Callable[[int, int, int], None],
        zero: Callable[[int, int], None],
        clock_ms: Callable[[], int],
        clock_s: Callable[[], int] = unix_s,
    ) -> None:
        self.slots = slots
        self.below = LocalTier()
        self.changes: ChangeRing | None = None  # with readers of the feed
        self.remote: tuple[LowerTier, ...] = ()  # asked in this order for what is not here
        self.clock_s = clock_s
        self.namespaces = namespaces
        self.namespace = namespaces.find  # by its digest: one dict access, which needs no lock
        self.clock_ms = clock_ms
        self.lock = threading.Lock()
        self._copy = copy
        self.miss_reasons = MissReasons()
        self.eviction = Eviction(slots, self.forget, self.hold_all, zero)

        def lower() -> Sequence[LowerTier]:
            return (self.below, *self.remote)

        self.promotion = Promotion(
            self.lock, lower, self._place, self.eviction, self._end_load, self._offer, clock_ms
        )
        self._order = self.eviction.order  # evictable pages, and pins
        namespaces.account_of = self._order.accounts.of
        self._unwanted: set[Page] = set()  # being written, and removed meanwhile
        self.writing_count = 0
        self.held_count = 0
        self.visible_count = 0

    def _move(self, move: SlicedWork) -> None:
        self._copy(move.page.offset, move.target, move.page.namespace.page_nbytes)
        self.release([move.page])

    def open_namespace(
        self, value: Namespace, digest: bytes, peer: str = ""
    ) -> tuple[NamespaceIndex, bool]:
        """Return the namespace, and whether it is new."""
        with self.lock:
            return self.namespaces.open(value, digest, peer)

    def set_limits(self, limits: Callable[[str], Limits], promised_nbytes: int) -> None:
        """Set the tenants' `limits`, and the sum of their bytes.

        Pages beyond a quota are evicted on demand; a tenant's first or last quota moves its pages.
        """
        with self.lock:
            changed = self._order.set_limits(limits, promised_nbytes)
        if not changed:
            return
        moving: list[tuple[int, Page]] = []

        def note(pages: Sequence[Page]) -> None:
            moving.extend((p.used_ms, p) for p in pages if p.namespace.account in changed)

        self.scan(None, note)
        # Each is moved before those that were used later
        moving.sort(key=lambda entry: entry[0], reverse=True)
        split_in_slices(self.lock, self._order.regroup, moving)

    # ---- lookup --------------------------------------------------------------------------

    def lookup(
        self,
        digest: bytes,
        prefix_hashes: Sequence[bytes],
        touch: bool,
        in_local_tier: list[int] | None = None,
    ) -> list[bool]:
        """Return presence per key. `touch`: it is a use, and counts as neither hit nor miss.

        Otherwise `in_local_tier` gets the positions of pages that only the local tier has.
        """
        if touch:  # the tail first, with other threads in between

            def look_up(some: Sequence[bytes]) -> list[bool]:
                return self._lookup(digest, some[::-1], touch)[::-1]

            return split_in_slices(self.lock, look_up, prefix_hashes[::-1])[::-1]
        with self.lock:
            return self._lookup(digest, prefix_hashes, touch, in_local_tier)

    def _lookup(
        self,
        digest: bytes,
        prefix_hashes: Sequence[bytes],
        touch: bool,
        in_local_tier: list[int] | None = None,
    ) -> list[bool]:
        index, visible = self.namespaces.find(digest), State.VISIBLE
        pages = list(map(index.pages.get, prefix_hashes))
        present = [p is not None and p.state is visible and not p.expiry_s for p in pages]
        if False in present:
            found = add_below(self.below, self.live, index, prefix_hashes, pages, present)
            if in_local_tier is not None:
                in_local_tier += found
                index.counters.pages_hit_disk += len(found)
        if touch:
            self._order.touch(reversed(pages), self.clock_ms())
            self.below.touch(digest, prefix_hashes)
        else:
            there = zip(prefix_hashes, present, pages, strict=True) if False in present else ()
            absent = [h for h, here, page in there if not here and page is None]
            index.count_lookup(present, absent, self.miss_reasons)
        return present

    def live_all(self, index: NamespaceIndex, prefix_hashes: Sequence[bytes]) -> list[Page | None]:
        """Return `live` of each."""
        visible, live = State.VISIBLE, self.live
        return [
            p
            if p is None or (p.state is visible and not p.expiry_s)
            else live(index, p.prefix_hash)
            for p in map(index.pages.get, prefix_hashes)
        ]

    def live(self, index: NamespaceIndex, prefix_hash: bytes) -> Page | None:
        """Return the page if it is visible and alive; the caller has the lock."""
        page = index.pages.get(prefix_hash)
        if page is None or page.state is not State.VISIBLE:
            return None
        if page.expiry_s and page.expiry_s <= self.clock_s():
            self.forget(page, "expired")
            return None
        return page

    # ---- write ---------------------------------------------------------------------------

    def reserve(
        self,
        digest: bytes,
        prefix_hashes: Sequence[bytes],
        page_nbytes: int,
        copies: Container[bytes] = (),
    ) -> Reservation:
        """Reserve slots for the pages that are not here.

        `copies`: keys that other members own. A page that was a copy here and is none any more
        becomes the node's own. Raises Exhausted if there is space for none.
        """
        work = self._reserve(digest, prefix_hashes, page_nbytes, copies)
        return run_in_slices(self.lock, self.eviction.budget, work, self._move)

    def _reserve(
        self,
        digest: bytes,
        prefix_hashes: Sequence[bytes],
        page_nbytes: int,
        copies: Container[bytes] = (),
    ) -> Work[Reservation]:
        now_ms = self.clock_ms()
        index = self.namespaces.find(digest)
        if page_nbytes != index.page_nbytes:
            raise LayoutMismatch(
                f"pages of {page_nbytes} bytes; namespace {digest.hex()} has {index.page_nbytes}"
            )
        self._order.expire_pins(now_ms)
        known = [page for page in self.live_all(index, prefix_hashes) if page is not None]
        if known:
            self._offer(self.eviction.own_copies([p for p in known if p.prefix_hash not in copies]))
            self._order.touch(reversed(known), now_ms)
            self.hold_all(known)  # making room for the batch must not evict the batch
        index.busy += 1
        result = Reservation(index, prefix_hashes, copies, now_ms)
        try:
            asked = list(zip(prefix_hashes, self.below.present(digest, prefix_hashes), strict=True))
            for start in range(0, len(asked), KEYS_A_SLICE):
                if start:
                    yield None
                some = asked[start : start + KEYS_A_SLICE]
                new = self._place_free(result, some)
                if len(new) == len(some):
                    result.write(new)
                else:
                    yield from self._place_rest(result, some, new)
            if len(result.pages) < len(prefix_hashes):
                result.count()
            if not result.pages:
                self.below.touch(digest, prefix_hashes)
            if result.is_full and result.verdicts.count(PutStatus.FULL) == len(prefix_hashes):
                raise Exhausted(self.eviction.refusal(index, self.held_count, self.writing_count))
            return result
        except BaseException:  # the caller gets no result with which it could release them
            self._take_back(result)
            raise
        finally:
            index.busy -= 1
            self.release_locked(known)

    def _place_free(self, result: Reservation, asked: Sequence[tuple[bytes, bool]]) -> list[Page]:
        """Place missing pages as far as there are slots; `asked` has (key, is it below)."""
        index = result.namespace
        lacking = [h for h, is_below in asked if not (is_below or h in index.pages)]
        if result.is_full:
            lacking = []
        first = len(result.pages)
        for is_copy, some in groupby(lacking, result.copies.__contains__):
            hashes = list(some)
            placed = self._place(index, hashes, result.now_ms, is_copy)
            result.pages += placed  # at once, so that an exception releases them
            if len(placed) < len(hashes):
                break
        return result.pages[first:]

    def _place_rest(
        self, result: Reservation, asked: Sequence[tuple[bytes, bool]], placed: Sequence[Page]
    ) -> Work[None]:
        """Place the others one by one, as room is made, and add the statuses."""
        index, first = result.namespace, len(result.pages) - len(placed)
        new = {page.prefix_hash: page for page in placed}
        for prefix_hash, is_below in asked:
            page = new.get(prefix_hash) or index.pages.get(prefix_hash)
            is_copy = prefix_hash in result.copies
            while page is None and not (is_below or result.is_full):
                if one := self._place(index, [prefix_hash], result.now_ms, is_copy):
                    result.pages += one
                    page = new[prefix_hash] = one[0]
                else:
                    made = yield from self.eviction.make_room(index, result.now_ms, is_copy)
                    result.is_full = not made
                    page = index.pages.get(prefix_hash)  # other threads may have run
            if page is not None and prefix_hash in new:
                result.write([page])
            else:
                result.add_status(page, is_below)
        # Restore the request's order, by which the writer finds its pages: a page that existed may
        # have been evicted while room was made, and was then reserved again at the end.
        result.pages[first:] = [new[prefix_hash] for prefix_hash, _ in asked if prefix_hash in new]

    def _place(
        self, index: NamespaceIndex, prefix_hashes: Sequence[bytes], now_ms: int, is_copy: bool
    ) -> list[Page]:
        """Make pages for the keys, from the first on, as far as there are slots for them."""
        pages = [Page(index, prefix_hash, now_ms, is_copy) for prefix_hash in prefix_hashes]
        placed = pages[: self.eviction.allocate(pages)]
        index.add(placed)
        self.writing_count += len(placed)
        return placed

    def _end_load(self, page: Page, visible: bool) -> None:
        """Make a loaded page visible, or forget it and leave its slot to its readers, if any."""
        self.writing_count -= 1
        if visible:
            page.state = State.VISIBLE
            self.visible_count += 1
            self._order.admit(page)
            if self.changes is not None:
                self.changes.loaded(page, self.below.present)
        else:
            page.state = State.DOOMED
            page.namespace.drop(page)
            if not page.holds:
                self.eviction.release(page)

    def commit(self, reservation: Reservation, checksums: Sequence[bytes], ttl_s: int = 0) -> int:
        """Make the reserved pages visible, for `ttl_s` seconds, 0: no limit.

        The chain becomes the newest, its head last.
        """
        expiry_s = self.clock_s() + ttl_s if ttl_s else 0
        writing, visible, pages = State.WRITING, State.VISIBLE, reservation.pages
        with self.lock:
            now_ms = self.clock_ms()
            for page, checksum in zip(pages, checksums, strict=True):
                assert page.state is writing
                page.checksum = checksum
                page.expiry_s = expiry_s
                page.state = visible
                page.stored_ms = now_ms
            stored = len(pages)
            self.writing_count -= stored
            self.visible_count += stored
            reservation.count_stored()
            self._order.admit_new(pages, reservation.chain, now_ms)
            self.below.touch(reservation.namespace.digest, reservation.prefix_hashes)
            self._offer([page for page in pages if not (page.is_copy or page in self._unwanted)])
            for page in self._unwanted.intersection(pages) if self._unwanted else ():
                self._unwanted.discard(page)
                self.forget(page, "removed")
            return stored

    def abort(self, reservation: Reservation) -> None:
        """Release the reserved slots; none was ever visible."""
        with self.lock:
            self._take_back(reservation)
            reservation.namespace.counters.pages_put_aborted += len(reservation.pages)

    def _take_back(self, reservation: Reservation) -> None:
        for page in reservation.pages:
            assert page.state is State.WRITING
            self._unwanted.discard(page)
            page.namespace.drop(page)
            self.eviction.release(page)
        self.writing_count -= len(reservation.pages)

    def offer(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bytes]:
        """Offer pages that are in RAM only to the tier below; return those not taken."""
        with self.lock:
            index = self.namespaces.find(digest)
            below = self.below.present(digest, prefix_hashes)
            only_here = [h for h, there in zip(prefix_hashes, below, strict=True) if not there]
            live = [self.live(index, prefix_hash) for prefix_hash in only_here]
            pages = [page for page in live if page is not None and not page.is_copy]
            taken = self.below.offer(pages, urgent=True) if pages else 0
            self.hold_all(pages[:taken])
            return [page.prefix_hash for page in pages[taken:]]

    def _offer(self, pages: list[Page]) -> None:
        """Offer the node's new pages to each lower tier, which writes them later."""
        if pages:
            if self.changes is not None:
                self.changes.came(pages)
            for tier in (self.below, *self.remote):
                self.hold_all(pages[: tier.offer(pages, urgent=False)])

    def own(self, pages: Sequence[Page]) -> None:
        """Make visible copies among the pages the node's own, which its disk takes."""
        with self.lock:
            self._offer(self.eviction.own_copies([p for p in pages if p.state is State.VISIBLE]))

    def hold_visible(self, pages: Sequence[Page]) -> list[Page]:
        """Hold those of the pages that are still visible, for a lower tier."""
        with self.lock:
            held = [page for page in pages if page.state is State.VISIBLE]
            self.hold_all(held)
            return held

    # ---- read ----------------------------------------------------------------------------

    def acquire(
        self,
        digest: bytes,
        prefix_hashes: Sequence[bytes],
        prefix_only: bool,
        wanted_nbytes: int,
        parts: PartialPage | None = None,
        near: Deadline | None = None,
    ) -> Acquired:
        """Hold a page or None per key, until `release`; it counts as a use.

        Pages of lower tiers get a slot, and the caller reads them (`promotion.read`).
        `wanted_nbytes`: bytes of each page that the caller will read, for the counters. `parts`:
        the parts wanted of pages that are not in RAM. `near`: its deadline, if it wants pages of
        other members, too.
        """
        acquired = Acquired(digest, prefix_hashes, prefix_only, parts, near)
        work = self._acquire(acquired, wanted_nbytes)
        return run_in_slices(self.lock, self.eviction.budget, work, self._move)

    def _acquire(self, acquired: Acquired, wanted_nbytes: int) -> Work[Acquired]:
        index = acquired.index = self.namespaces.find(acquired.digest)
        prefix_hashes = acquired.prefix_hashes
        pages = acquired.pages = self.live_all(index, prefix_hashes)
        self.hold_all([page for page in pages if page is not None])
        if None in pages:
            yield from self._acquire_missing(acquired)
        self._order.touch(reversed(pages), self.clock_ms())
        self.below.touch(index.digest, prefix_hashes)
        misses = pages.count(None)
        index.counters.count_get(len(prefix_hashes) - misses, misses, wanted_nbytes)
        return acquired

    def _acquire_missing(self, acquired: Acquired) -> Work[None]:
        """Add pages that are being loaded, or that a lower tier has, to those that are held."""
        pages, loading = acquired.pages, acquired.index.loading
        lacking: dict[bytes, None] = {}
        for position, prefix_hash in enumerate(acquired.prefix_hashes):
            if pages[position] is None:
                page = pages[position] = loading(prefix_hash)
                if page is None:
                    lacking[prefix_hash] = None
                else:
                    self.hold_all([page])
        if lacking and self.promotion.is_asked(acquired.near):
            yield from self._promote_all(acquired, lacking)
        if acquired.prefix_only and None in pages:
            first = pages.index(None)
            self.release_locked([page for page in pages[first:] if page is not None])
            pages[first:] = [None] * (len(pages) - first)

    def _promote_all(self, acquired: Acquired, lacking: Collection[bytes]) -> Work[None]:
        """Ask lower tiers for pages, and give found ones slots."""
        index, pages = acquired.index, acquired.pages
        index.busy += 1
        try:
            find = partial(self.promotion.find, index.value, lacking, acquired.near)
            acquired.sources = yield find
            for position, prefix_hash in enumerate(acquired.prefix_hashes):
                if pages[position] is None:
                    page = yield from self._promote(acquired, prefix_hash)
                    if page is not None:
                        self.hold_all([page])
                        pages[position] = page
                    elif acquired.prefix_only:
                        break
        except BaseException:  # the caller gets no result with which it could release them
            self.promotion.give_up(acquired.loads)
            self.release_locked([page for page in pages if page is not None])
            raise
        finally:
            index.busy -= 1
            release(acquired.sources.values())

    def _promote(self, acquired: Acquired, prefix_hash: bytes) -> Work[Page | None]:
        """Return an arrived page, or one with a slot for this caller to fill; None for a miss."""
        index, parts = acquired.index, acquired.parts
        while True:
            page = acquired.private.get(prefix_hash) or self.live(index, prefix_hash)
            page = page or index.loading(prefix_hash)
            source = acquired.sources.get(prefix_hash)
            if page is not None or source is None or not source.tier.is_there(source):
                return page
            # A page that is being written here may take long, and parts are useless to others.
            space = parts if parts is not None and source.tier.reads_parts else index
            is_private = space is parts or prefix_hash in index.pages
            page = self.promotion.begin(acquired, space, prefix_hash, is_private)
            if page is not None:
                return page
            is_copy = source.is_copy and not is_private
            if not (yield from self.eviction.make_room(space, self.clock_ms(), is_copy)):
                return None

    def count_lost(self, digest: bytes, count: int, wanted_nbytes: int) -> None:
        """Count acquired pages that could not be read from lower tiers as misses."""
        with self.lock:
            self.namespaces.find(digest).counters.count_get(-count, count, wanted_nbytes)

    def hold_all(self, pages: Sequence[Page]) -> None:
        """Hold pages; the caller has the lock."""
        for page in pages:
            page.holds += 1
            self.held_count += page.holds == 1

    def release(self, pages: Sequence[Page]) -> None:
        """End a hold of each page."""
        with self.lock:
            self.release_locked(pages)

    def release_locked(self, pages: Sequence[Page]) -> None:
        """End a hold of each page; the caller has the lock."""
        for page in pages:
            assert page.holds > 0
            page.holds -= 1
            if page.holds == 0:
                self.held_count -= 1
                if page.state is State.DOOMED:
                    self.eviction.release(page)
                elif page.newer is None:
                    self._order.give_back(page)

    # ---- pin -----------------------------------------------------------------------------

    def pin(self, digest: bytes, prefix_hashes: Sequence[bytes], ttl_ms: int) -> list[bool]:
        """Pin visible pages, here and below, for `ttl_ms`; a new pin replaces the old one.

        Raises Exhausted, and pins none, if too much would be pinned.
        """
        with self.lock:
            now_ms = self.clock_ms()
            index = self.namespaces.find(digest)
            self._order.expire_pins(now_ms)
            pages = [self.live(index, prefix_hash) for prefix_hash in prefix_hashes]
            self._order.pins.check_room([page for page in pages if page is not None])
            new = sum(page is not None and page not in self._order.pins for page in pages)
            index.account.check_pins(new)
            below = self.below.pin(digest, prefix_hashes, -(-ttl_ms // 1000))  # may raise, too
            for page in pages:
                if page is not None:
                    self._order.pin(page, now_ms + ttl_ms)
            return [page is not None or there for page, there in zip(pages, below, strict=True)]

    def unpin(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """End pins; return True for each page that was pinned."""
        with self.lock:
            pages = [self.namespaces.find(digest).pages.get(h) for h in prefix_hashes]
            unpinned = [page is not None and self._order.unpin(page) for page in pages]
            below = self.below.pin(digest, prefix_hashes, 0)
            return [here or there for here, there in zip(unpinned, below, strict=True)]

    # ---- forget --------------------------------------------------------------------------

    def remove(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Forget pages, here and below, pinned ones too; return which were visible."""

        def remove(some: Sequence[bytes]) -> list[bool]:
            return self.remove_locked(self.namespaces.find(digest), some)

        return split_in_slices(self.lock, remove, prefix_hashes)

    def remove_locked(self, index: NamespaceIndex, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Remove pages as `remove` does; the caller has the lock."""
        removed = []
        for prefix_hash in prefix_hashes:
            page = self.live(index, prefix_hash) or index.pages.get(prefix_hash)
            if page is not None and page.state is State.LOADING:
                self.promotion.forget(page)
            elif page is not None and page.state is State.WRITING:
                self._unwanted.add(page)  # its bytes may have been on their way before the removal
            removed.append(page is not None and page.state is State.VISIBLE)
            if removed[-1] and page is not None:
                self.forget(page, "removed")
        below = self.below.remove(index.digest, prefix_hashes)
        return [here or there for here, there in zip(removed, below, strict=True)]

    def drop_corrupt(self, page: Page) -> None:
        """Forget a corrupt page that the caller holds."""
        with self.lock:
            if page.state is State.VISIBLE:
                self.forget(page, "corrupt")

    def forget(self, page: Page, reason: str, successor: Page | None = None) -> None:
        """Remove a visible page; its slot is freed, or passed to its successor, when unread."""
        index = page.namespace
        index.drop(page)
        if reason != "evicted" or not page.is_copy:  # its owners have it
            self.miss_reasons.remember(index.digest, page.prefix_hash, reason)
            index.counters.pages_evicted += reason == "evicted"
        self.visible_count -= 1
        page.state = State.DOOMED
        if self.changes is not None and not page.is_copy:
            self.changes.went(index.digest, page.prefix_hash)
        self._order.withdraw(page)
        if page.holds == 0:
            self.eviction.release(page, successor)

    # ---- all pages -----------------------------------------------------------------------

    def scan(
        self,
        index: NamespaceIndex | None,
        visit: Callable[[list[Page]], None],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `visit`, under the lock, with all pages of this namespace or, with None, of all.

        A page that exists throughout is visited; one that is added or removed meanwhile perhaps.
        `then` is called after each visit, without the lock.
        """
        PageScan(self.slots, self.eviction.watchers, index).run(self.lock, visit, then)

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        with self.lock:
            counted = Counted(self.writing_count, self.visible_count, self.held_count)
            return self.eviction.check() + violations(self.namespaces.all(), self.slots, counted)
