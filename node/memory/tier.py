"""The RAM tier: which page is in which slot of the arena, who may not lose it, who goes next.

It deals in offsets, never in bytes (`copy` moves a slot for it, `zero` clears one) and takes its clock
as an argument, so the same code runs in a simulation. One lock, held for the length of a batch's bookkeeping and
never for a transfer: between `reserve` and `commit` the writer alone may touch a slot, between
`acquire` and `release` the slot can not change or go, whatever is removed or evicted meanwhile.
What may take long (making room, going through all pages) is done in turns (`turn.py`): docs/decisions/0015
says what each takes at most.
"""

import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Protocol, TypeVar

from kvstore.errors import Exhausted, LayoutMismatch
from kvstore.keys import Namespace
from node.clock import unix_s
from node.memory.eviction import Eviction
from node.memory.lock_slices import STEPS, SlicedWork, Work, run_in_slices, split_in_slices
from node.memory.lower_tier import LowerTier, NoLowerTier
from node.memory.page import Acquired, MissReasons, NamespaceIndex, Namespaces, Page, PutStatus, Reservation, State
from node.memory.promotion import NOWHERE, PartialPage, Promotion, hold_all
from node.memory.scan import Counted, remove_all, violations, walk
from node.memory.tenant_usage import Limits
from node.slab import SlotAllocator

# Slots for a writer: as many of the pages that are not here as there are slots for at once, then
# one by one, as room is made.

KEYS_A_TURN = STEPS // 4  # each may take others: a page that goes for it, a place that is looked for

Asked = Sequence[tuple[bytes, bool]]  # keys, and whether the tier below has them


class Places(Protocol):
    """What is needed of the RAM tier (`node.memory.tier.RamTier`)."""

    eviction: Eviction

    def place(
        self, index: NamespaceIndex, prefix_hashes: Sequence[bytes], now_ms: int, is_copy: bool
    ) -> list[Page]: ...


def reserve_all(tier: Places, result: Reservation, asked: Asked, copies: Container[bytes], now_ms: int) -> Work[None]:
    """Adds pages and verdicts to the `result`, in turns. `copies`: keys that other members own."""
    for start in range(0, len(asked), KEYS_A_TURN):
        if start:
            yield None
        yield from _reserve_some(tier, result, asked[start : start + KEYS_A_TURN], copies, now_ms)


def _reserve_some(tier: Places, result: Reservation, asked: Asked, copies: Container[bytes], now_ms: int) -> Work[None]:
    index = result.namespace
    lacking = [] if result.is_full else [h for h, is_below in asked if not is_below and h not in index.pages]
    first = len(result.pages)
    for is_copy, some in groupby(lacking, copies.__contains__):
        hashes = list(some)
        placed = tier.place(index, hashes, now_ms, is_copy)
        result.pages += placed  # now: a caller who is never told of them can not give them back
        if len(placed) < len(hashes):
            break
    at_once = result.pages[first:]
    if len(at_once) == len(asked):
        result.write(at_once)
        return
    new = {page.prefix_hash: page for page in at_once}
    for prefix_hash, is_below in asked:
        page, is_copy = new.get(prefix_hash) or index.pages.get(prefix_hash), prefix_hash in copies
        while page is None and not (is_below or result.is_full):
            if one := tier.place(index, [prefix_hash], now_ms, is_copy):
                result.pages += one
                page = new[prefix_hash] = one[0]
            else:
                result.is_full = not (yield from tier.eviction.make_room(index, now_ms, is_copy))
                page = index.pages.get(prefix_hash)  # others had their turn
        if page is not None and prefix_hash in new:
            result.write([page])
        else:
            result.refuse(page, is_below)
    # In the order of the verdicts, by which the writer finds them: a page that was here may have gone for those that
    # came at once, and has been given a new place behind them.
    result.pages[first:] = [new[prefix_hash] for prefix_hash, _ in asked if prefix_hash in new]


T = TypeVar("T")


