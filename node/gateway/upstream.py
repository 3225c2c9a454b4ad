"""Pool a gateway's connections to its node: Unix sockets that carry frames.

    call --> lease --> [on_behalf] request frame --> reply frame --> back to the pool

A call that ends early closes the connection, and the node ends the call's work. Requests and
replies are parsed as little as possible. Page bytes move in threads, without the GIL, while the
event loop handles the chunks before or after.
"""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from kvstore.config import MESSAGE_NBYTES_MAX
from kvstore.errors import Exhausted, Unauthenticated, Unavailable
from kvstore.messages import delimited, field_of
from kvstore.pb import kvstore_pb2 as pb
from kvstore.threads import begun
from kvstore.transports.connections import TRACED_NBYTES_MAX
from kvstore.transports.frames import FIXED_NBYTES, pack_fixed, unpack_fixed
from node.serving.limits import ON_BEHALF_NBYTES_MAX

HEADER_NBYTES_MAX = MESSAGE_NBYTES_MAX + 64  # the largest message, and the frame's own fields
RECEIVE_NBYTES = 64 << 10  # requested where a reply begins
INLINE_NBYTES_MAX = 256 << 10  # page bytes that the event loop moves itself: a thread costs more
# Requested for each direction; the system may grant less
BUFFER_NBYTES = 4 << 20
SEARCHED_MAX = 8  # idle connections that are searched for the same caller
KEPT_MAX = 16  # idle connections that stay; others are closed a while after their use

Result = TypeVar("Result")

_REQUEST = {field.name: field.number for field in pb.BulkRequest.DESCRIPTOR.fields}
_REPLY = {field.number: field.name for field in pb.BulkReply.DESCRIPTOR.fields}


