"""Track what a client's connection holds, and free it however the connection ends."""

import contextlib
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvstore.checksum import (
    checksum,
    hashed_nbytes,
    joined_checksum,
    parts_match,
    root,
    roots,
    stored_leaves,
)
from kvstore.deadline import Deadline
from kvstore.errors import Exhausted, UnknownNamespace
from kvstore.keys import NAMESPACE_DIGEST_NBYTES, PREFIX_HASH_NBYTES_MAX
from kvstore.layout import SLOT_ALIGN_NBYTES
from kvstore.messages import get_reply
from kvstore.pb import kvstore_pb2 as pb
from kvstore.tracing import span
from node.auth.access import Caller
from node.disk.durability import Wait
from node.memory.arena import Arena
from node.memory.page import Page, Reservation
from node.memory.promotion import Acquired, PartialPage, Range, SomeReady
from node.memory.tier import RamTier
from node.serving.limits import NO_CHARGE, Budget, Charge, make_limit
from node.serving.request_metrics import DISK, PEER, RAM, RequestMetrics, Subject
from node.serving.tenants import Tenants

# Expiry times have 32 bits of seconds since the epoch; a page may be forgotten sooner.
TTL_S_MAX = 10 * 366 * 24 * 3600
# Processes may hold the same pages, so their sum may exceed the RAM.
HOLDERS_MAX = 64
# Page bytes of a reply in parts at least: each one wakes the client up
PART_NBYTES = 2 << 20


class Content:
    """The bytes of held pages: positions of ranges in the arena, and verification.

    Thread-safe. A corrupt page is dropped.
    """

    def __init__(self, arena: Arena, tier: RamTier) -> None:
        self._arena = arena
        self._tier = tier

    def views(self, pages: Sequence[Page], ranges: Sequence[Range]) -> Iterator[memoryview]:
        """Return the memory of these ranges of each page; without ranges, of whole pages."""
        if pages and not ranges:
            return iter(
                self._arena.views([page.offset for page in pages], pages[0].namespace.page_nbytes)
            )
        return (
            self._arena.view(offset, nbytes)
            for page in pages
            for offset, (_, nbytes) in zip(arena_offsets(page, ranges), ranges, strict=True)
        )

    def checksum(self, page: Page, ranges: Sequence[Range]) -> bytes:
        """Return the checksum of ranges for their transfer; empty if the page is corrupt.

        The reader does not get whole leaves, so they are verified here, except for a partial page,
        which was verified when it was read.
        """
        if not isinstance(page.namespace, PartialPage) and not self.intact(page, ranges):
            return b""
        nbytes = sum(nbytes for _, nbytes in ranges)
        return joined_checksum(
            self.views([page], ranges), nbytes, page.namespace.seed(page.prefix_hash)
        )

    def checksums(
        self,
        pages: Sequence[Page],
        ranges: Sequence[Range],
        charge: Charge,
        check: Callable[[], None],
    ) -> dict[Page, bytes]:
        """Return a checksum of the ranges of each intact page.

        `check` may raise in between.
        """
        sums, wanted_nbytes = {}, sum(nbytes for _, nbytes in ranges)
        for page in dict.fromkeys(pages):
            check()
            charge.add_processed(wanted_nbytes + _checked_nbytes(page, ranges))
            if checksum := self.checksum(page, ranges):
                sums[page] = checksum
        return sums

    def intact(self, page: Page, ranges: Sequence[Range] = ()) -> bool:
        """Compare a page, or the leaves that cover `ranges` of it, with its checksum."""
        view = self._arena.view(page.offset, page.namespace.page_nbytes)
        seed = page.namespace.seed(page.prefix_hash)
        if ranges and page.leaves:
            intact = root(page.leaves, seed) == page.checksum and parts_match(
                view, page.leaves, ranges
            )
        else:
            intact = checksum(view, seed) == page.checksum
        if not intact:
            self._tier.drop_corrupt(page)
        return intact


def _checked_nbytes(page: Page, ranges: Sequence[Range]) -> int:
    """Return how many bytes are hashed to verify ranges: whole leaves, or the page."""
    if isinstance(page.namespace, PartialPage):
        return 0  # verified when they were read from disk
    page_nbytes = page.namespace.page_nbytes
    return hashed_nbytes(page_nbytes, ranges) if page.leaves else page_nbytes


