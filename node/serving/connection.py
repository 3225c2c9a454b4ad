"""Serve one connection that carries frames.

    first frame --> authentication --> session --> [ request --> reply ]... --> end

A thread of its own serves it. After `SMALL_RUN` small requests it waits for the next one in
`node.serving.request_loop`, whose thread serves small requests of all connections; any other
request gets a thread again.

It ends when the client hangs up, stalls or breaks the protocol, or when the connection is evicted.
`node.serving.bulk` and `node.serving.shm` handle the requests that move pages,
`node.serving.acceptor` accepts connections.
"""

import abc
import contextlib
import enum
import errno
import logging
import os
import resource
import select
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import monotonic_ns
from typing import Any, ClassVar, Protocol

from google.protobuf.message import DecodeError

import kvstore.tracing as tracing
from kvstore.config import MESSAGE_NBYTES_MAX
from kvstore.errors import Exhausted, InvalidRequest, KVStoreError, ProtocolError, Unauthenticated
from kvstore.messages import delimited
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.identities import Principal
from kvstore.tracing import Trace, unpacked
from kvstore.transports.frames import FrameSocket
from kvstore.transports.status import status_code
from node.auth.access import Caller
from node.serving.limits import (
    LONG_CALLS,
    REQUEST_NBYTES_FREE,
    REQUEST_S_MAX,
    ConnectionSlot,
    inside,
)
from node.serving.request_metrics import QUEUE, TIMED
from node.serving.service import Service
from node.serving.session import Session
from node.tls import Shown

log = logging.getLogger(__name__)

PLENTY = 1 << 13
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_highest = 0  # highest descriptor that `few_left` has seen


def few_left(fd: int, count: int) -> bool:
    """Return whether fewer than `count` descriptors are left; `fd` was opened just now.

    It is the lowest free one, so as long as none came near the limit there are enough. Once one
    did, they are counted: a low one may have filled the only gap.
    """
    global _highest
    _highest = max(_highest, fd)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if _highest + count < allowed:
        return False
    try:
        # without the descriptor of this listing
        return allowed - (len(os.listdir("/proc/self/fd")) - 1) < count
    except OSError:
        return True


class SpareDescriptor:
    """A descriptor in reserve, so that a node without free ones can still answer. Thread-safe.

    While it is lent, there is none in reserve.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = _open()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Free one descriptor within the block, where it must be used and closed again."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            try:
                yield
            finally:
                self._fd = _open()

    def shed(self, listener: socket.socket) -> None:
        """Accept a waiting connection and close it; otherwise `accept` would fail again at once."""
        with self.lent(), contextlib.suppress(OSError):
            listener.accept()[0].close()

    def close(self) -> None:
        """Close the spare descriptor."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1


