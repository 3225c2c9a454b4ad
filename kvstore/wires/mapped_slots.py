"""Slots of the node's arena in a client's hands: reserved to be written, acquired to be read.

Both are made and ended by the contexts of `kvstore.wires.shm`. Views are released when the slot is not the
client's any more, so that a use after that raises ValueError. What a caller made of a view and kept
(a numpy array) is its own to drop before; one that still stands is InvalidRequest.
"""

from collections.abc import Sequence

from kvstore.deadline import Deadline
from kvstore.errors import InvalidRequest, ProtocolError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.wires.arena_map import ArenaMap
from kvstore.wires.connections import Lease, exchange, request_header
from kvstore.wires.unix_sockets import DescriptorSocket

# A release is a few bytes, for which a socket has room at once, also that of a node that is stopped. If it has none,
# this is after the deadline of a call that failed, so short.
RELEASE_S = 0.1


class _Slots:
    """`offsets`: where each slot is in `arena`. Used by one thread."""

    def __init__(
        self, lease: Lease[DescriptorSocket], arena: ArenaMap, offsets: list[int], sizes: list[int], writable: bool
    ) -> None:
        arena.check(offsets, sizes)
        self.arena = arena
        self.offsets = offsets
        self._sizes = sizes
        self._writable = writable
        self._lease = lease
        self._pages: list[memoryview] | None = None
        self._dropped = False

    @property
    def pages(self) -> list[memoryview]:
        """A view of each slot. Made when they are first asked for: who copies with a GPU needs none."""
        if self._pages is None:
            views = self.arena.views(self.offsets, self._sizes)
            self._pages = views if self._writable else [view.toreadonly() for view in views]
            if self._dropped:
                self._drop()
        return self._pages

    def _drop(self) -> None:
        self._dropped = True
        kept = None
        for view in self._pages or ():
            try:
                view.release()
            except BufferError as error:
                kept = error
        if kept is not None:
            raise InvalidRequest(f"something made of a page's view is still in use; drop it first ({kept})") from kept


class ReservedSlots(_Slots):
    """`verdicts`: a PutVerdict per key. `pages`, `offsets`: of the keys with verdict WRITE, in order: a
    writable view of `page_nbytes` bytes each, and where in `arena` it is."""

    def __init__(
        self,
        lease: Lease[DescriptorSocket],
        arena: ArenaMap,
        request: pb.PutRequest,
        reply: pb.PutReply,
        deadline: Deadline,
    ) -> None:
        self.verdicts: list[int] = list(reply.verdicts)
        offsets = reply.offsets[:]
        if len(self.verdicts) != len(request.prefix_hashes) or len(offsets) != self.verdicts.count(pb.WRITE):
            raise ProtocolError("the reply to a put does not fit its request")
        super().__init__(lease, arena, offsets, [request.page_nbytes] * len(offsets), writable=True)
        self._deadline = deadline
        self._waiting = bool(offsets)

    def commit(self, leaves: Sequence[bytes]) -> None:
        """The bytes are in place: makes the pages visible. `kvstore.checksum.leaves` of each page. Nothing may
        write to them any more, neither a thread nor a GPU."""
        if not self._waiting:
            raise InvalidRequest("there is nothing to commit: no page was to be written, or it was done already")
        self._drop()
        self._lease.connection.arm(self._deadline.remaining())
        with self._lease as connection:
            exchange(connection, "commit", pb.CommitRequest(leaves=leaves))
            connection.holds = False
        self._waiting = False

    def end(self) -> None:
        """Gives the slots back if they were not committed."""
        try:
            self._drop()
        finally:
            if self._waiting:
                self._waiting = False
                release(self._lease)


class AcquiredSlots(_Slots):
    """`hits`: a bool per key. `pages`, `checksums`, `offsets`: of the hits, in order: a read-only view
    each, the checksum that its bytes must have, and where in `arena` it is. Of a request with ranges `pages` and
    `offsets` have each range of each hit."""

    def __init__(
        self,
        lease: Lease[DescriptorSocket],
        arena: ArenaMap,
        request: pb.GetRequest,
        reply: pb.GetReply,
        page_nbytes: int,
    ) -> None:
        self.hits = reply.hits[:]
        self.checksums = reply.checksums[:]
        offsets = reply.offsets[:]
        sizes = [part.nbytes for part in request.ranges] or [page_nbytes]
        count = self.hits.count(True)
        fits = len(self.hits) == len(request.prefix_hashes) and len(self.checksums) == count
        if not fits or len(offsets) != count * len(sizes):
            raise ProtocolError("the reply to a get does not fit its request")
        super().__init__(lease, arena, offsets, sizes * count, writable=False)

    def end(self) -> None:
        """Lets the node evict the pages again."""
        try:
            self._drop()
        finally:
            if self.offsets:
                release(self._lease)


def release(lease: Lease[DescriptorSocket]) -> None:
    """Sent even when the deadline passed or the exchange before failed: without it the node, which can
    not tell a client that is still writing from one that is not, keeps the slots until the process ends. Not behind
    half a frame: of a request that did not arrive the node holds nothing."""
    if not give_back(lease.connection):
        lease.in_step = False


def give_back(connection: DescriptorSocket) -> bool:
    """Tells the node that this connection holds no slots. False: it could not be told."""
    if connection.torn:
        return False
    try:
        connection.arm(RELEASE_S)
        connection.send_frame(request_header("release", pb.ReleaseRequest()), at_once=True)
    except OSError:
        return False
    connection.holds = False
    return True


def let_go(connection: DescriptorSocket) -> None:
    """Before a connection is closed of which nobody gave back what it holds: an interrupt came twice."""
    if connection.holds:
        give_back(connection)