class Refused(Exception):
    """The node's error reply: a gRPC status code and a message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class NodeConnection:
    """A connection that carries one call at a time.

    `clean` is False between a request and the end of its reply.
    """

    def __init__(self, sock: socket.socket, threads: ThreadPoolExecutor) -> None:
        self._sock = sock
        self._threads = threads
        self._moving: Future[Any] | None = None  # a thread's current work on the socket
        self._loop = asyncio.get_running_loop()
        self._early = memoryview(b"")  # received and not consumed yet
        self._waiting: asyncio.Future[bytes] | None = None  # for the next bytes
        self._wanted = 0  # most bytes for it
        self._listening = False
        self._listen()
        self.on_behalf = b""  # the caller of its last request
        self.unsent = b""  # frames that are sent along with the next request
        self.clean = True

    def close(self) -> None:
        """Close the connection, or shut it down if a thread uses its socket, which then closes it.

        Its descriptor's number must not be reused before, and the event loop may still know the
        number from a send that was just cancelled.
        """
        self._stop_listening()
        self._loop.remove_writer(self._sock)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._moving is None:
            self._sock.close()
        else:
            self._moving.add_done_callback(lambda done: self._sock.close())

    @property
    def quiet(self) -> bool:
        """Return whether the connection is open and has no unexpected bytes."""
        return self._listening and not self._early.nbytes

    def _listen(self) -> None:
        if not self._listening:
            self._loop.add_reader(self._sock, self._readable)
            self._listening = True

    def _stop_listening(self) -> None:
        if self._listening:
            self._loop.remove_reader(self._sock)
            self._listening = False

    def _readable(self) -> None:
        """Receive for the waiting coroutine.

        If none waits, leave the bytes in the socket and stop polling it.
        """
        if self._waiting is None or self._waiting.done():
            return self._stop_listening()
        try:
            self._waiting.set_result(self._sock.recv(self._wanted))
        except BlockingIOError:
            pass
        except OSError:
            self._waiting.set_result(b"")

    async def exchange(
        self, op: str, request: bytes | memoryview, trace: bytes = b""
    ) -> memoryview:
        """Send a request and return the reply, both serialised.

        Raises Refused for an error reply.
        """
        reply, payload_nbytes = await self.begin(op, request, trace)
        if payload_nbytes:
            raise Unavailable("the node's answer has unexpected page bytes")
        self.clean = True
        return reply

    async def begin(
        self, op: str, request: bytes | memoryview, trace: bytes = b""
    ) -> tuple[memoryview, int]:
        """Send a request of a call that continues.

        Return (reply, number of page bytes that follow). Raises Refused.
        """
        header = delimited(_REQUEST[op], request)
        if trace and len(request) <= TRACED_NBYTES_MAX:
            header += delimited(_REQUEST["trace"], trace)
        frame = b"".join((self.unsent, pack_fixed(len(header), 0), header))
        self.unsent, self.clean = b"", False
        await self._send(frame)
        return await self._reply(op)

    async def begin_payload(self, nbytes: int) -> None:
        """Announce `nbytes` page bytes, which `send_payload` sends."""
        self.clean = False
        await self._send(pack_fixed(0, nbytes))

    def add_payload(self, data: memoryview) -> None:
        """Have the next request follow page bytes, all of them sent at once."""
        self.unsent = b"".join((self.unsent, pack_fixed(0, data.nbytes), data))

    async def send_payload(self, data: memoryview) -> None:
        """Send page bytes.

        Raises the node's error if it has ended the call.
        """
        if data.nbytes < INLINE_NBYTES_MAX:
            return await self._send(data)
        try:
            await self._in_thread(self._sock.sendall, data)
        except ConnectionError as error:
            await self._fail(error)

    async def payload(self, nbytes: int) -> bytes:
        """Return the next `nbytes` page bytes behind a reply."""
        early, self._early = bytes(self._early[:nbytes]), self._early[nbytes:]
        left = nbytes - len(early)
        try:
            if left < INLINE_NBYTES_MAX:
                pieces = [early]
                while left:
                    pieces.append(await self._receive(left))
                    left -= len(pieces[-1])
                return b"".join(pieces)
            data = await self._in_thread(_received, self._sock, left)
        except ConnectionError as error:
            raise Unavailable("the node ended this call") from error
        if len(data) < left:
            raise Unavailable("the node ended this call")
        return early + data if early else data

    async def _in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a blocking function of the socket in a thread.

        Nothing else uses the socket meanwhile.
        """
        self._stop_listening()
        self._sock.setblocking(True)
        moving = begun(self._threads, function, *arguments)
        if moving is None:
            raise Exhausted("this gateway can start no more threads; raise its limit of processes")
        self._moving = moving
        result: Result = await asyncio.wrap_future(moving)
        self._moving = None
        self._sock.setblocking(False)
        self._listen()
        return result

    async def _send(self, data: bytes | memoryview) -> None:
        try:
            sent = self._send_now(data)
            if sent < len(data):
                await self._loop.sock_sendall(self._sock, memoryview(data)[sent:])
        except ConnectionError as error:
            await self._fail(error)

    def _send_now(self, data: bytes | memoryview) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0

    async def _fail(self, error: ConnectionError) -> NoReturn:
        """Raise the error that the node sent before it hung up, or else Unavailable."""
        self._sock.setblocking(False)
        await self._reply("")
        raise Unavailable("the node ended this call") from error

    async def _receive(self, nbytes: int) -> bytes:
        self._listen()
        self._waiting, self._wanted = self._loop.create_future(), nbytes
        data = await self._waiting
        if not data:
            raise Unavailable("the node ended this call")
        return data

    async def _reply(self, op: str) -> tuple[memoryview, int]:
        data = self._early or memoryview(await self._receive(RECEIVE_NBYTES))
        while data.nbytes < FIXED_NBYTES:
            data = memoryview(bytes(data) + await self._receive(RECEIVE_NBYTES))
        header_nbytes, payload_nbytes = unpack_fixed(bytes(data[:FIXED_NBYTES]), HEADER_NBYTES_MAX)
        missing = FIXED_NBYTES + header_nbytes - data.nbytes
        if missing > 0:
            pieces = [bytes(data)]
            while missing > 0:
                pieces.append(await self._receive(missing))
                missing -= len(pieces[-1])
            data = memoryview(b"".join(pieces))
        end = FIXED_NBYTES + header_nbytes
        self._early = data[end:]
        number, reply = field_of(data[FIXED_NBYTES:end])
        got = _REPLY.get(number)
        if got == "error":
            error = pb.Error.FromString(bytes(reply))
            self.clean = not error.last
            raise Refused(error.code, error.message)
        if got != op:
            raise Unavailable(f"the node answers a {op} by a {got}")
        return reply, payload_nbytes


