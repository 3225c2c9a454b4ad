"""Map a node's arena into this process and lend its slots for reads and writes.

The contexts of `kvstore.transports.shm` begin and end the use of slots. Views are released at the
end, so that a later use raises ValueError. A caller must drop objects made from a view, such as
numpy arrays, before; one that still exists raises InvalidRequest.
"""

import ctypes
import fcntl
import mmap
import operator
import os
from collections.abc import Sequence

from kvstore.buffers import advise
from kvstore.deadline import Deadline
from kvstore.errors import InvalidRequest, ProtocolError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.sync import Event
from kvstore.transports.connections import Lease, exchange, request_header
from kvstore.transports.unix_sockets import DescriptorSocket

_MADV_POPULATE_READ = 22  # Linux 5.14; mmap does not name it
# Mapped by one call: about 75 us, for which a thread that maps or unmaps memory may wait.
_POPULATE_STEP_NBYTES = 1 << 20
_DEPOPULATE_STEP_NBYTES = 64 << 20


class ArenaMap:
    """Map `nbytes` of the node's memory, shared and writable.

    Thread-safe.

    There is no `close`: the map ends with its last view, so that no thread can touch unmapped
    memory. Memory of a dead node stays readable for a thread that still uses it.

    `memory`, at `address`, is all of it, for a GPU driver that must register it once. Offsets and
    views come from the contexts of `kvstore.transports.shm`; other bytes belong to other clients.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map the arena behind `fd`, which stays the caller's.

        Raises ProtocolError if it is not an arena of `nbytes` bytes.
        """
        size = os.fstat(fd).st_size
        if size != nbytes or not nbytes:
            raise ProtocolError(f"the node passed an arena of {size} bytes, but announced {nbytes}")
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ProtocolError(
                "the node passed a file that is no arena: it can not be sealed"
            ) from error
        # Reading behind the end of a file that shrank kills the reader
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ProtocolError("the node passed an arena that could shrink under its readers")
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        # A forked child may outlive this process, when its slots belong to other clients.
        self._map.madvise(mmap.MADV_DONTFORK)
        self.memory = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def check(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Raise ProtocolError if one of these slots lies outside the arena."""
        if max(map(operator.add, offsets, sizes), default=0) > self.nbytes:
            for offset, nbytes in zip(offsets, sizes, strict=True):
                if offset + nbytes > self.nbytes:
                    raise ProtocolError(
                        f"a slot at {offset}+{nbytes} in an arena of {self.nbytes} bytes"
                    )

    def views(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Return views of slots that were checked."""
        return [
            self.memory[offset : offset + nbytes]
            for offset, nbytes in zip(offsets, sizes, strict=True)
        ]

    def populate(self, stop: Event) -> None:
        """Map the arena's pages into this process, until done or stopped.

        Otherwise the first use of each 4 KiB page faults, which makes the first pass over the arena
        three times slower (measured). 75 ms per GiB, in small steps between which other threads may
        run.
        """
        for start in range(0, self.nbytes, _POPULATE_STEP_NBYTES):
            try:
                advise(
                    self._map,
                    _MADV_POPULATE_READ,
                    start,
                    min(_POPULATE_STEP_NBYTES, self.nbytes - start),
                )
            except OSError:
                return  # an older kernel: each page is mapped at its first use
            if stop.wait(0.0001):
                return

    def depopulate(self) -> None:
        """Remove the arena from the page table again.

        Bytes and views stay: the next use faults its page in again.

        Python unmaps with the GIL held, 60 ms and more per mapped GiB, in whichever thread drops
        the last view; after this, next to nothing is left to do then.
        """
        for start in range(0, self.nbytes, _DEPOPULATE_STEP_NBYTES):
            advise(
                self._map,
                mmap.MADV_DONTNEED,
                start,
                min(_DEPOPULATE_STEP_NBYTES, self.nbytes - start),
            )


# A release is a few bytes, for which a socket has space at once, even if the node is stopped. If
# not, the deadline of a call that failed has passed, so this is short.
RELEASE_S = 0.1


class _Slots:
    """Slots for one thread.

    `offsets`: of each slot in `arena`.
    """

    def __init__(
        self,
        lease: Lease[DescriptorSocket],
        arena: ArenaMap,
        offsets: list[int],
        sizes: list[int],
        writable: bool,
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
        """Return a view of each slot.

        They are made at first use: a copy by a GPU needs none.
        """
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
            raise InvalidRequest(
                f"an object made from a page's view is still in use; drop it first ({kept})"
            ) from kept


class ReservedSlots(_Slots):
    """Slots to write to.

    `verdicts`: a PutStatus per key. `pages`, `offsets`: of the keys with status WRITE, in order: a
    writable view of `page_nbytes` bytes each, and its offset in `arena`.
    """

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
        if len(self.verdicts) != len(request.prefix_hashes) or len(offsets) != self.verdicts.count(
            pb.WRITE
        ):
            raise ProtocolError("the reply to a put does not fit its request")
        super().__init__(lease, arena, offsets, [request.page_nbytes] * len(offsets), writable=True)
        self._deadline = deadline
        self._waiting = bool(offsets)

    def commit(self, leaves: Sequence[bytes]) -> None:
        """Make the pages visible, whose bytes are complete.

        `leaves`: `kvstore.checksum.leaves` of each page. Afterwards neither a thread nor a GPU may
        write to them.
        """
        if not self._waiting:
            raise InvalidRequest(
                "there is nothing to commit: no page was to be written, or it was done already"
            )
        self._drop()
        self._lease.connection.arm(self._deadline.remaining())
        with self._lease as connection:
            exchange(connection, "commit", pb.CommitRequest(leaves=leaves))
            connection.holds = False
        self._waiting = False

    def end(self) -> None:
        """Release the slots if they were not committed."""
        try:
            self._drop()
        finally:
            if self._waiting:
                self._waiting = False
                release(self._lease)


class AcquiredSlots(_Slots):
    """Slots to read from.

    `hits`: a bool per key. `pages`, `checksums`, `offsets`: of the hits, in order: a read-only view
    each, the checksum that its bytes must have, and its offset in `arena`. For a request with
    ranges `pages` and `offsets` have each range of each hit. Of a reply in parts, only the keys of
    this part, after `done` others.
    """

    def __init__(
        self,
        lease: Lease[DescriptorSocket],
        arena: ArenaMap,
        request: pb.GetRequest,
        reply: pb.GetReply,
        page_nbytes: int,
        done: int = 0,
    ) -> None:
        self.hits = reply.hits[:]
        self.checksums = reply.checksums[:]
        left = len(request.prefix_hashes) - done
        self._may_hold = done > 0
        offsets = reply.offsets[:]
        sizes = [part.nbytes for part in request.ranges] or [page_nbytes]
        count = self.hits.count(True)
        if reply.more:
            fits = request.in_parts and 0 < len(self.hits) < left
        else:
            fits = len(self.hits) == left
        if not fits or len(self.checksums) != count or len(offsets) != count * len(sizes):
            raise ProtocolError("the reply to a get does not fit its request")
        super().__init__(lease, arena, offsets, sizes * count, writable=False)

    def drop(self) -> None:
        """Drop the views; the node holds the pages until the last part's end."""
        self._drop()

    def end(self) -> None:
        """Allow the node to evict the pages again, those of earlier parts, too."""
        try:
            self._drop()
        finally:
            if self.offsets or self._may_hold:
                release(self._lease)


def release(lease: Lease[DescriptorSocket]) -> None:
    """Release a lease's slots, even when the deadline passed or the exchange before failed.

    Otherwise the node would keep the slots until the process ends, because it can not tell whether
    a client still writes. It is not sent after half a frame: the node holds nothing for a request
    that did not arrive.
    """
    if not give_back(lease.connection):
        lease.in_step = False


def give_back(connection: DescriptorSocket) -> bool:
    """Tell the node that this connection holds no slots.

    Return False if it could not be told.
    """
    if connection.torn:
        return False
    try:
        connection.arm(RELEASE_S)
        connection.send_frame(request_header("release", pb.ReleaseRequest()), at_once=True)
    except OSError:
        return False
    connection.holds = False
    return True


def close_descriptors(connection: DescriptorSocket) -> None:
    """Release slots before a connection that still holds some is closed, after two interrupts."""
    if connection.holds:
        give_back(connection)
