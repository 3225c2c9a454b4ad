"""Pool connections that carry frames to one node, and exchange a request for its reply.

Bulk TCP and shared memory share this. They differ in how they connect and in where the page bytes
are.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError

from kvstore.config import MESSAGE_NBYTES_MAX, PROTOCOL_VERSION
from kvstore.deadline import Deadline
from kvstore.errors import (
    DeadlineExceeded,
    Exhausted,
    InvalidRequest,
    KVStoreError,
    ProtocolError,
    Unavailable,
)
from kvstore.messages import delimited
from kvstore.pb import kvstore_pb2 as pb
from kvstore.sync import LeaseTable, NoThread, run_in_helper_thread
from kvstore.tracing import current
from kvstore.transports.frames import FrameSocket
from kvstore.transports.status import from_status

Socket = TypeVar("Socket", bound=FrameSocket)
Granted = TypeVar("Granted", bound="Lease[Any]")

_NUMBERS = {field.name: field.number for field in pb.BulkRequest.DESCRIPTOR.fields}
# A header over 64 KiB may hold one operation and nothing else (docs/FORMAT.md)
TRACED_NBYTES_MAX = 63 << 10


class NeedsThread(Exception):
    """A call would have to wait for something else than a reply; nothing of it was done."""


class Refused(Exception):
    """The node answered with an error; the stream is still in step."""

    def __init__(self, error: KVStoreError) -> None:
        self.error = error


def check_process(pid: int) -> None:
    """Raise InvalidRequest in a child of a fork of process `pid`."""
    if os.getpid() != pid:
        raise InvalidRequest(
            "this client was connected before a fork; make a client of its own in each process"
        )


class ConnectionPool(Generic[Socket]):
    """Hold at most `count_max` connections to one node; a call leases one.

    The last one returned is the first one leased, so that an idle pool keeps few connections warm.
    `where` names the peer in messages, `connect` makes a greeted connection, `on_close` is called
    before a connection is closed, perhaps twice.

    An interrupt may come anywhere: a connection is always in at most one list, and one that is in
    no list is closed when it is collected.
    """

    def __init__(
        self,
        where: str,
        connect: Callable[[Deadline], Socket],
        count_max: int,
        on_close: Callable[[Socket], None] = lambda connection: None,
    ) -> None:
        self.where = where
        self._connect = connect
        self._count_max = count_max
        self._on_close = on_close
        # Each lease has its connection in a list.
        self._leases: LeaseTable[list[Socket]] = LeaseTable(count_max, self._end_all)
        self._lock = threading.Lock()
        self._idle: list[Socket] = []
        self._closed = False
        self._pid = os.getpid()

    def lease(self, deadline: Deadline) -> "Lease[Socket]":
        """Lease a connection until `Lease.end`, armed with the deadline."""
        return self._grant(Lease(self, deadline), deadline)

    def connection(self, deadline: Deadline) -> "OneExchange[Socket]":
        """Lease a connection for one exchange, as a context.

        A connection that fails is closed, which frees everything the node held for it.
        """
        return self._grant(OneExchange(self, deadline), deadline)

    def attempt(self, deadline: Deadline) -> "Attempt[Socket]":
        """Lease a connection for one exchange that may be repeated, as `Attempt` says."""
        return self._grant(Attempt(self, deadline), deadline)

    def attempt_now(self, deadline: Deadline) -> "Attempt[Socket]":
        """Lease an idle connection as `attempt` does. Raises NeedsThread if there is none."""
        if not self._idle:
            raise NeedsThread
        return self._grant(Attempt(self, deadline, only_idle=True), deadline)

    def _grant(self, lease: Granted, deadline: Deadline) -> Granted:
        self.check_process()
        left_s = deadline.remaining()  # raises before a connection is taken
        if not self._leases.acquire(lease, lease.held, 0.0 if lease.only_idle else left_s):
            if lease.only_idle:
                raise NeedsThread
            raise Exhausted(
                f"all {self._count_max} connections (connections_max) stayed busy for "
                f"{deadline.seconds:g} s"
            )
        try:
            self._begin(lease, deadline)
        except BaseException:
            lease.in_step = False
            lease.end()
            raise
        return lease

    def _begin(self, lease: "Lease[Socket]", deadline: Deadline) -> None:
        held = lease.held
        self._take_idle(held)
        if not held:
            if lease.only_idle:
                raise NeedsThread
            lease.fresh = True
            try:
                # In a helper thread: connecting opens and closes descriptors
                held.append(run_in_helper_thread(partial(self._connect, deadline)))
            except Exception as error:
                self.raise_named(error, deadline)
                raise
        connection = lease.connection = held[0]
        connection.arm(deadline.remaining())
        connection.heard = False

    def _take_idle(self, held: list[Socket]) -> None:
        """Take an idle connection that the node has not closed meanwhile.

        A full node closes the longest idle one, which is no failure of a call.
        """
        while True:
            with self._lock:
                if not self._idle:
                    return
                held.append(self._idle.pop())
            if held[0].quiet:
                return
            self._end_all(held)

    def _end_all(self, held: list[Socket]) -> None:
        for connection in tuple(held):
            self._on_close(connection)
            connection.close()
        held.clear()

    @property
    def forked(self) -> bool:
        """Return whether this process is a fork of the one that made the pool."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise InvalidRequest after a fork: two processes would mix their replies."""
        check_process(self._pid)

    def separate(self, deadline: Deadline) -> Socket:
        """Open a connection beside those of the pool, which the caller closes.

        Raises KVStoreErrors only.
        """
        self.check_process()
        try:
            return self._connect(deadline)
        except Exception as error:
            self.raise_named(error, deadline)
            raise

    def raise_named(self, error: BaseException, deadline: Deadline) -> None:
        """Raise a connection's failure as a KVStoreError; return if it is one already."""
        if isinstance(error, Refused):
            raise error.error from None
        if isinstance(error, TimeoutError):
            raise DeadlineExceeded(
                f"no answer from {self.where} in {deadline.seconds:g} s"
            ) from error
        if isinstance(error, OSError):
            raise Unavailable(f"connection to {self.where} failed: {error}") from error
        if isinstance(error, NoThread):
            raise Unavailable(f"no thread to connect to {self.where} in: {error}") from error

    def take_back(self, lease: "Lease[Socket]") -> None:
        """End a lease.

        Closes a connection that is out of step, and one for which the node still holds slots, as
        after two interrupts: its next request would be refused, and the slots kept as long.
        """
        if lease.in_step and not (lease.held and lease.held[0].holds):
            with self._lock:
                if lease.held and not self._closed:
                    self._idle.append(lease.held.pop())  # never in two places
        if lease.held:
            self._end_all(lease.held)
        self._leases.release(lease)

    def close(self) -> None:
        """Close idle connections; those in use close when their call ends.

        In a child of a fork, whose parent's threads may have held the lock, close only this
        process's copies of the descriptors.
        """
        if self.forked:
            for connection in tuple(self._idle):
                connection.close()
            return
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        self._end_all(idle)
        self._leases.reclaim()


