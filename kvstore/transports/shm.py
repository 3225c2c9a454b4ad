"""Move pages through shared memory, client side: requests over a Unix socket, pages in place.

The pages lie in the node's own memory, which is mapped here.

    put   {put} -> statuses, offsets; write in place; {commit} -> reply
    get   {get} -> hits, checksums, offsets; read in place; {release}, not answered

Slots that the node reserved or holds stay valid while this process lives, or until they are
released: no time limit, and no eviction under a reader (docs/decisions/0009).
"""

import contextlib
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from kvstore.buffers import HELD_NBYTES_MAX, Pieces, copy, copying, segments_nbytes, zip_segments
from kvstore.checksum import Leaves, leaves, root
from kvstore.config import MESSAGE_NBYTES_MAX, PATH_NBYTES_MAX, PROTOCOL_VERSION, ClientConfig
from kvstore.deadline import Deadline
from kvstore.errors import InvalidRequest, KVStoreError, ProtocolError, Unavailable
from kvstore.page_hmac import PageHmacs, receive_buffers, with_hmacs
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.secrets import token_of
from kvstore.sync import Event, start_thread
from kvstore.transports.connections import (
    ConnectionPool,
    Lease,
    common_version,
    exchange,
    greeting,
    parse_reply,
    request_header,
)
from kvstore.transports.mapped_memory import (
    AcquiredSlots,
    ArenaMap,
    ReservedSlots,
    close_descriptors,
    release,
)
from kvstore.transports.parallel import ParallelTransfer, split, stream_count
from kvstore.transports.unix_sockets import DescriptorSocket, connected
from kvstore.transports.view_stream import FrameViews

log = logging.getLogger(__name__)
# Copied, then hashed while a core's own cache still has them: 1 MiB and its copy fill that cache.
STEP_NBYTES = 512 << 10
# Bytes copied and hashed in a second; below this a thread is waiting for the GIL, which both
# release.
CROWDED_BELOW = 400e6

T = TypeVar("T")
Slots = TypeVar("Slots", ReservedSlots, AcquiredSlots)


def socket_here(node_path: str, config: ClientConfig) -> str:
    """Return the local path of the socket that is at `node_path` on the node."""
    return (
        os.path.join(config.shm_dir, os.path.basename(node_path)) if config.shm_dir else node_path
    )


