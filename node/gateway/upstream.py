"""A gateway's connections to its node: Unix sockets that carry the frames of `kvstore.wires.frames`.

    call --> lease --> [on_behalf] request frame --> reply frame --> back to the pool
                       whoever leaves in between closes the connection, which ends what it had begun at the node

Requests and replies stay in their wire form. A gateway reads no more of them than it must.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from kvstore.config import GRPC_CHUNK_NBYTES, MESSAGE_NBYTES_MAX
from kvstore.errors import Exhausted, Unavailable
from kvstore.messages import chunk_frame, delimited, field_of
from kvstore.pb import kvstore_pb2 as pb
from kvstore.wires.frames import FIXED_NBYTES, pack_fixed, unpack_fixed
from node.serve.limits import REQUEST_NBYTES_FREE

HEADER_NBYTES_MAX = MESSAGE_NBYTES_MAX + 64  # the largest message, and the frame's own fields
RECEIVE_NBYTES = 64 << 10  # asked for where a reply begins
BUFFER_NBYTES = 4 << 20  # asked of the system for each direction; it gives what its own limit allows
SEARCHED_MAX = 8  # idle connections that are searched for one that asked for the same caller last
KEPT_MAX = 16  # idle connections that stay; the others are closed a while after they were used

_REQUEST = {field.name: field.number for field in pb.BulkRequest.DESCRIPTOR.fields}
_REPLY = {field.number: field.name for field in pb.BulkReply.DESCRIPTOR.fields}


class Refused(Exception):
    """The node's answer is an error: a status code of gRPC, and what it says."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class NodeConnection:
    """Carries one call at a time. `clean` is False while an exchange has begun and is not over."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._early = memoryview(b"")  # received and not handed out yet
        self.on_behalf = b""  # the caller for whom it asked last
        self.unsent = b""  # frames that go along with the next request
        self.clean = True

    def close(self) -> None:
        self._sock.close()

    @property
    def quiet(self) -> bool:
        """Whether the node has said nothing more, and not hung up."""
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return not self._early.nbytes
        except OSError:
            pass
        return False

    async def exchange(self, op: str, request: bytes | memoryview, trace: bytes = b"") -> memoryview:
        """Return the reply to a request, both in their wire form. Raise Refused."""
        reply, payload_nbytes = await self.begin(op, request, trace)
        if payload_nbytes:
            raise Unavailable("the node's answer has page bytes that nobody asked for")
        self.clean = True
        return reply

    async def begin(self, op: str, request: bytes | memoryview, trace: bytes = b"") -> tuple[memoryview, int]:
        """As `exchange`, for a call that goes on. Return also how many page bytes follow the reply."""
        header = delimited(_REQUEST[op], request)
        if trace and len(request) <= REQUEST_NBYTES_FREE:  # a large request is one field and nothing else
            header += delimited(_REQUEST["trace"], trace)
        frame = b"".join((self.unsent, pack_fixed(len(header), 0), header))
        self.unsent, self.clean = b"", False
        await self._send(frame)
        return await self._reply(op)

    async def send_payload(self, data: bytes | memoryview) -> None:
        """Send page bytes. If the node has ended the call before, raise what it said."""
        await self._send(data)

    async def send_payload_head(self, nbytes: int) -> None:
        """Announce so many page bytes, which follow by `send_payload`."""
        self.clean = False
        await self._send(pack_fixed(0, nbytes))

    async def chunk(self, nbytes_left: int) -> tuple[bytes, int]:
        """Receive the next page bytes, at most GRPC_CHUNK_NBYTES. Return them as a GetFrame in its wire form, and how
        many they are."""
        nbytes = wanted = min(nbytes_left, GRPC_CHUNK_NBYTES)
        pieces = []
        if self._early.nbytes:
            pieces.append(self._early[:wanted])
            self._early = self._early[wanted:]
            wanted -= pieces[0].nbytes
        while wanted:
            pieces.append(memoryview(await self._receive(wanted)))
            wanted -= pieces[-1].nbytes
        return chunk_frame(pieces), nbytes

    async def _send(self, data: bytes | memoryview) -> None:
        try:
            await self._loop.sock_sendall(self._sock, data)
        except ConnectionError as error:
            with contextlib.suppress(ConnectionError):
                await self._reply("")  # why it hung up
            raise Unavailable("the node ended this call") from error

    async def _receive(self, nbytes: int) -> bytes:
        try:
            data = await self._loop.sock_recv(self._sock, nbytes)
        except ConnectionError as error:
            raise Unavailable("the node ended this call") from error
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


class Upstream:
    """The pool of connections. Belongs to the event loop's thread."""

    def __init__(self, door: socket.socket) -> None:
        """`door`: takes one end of each new connection to the node."""
        self._door = door
        self._idle: list[NodeConnection] = []  # used last at the end
        self.count = 0

    @contextlib.contextmanager
    def lease(self, on_behalf: bytes) -> Iterator[NodeConnection]:
        """Lend a connection on which the node takes requests for those of this caller, an OnBehalfRequest in its wire
        form. Raise Exhausted or Unavailable."""
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
        idle = self._idle
        while idle:
            searched = range(len(idle) - 1, max(-1, len(idle) - 1 - SEARCHED_MAX), -1)
            at = next((at for at in searched if idle[at].on_behalf == on_behalf), len(idle) - 1)
            connection = idle.pop(at)
            if connection.quiet:
                return connection
            self._close(connection)
        connection = NodeConnection(self._opened())
        self.count += 1
        return connection

    def _opened(self) -> socket.socket:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise Exhausted(f"this gateway can open no more connections to its node: {error}") from error
        with theirs:
            try:
                ours.setblocking(False)
                for end in (ours, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_NBYTES)
                socket.send_fds(self._door, [b"c"], [theirs.fileno()])
            except OSError as error:  # it takes no more at the moment, or is gone
                ours.close()
                raise Unavailable(f"the node takes no more connections of its gateway: {error}") from error
        return ours

    def trim(self) -> None:
        """Close idle connections that the calls of the moment do not need. Called now and then."""
        while len(self._idle) > KEPT_MAX:
            self._close(self._idle.pop(0))

    def _close(self, connection: NodeConnection) -> None:
        connection.close()
        self.count -= 1

    def close(self) -> None:
        while self._idle:
            self._close(self._idle.pop())


def on_behalf_of(address: str, authorization: str, names: tuple[str, ...] | None) -> bytes:
    """Return an OnBehalfRequest in its wire form. `names`: of the certificate that was shown; None: none was."""
    made: Any = pb.OnBehalfRequest(address=address, authorization=authorization)
    if names is not None:
        made.certificate = True
        made.names.extend(names)
    return bytes(made.SerializeToString(deterministic=True))