class RamTier:
    """Thread-safe. `clock_ms` gives whole milliseconds that never go back, `clock_s` whole seconds
    since the epoch that do not jump, for times to live that outlast the process."""

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
        self.below: LowerTier = NoLowerTier()
        self.clock_s = clock_s
        self.namespaces = namespaces
        self.namespace = namespaces.find  # by its digest: one look into a dict, which needs no lock
        self.clock_ms = clock_ms
        self.lock = threading.Lock()
        self._copy = copy
        self._zero = zero
        self.ghosts = MissReasons()
        self.eviction = Eviction(slots, self._forget, self.hold_all, zero)
        self.loads = Promotion(self.lock, self.place, self.eviction.lend, self._settle, self._offer, clock_ms)
        self._order = self.eviction.order  # of pages that may be evicted, and who is pinned
        namespaces.account_of = self._order.accounts.of
        self._unwanted: set[Page] = set()  # being written, and removed meanwhile
        self._to_zero: set[Page] = set()  # removed pages: their slots are zeroed when free
        self.zeroed_nbytes = 0
        self.writing_count = 0
        self.held_count = 0
        self.visible_count = 0

    @property
    def pinned_count(self) -> int:
        return len(self._order.pins)

    def _in_turns(self, work: Work[T]) -> T:
        return run_in_slices(self.lock, self.eviction.turn, work, self._move)

    def _move(self, move: SlicedWork) -> None:
        self._copy(move.page.offset, move.target, move.page.namespace.page_nbytes)
        self.release([move.page])

    # ---- namespaces ----------------------------------------------------------------------

    def open_namespace(self, value: Namespace, digest: bytes, peer: str = "") -> tuple[NamespaceIndex, bool]:
        with self.lock:
            return self.namespaces.open(value, digest, peer)

    # ---- lookup --------------------------------------------------------------------------

    def lookup(self, digest: bytes, prefix_hashes: Sequence[bytes], touch: bool) -> list[bool]:
        """Presence per key. Without `touch` nothing is kept alive by it; with it, it is a use and
        not a question, so hits and misses are not counted."""
        if touch:  # the tail first, and others in between
            tail = split_in_slices(
                self.lock, lambda some: self._lookup(digest, some[::-1], touch)[::-1], prefix_hashes[::-1]
            )
            return tail[::-1]
        with self.lock:
            return self._lookup(digest, prefix_hashes, touch)

    def _lookup(self, digest: bytes, prefix_hashes: Sequence[bytes], touch: bool) -> list[bool]:
        index, visible = self.namespaces.find(digest), State.VISIBLE
        pages = list(map(index.pages.get, prefix_hashes))
        present = [page is not None and page.state is visible and not page.expiry_s for page in pages]
        if False in present:
            self._look_closer(index, prefix_hashes, pages, present)
        if touch:
            self._order.touch(reversed(pages), self.clock_ms())
            self.below.touch(digest, prefix_hashes)
        else:
            there = zip(prefix_hashes, present, pages, strict=True)
            absent = [h for h, here, page in there if not here and page is None]
            index.count_lookup(present, absent, self.ghosts)
        return present

    def lacking(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bytes]:
        """Those that are in no tier, nor read into one. Not counted, and no use of the others."""
        with self.lock:
            index = self.namespaces.find(digest)
            pages, writing = map(index.pages.get, prefix_hashes), State.WRITING
            absent = [h for h, page in zip(prefix_hashes, pages, strict=True) if page is None or page.state is writing]
            return [h for h, there in zip(absent, self.below.present(digest, absent), strict=True) if not there]

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

    def live_all(self, index: NamespaceIndex, prefix_hashes: Sequence[bytes]) -> list[Page | None]:
        """`live` of each."""
        visible, live = State.VISIBLE, self.live
        return [
            page if page is None or (page.state is visible and not page.expiry_s) else live(index, page.prefix_hash)
            for page in map(index.pages.get, prefix_hashes)
        ]

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

    # ---- write ---------------------------------------------------------------------------

    def reserve(
        self, digest: bytes, prefix_hashes: Sequence[bytes], page_nbytes: int, copies: Container[bytes] = ()
    ) -> Reservation:
        """Slots for the pages that are not here. `copies`: those that other members own; what is here as one and is
        none any more becomes the node's own. Raises Exhausted if there is space for none."""
        return self._in_turns(self._reserve(digest, prefix_hashes, page_nbytes, copies))

    def _reserve(
        self, digest: bytes, prefix_hashes: Sequence[bytes], page_nbytes: int, copies: Container[bytes] = ()
    ) -> Work[Reservation]:
        now_ms = self.clock_ms()
        index = self.namespaces.find(digest)
        if page_nbytes != index.page_nbytes:
            raise LayoutMismatch(f"pages of {page_nbytes} bytes; namespace {digest.hex()} has {index.page_nbytes}")
        self._order.expire_pins(now_ms)
        here = self.live_all(index, prefix_hashes)
        known = [page for page in here if page is not None]
        self._own([page for page in known if page.is_copy and page.prefix_hash not in copies])
        self._order.touch(reversed(here), now_ms)
        self.hold_all(known)  # making room for the batch must not evict the batch
        index.busy += 1
        result = Reservation(index, prefix_hashes)
        try:
            below = self.below.present(digest, prefix_hashes)
            yield from reserve_all(self, result, list(zip(prefix_hashes, below, strict=True)), copies, now_ms)
            if len(result.pages) < len(prefix_hashes):
                result.count()
            if not result.pages:
                self.below.touch(digest, prefix_hashes)
            if result.is_full and result.verdicts.count(PutStatus.FULL) == len(prefix_hashes):
                raise Exhausted(self.eviction.refusal(index, self.held_count, self.writing_count))
            return result
        except BaseException:  # a caller who is never told of them can not give them back
            self._take_back(result)
            raise
        finally:
            index.busy -= 1
            self.let_go(known)

    def _own(self, copies: list[Page]) -> None:
        for page in copies:
            self.eviction.own(page)
        self._offer(copies, urgent=False)

    def place(self, index: NamespaceIndex, prefix_hashes: Sequence[bytes], now_ms: int, is_copy: bool) -> list[Page]:
        """Pages to be written, of the keys from the first on, as far as there are slots for them. The caller has the
        lock."""
        pages = [Page(index, prefix_hash, now_ms, is_copy) for prefix_hash in prefix_hashes]
        placed = pages[: self.eviction.place(pages)]
        index.add(placed)
        self.writing_count += len(placed)
        return placed

    def _settle(self, page: Page, visible: bool) -> None:
        """A page whose load is over is visible, or forgotten: then its slot waits for its readers."""
        self.writing_count -= 1
        if visible:
            page.state = State.VISIBLE
            self.visible_count += 1
            self._order.admit(page)
        else:
            page.state = State.DOOMED
            page.namespace.drop(page)

    def commit(self, reservation: Reservation, checksums: Sequence[bytes], ttl_s: int = 0) -> int:
        """Makes the reserved pages visible, for `ttl_s` seconds, 0: no limit; the chain is the newest, head last."""
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
            self._offer([page for page in pages if not (page.is_copy or page in self._unwanted)], urgent=False)
            for page in self._unwanted.intersection(pages) if self._unwanted else ():
                self._unwanted.discard(page)
                self._forget(page, "removed")
            return stored

    def offer(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bytes]:
        """Offers those of the pages that are in RAM only to the tier below; those that it did not take."""
        with self.lock:
            index = self.namespaces.find(digest)
            below = self.below.present(digest, prefix_hashes)
            live = [self.live(index, h) for h, is_below in zip(prefix_hashes, below, strict=True) if not is_below]
            pages = [page for page in live if page is not None and not page.is_copy]
            return [page.prefix_hash for page in pages[self._offer(pages, urgent=True) :]]

    def hold_visible(self, pages: Sequence[Page]) -> list[Page]:
        """Holds those of the pages that are still visible, for the tier below."""
        with self.lock:
            held = [page for page in pages if page.state is State.VISIBLE]
            self.hold_all(held)
            return held

    def _offer(self, pages: list[Page], urgent: bool) -> int:
        if not pages:
            return 0
        taken = self.below.offer(pages, urgent)
        self.hold_all(pages[:taken])
        return taken

    def abort(self, reservation: Reservation) -> None:
        """Gives the reserved slots back; nothing of them was ever visible."""
        with self.lock:
            self._take_back(reservation)
            reservation.namespace.counters.pages_put_aborted += len(reservation.pages)

    def _take_back(self, reservation: Reservation) -> None:
        for page in reservation.pages:
            assert page.state is State.WRITING
            self._unwanted.discard(page)
            page.namespace.drop(page)
            self._free(page)
        self.writing_count -= len(reservation.pages)

    # ---- read ----------------------------------------------------------------------------

    def acquire(
        self,
        digest: bytes,
        prefix_hashes: Sequence[bytes],
        prefix_only: bool,
        wanted_nbytes: int,
        parts: PartialPage | None = None,
        elsewhere: Mapping[bytes, bool] = NOWHERE,
    ) -> Acquired:
        """A page or None per key; each page is held until `release`. Counts as a use. `wanted_nbytes`: bytes of each
        page that the caller is going to read, for the counters; `parts`: all that he wants of what is only below.
        `elsewhere`: what he can fetch from other nodes if it is not here, and whether it is a copy then."""
        return self._in_turns(self._acquire(digest, prefix_hashes, prefix_only, wanted_nbytes, parts, elsewhere))

    def _acquire(
        self,
        digest: bytes,
        prefix_hashes: Sequence[bytes],
        prefix_only: bool,
        wanted_nbytes: int,
        parts: PartialPage | None,
        elsewhere: Mapping[bytes, bool] = NOWHERE,
    ) -> Work[Acquired]:
        index = self.namespaces.find(digest)
        acquired = yield from hold_all(self, index, prefix_hashes, prefix_only, parts, elsewhere)
        self._order.touch(reversed(acquired.pages), self.clock_ms())
        self.below.touch(digest, prefix_hashes)
        misses = acquired.pages.count(None)
        index.counters.count_get(len(prefix_hashes) - misses, misses, wanted_nbytes)
        return acquired

    def count_lost(self, digest: bytes, count: int, wanted_nbytes: int) -> None:
        """Of the pages that were acquired, `count` could not be read from the tier below after all."""
        with self.lock:
            self.namespaces.find(digest).counters.count_get(-count, count, wanted_nbytes)

    def hold_all(self, pages: Sequence[Page]) -> None:
        """The caller has the lock."""
        for page in pages:
            page.holds += 1
            self.held_count += page.holds == 1

    def release(self, pages: Sequence[Page]) -> None:
        with self.lock:
            self.let_go(pages)

    def let_go(self, pages: Sequence[Page]) -> None:
        """The same; the caller has the lock."""
        for page in pages:
            assert page.holds > 0
            page.holds -= 1
            if page.holds == 0:
                self.held_count -= 1
                if page.state is State.DOOMED:
                    self._free(page)
                elif page.newer is None:
                    self._order.give_back(page)

    # ---- forget --------------------------------------------------------------------------

    def remove(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Forgets pages, pinned ones too. True for each that was visible."""
        return split_in_slices(
            self.lock, lambda some: self.remove_some(self.namespaces.find(digest), some), prefix_hashes
        )

    def remove_some(self, index: NamespaceIndex, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """The same for a few; the caller has the lock."""
        removed = []
        for prefix_hash in prefix_hashes:
            page = self.live(index, prefix_hash) or index.pages.get(prefix_hash)
            if page is not None and page.state is State.LOADING:
                self.loads.forget(page)
            elif page is not None and page.state is State.WRITING:
                self._unwanted.add(page)  # the bytes may have been on their way before the removal
            removed.append(page is not None and page.state is State.VISIBLE)
            if removed[-1] and page is not None:
                self._forget(page, "removed")
        below = self.below.remove(index.digest, prefix_hashes)
        return [here or there for here, there in zip(removed, below, strict=True)]

    def remove_namespace(self, digest: bytes, zero: bool = False) -> int:
        """Forgets all pages of a namespace in every tier; how many there were, a page that was in RAM and
        below counting once. Pages that are put meanwhile may stay. `zero`: their slots in RAM are
        zeroed when they become free."""
        index = self.namespace(digest)
        removed = remove_all(self, index, zero) + self.below.remove_namespace(digest)
        remove_all(self, index, zero)  # what was loaded from below meanwhile, which is counted already
        return removed

    def drop_corrupt(self, page: Page) -> None:
        """Forgets a page whose bytes do not match its checksum (the caller holds it)."""
        with self.lock:
            if page.state is State.VISIBLE:
                self._forget(page, "corrupt")

    def _forget(self, page: Page, reason: str, successor: Page | None = None) -> None:
        """Takes a visible page out; its slot follows, or goes to its successor, at once or with its last reader."""
        index = page.namespace
        index.drop(page)
        if reason != "evicted" or not page.is_copy:  # which its owners have
            self.ghosts.remember(index.digest, page.prefix_hash, reason)
            index.counters.pages_evicted += reason == "evicted"
        self.visible_count -= 1
        page.state = State.DOOMED
        self._order.withdraw(page)
        if page.holds == 0:
            self._free(page, successor)

    def _free(self, page: Page, successor: Page | None = None) -> None:
        """Frees the slot of a page neither visible nor held, or gives it to the successor."""
        if self._to_zero and page in self._to_zero:
            self._to_zero.discard(page)
            self._zero_slot(page)
        self.eviction.release(page, successor)

    # ---- zero ----------------------------------------------------------------------------

    def zero_when_free(self, pages: Iterable[Page]) -> None:
        """Zeroes the slots of removed pages before other pages get them. The caller has the lock."""
        self._to_zero.update(pages)

    def zero_removed(self, pages: Sequence[Page]) -> None:
        """Zeroes and releases removed pages that the caller holds. Call it without the lock.

        Nobody finds a removed page, so a page that only the caller holds stays so, and its slot is
        zeroed without the lock. The slot of another one is zeroed when its last reader releases it.
        """
        alone = [page for page in pages if page.holds == 1 and page.state is State.DOOMED]
        for page in alone:
            self._zero_slot(page)
        with self.lock:
            self._to_zero.difference_update(alone)
            self.let_go(pages)

    def _zero_slot(self, page: Page) -> None:
        self._zero(page.offset, page.namespace.slot_nbytes)
        self.zeroed_nbytes += page.namespace.slot_nbytes

    def to_zero_count(self, digests: Container[bytes]) -> int:
        """Removed pages of these namespaces that are read or written still, and not zeroed yet."""
        with self.lock:
            return sum(page.namespace.digest in digests for page in self._to_zero)

    # ---- check ---------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        with self.lock:
            counted = Counted(self.writing_count, self.visible_count, self.held_count)
            return self.eviction.check() + violations(self.namespaces.all(), self.slots, counted)


# Quotas of the RAM change while the node serves: pages of a tenant that gets one, or loses it,
# change their pool.

REGROUPED = 256  # pages under one lock


def set_ram_limits(tier: RamTier, limits: Callable[[str], Limits], promised_nbytes: int) -> None:
    """`limits` of each tenant, and their bytes all together. What is more than a quota goes when room is needed."""
    order = tier.eviction.order
    with tier.lock:
        changed = order.accounts.set_limits(limits, promised_nbytes)
    if not changed:
        return
    moving: list[tuple[int, Page]] = []

    def collect(pages: Sequence[Page]) -> None:
        moving.extend((page.used_ms, page) for page in pages if page.namespace.account in changed)

    walk(tier, None, collect)
    moving.sort(key=lambda entry: entry[0], reverse=True)  # each goes before those that were used later
    for start in range(0, len(moving), REGROUPED):
        with tier.lock:
            for used_ms, page in moving[start : start + REGROUPED]:
                order.regroup(page, used_ms)
        time.sleep(0)  # else this thread would have the lock again


# Pinning pages, in RAM and below: a promise to keep them from eviction for a time.


class Pinning:
    """Thread-safe: takes the RAM tier's lock."""

    def __init__(self, tier: RamTier) -> None:
        self._tier = tier
        self._order = tier.eviction.order

    def pin(self, digest: bytes, prefix_hashes: Sequence[bytes], ttl_ms: int) -> list[bool]:
        """Keeps visible pages from eviction for `ttl_ms`; a new pin replaces the old one. Raises Exhausted,
        and pins none, if too much would be pinned."""
        tier = self._tier
        with tier.lock:
            now_ms = tier.clock_ms()
            index = tier.namespaces.find(digest)
            self._order.expire_pins(now_ms)
            pages = [tier.live(index, prefix_hash) for prefix_hash in prefix_hashes]
            self._order.pins.check_room([page for page in pages if page is not None])
            index.account.check_pins(sum(page is not None and page not in self._order.pins for page in pages))
            below = tier.below.pin(digest, prefix_hashes, -(-ttl_ms // 1000))  # may be exhausted too
            for page in pages:
                if page is not None:
                    self._order.pin(page, now_ms + ttl_ms)
            return [page is not None or there for page, there in zip(pages, below, strict=True)]

    def unpin(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """True for each that was pinned."""
        tier = self._tier
        with tier.lock:
            index = tier.namespaces.find(digest)
            pages = [index.pages.get(prefix_hash) for prefix_hash in prefix_hashes]
            unpinned = [page is not None and self._order.unpin(page) for page in pages]
            below = tier.below.pin(digest, prefix_hashes, 0)
            return [here or there for here, there in zip(unpinned, below, strict=True)]
