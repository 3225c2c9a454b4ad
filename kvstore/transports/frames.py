"""Send and receive the frames of the bulk and the shared-memory wire under a deadline.

    0        2      3      4              8                      16
    | 'K''V' | ver  | 0    | header u32le | payload u64le        | header ... | payload ... |

The header is a BulkRequest or BulkReply; the payload is raw page bytes, received directly into
their destination. Lengths are checked against limits first. A peer that breaks the framing loses
its connection: the next frame can not be found.
"""

import collections
import functools
import itertools
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvstore.buffers import chunks as grouped
from kvstore.buffers import copy
from kvstore.checksum import CHUNK_NBYTES, Leaves
from kvstore.config import GRPC_CHUNK_NBYTES, PROTOCOL_VERSION, speaks
from kvstore.errors import InvalidRequest, ProtocolError


def runs(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Cut concatenated views into chunks of GRPC_CHUNK_NBYTES for gRPC, across page borders.

    Each chunk is a list of segments; the last chunk may be shorter.
    """
    return grouped(views, itertools.repeat(GRPC_CHUNK_NBYTES))


def fill(pages: Iterable[Sequence[memoryview]], chunks: Iterator[memoryview]) -> list[bytes]:
    """Copy chunks through the views of each page, and return the leaves of each page.

    Each chunk is hashed right after its copy, while it is in the cache. Takes no chunk more than it
    needs. Raises InvalidRequest if the chunks are too few, empty, or too long.
    """
    made = []
    rest = empty = memoryview(b"")
    for page in pages:
        running = Leaves(sum(view.nbytes for view in page))
        for view in page:
            while view.nbytes:
                if not rest.nbytes:
                    rest = next(chunks, empty)
                    if not rest.nbytes:
                        raise InvalidRequest(
                            f"page bytes ended early: {view.nbytes} bytes of a page are missing"
                        )
                count = min(rest.nbytes, view.nbytes)
                copy(view[:count], rest[:count])
                running.update(view[:count])
                view, rest = view[count:], rest[count:]
        made.append(running.digest())
    if rest.nbytes:
        raise InvalidRequest(f"{rest.nbytes} page bytes more than announced")
    return made


_FIXED = struct.Struct("<2sBBIQ")
FIXED_NBYTES = _FIXED.size
_MAGIC = b"KV"
_VERSION_AT = len(_MAGIC)
_TIMEVAL = struct.Struct("@ll")
# Requested where a frame begins, so that a small frame takes a single system call. The part of a
# large payload in it is copied once more, which costs less than the call.
_AHEAD_NBYTES = 4096
_VIEWS_MAX = 1024  # IOV_MAX of a system call


def pack_fixed(header_nbytes: int, payload_nbytes: int, version: int = PROTOCOL_VERSION) -> bytes:
    """Pack the fixed part of a frame."""
    return _FIXED.pack(_MAGIC, version, 0, header_nbytes, payload_nbytes)


def unpack_fixed(fixed: bytes | bytearray | memoryview, header_nbytes_max: int) -> tuple[int, int]:
    """Unpack a frame's fixed part to (header_nbytes, payload_nbytes); more bytes may follow it.

    Raises ProtocolError for anything that is not a frame.
    """
    magic, version, zero, header_nbytes, payload_nbytes = _FIXED.unpack_from(fixed)
    if magic != _MAGIC or zero != 0:
        raise ProtocolError(f"not a kvstore bulk frame: it starts with {bytes(fixed[:4]).hex()}")
    if not speaks(version):
        raise ProtocolError(
            f"the peer speaks protocol {version}, this side {PROTOCOL_VERSION}; update the older "
            "one"
        )
    if header_nbytes > header_nbytes_max:
        raise ProtocolError(
            f"a frame's header has {header_nbytes} bytes, at most {header_nbytes_max}"
        )
    return header_nbytes, payload_nbytes


def timeval(seconds: float) -> bytes:
    """Return a value for SO_RCVTIMEO or SO_SNDTIMEO, at least 1 ms because zero means forever."""
    seconds = max(seconds, 0.001)
    return _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))


class FrameSocket:
    """A connected stream socket, TCP or Unix.

    For one thread at a time; after a failure it must be closed.

    `arm(seconds)` sets the deadline of the following transfers; they raise TimeoutError after it,
    ConnectionError if the peer is gone and ProtocolError for bad framing. The kernel's own send and
    receive timeouts do the waiting, so there is no poll before each call.
    """

    is_plain = True  # False for TLS
    holds = False  # whether the node may hold slots for this connection, as over shared memory

    def __init__(self, sock: socket.socket, version: int = PROTOCOL_VERSION) -> None:
        """Wrap a connected socket; `version` is the protocol's, until the peer's is known."""
        sock.setblocking(True)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock = sock
        self.version = version
        self._timeout_s = 0.0
        self._deadline = 0.0
        self._ahead = memoryview(bytearray(_AHEAD_NBYTES))
        self._early = self._ahead[:0]  # bytes that were received ahead and not consumed yet
        self.heard = False  # whether any byte arrived since this was last reset
        # only the beginning of something was sent: the peer would take the next bytes for its end
        self.torn = False
        # whether the node may hold slots for it; on some transports it never does
        self.holds = False
        # Called with the length of a header before it is received; may raise to refuse it.
        self.admit: Callable[[int], None] = lambda header_nbytes: None

    def handshake(self) -> None:
        """Perform what precedes the first frame: nothing on a plain connection."""

    @property
    def certificate(self) -> Mapping[str, Any]:
        """Return the peer's verified certificate, as of `getpeercert`; empty without one."""
        return {}

    def arm(self, seconds: float) -> None:
        """Set the deadline of the following sends and receives, in seconds from now."""
        self._deadline = time.monotonic() + seconds

    def _set_timeouts(self, seconds: float) -> None:
        """Set the socket's timeouts to somewhat less; early wake-ups check the deadline.

        So calls with about the same time left set them once.
        """
        self._timeout_s = seconds * 0.75
        packed = timeval(self._timeout_s)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)

    def send_frame(self, header: bytes, payload_nbytes: int = 0, at_once: bool = False) -> None:
        """Send a frame without its payload, which follows by `send`."""
        self.send(self.begun(header, payload_nbytes), at_once)

    def begun(self, header: bytes, payload_nbytes: int) -> bytes:
        """Build a frame without its payload."""
        return pack_fixed(len(header), payload_nbytes, self.version) + header

    def send(self, data: bytes | memoryview, at_once: bool = False) -> None:
        """Send all bytes; `at_once` sends what needs no wait even past the deadline."""
        view = memoryview(data)
        nbytes = view.nbytes
        flags = socket.MSG_DONTWAIT if at_once else 0
        try:
            while view.nbytes:
                if not flags:
                    self._check_deadline("send")
                try:
                    view = view[self._sock.send(view, flags) :]
                except BlockingIOError:
                    flags = 0
        finally:
            self.torn = self.torn or 0 < view.nbytes < nbytes

    def recv_frame(self, header_nbytes_max: int) -> tuple[bytes, int]:
        """Return (header, payload_nbytes) of the next frame; the payload comes next."""
        while True:
            self._check_deadline("receive")
            if self._receive_ahead():
                return self._recv_header(header_nbytes_max)

    def peek_frame(self) -> bytes | None:
        """Return the header of the next frame if it is all there, without a wait.

        `take_frame` takes it; `recv_frame` can receive it as well. Return None for a frame that is
        incomplete, has a payload, or does not fit the bytes that are received ahead. Raises
        ConnectionError if the peer has closed. Not for TLS.
        """
        if not self._receive_ahead(socket.MSG_DONTWAIT) or self._early.nbytes < FIXED_NBYTES:
            return None
        try:
            header_nbytes, payload_nbytes = unpack_fixed(self._early, _AHEAD_NBYTES)
        except ProtocolError:  # `recv_frame` raises it again
            return None
        end = FIXED_NBYTES + header_nbytes
        if payload_nbytes or not header_nbytes or end > self._early.nbytes:
            return None
        return bytes(self._early[FIXED_NBYTES:end])

    def take_frame(self, header_nbytes: int) -> None:
        """Drop the frame that `peek_frame` returned."""
        self.version = self._early[_VERSION_AT]
        self._early = self._early[FIXED_NBYTES + header_nbytes :]

    @property
    def has_early(self) -> bool:
        """Return whether bytes of the next frame were received, which `poll` does not show."""
        return bool(self._early.nbytes)

    def send_now(self, data: bytes) -> bytes:
        """Send what needs no wait; return the rest."""
        try:
            sent = self._sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return data
        return data[sent:]

    def wait_frame(self, header_nbytes_max: int, frame_s: float) -> tuple[bytes, int] | None:
        """Receive like `recv_frame`, but return None if no first byte comes within the armed time.

        From its first byte on, the frame has `frame_s` seconds to arrive.
        """
        left_s = self._deadline - time.monotonic()
        if not left_s / 2 <= self._timeout_s <= left_s:
            self._set_timeouts(left_s)
        if not self._receive_ahead():
            return None
        self.arm(frame_s)
        return self._recv_header(header_nbytes_max)

    def _receive_ahead(self, flags: int = 0) -> bool:
        """Wait until there are early bytes; return False if the socket's timeout passed first.

        With MSG_DONTWAIT, return False if there are none now.
        """
        if self._early.nbytes:
            return True
        try:
            got = self._receive(self._ahead, flags)
        except BlockingIOError:
            return False
        if got == 0:
            raise ConnectionResetError("the peer closed the connection")
        self.heard = True
        self._early = self._ahead[:got]
        return True

    def _receive(self, view: memoryview, flags: int = 0) -> int:
        """Receive a byte or more; 0 at the end. Raises BlockingIOError on timeout."""
        return self._sock.recv_into(view, view.nbytes, flags)

    def _recv_header(self, header_nbytes_max: int) -> tuple[bytes, int]:
        fixed = self._recv(FIXED_NBYTES)
        header_nbytes, payload_nbytes = unpack_fixed(fixed, header_nbytes_max)
        self.version = fixed[_VERSION_AT]
        self.admit(header_nbytes)
        return self._recv(header_nbytes), payload_nbytes

    def _recv(self, nbytes: int) -> bytes:
        if nbytes <= self._early.nbytes:
            data, self._early = self._early[:nbytes], self._early[nbytes:]
            return bytes(data)
        buffer = bytearray(nbytes)
        self.recv_into(memoryview(buffer))
        return bytes(buffer)

    def recv_into(self, view: memoryview) -> None:
        """Fill the view."""
        if self._early.nbytes:
            count = min(self._early.nbytes, view.nbytes)
            view[:count] = self._early[:count]
            self._early, view = self._early[count:], view[count:]
        while view.nbytes:
            self._check_deadline("receive")
            try:
                got = self._receive(view, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            if got == 0:
                raise ConnectionResetError("the peer closed the connection")
            view = view[got:]

    def send_all(
        self, views: Iterable[memoryview], next_s: Callable[[], float] | None = None
    ) -> None:
        """Send all views in few system calls; each costs a wait for the GIL among many threads.

        `next_s` returns the seconds for the next CHUNK_NBYTES, or the rest, and may raise. Without
        it the armed deadline covers everything.
        """
        left = collections.deque(views)
        try:
            self._through(left, next_s, "send", self._send_some)
        finally:
            self.torn = self.torn or bool(left)

    def recv_all(
        self, views: Iterable[memoryview], next_s: Callable[[], float] | None = None
    ) -> None:
        """Fill the views; see `send_all`."""
        left = collections.deque(views)
        while left and self._early.nbytes:
            early = left[0][: self._early.nbytes]
            self.recv_into(early)
            _pass(left, early.nbytes)
        self._through(left, next_s, "receive", self._recv_some)

    def _send_some(self, views: list[memoryview]) -> int:
        return self._sock.sendmsg(views)

    def _recv_some(self, views: list[memoryview]) -> int:
        got: int = self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        if got == 0:
            raise ConnectionResetError("the peer closed the connection")
        return got

    def _through(
        self,
        left: collections.deque[memoryview],
        next_s: Callable[[], float] | None,
        doing: str,
        some: Callable[[list[memoryview]], int],
    ) -> None:
        moved = CHUNK_NBYTES
        _pass(left, 0)  # empty ones alone would receive nothing, as if the peer had closed
        while left:
            if next_s and moved >= CHUNK_NBYTES:
                self.arm(next_s())
                moved = 0
            self._check_deadline(doing)
            try:
                count = some(list(itertools.islice(left, _VIEWS_MAX)))
            except BlockingIOError:
                continue
            moved += count
            _pass(left, count)

    def _check_deadline(self, doing: str) -> None:
        """Raise TimeoutError past the deadline and keep the socket's timeout close to what is left.

        It runs before each system call, also after complete ones.
        """
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"the deadline passed while trying to {doing}")
        if not left_s / 2 <= self._timeout_s <= left_s:
            self._set_timeouts(left_s)

    def detach(self) -> socket.socket:
        """Return the socket, set not to block. Raises ProtocolError for early bytes."""
        if self._early.nbytes:
            raise ProtocolError("the peer sent more than it was asked for")
        self._sock.setblocking(False)
        return self._sock

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._sock.fileno()

    @property
    def quiet(self) -> bool:
        """Return whether the peer has sent nothing more and not hung up.

        Each lease calls this: by `poll` it takes 3 µs, by an exception 15.
        """
        return not self._early.nbytes and not self._news.poll(0)

    @functools.cached_property
    def _news(self) -> select.poll:
        """Return a poll object that watches the socket for input."""
        news = select.poll()
        news.register(self._sock, select.POLLIN)
        return news

    def shutdown(self) -> None:
        """Shut the socket down and wake a thread that is blocked in it with ConnectionError."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected any more

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


def _pass(views: collections.deque[memoryview], nbytes: int) -> None:
    """Drop the first `nbytes` bytes of the views."""
    while views and nbytes >= views[0].nbytes:
        nbytes -= views.popleft().nbytes
    if nbytes:
        views[0] = views[0][nbytes:]
