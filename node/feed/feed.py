"""Serve the feed: which blocks are stored, for readers that poll.

    a tier's change -> ring                 by writers, under the locks that they hold anyway
    ring -> present in all namespaces?      by the first reader that comes, for all readers
         -> change log (stored, removed)    kept for a while, with sequence numbers
    snapshot: all keys, looked up one by one, then the changes since its beginning

Whether a block is stored is looked up when a change of one of its pages is read, so it does not
matter in which order tiers and ranks changed: the last look comes after the last change. A page
that moves from one tier to the other is sent only while snapshots run, which may have missed it.
"""

import heapq
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from kvstore.config import FEED_WAIT_S_MAX, MESSAGE_NBYTES_MAX
from kvstore.errors import Exhausted, InvalidRequest, Unavailable
from kvstore.keys import TEXT_NBYTES_MAX
from kvstore.pb import kvstore_pb2 as pb
from node.feed.change_log import ChangeLog, Cursor, LoggedChange, read_cursor
from node.feed.models import Model, Models
from node.memory.changes import Change, ChangeRing
from node.memory.page import NamespaceIndex, State
from node.memory.tier import RamTier

TICK_S = 0.1  # how often a waiting reader looks; writers wake nobody
GATHER_S = 0.2  # a reader waits so long first, and gets in one reply what came meanwhile
IDLE_S = 60.0  # without readers, then changes are not noted any more
REPLY_KEYS, REPLY_NBYTES = 8192, MESSAGE_NBYTES_MAX // 2  # of one reply
PART_KEYS = 2048  # of a snapshot, looked at in one call
SNAPSHOTS_MAX = 16  # at a time
SNAPSHOT_IDLE_S = 30.0
EXPIRIES_MAX = 1 << 18  # blocks with a time to live that readers know; 50 MB

LOCKED_KEYS = 64  # looked up in one hold of the RAM tier's lock

Sees = Callable[[Model], bool]
CAME, WENT = 1, 2
Looks = dict[bytes, dict[bytes, int]]  # by model and block: whether pages of it came, and went


class Caller(Protocol):
    """The client of a request. `peer`: the key by which limits count it."""

    @property
    def peer(self) -> str:
        """Return whose share it counts to."""

    @property
    def has_left(self) -> Callable[[], bool]:
        """Return a function that tells whether the caller has gone."""


@dataclass
class Snapshot:
    """A snapshot that a reader fetches part by part.

    `ahead`: the next part's model and keys; empty after the last part, None before they are read.
    `reading`: held to read them.
    """

    peer: str
    parts: Iterator[tuple[Model, list[bytes]]]
    reading: threading.Lock
    used_s: float
    part: int = 0
    ahead: tuple[Model, list[bytes]] | tuple[()] | None = None


@dataclass
class Reply:
    """A reply: its head, and changes that were serialized for all readers."""

    head: pb.FeedReply
    changes: Sequence[LoggedChange] = ()

    def SerializeToString(self) -> bytes:  # noqa: N802  (as a message's)
        """Return the bytes of the message; repeated fields may come in several places of it."""
        return b"".join([self.head.SerializeToString(), *(change.data for change in self.changes)])


class Expiries:
    """Remember when blocks with a time to live expire. Bounded."""

    def __init__(self) -> None:
        self._expiry_s: dict[tuple[bytes, bytes], int] = {}
        self._order: list[tuple[int, tuple[bytes, bytes]]] = []

    def note(self, model_id: bytes, prefix_hash: bytes, expiry_s: int) -> bool:
        """Remember when a block expires; False if there is no room."""
        key = (model_id, prefix_hash)
        if self._expiry_s.get(key) == expiry_s:
            return True
        if key not in self._expiry_s and len(self._expiry_s) >= EXPIRIES_MAX:
            return False
        heapq.heappush(self._order, (expiry_s, key))  # first: it may fail
        self._expiry_s[key] = expiry_s
        if len(self._order) > 2 * len(self._expiry_s) + PART_KEYS:  # most are forgotten
            self._order = [(known_s, known) for known, known_s in self._expiry_s.items()]
            heapq.heapify(self._order)
        return True

    def forget(self, model_id: bytes, prefix_hashes: Iterable[bytes]) -> None:
        """Forget blocks that are not stored any more."""
        if self._expiry_s:
            for prefix_hash in prefix_hashes:
                self._expiry_s.pop((model_id, prefix_hash), None)

    def due(self, now_s: int) -> list[tuple[bytes, bytes]]:
        """Return the blocks that have expired, and forget them."""
        found = []
        while self._order and self._order[0][0] <= now_s:
            expiry_s, key = heapq.heappop(self._order)
            if self._expiry_s.get(key) == expiry_s:
                del self._expiry_s[key]
                found.append(key)
        return found