def _open() -> int:
    """Open a spare descriptor; -1 if there is none until the next try."""
    try:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def allow_descriptors(count: int) -> None:
    """Raise the soft limit of descriptors by `count`, as far as possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= PLENTY:
        return
    allowed = soft + count if hard == resource.RLIM_INFINITY else min(soft + count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < soft + count:
        log.warning(
            "%d descriptors may be too few for all connections; idle ones are then closed "
            "(ulimit -Hn)",
            allowed,
        )


LAST_ERROR_S = 0.1
HELLO_NBYTES_MAX = 4 << 10
GATEWAYS_OPS = ("admit", "on_behalf")
# Requests that never wait, of at most a few thousand bytes: a connection with so many in a row is
# likely to send more of them.
SMALL_OPS = ("lookup", "stat")
SMALL_RUN = 8
_REPLIES = {field.name: field.number for field in pb.BulkReply.DESCRIPTOR.fields}
Request = tuple[str, Any]
Transfer = Callable[[Session, Any], None]


class Ready(enum.Enum):
    """Say what became of a connection whose socket was ready."""

    SERVED = enum.auto()
    NEEDS_THREAD = enum.auto()
    ENDED = enum.auto()


class Acceptor(Protocol):
    """The server that accepted a connection (`ConnectionServer`); told when requests begin and end.

    A protocol, because that file imports this one.
    """

    @property
    def has_loop(self) -> bool:
        """Return whether small requests are best served by a loop."""

    def begin(self, connection: "Connection") -> bool:
        """Note that a request was received.

        Return False if the server stops or this connection was evicted: then the request is not
        served.
        """

    def done(self, connection: "Connection") -> bool:
        """Note that a request and its follow-up have ended.

        Return False if the server stops: then nothing more is received.
        """

    def change_share(self, connection: "Connection") -> None:
        """Count an authenticated connection to another share. Raises Exhausted."""


class Connection(abc.ABC):
    """One client connection; all methods but `socket.shutdown` run in its own thread.

    A connection is a session from its first valid frame on: at its end, `end` releases everything
    that the session holds. `peer`: key that limits count it by.
    """

    maps_arena: ClassVar[bool] = False
    of_gateway: ClassVar[bool] = False
    header_nbytes_max: ClassVar[int] = MESSAGE_NBYTES_MAX

    def __init__(
        self, sock: FrameSocket, name: str, caller: Caller, service: Service, stall_s: float
    ) -> None:
        self.socket = sock
        self.name = name
        self.peer = caller.peer
        self.busy = False
        self.service = service
        self.stall_s = stall_s
        self.caller = caller
        self.slot: ConnectionSlot | None = None
        self._wire_metrics = service.traffic.of_wire(caller.wire)
        self._trace: Trace | None = None  # of the last request
        self._request_nbytes = 0  # taken from the budget for large requests
        # peer whose budget it was; the caller may have another one by the time it is returned
        self._request_peer = ""
        self._session: Session | None = None
        self._in_loop = False  # the request loop serves it now: no call may wait
        self._unsent = b""  # of a reply: what the loop could not send without a wait
        sock.admit = self._admit

    # ---- differences between transports --------------------------------------------------------

    @abc.abstractmethod
    def transfer(self, op: str) -> Transfer | None:
        """Return the handler of an operation that moves pages; None for other operations."""

    @property
    def may_loop(self) -> bool:
        """Return whether the request loop may serve it."""
        return False

    def greet(self) -> tuple[bytes, int]:
        """Receive the first frame, within the armed time."""
        return self.socket.recv_frame(self.first_nbytes_max)

    @property
    def first_nbytes_max(self) -> int:
        """Return the size limit of the first frame: a hello's for unauthenticated clients."""
        return MESSAGE_NBYTES_MAX if self.service.authorizer.access.open else HELLO_NBYTES_MAX

    @property
    def client_certificate(self) -> Shown | None:
        """Return the client's certificate after its greeting; None without one."""
        return None

    def refusal(self, principal: Principal) -> str:
        """Return why an authenticated client is refused here; empty if it is not."""
        return ""

    def _identify(self, server: Acceptor, op: str, request: Any) -> None:
        """Authenticate the client by the token of its hello, or its certificate.

        Raises Unauthenticated.
        """
        gate = self.service.authorizer
        if gate.access.open:
            return
        principal_now = gate.access.credential(
            request.token if op == "hello" else "",
            self.client_certificate.names if self.client_certificate else (),
        )
        principal = gate.authenticate(op, self.peer, principal_now)
        if why := self.refusal(principal):
            raise gate.refuse_connection(op, self.peer, principal, why)

        def same_principal() -> Principal:
            now = principal_now()
            if now is principal:
                return now
            if now.tenant != principal.tenant or self.refusal(now):
                raise Unauthenticated(
                    f"{now.name} has lost rights since this connection began; connect again"
                )
            return now

        # A process has its own share
        share = "" if self.maps_arena else gate.access.share(principal)
        self.caller = replace(
            self.caller, peer=share or self.peer, principal=same_principal, address=self.peer
        )
        if share:
            self.peer = share
            server.change_share(self)

    def unfinished(self, session: Session) -> bool:
        """Return whether the client is between two requests that belong together."""
        return False

    def abandoned(self) -> bool:
        """Return whether to close the connection.

        Called now and then while the client sends nothing.
        """
        return False

    def end(self, session: Session) -> None:
        """End the session."""
        session.close()

    def close(self) -> None:
        """Close the socket and return everything that the connection has taken."""
        self.socket.close()
        self._return_request_bytes()

    # ---- the loop ------------------------------------------------------------------------

    def serve(self, server: Acceptor) -> bool:
        """Greet the client and serve it; see `proceed`."""
        with self.refusing():
            self.socket.arm(REQUEST_S_MAX)
            first = self.parse(*self.greet())
            self._identify(server, *first)
        self._session = self.service.sessions.open(self.caller, self.maps_arena)
        return self.proceed(server, first)

    def proceed(self, server: Acceptor, request: Request | None = None) -> bool:
        """Serve from this request on, or from the next one; return whether the loop goes on.

        Otherwise the session has ended, because the client has closed (ConnectionError), stalled
        (TimeoutError) or erred, the connection was evicted, or the server stops.
        """
        assert self._session is not None
        session, loop_goes_on, small_run = self._session, False, 0
        try:
            if self._unsent:
                self.socket.arm(self.stall_s)
                unsent, self._unsent = self._unsent, b""
                self.socket.send(unsent)
                if not server.done(self):
                    return False
            while True:
                request = request or self._wait_request()
                if request is None:
                    if self.abandoned():
                        return False
                    continue
                if not server.begin(self):
                    return False
                small_run = small_run + 1 if is_small(*request) else 0
                if request[0] != "follow":
                    self.serve_request(session, *request)
                elif not self._serve_follow(server, session, request[1]):
                    return False
                request = None
                if self.unfinished(session):
                    continue
                if not server.done(self):
                    return False
                prefers_loop = small_run >= SMALL_RUN and self.may_loop and server.has_loop
                loop_goes_on = prefers_loop and not self.socket.has_early
                if loop_goes_on:
                    return True
        finally:
            if not loop_goes_on:
                self.finish(server)

    def serve_ready(self, server: Acceptor) -> "Ready":
        """Serve the small requests that have arrived, without a wait: for the request loop.

        Raises ConnectionError if the client has closed.
        """
        while True:
            header = self.socket.peek_frame()
            if header is None:
                return Ready.NEEDS_THREAD
            try:
                op, request = self.parse(header, 0)
            except KVStoreError:  # a thread finds it again and reports it
                return Ready.NEEDS_THREAD
            if not is_small(op, request):
                return Ready.NEEDS_THREAD
            if not server.begin(self):
                return Ready.ENDED
            self.socket.take_frame(len(header))
            self._in_loop = True
            try:
                self.serve_request(self._session, op, request)
            finally:
                self._in_loop = False
            if self._unsent:
                return Ready.NEEDS_THREAD
            if not server.done(self):
                return Ready.ENDED
            if not self.socket.has_early:
                return Ready.SERVED

    def finish(self, server: Acceptor) -> None:
        """End the session."""
        server.done(self)
        if self.slot is not None:
            # the slot stays taken while the session is cleaned up
            self.slot.busy()
        if self._session is not None:
            self.end(self._session)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Report the error that ends the connection, while frames are received."""
        try:
            yield
        except (KVStoreError, OSError) as error:
            raise self.report_error(error) from error

    def report_error(self, error: KVStoreError | OSError) -> OSError:
        """Report an error to the client, and return the one to close the connection with."""
        if isinstance(error, KVStoreError):
            self.send_error(error, last=True)
            return ConnectionAbortedError(str(error))
        if error.errno in OUT_OF_DESCRIPTORS:
            self.send_last_error(
                Exhausted("this node has no descriptor left; raise its limit (ulimit -n)")
            )
        return error

    def _wait_request(self) -> Request | None:
        # A slow reply before may have left less time, and waiting would spin
        self.socket.arm(self.stall_s)
        try:  # as `refusing`, inlined because that costs a microsecond
            frame = self.socket.wait_frame(self.header_nbytes_max, self.stall_s)
            return None if frame is None else self.parse(*frame)
        except InvalidRequest as error:  # all of it was received: the next frame begins behind it
            self._return_request_bytes()
            self.send_error(error)
            return None
        except (KVStoreError, OSError) as error:
            raise self.report_error(error) from error

    def serve_request(self, session: Any, op: str, request: Any) -> None:
        """Answer a request, or send its error, within the trace that it carries."""
        began_ns = monotonic_ns()
        is_traced = self._trace is not None or tracing.tracer is not None
        with tracing.serving(op, self._trace) if is_traced else tracing.NOTHING:
            try:
                transfer = self.transfer(op)
                if transfer is not None:
                    transfer(session, request)
                else:
                    self.send(op, self._answer(op, request))
                if op in TIMED and op != "release":  # it has no reply
                    self._wire_metrics.answered(op, began_ns, session, request)
            except KVStoreError as error:
                self._wire_metrics.failed(op, error, began_ns, session, request)
                self.send_error(error, last=isinstance(error, ProtocolError))
                if isinstance(error, ProtocolError):
                    raise
            except BaseException as error:
                self._wire_metrics.failed(op, error, began_ns, session, request)
                raise
        if self._request_nbytes:
            self._return_request_bytes()

    def _serve_follow(self, server: Acceptor, session: Session, request: pb.FollowRequest) -> bool:
        """Serve a follow request; return False if the connection was evicted or the server stops.

        While it waits for a view the connection counts as idle, so it may be evicted, and a stop
        does not wait for it.
        """
        try:
            self.service.authorizer.admit("follow", request, self.caller)
            followers = self.service.followers
            view = followers.view(request.number)
            if view is None and request.wait_ms and not self.unfinished(session):
                if not server.done(self):
                    return False
                try:
                    view = followers.wait(
                        self.peer, request.number, request.wait_ms / 1000, self.socket
                    )
                finally:
                    stays = server.begin(self)
                if not stays:
                    return False
            self.send("follow", view or pb.View())
        except KVStoreError as error:
            self._wire_metrics.failed("follow", error)
            self.send_error(error)
        return True

    def _answer(self, op: str, request: Any) -> Any:
        # Few, and they may wait, for the disk or for nodes; the loop has one call at a time
        if self._in_loop or may_wait(op, request):
            return self.service.call(op, request, self.caller)
        turns, peer = self.service.peer_queue, self.peer
        if op == "hint":  # long, and in no hurry: the peer's other calls do not wait for it
            peer += "\0hint"
        waited_ns = turns.begin(peer)
        try:
            if waited_ns:
                self.service.traffic.slow.step(QUEUE, waited_ns)
            return self.service.call(op, request, self.caller)
        finally:
            turns.end(peer)

    def _admit(self, header_nbytes: int) -> None:
        """Refuse a large request before it is received, if there are too many."""
        if header_nbytes > REQUEST_NBYTES_FREE:
            taken = self.service.request_parser.take(self.peer, header_nbytes)
            self._request_peer, self._request_nbytes = self.peer, self._request_nbytes + taken

    def _return_request_bytes(self) -> None:
        if self._request_nbytes:
            self.service.requests.give(self._request_peer, self._request_nbytes)
            self._request_nbytes = 0

    def parse(self, header: bytes, payload_nbytes: int) -> Request:
        """Parse a request. Raises ProtocolError or InvalidRequest."""
        if payload_nbytes:
            raise ProtocolError(f"a payload of {payload_nbytes} bytes where a request was expected")
        self._trace = None
        try:
            if len(header) > REQUEST_NBYTES_FREE:
                op, data = inside(header)
                self._check_op(op)
                return op, self.service.request_parser.parsed(op, data, self.peer)
            message = pb.BulkRequest.FromString(header)
        except DecodeError as error:
            raise ProtocolError("a request that is not a BulkRequest message") from error
        op = message.WhichOneof("op")
        if op is None:
            raise ProtocolError("a request without an operation")
        self._check_op(op)
        if message.trace:
            self._trace = unpacked(message.trace)
        return op, getattr(message, op)

    def _check_op(self, op: str) -> None:
        """Raise ProtocolError for a request that only the node's gateways may send."""
        if op in GATEWAYS_OPS and not self.of_gateway:
            raise ProtocolError(f"{op} is for the node's own gateways")

    def send(self, op: str, reply: Any) -> None:
        """Send a reply."""
        frame = self._frame(op, reply)
        if self._in_loop:
            self._unsent += self.socket.send_now(frame)
            return
        self.socket.arm(self.stall_s)
        if self._unsent:
            frame, self._unsent = self._unsent + frame, b""
        self.socket.send(frame)

    def send_soon(self, op: str, reply: Any) -> None:
        """Send what the client takes at once, and the rest with the next reply.

        For other threads than the connection's, which waits for them.
        """
        frame = self._frame(op, reply)
        if not self._unsent:
            with contextlib.suppress(OSError):  # the next reply meets it again
                frame = self.socket.send_now(frame)
        self._unsent += frame

    def _frame(self, op: str, reply: Any) -> bytes:
        header = delimited(_REPLIES[op], reply.SerializeToString())  # copied once less
        return self.socket.begun(header, 0)

    def send_error(self, error: KVStoreError, last: bool = False) -> None:
        """Send an error.

        `last`: the connection ends with it.
        """
        self.send("error", message_of(error, last))

    def send_last_error(self, error: KVStoreError) -> None:
        """Send the reason of the end to a client that may not listen any more."""
        with contextlib.suppress(OSError):
            self.socket.arm(LAST_ERROR_S)
            self.socket.send_frame(
                pb.BulkReply(error=message_of(error, last=True)).SerializeToString()
            )


def may_wait(op: str, request: Any) -> bool:
    """Return whether a unary request may wait, for the disk or for nodes."""
    return op in LONG_CALLS or (op == "lookup" and request.near)


def is_small(op: str, request: Any) -> bool:
    """Return whether a request never waits and takes microseconds."""
    return op in SMALL_OPS and not may_wait(op, request)


def ready(fd: int | socket.socket, events: int) -> bool:
    """Return whether one of these events of `poll` is there now.

    (`select` takes no descriptor above 1,023.)
    """
    asked = select.poll()
    asked.register(fd, events)
    return bool(asked.poll(0))


def caller_at(sock: socket.socket, peer: str, wire: str) -> Caller:
    """Return the caller at a socket.

    It is gone when it has hung up, even if received bytes are unread.
    """
    return Caller(peer, lambda: ready(sock, select.POLLRDHUP), wire=wire)


def message_of(error: KVStoreError, last: bool = False) -> pb.Error:
    """Return the message of an error.

    `last`: the connection ends with it.
    """
    return pb.Error(code=status_code(error), message=str(error), last=last)