class ShmWire:
    """Connections to one run of one node, and the map of its arena.

    `elsewhere`: the node's socket was not found here, as is normal with a node on another host.
    """

    name = "shm"

    def __init__(
        self,
        node_path: str,
        instance_id: bytes,
        config: ClientConfig,
        version: int = PROTOCOL_VERSION,
        is_here: bool = False,
    ) -> None:
        """Prepare a connection to the node's Unix socket.

        `node_path` is the socket's path as the node sees it, which may be mounted elsewhere here;
        with `is_here` it is the path here. `instance_id` names the node's run; empty accepts the
        first that answers.
        """
        self.hello = pb.HelloReply()  # the reply to the first connection
        self._version = version
        self._config = config
        self._path = node_path if is_here else socket_here(node_path, config)
        self._instance_id = instance_id
        self._pool = ConnectionPool(
            self._path, self._connect, config.connections_max, close_descriptors
        )
        self._lock = threading.Lock()
        self._arena: ArenaMap | None = None
        self._closed = Event()
        self._threads = ParallelTransfer()
        self.elsewhere = False

    @property
    def arena(self) -> ArenaMap:
        """Return the mapped arena; it exists from the first connection until `close`."""
        arena = self._arena
        if arena is None:
            raise Unavailable(f"the connections to {self._path} are closed")
        return arena

    def connect(self, deadline: Deadline) -> None:
        """Make sure that the arena is mapped.

        Raises Unavailable or ProtocolError.
        """
        try:
            os.stat(self._path)
        except FileNotFoundError as error:
            self.elsewhere = True
            raise Unavailable(f"the node's socket {self._path} does not exist here") from error
        except OSError as error:  # such as a folder without permission
            raise Unavailable(
                f"the node's socket {self._path} can not be reached: {error}"
            ) from error
        with self._pool.connection(deadline):
            pass

    def greet(self, deadline: Deadline) -> pb.HelloReply:
        """Say hello, as `BulkWire.greet` does."""
        try:
            self.connect(deadline)
        except ProtocolError:
            self._version = PROTOCOL_VERSION - 1
            self.connect(deadline)
        self._version = common_version(self.hello)
        return self.hello

    def follow(self, number: int, seconds: float, deadline: Deadline) -> FrameViews:
        """Open a stream of views, as `BulkWire.follow` does."""
        return FrameViews(
            self._pool.separate(deadline), number, seconds, deadline, self._pool.raise_named
        )

    def call(self, op: str, request: Any, deadline: Deadline) -> Any:
        """Send one request and return its reply."""
        with self._pool.connection(deadline) as connection:
            return exchange(connection, op, request)[0]

    # ---- in place ------------------------------------------------------------------------

    def reserving(
        self, request: pb.PutRequest, deadline: Deadline, until: Deadline | None = None
    ) -> contextlib.AbstractContextManager[ReservedSlots]:
        """Reserve slots to write to; leaving the context without a commit releases them.

        `until`: the deadline of the commit, if it is another one.
        """
        commit = until or deadline
        return self._slots(
            "put",
            request,
            lambda lease, reply: ReservedSlots(lease, self.arena, request, reply, commit),
            deadline,
        )

    def acquiring(
        self, request: pb.GetRequest, page_nbytes: int, deadline: Deadline
    ) -> contextlib.AbstractContextManager[AcquiredSlots]:
        """Acquire slots to read from, until the context is left."""
        return self._slots(
            "get",
            request,
            lambda lease, reply: AcquiredSlots(lease, self.arena, request, reply, page_nbytes),
            deadline,
        )

    @contextlib.contextmanager
    def _slots(
        self,
        op: str,
        request: Any,
        make: Callable[[Lease[DescriptorSocket], Any], Slots],
        deadline: Deadline,
    ) -> Iterator[Slots]:
        lease = self._pool.lease(deadline)
        try:
            try:
                with lease as connection:
                    connection.holds = True
                    slots = make(lease, exchange(connection, op, request)[0])
                try:
                    yield slots
                except BaseException:
                    # A view in use: the error that ended the context says more
                    with contextlib.suppress(InvalidRequest):
                        slots.end()
                    raise
                slots.end()
                connection.holds = False
            except BaseException:
                # The answer may be under way, or an interrupt came before the node was told;
                # releasing twice does no harm.
                release(lease)
                raise
        finally:
            lease.end()

    # ---- with the caller's buffers -------------------------------------------------------

    def put(
        self,
        request: pb.PutRequest,
        pages: Sequence[Pieces],
        deadline: Deadline,
        hmacs: PageHmacs | None = None,
    ) -> list[int]:
        """Reserve slots, write the pages into them and commit; see `Wire.put`."""
        with self.reserving(request, deadline) as reserved:
            chosen = [i for i, verdict in enumerate(reserved.verdicts) if verdict == pb.WRITE]

            def write(number: int) -> bytes:
                i = chosen[number]
                return _write_page(
                    reserved.pages[number], with_hmacs(pages[i], request.prefix_hashes[i], hmacs)
                )

            leaves = self._each(write, len(chosen), request.page_nbytes, deadline)
            if chosen:
                reserved.commit(leaves)
            return reserved.verdicts

    def get(
        self,
        request: pb.GetRequest,
        buffers: Sequence[Pieces],
        seeds: Sequence[int],
        deadline: Deadline,
        hmacs: PageHmacs | None = None,
    ) -> tuple[list[bool], list[int]]:
        """Copy pages out of the mapped slots and verify the copies; see `Wire.get`.

        Pages that the node has are copied while it reads others from the disk or from members.
        """
        nbytes = (segments_nbytes(buffers[0]) if buffers else 0) + (hmacs.nbytes if hmacs else 0)
        count = max(1, len(request.ranges))  # parts of each hit
        hits: list[bool] = []
        corrupt: list[int] = []

        def take(acquired: AcquiredSlots) -> None:
            found = [i for i, hit in enumerate(acquired.hits, len(hits)) if hit]
            hits.extend(acquired.hits)

            def read(number: int) -> bool:
                i, parts = found[number], acquired.pages[number * count : (number + 1) * count]
                target = receive_buffers(buffers[i], hmacs)
                intact = root(_read_page(target, parts), seeds[i]) == acquired.checksums[number]
                if (
                    intact
                    and hmacs
                    and not hmacs.verify(request.prefix_hashes[i], target[:-1], target[-1])
                ):
                    hits[i] = False
                return intact

            intact = self._each(read, len(found), nbytes, deadline)
            for i, good in zip(found, intact, strict=True):
                if not good:
                    hits[i] = False
                    corrupt.append(i)

        def last(lease: Lease[DescriptorSocket], reply: pb.GetReply) -> AcquiredSlots:
            while True:
                slots = AcquiredSlots(lease, self.arena, request, reply, nbytes, len(hits))
                if not reply.more:
                    return slots
                take(slots)
                slots.drop()
                header = lease.connection.recv_frame(MESSAGE_NBYTES_MAX)[0]
                reply = parse_reply("get", header)

        with self._slots("get", request, last, deadline) as acquired:
            take(acquired)
        return hits, corrupt

    def _each(
        self, work: Callable[[int], T], count: int, nbytes: int, deadline: Deadline
    ) -> list[T]:
        """Return `work` of each of `count` pages; each page moves `nbytes`.

        Several threads do it where there are cores for them. None touches a page after this
        returns.
        """

        def of_part(part: slice) -> list[T]:
            made = []
            for number in range(count)[part]:
                deadline.remaining()
                made.append(work(number))
            return made

        streams = stream_count(count, nbytes)
        if streams == 1:
            return of_part(slice(count))
        made = []
        for result in self._threads.run(
            [functools.partial(of_part, part) for part in split(count, streams)]
        ):
            if isinstance(result, KVStoreError):
                raise result
            made += result
        return made

    # ---- connecting ----------------------------------------------------------------------

    def _connect(self, deadline: Deadline) -> DescriptorSocket:
        limit = deadline.sooner(self._config.connect_timeout_s)
        connection = DescriptorSocket(self._connected(limit), self._version)
        with greeting(connection, self._path, limit):
            uid = connection.peer.uid
            # Another user who could put a socket in the node's place would receive our pages.
            if uid not in (os.geteuid(), 0) and not self._config.shm_dir:
                raise Unavailable(
                    f"{self._path} is served by uid {uid}; set shm_dir if that is intended, which "
                    "the address local ignores"
                )
            hello = pb.HelloRequest(protocol_version=self._version, token=token_of(self._config))
            with _own_pidfd() as pidfd:
                connection.send_frame_with(pidfd, request_header("hello", hello))
            header, _, fd = connection.recv_frame_with(MESSAGE_NBYTES_MAX)
            try:
                reply = parse_reply("hello", header)
                if reply.instance_id != (self._instance_id or reply.instance_id):
                    self.elsewhere = True
                    raise Unavailable(
                        f"{self._path} belongs to another node, or the node was restarted"
                    )
                self._map(fd, reply.arena_nbytes)
                if not self.hello.ByteSize():
                    self.hello, self._instance_id = reply, reply.instance_id
            finally:
                if fd is not None:
                    os.close(fd)
        return connection

    def _connected(self, limit: Deadline) -> socket.socket:
        if len(os.fsencode(self._path)) > PATH_NBYTES_MAX:
            raise Unavailable(
                f"{self._path} is longer than a Unix socket's path may be; set a shorter shm_dir"
            )
        try:
            return connected(self._path, limit.remaining())
        except TimeoutError as error:
            raise Unavailable(f"no connection to {self._path} in {limit.seconds:.3g} s") from error

    def _map(self, fd: int | None, nbytes: int) -> None:
        """Map the arena once: all connections are to one run of the node."""
        if fd is None:
            raise ProtocolError("the node passed no arena")
        with self._lock:
            if self._arena is not None or self._closed.is_set():
                return
            self._arena = arena = ArenaMap(fd, nbytes)
        _beside("kvstore-populate", lambda: arena.populate(self._closed))

    def close(self) -> None:
        """Close idle connections; those in use close when their call or context ends.

        The map ends with the last view of it, without a garbage collection: a node that has died
        leaves its memory to the last process that maps it.
        """
        if self._pool.forked:
            return self._pool.close()
        with self._lock:
            arena, self._arena = self._arena, None
            self._closed.set()
        self._pool.close()
        self._threads.close()
        if arena is not None:
            _beside("kvstore-depopulate", arena.depopulate)