def arena_offsets(page: Page, ranges: Sequence[Range]) -> list[int]:
    """Return the position in the arena of each range."""
    space = page.namespace
    if isinstance(space, PartialPage):
        return [page.offset + space.slot_offset(offset) for offset, _ in ranges]
    return [page.offset + offset for offset, _ in ranges]


def offsets_of(pages: Sequence[Page], ranges: Sequence[Range]) -> list[int]:
    """Return the arena offset of each range of each page; without ranges, of each page."""
    return (
        [offset for page in pages for offset in arena_offsets(page, ranges)]
        if ranges
        else [page.offset for page in pages]
    )


def ttls_ms(pages: Sequence[Page], clock_s: Callable[[], int]) -> list[int]:
    """Return the remaining time to live of each page, 0 without one; nothing if none has one."""
    expiries_s = [page.expiry_s for page in pages]
    if not any(expiries_s):
        return []
    now_s = clock_s()
    return [max(1, expiry_s - now_s) * 1000 if expiry_s else 0 for expiry_s in expiries_s]


def reply_about(
    pages: Sequence[Page | None],
    clock_s: Callable[[], int],
    sums: Mapping[Page, bytes] | None = None,
) -> pb.GetReply:
    """Return the reply to a get about its keys' pages; `sums`: the checksums of their ranges."""
    found = [page for page in pages if page is not None]
    checksums = [page.checksum if sums is None else sums[page] for page in found]
    return get_reply([page is not None for page in pages], checksums, ttls_ms(found, clock_s))