def _received(sock: socket.socket, nbytes: int) -> bytes:
    """Receive so many bytes, or fewer at the end of the connection.

    A process that was stopped gets a part when it continues.
    """
    data = sock.recv(nbytes, socket.MSG_WAITALL)
    while data and len(data) < nbytes:
        more = sock.recv(nbytes - len(data), socket.MSG_WAITALL)
        if not more:
            break
        data += more
    return data


class Upstream:
    """The pool of connections to the node.

    Use it from the event loop's thread only.
    """

    def __init__(self, door: socket.socket, transfers: int) -> None:
        """Prepare connections to the node; `door` takes an end of each, `transfers` are threads."""
        self._door = door
        self._threads = ThreadPoolExecutor(transfers, "gateway-transfer")
        self._idle: list[NodeConnection] = []  # most recently used at the end
        self.count = 0

    @contextlib.contextmanager
    def lease(self, on_behalf: bytes) -> Iterator[NodeConnection]:
        """Lend a connection whose requests count as this caller's.

        Raises Exhausted, Unavailable, and Unauthenticated for a caller with too long headers.
        """
        if len(on_behalf) > ON_BEHALF_NBYTES_MAX:
            raise Unauthenticated(
                f"the names in this certificate have {len(on_behalf)} bytes; at most "
                f"{ON_BEHALF_NBYTES_MAX} are accepted"
            )
        connection = self._taken(on_behalf)
        try:
            if connection.on_behalf != on_behalf:
                header = delimited(_REQUEST["on_behalf"], on_behalf)
                connection.unsent = pack_fixed(len(header), 0) + header
                connection.on_behalf = on_behalf
            yield connection
        finally:
            if connection.clean and not connection.unsent:
                self._idle.append(connection)
            else:
                self._close(connection)

    def _taken(self, on_behalf: bytes) -> NodeConnection:
        """Return an idle connection, preferably of the same caller, or a new one."""
        idle = self._idle
        while idle:
            searched = range(len(idle) - 1, max(-1, len(idle) - 1 - SEARCHED_MAX), -1)
            at = next((at for at in searched if idle[at].on_behalf == on_behalf), len(idle) - 1)
            connection = idle.pop(at)
            if connection.quiet:
                return connection
            self._close(connection)
        connection = NodeConnection(self._opened(), self._threads)
        self.count += 1
        return connection

    def _opened(self) -> socket.socket:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise Exhausted(
                f"this gateway can open no more connections to its node: {error}"
            ) from error
        with theirs:
            try:
                ours.setblocking(False)
                for end in (ours, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_NBYTES)
                socket.send_fds(self._door, [b"c"], [theirs.fileno()])
            except OSError as error:  # it takes no more at the moment, or is gone
                ours.close()
                raise Unavailable(
                    f"the node takes no more connections of its gateway: {error}"
                ) from error
        return ours

    def trim(self) -> None:
        """Close all but `KEPT_MAX` idle connections.

        Call it periodically.
        """
        while len(self._idle) > KEPT_MAX:
            self._close(self._idle.pop(0))

    def _close(self, connection: NodeConnection) -> None:
        connection.close()
        self.count -= 1

    def close(self) -> None:
        """Close all idle connections and end the threads."""
        while self._idle:
            self._close(self._idle.pop())
        self._threads.shutdown(wait=False, cancel_futures=True)


@functools.lru_cache(1024)
def on_behalf_of(address: str, authorization: str, names: tuple[str, ...] | None) -> bytes:
    """Return a serialised OnBehalfRequest.

    `names`: from the client certificate; None if none was shown.
    """
    made: Any = pb.OnBehalfRequest(address=address, authorization=authorization)
    if names is not None:
        made.certificate = True
        made.names.extend(names)
    return bytes(made.SerializeToString(deterministic=True))