class Feed:
    """The feed of a node. Thread-safe. Without readers nothing is kept."""

    def __init__(
        self,
        tier: RamTier,
        stops: Callable[[], bool] = lambda: False,
        is_member: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare the feed; `stops` tells whether the node stops.

        `is_member`: the node is in a cluster. Then each namespace is a model by itself, for readers
        that merge the members' feeds.
        """
        self._tier = tier
        self.is_member = is_member
        self._single = False
        self.wait_s_max = FEED_WAIT_S_MAX
        self._stops = stops
        self._lock = threading.Lock()
        self._ring: ChangeRing | None = None
        self._used_s = 0.0
        self._stale = False
        self._epoch = b""
        self._models = Models()
        self._change_log = ChangeLog()
        self._expiries = Expiries()
        self._snapshots: dict[bytes, Snapshot] = {}

    # ---- for readers ---------------------------------------------------------------------

    def poll(self, request: pb.FeedRequest, caller: Caller, sees: Sees) -> Reply:
        """Return what comes after the request's cursor, as soon as there is something.

        `sees` tells which models the caller may see.
        """
        if request.member != self.is_member():
            raise InvalidRequest(
                "this node is in no cluster: ask without `member`"
                if request.member
                else "a member of a cluster tells what it owns itself: ask each member (`member`), "
                "and merge their feeds, as Client.feed does"
            )
        if len(request.model.encode()) > TEXT_NBYTES_MAX:
            raise InvalidRequest(f"the model's name is longer than {TEXT_NBYTES_MAX} bytes")
        cursor, name = read_cursor(request.cursor), request.model
        end = time.monotonic() + min(request.wait_ms / 1000, self.wait_s_max)

        def wanted(model: Model) -> bool:
            return (not name or model.value.model == name) and sees(model)

        if request.wait_ms and not cursor.snapshot and self._has_few(cursor):
            time.sleep(min(GATHER_S, request.wait_ms / 1000))
        self._check_wanted(caller)
        begun = b""  # a snapshot's name
        while True:
            self._read_ahead(cursor)
            with self._lock:
                self._check_wanted(caller, begun)  # otherwise the next call gets what was read
                self._used_s = time.monotonic()
                self._pump()
                reply = self._reply(cursor, wanted)
                if reply is None:
                    cursor = self._begin(cursor, wanted, caller.peer)
                    begun = cursor.snapshot
                    continue
            reply.head.begin = bool(begun)
            if begun or reply.changes or cursor.snapshot or time.monotonic() >= end:
                return reply
            cursor = read_cursor(reply.head.cursor)
            time.sleep(TICK_S)

    def _check_wanted(self, caller: Caller, begun: bytes = b"") -> None:
        """Raise if nobody waits for a reply; nobody knows of a snapshot that the call has begun."""
        if caller.has_left() or self._stops():
            self._snapshots.pop(begun, None)
            raise Unavailable("the caller has left, or the node stops")

    def _has_few(self, cursor: Cursor) -> bool:
        log = self._change_log
        return cursor.epoch == self._epoch and log.keys_after(cursor.sequence) < REPLY_KEYS // 2

    def _reply(self, cursor: Cursor, wanted: Sees) -> Reply | None:
        """Return what comes after the cursor; None if that is not known any more."""
        if cursor.epoch == self._epoch and self._change_log.has_next_of(cursor.sequence):
            if not cursor.snapshot:
                return self._changes(cursor, wanted)
            snapshot = self._snapshots.get(cursor.snapshot)
            if snapshot and snapshot.part == cursor.part and snapshot.ahead is not None:
                if not self._change_log.forgets_soon(cursor.sequence):
                    return self._part(cursor, snapshot, wanted)
                # Otherwise a large snapshot would never end while much changes
                snapshot.used_s = time.monotonic()
                reply = self._changes(cursor, wanted)
                reply.head.snapshot = True
                return reply
        return None

    def _changes(self, cursor: Cursor, wanted: Sees) -> Reply:
        models, told = dict[bytes, pb.FeedModel | None](), list[LoggedChange]()
        count, nbytes, sequence = 0, 0, cursor.sequence
        for change in self._change_log.after(sequence):
            if change.model_id not in models:
                model = self._models.find(change.model_id)
                message = model.message if model is not None and wanted(model) else None
                models[change.model_id] = message
                nbytes += message.ByteSize() if message is not None else 0
            if models[change.model_id] is not None:
                count, nbytes = count + change.key_count, nbytes + len(change.data)
                if told and (count > REPLY_KEYS or nbytes > REPLY_NBYTES):
                    break
                told.append(change)
            sequence = change.sequence
        named = {change.model_id for change in told}
        about = [
            message for name, message in models.items() if message is not None and name in named
        ]
        head = pb.FeedReply(models=about, cursor=cursor._replace(sequence=sequence).packed())
        return Reply(head, told)

    def _begin(self, last: Cursor, wanted: Sees, peer: str) -> Cursor:
        """Begin a snapshot, in place of the reader's last one."""
        self._snapshots.pop(last.snapshot, None)
        of_peer = sum(snapshot.peer == peer for snapshot in self._snapshots.values())
        if len(self._snapshots) >= SNAPSHOTS_MAX or of_peer >= SNAPSHOTS_MAX // 2:
            raise Exhausted(
                f"{len(self._snapshots)} snapshots are being sent already, {of_peer} of them to "
                "this peer; wait until one has ended"
            )
        # Changes from now on come after it
        cursor = Cursor(self._epoch, self._change_log.last, os.urandom(8))
        parts = self._keys([model for model in self._models if wanted(model)])
        now_s = time.monotonic()
        self._snapshots[cursor.snapshot] = Snapshot(peer, parts, threading.Lock(), now_s)
        return cursor

    def _read_ahead(self, cursor: Cursor) -> None:
        """Read the keys of a snapshot's next part, without the lock: the disk may hang."""
        snapshot = self._snapshots.get(cursor.snapshot)
        if snapshot is None:
            return
        with snapshot.reading:  # by one of several calls with the same cursor
            if snapshot.ahead is not None:
                return
            snapshot.used_s = time.monotonic()
            try:
                snapshot.ahead = next(snapshot.parts, ())
            except BaseException:  # before another call takes this for the end
                with self._lock:
                    self._snapshots.pop(cursor.snapshot, None)
                raise

    def _part(self, cursor: Cursor, snapshot: Snapshot, wanted: Sees) -> Reply:
        """Return the next part of a snapshot; after the last one, changes follow."""
        head = pb.FeedReply()
        snapshot.used_s = time.monotonic()
        try:
            if snapshot.ahead:
                model, hashes = snapshot.ahead
                if wanted(model) and (stored := self._stored(model, hashes)):
                    head.models.append(model.message)
                    head.changes.append(pb.FeedChange(model=model.id, prefix_hashes=stored))
                head.snapshot = True
                snapshot.part, snapshot.ahead = snapshot.part + 1, None
            else:
                self._pump()  # before the snapshot is over: pages may have moved behind it
        except BaseException:
            self._snapshots.pop(cursor.snapshot, None)
            raise
        if head.snapshot:
            head.cursor = cursor._replace(part=snapshot.part).packed()
        else:
            self._snapshots.pop(cursor.snapshot, None)
            head.cursor = cursor._replace(snapshot=b"").packed()
        return Reply(head)

    def _keys(self, models: Iterable[Model]) -> Iterator[tuple[Model, list[bytes]]]:
        """Yield the keys of each model, of one of its namespaces, in RAM and then below.

        Most are yielded twice: a set of a million takes 0.2 s, in which no other thread runs.
        """
        for model in models:
            for index in model.parts[0] if model.parts else ():
                in_ram = list(index.pages)  # one step of the interpreter, so no lock
                for start in range(0, len(in_ram), PART_KEYS):
                    yield model, in_ram[start : start + PART_KEYS]
                in_ram, after = [], b""
                while some := self._below(index, after):
                    after = some[-1]
                    yield model, some

    def _below(self, index: NamespaceIndex, after: bytes) -> list[bytes]:
        return list(islice(self._tier.below.list_hashes(index.digest, b"", after), PART_KEYS))

    # ---- from the tiers ------------------------------------------------------------------

    def _pump(self) -> None:
        """Look up all blocks that have changed, and log the changes."""
        try:
            self._take_changes()
        except BaseException:  # such as MemoryError: what was read is told to nobody
            self._stale = True
            raise

    def _take_changes(self) -> None:
        if self._ring is None or self._stale or self._single != self.is_member():
            self._restart()
        assert self._ring is not None
        changes = self._ring.read()
        # After it, or a namespace may have been opened anew before pages of it came
        is_new = self._models.refresh(self._tier.namespaces.all())
        if changes is None or is_new:
            return self._restart()
        if looks := self._looks(changes):
            self._note(looks)

    def _looks(self, changes: list[Change]) -> Looks:
        """Return which blocks to look at, and whether pages of them came, and went."""
        looks: Looks = {}
        for _, digest, prefix_hashes, is_new in changes:
            model = self._models.of(digest)
            if model is None:  # opened and closed meanwhile: no reader knows it
                continue
            blocks, change = looks.setdefault(model.id, {}), CAME if is_new else WENT
            for prefix_hash in prefix_hashes:
                blocks[prefix_hash] = blocks.get(prefix_hash, 0) | change
        for model_id, prefix_hash in self._expiries.due(self._tier.clock_s()):
            blocks = looks.setdefault(model_id, {})
            blocks[prefix_hash] = blocks.get(prefix_hash, 0) | WENT
        return looks

    def _note(self, looks: Looks) -> None:
        told = CAME | WENT if self._snapshots else CAME
        there = {
            model_id: self._stored(self._models.find(model_id), blocks)
            for model_id, blocks in looks.items()
        }
        for model_id, blocks in looks.items():
            gone = [h for h in blocks if h not in there[model_id]]
            self._expiries.forget(model_id, gone)
            self._change_log.add(model_id, True, [h for h in gone if blocks[h] & WENT])
        for model_id, blocks in looks.items():
            stored = [h for h in there[model_id] if blocks[h] & told]
            self._change_log.add(model_id, False, stored)

    def _stored(self, model: Model | None, prefix_hashes: Collection[bytes]) -> Collection[bytes]:
        """Return the blocks that all parts of a model have; remember when each ends."""
        if model is None or not model.parts:
            return ()
        ends_s = self._ends_of(model.parts[0], prefix_hashes)
        for part in model.parts[1:]:
            found = self._ends_of(part, ends_s)
            ends_s = {
                prefix_hash: min(end_s, found[prefix_hash]) or end_s or found[prefix_hash]
                for prefix_hash, end_s in ends_s.items()
                if prefix_hash in found
            }
        if not any(ends_s.values()):
            return ends_s
        for prefix_hash in [h for h, end_s in ends_s.items() if end_s]:
            if not self._expiries.note(model.id, prefix_hash, ends_s[prefix_hash]):
                del ends_s[prefix_hash]
        return ends_s

    def _ends_of(self, part: list[NamespaceIndex], hashes: Collection[bytes]) -> dict[bytes, int]:
        """Return when the blocks end that one of a part's namespaces has; 0 for never."""
        found = self._expiries_of(part[0], hashes)
        for index in part[1:]:
            for prefix_hash, expiry_s in self._expiries_of(index, hashes).items():
                other_s = found.get(prefix_hash, expiry_s)
                found[prefix_hash] = max(expiry_s, other_s) if expiry_s and other_s else 0
        return found

    def _expiries_of(self, index: NamespaceIndex, hashes: Iterable[bytes]) -> dict[bytes, int]:
        """Return when the pages expire that are here and no copies; 0 for never."""
        tier, pages, found, others = self._tier, index.pages, dict[bytes, int](), list[bytes]()
        for prefix_hash in hashes:
            page = pages.get(prefix_hash)
            if page is None or page.state is not State.VISIBLE or page.is_copy or page.expiry_s:
                others.append(prefix_hash)
            else:
                found[prefix_hash] = 0
        for start in range(0, len(others), LOCKED_KEYS):
            with tier.lock:  # so that none moves from one tier to the other meanwhile
                for prefix_hash in others[start : start + LOCKED_KEYS]:
                    page = tier.live(index, prefix_hash)
                    if page is None:
                        below = tier.below.info(index.digest, prefix_hash)
                        if below is not None:
                            found[prefix_hash] = below.ttl_s and tier.clock_s() + below.ttl_s
                    elif not page.is_copy:
                        found[prefix_hash] = page.expiry_s
        return found

    # ---- start and end -------------------------------------------------------------------

    def _restart(self) -> None:
        """Begin to note changes, or begin anew: all readers get a snapshot."""
        self._stale = False
        self._watch(ChangeRing())
        self._epoch = os.urandom(8)
        self._single = self.is_member()
        self._models = Models(self._single)
        self._change_log, self._expiries = ChangeLog(), Expiries()
        self._snapshots.clear()
        self._models.refresh(self._tier.namespaces.all())

    def _watch(self, ring: ChangeRing | None) -> None:
        with self._tier.lock:  # what is visible by then is in the snapshot
            self._tier.changes = ring
            self._tier.below.watch(ring)
        self._ring = ring

    def forget(self) -> None:
        """Begin anew with the next call: pages came or went all at once, as when a disk stops."""
        self._stale = True

    def look(self) -> None:
        """Stop noting changes when there are no readers any more; called periodically.

        It waits for no reader: one that reads the disk's rows may hang.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._look(time.monotonic())
        finally:
            self._lock.release()

    def _look(self, now_s: float) -> None:
        idle = [n for n, s in self._snapshots.items() if now_s - s.used_s > SNAPSHOT_IDLE_S]
        for name in idle:
            del self._snapshots[name]
        if self._ring is not None and now_s - self._used_s > IDLE_S:
            self._watch(None)
            self._epoch, self._change_log, self._expiries = b"", ChangeLog(), Expiries()
            self._snapshots.clear()
            self._models = Models()