class ReadyRun:
    """Report the leading keys of a get whose pages may be read, while others are still loaded.

        keys          0 1 2 3 | 4 5 | 6 7 8
        have arrived  x x x x   x x   . x .    from other members or the disk, in any order
        replies       part      part  the last one

    Clients in shared memory copy and verify these meanwhile. Thread-safe.
    """

    def __init__(
        self, send: Callable[[pb.GetReply], None], page_nbytes: int, clock_s: Callable[[], int]
    ) -> None:
        self._send = send
        self._pages_min = -(-PART_NBYTES // page_nbytes)
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self.count = 0  # keys that were reported
        self._end = 0  # keys that may be: small pages are not all looked at again at each arrival

    def some_ready(self, pages: Sequence[Page | None]) -> None:
        """Report the next keys if they have enough pages; the last key is left for the last reply.

        A page gets its checksum when its bytes are here and verified.
        """
        with self._lock:
            end = self._end
            while end < len(pages) - 1 and ((page := pages[end]) is None or page.checksum):
                end += 1
            self._end = end
            if end - self.count >= self._pages_min:
                part = self.reply(pages[self.count : end])
                part.more = True
                self.count = end
                self._send(part)

    def reply(self, pages: Sequence[Page | None]) -> pb.GetReply:
        """Return the reply about the next keys, whose pages these are."""
        reply = reply_about(pages, self._clock_s)
        reply.offsets.extend([page.offset for page in pages if page is not None])
        return reply


class Session:
    """One put and one get at a time, for one connection.

    Used by one thread. A reservation belongs to the session until commit or abort, held pages until
    release; `close` releases everything. `maps_arena`: the client maps the arena, so it gets
    offsets.
    """

    def __init__(
        self, tier: RamTier, sessions: "Sessions", caller: Caller, maps_arena: bool
    ) -> None:
        self.caller = caller
        self.peer = caller.peer
        self.has_left = caller.has_left
        self.maps_arena = maps_arena
        self._tier = tier
        self._sessions = sessions
        self._reservation: Reservation | None = None
        self._held: list[Page] = []
        self._reserved_nbytes = 0  # taken from the budgets
        self._held_nbytes = 0
        self.tenant = ""  # of the pages' holder
        self.charge = NO_CHARGE  # of the current get
        self.put_charge = NO_CHARGE  # of the current put
        self.tier = RAM  # the farthest tier that had one of them
        self.put_request = pb.PutRequest()  # of the reservation
        self.must_ack: list[bytes] = []  # of its pages, those that must be durable at the commit
        self.wait = Wait(0.0, caller.has_left)  # for that
        # Context around waits for the disk
        self.loading: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def reserve(
        self,
        digest: bytes,
        prefix_hashes: Sequence[bytes],
        page_nbytes: int,
        copies: Container[bytes] = (),
    ) -> Reservation:
        """See `RamTier.reserve`.

        Raises Exhausted if this peer, or all of them, have too much reserved and not committed.
        """
        assert self._reservation is None, "a session writes one batch at a time"
        slot = self._tier.namespace(digest).slot_nbytes
        self._reserved_nbytes = self._take_reserved(digest, prefix_hashes, slot)
        reservation = None
        try:
            reservation = self._tier.reserve(digest, prefix_hashes, page_nbytes, copies)
        finally:
            wanted = len(reservation.pages) * slot if reservation else 0
            self._sessions.reserved.give(self.peer, self._reserved_nbytes - wanted)
            self._reserved_nbytes = wanted
        if reservation.pages:
            self._reservation = reservation
        return reservation

    def _take_reserved(
        self, digest: bytes, prefix_hashes: Sequence[bytes], slot_nbytes: int
    ) -> int:
        """Count the reservation before the tier evicts for it: for all keys, or the new ones."""
        nbytes = len(prefix_hashes) * slot_nbytes
        try:
            self._sessions.reserved.take(self.peer, nbytes)
        except Exhausted:
            present = self._tier.lookup(digest, prefix_hashes, touch=True)
            nbytes = present.count(False) * slot_nbytes
            self._sessions.reserved.take(self.peer, nbytes)
        return nbytes

    @property
    def reserved(self) -> list[Page]:
        """Return the pages that wait for bytes and commit."""
        return self._reservation.pages if self._reservation else []

    @property
    def held(self) -> list[Page]:
        """Return the pages that are being read."""
        return self._held

    def commit(self, leaves: Sequence[bytes], ttl_s: int) -> int:
        """Make the reserved pages visible.

        Each page's `leaves` are kept if it has several, for reads of its parts.
        """
        assert self._reservation is not None
        pages = self._reservation.pages
        checksums = roots(
            leaves, self._reservation.namespace.digest, [page.prefix_hash for page in pages]
        )
        if stored_leaves(leaves[0]):  # all have as many
            for page, some in zip(pages, leaves, strict=True):
                page.leaves = some
        stored = self._tier.commit(self._reservation, checksums, min(ttl_s, TTL_S_MAX))
        # only now: if that raised, `abort` still knows what to release
        self._take_reservation()
        return stored

    def abort(self) -> None:
        """Release the reserved pages."""
        if self._reservation is not None:
            self._tier.abort(self._take_reservation())

    def _take_reservation(self) -> Reservation:
        assert self._reservation is not None
        reservation, self._reservation = self._reservation, None
        nbytes, self._reserved_nbytes = self._reserved_nbytes, 0
        self._sessions.reserved.give(self.peer, nbytes)
        return reservation

    def acquire(
        self,
        digest: bytes,
        prefix_hashes: Sequence[bytes],
        prefix_only: bool,
        wanted_nbytes: int,
        parts: PartialPage | None = None,
        near: Deadline | None = None,
        some_ready: SomeReady | None = None,
    ) -> list[Page | None]:
        """See `RamTier.acquire`; pages of lower tiers are read. `some_ready`: see `Promotion.read`.

        Raises Exhausted if this process holds too much: where clients map the arena, a hold has no
        time limit.
        """
        if self.maps_arena:
            nbytes = len(prefix_hashes) * self._tier.namespace(digest).slot_nbytes
            self._sessions.hold(self, nbytes)
            self._held_nbytes = nbytes
        acquired = self._tier.acquire(
            digest, prefix_hashes, prefix_only, wanted_nbytes, parts, near
        )
        assert not self._held, "a session reads one batch at a time"
        self._held = [page for page in acquired.pages if page is not None]
        if all(page.checksum for page in self._held):
            self.tier = RAM
            return acquired.pages
        pages = self._load(acquired, some_ready)
        lost_count = pages.count(None) - acquired.pages.count(None)
        if lost_count:
            self._tier.count_lost(digest, lost_count, wanted_nbytes)
        return pages

    def _load(self, acquired: Acquired, some_ready: SomeReady | None) -> list[Page | None]:
        """Read pages of lower tiers, and wait for those that other sessions read."""
        promotion = self._tier.promotion
        with contextlib.ExitStack() as stack:
            try:
                self.tier = PEER if PEER in promotion.tiers_of(acquired) else DISK
                spaces = [load.page.namespace for load in acquired.loads]
                self.charge.add_processed(
                    sum(min(space.page_nbytes, space.slot_nbytes) for space in spaces)
                )
                stack.enter_context(self.loading())
                stack.enter_context(self._sessions.traffic.waiting(self.tier))
                stack.enter_context(span("kvstore.load", tier=self.tier))
            except BaseException:  # otherwise others would wait for these pages
                promotion.cancel(acquired)
                raise
            pages = promotion.read(acquired, self.has_left, some_ready)
        # They arrived in any order: the chain's end must be evicted before its head
        if self.tier == PEER and acquired.loads:
            self._tier.lookup(acquired.digest, acquired.prefix_hashes, touch=True)
        return pages

    def release(self) -> None:
        """Release read pages."""
        held, self._held = self._held, []
        self._tier.release(held)
        nbytes, self._held_nbytes = self._held_nbytes, 0
        if nbytes:
            self._sessions.released(self, nbytes)

    def close(self) -> None:
        """Release everything."""
        self.abort()
        self.release()
        self._sessions.closed(self)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sessions:
    """The live sessions, and their common limits.

    Their number is bounded by that of the connections and transfers. Thread-safe.
    """

    def __init__(
        self, tier: RamTier, batch_keys_max: int, batch_nbytes_max: int, tenants: Tenants
    ) -> None:
        self._tier = tier
        self.tenants = tenants
        self.traffic = RequestMetrics()
        self.traffic.slow.describe = self._subject
        self._lock = threading.Lock()
        self._live: set[Session] = set()
        ram_nbytes = tier.slots.region_nbytes
        # The largest batch is always possible, also for one peer alone: its pages, rounded up to
        # slots.
        batch = min(ram_nbytes, batch_nbytes_max + batch_keys_max * SLOT_ALIGN_NBYTES)
        self.reserved = Budget(
            make_limit(
                "bytes reserved by puts that are not committed",
                max(ram_nbytes // 2, batch),
                "put smaller batches, or fewer at a time",
                max(ram_nbytes // 4, batch),
            )
        )
        self.held = Budget(
            make_limit(
                "bytes held by reads in shared memory",
                max(ram_nbytes // 2, batch) * HOLDERS_MAX,
                "release what was read",
                max(ram_nbytes // 2, batch),
            )
        )

    @property
    def count(self) -> int:
        """Return the number of sessions."""
        return len(self._live)

    def open(self, caller: Caller, maps_arena: bool = False) -> Session:
        """Open a session."""
        session = Session(self._tier, self, caller, maps_arena)
        with self._lock:
            self._live.add(session)
        return session

    def hold(self, session: Session, nbytes: int) -> None:
        """Count bytes that a session holds to its process and its tenant.

        Raises Exhausted.
        """
        self.held.take(session.peer, nbytes)
        try:
            self.tenants.hold(session.tenant, nbytes)
        except Exhausted:
            self.held.give(session.peer, nbytes)
            raise

    def _subject(self, session: Session | None, request: Any) -> Subject:
        """Return what a slow call is about. `session`: whose put a commit completes."""
        if isinstance(request, pb.CommitRequest) and session is not None:
            request = session.put_request
        digest, hashes = getattr(request, "namespace", b""), getattr(request, "prefix_hashes", ())
        if not isinstance(digest, bytes) or not digest:
            return Subject()
        # clients choose both, and refused ones may be long
        digest = digest[:NAMESPACE_DIGEST_NBYTES]
        key, count = hashes[0][:PREFIX_HASH_NBYTES_MAX] if hashes else b"", len(hashes)
        try:
            space = self._tier.namespace(digest)
        except UnknownNamespace:
            return Subject(digest, key=key, page_count=count)
        nbytes = 0
        if isinstance(request, pb.PutRequest):
            nbytes = count * space.page_nbytes
        elif isinstance(request, pb.GetRequest):
            parts = [part.nbytes for part in request.ranges] or [space.page_nbytes]
            nbytes = count * sum(parts)
        return Subject(digest, space.value.tenant, space.value.model, key, count, nbytes)

    def released(self, session: Session, nbytes: int) -> None:
        """Count released bytes."""
        self.held.give(session.peer, nbytes)
        self.tenants.release(session.tenant, nbytes)

    def closed(self, session: Session) -> None:
        """Forget a closed session."""
        with self._lock:
            self._live.discard(session)