def _beside(name: str, work: Callable[[], None]) -> None:
    """Run work in a separate thread.

    If none can be started, the arena stays unmapped in the page table, which is only slower.
    """
    try:
        start_thread(work, name)
    except RuntimeError as error:
        log.warning("no thread for %s: %s", name, error)


@contextlib.contextmanager
def _own_pidfd() -> Iterator[int]:
    """Open a pidfd of this process, by which the node notices its end in any container."""
    try:
        pidfd = os.pidfd_open(os.getpid())
    except OSError as error:
        raise Unavailable(f"shared memory needs pidfd_open, Linux 5.3 or newer: {error}") from error
    try:
        yield pidfd
    finally:
        os.close(pidfd)


class _Pace:
    """Choose the steps in which pages are copied and hashed.

    After each step the GIL is taken twice, which costs a few us, or 5 ms each time beside a thread
    that computes: then one step covers the rest. One object for the process, as there is one GIL.
    """

    def __init__(self) -> None:
        self._crowded = False

    def end_of_step(self, start: int, nbytes: int) -> int:
        """Return where the step from `start` on ends, so that no short one remains."""
        return nbytes if self._crowded or nbytes - start < 2 * STEP_NBYTES else start + STEP_NBYTES

    def took(self, nbytes: int, seconds: float) -> None:
        self._crowded = nbytes < seconds * CROWDED_BELOW