class Lease(Generic[Socket]):
    """Lend one connection to one thread; `fresh`: made for it; `only_idle`: never made for it.

    As a context around exchanges, it translates their errors to KVStoreErrors. After an error the
    next bytes of the stream are unknown, so the connection is not used again. A refusal leaves it
    in step.
    """

    connection: Socket

    def __init__(
        self, pool: ConnectionPool[Socket], deadline: Deadline, only_idle: bool = False
    ) -> None:
        self._pool = pool
        self.only_idle = only_idle
        self.held: list[Socket] = []  # its connection, until another list takes it
        self.fresh = False
        self._deadline = deadline
        self.in_step = True

    def __enter__(self) -> Socket:
        self.in_step = False
        return self.connection

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is None:
            self.in_step = True
            return
        # After a ProtocolError the node hangs up.
        self.in_step = isinstance(error, Refused) and not isinstance(error.error, ProtocolError)
        self._pool.raise_named(error, self._deadline)

    def end(self) -> None:
        """Return the connection to the pool. May be called twice."""
        self._pool.take_back(self)


class OneExchange(Lease[Socket]):
    """End a lease with its context."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        try:
            super().__exit__(kind, error, at)
        finally:
            self.end()


class Attempt(OneExchange[Socket]):
    """Ignore the error of an idle connection that the node had closed before the request arrived.

    So the caller tries another one:

        while True:
            with pool.attempt(deadline) as connection:
                return exchange(connection, ...)
    """

    def __exit__(  # type: ignore[override]
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> bool:
        try:
            super().__exit__(kind, error, at)
        except Unavailable:
            if self.fresh or self.connection.heard:
                raise
            return True
        return False


@contextlib.contextmanager
def greeting(connection: FrameSocket, where: str, limit: Deadline) -> Iterator[None]:
    """Close a new connection if its first exchange fails.

    `limit` began before the connecting and covers both.
    """
    try:
        connection.arm(limit.remaining())
        yield
    except TimeoutError as error:
        connection.close()
        raise Unavailable(f"{where} accepts connections but does not answer") from error
    except BaseException:
        connection.close()
        raise


def common_version(hello: pb.HelloReply) -> int:
    """Return the protocol version to use with a node: the older of both."""
    return min(hello.protocol_version or PROTOCOL_VERSION, PROTOCOL_VERSION)


def exchange(connection: FrameSocket, op: str, request: Any) -> tuple[Any, int]:
    """Send one request; return the reply of the same kind and its payload's length."""
    connection.send_frame(request_header(op, request))
    header, payload_nbytes = connection.recv_frame(MESSAGE_NBYTES_MAX)
    return parse_reply(op, header), payload_nbytes


def request_header(op: str, request: Any) -> bytes:
    """Serialise a BulkRequest around this request without copying it once more."""
    header = delimited(_NUMBERS[op], request.SerializeToString())
    trace = current()
    if trace is None or len(header) > TRACED_NBYTES_MAX:
        return header
    # Serialised messages may be concatenated
    return header + pb.BulkRequest(trace=trace.packed()).SerializeToString()


def parse_reply(op: str, header: bytes) -> Any:
    """Return the reply to `op`.

    Raises Refused if the node sent an error, ProtocolError otherwise.
    """
    try:
        reply = pb.BulkReply.FromString(header)
    except DecodeError as error:
        raise ProtocolError(f"the answer to {op} is not a BulkReply message") from error
    kind = reply.WhichOneof("op")
    if kind == "error":
        raise Refused(from_status(reply.error.code, reply.error.message))
    if kind != op:
        raise ProtocolError(f"the node answered {op} with {kind}")
    return getattr(reply, op)