_pace = _Pace()


def _write_page(slot: memoryview, page: Pieces) -> bytes:
    """Copy the segments of a page and hash the caller's bytes.

    Return their leaves.
    """
    if len(page) == 1 and slot.nbytes <= HELD_NBYTES_MAX:  # faster than in steps
        copy(slot, page[0])
        return leaves(page[0])
    running = Leaves(segments_nbytes(page))
    for target, piece in zip_segments([slot], page):
        _copy_hashed(target, piece, piece, running)
    return running.digest()


def _read_page(page: Pieces, parts: Sequence[memoryview]) -> bytes:
    """Copy the parts in order and return the leaves of the copy.

    The copy is hashed, not the slot, because the copy is what the caller uses.
    """
    if len(page) == len(parts) == 1 and page[0].nbytes <= HELD_NBYTES_MAX:
        copy(page[0], parts[0])
        return leaves(page[0])
    running = Leaves(segments_nbytes(page))
    for target, part in zip_segments(page, parts):
        _copy_hashed(target, part, target, running)
    return running.digest()


def _copy_hashed(
    target: memoryview, source: memoryview, hashed: memoryview, running: Leaves
) -> None:
    """Copy and hash step by step; `hashed` is one of the two."""
    nbytes = source.nbytes
    if nbytes <= HELD_NBYTES_MAX:
        copy(target, source)
        running.update(hashed)
        return
    with copying(target, source) as copy_piece:
        start, began = 0, time.perf_counter()
        while start < nbytes:
            end = _pace.end_of_step(start, nbytes)
            copy_piece(start, end)
            running.update(hashed[start:end])
            ended = time.perf_counter()
            _pace.took(end - start, ended - began)
            start, began = end, ended
