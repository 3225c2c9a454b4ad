"""Bulk TCP for asyncio: the steps of `kvstore.transports.bulk` on sockets that do not block.

Only the coroutine of a call moves its bytes: it waits until the socket is ready, and then calls
`recv_into` or `send` itself. So nothing reads or writes a caller's buffer after its call has
ended, also if it was cancelled. A connection whose exchange did not end is closed, never reused.
"""

import asyncio
import collections
import contextlib
import itertools
import select
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any

from kvstore.buffers import Pieces, chunks, segments_nbytes
from kvstore.checksum import CHUNK_NBYTES, Leaves
from kvstore.config import MESSAGE_NBYTES_MAX
from kvstore.deadline import Deadline
from kvstore.errors import Exhausted, InvalidRequest, ProtocolError, Unavailable
from kvstore.page_hmac import PageHmacs
from kvstore.pb import kvstore_pb2 as pb
from kvstore.steps import run_async
from kvstore.transports.bulk import BulkWire, get_steps, hits_of, put_steps
from kvstore.transports.connections import Refused, parse_reply, request_header
from kvstore.transports.frames import FIXED_NBYTES, FrameSocket, pack_fixed, unpack_fixed

AHEAD_NBYTES = 4096  # read where a frame begins, so that a small reply takes one system call
TURN_NBYTES = 1 << 20  # bytes moved without a wait, after which other tasks have a turn
Connect = Callable[[Deadline], Coroutine[Any, Any, FrameSocket]]


class AsyncConnection:
    """A greeted connection for one task at a time; the `stream` of the steps of bulk TCP."""

    def __init__(self, frames: FrameSocket) -> None:
        self._version = frames.version
        self._sock = frames.detach()
        self._early = memoryview(b"")
        self._news = select.poll()
        self._news.register(self._sock, select.POLLIN)
        self._unyielded = 0
        self.deadline = Deadline(0.0)
        self.heard = False  # whether any byte of this exchange arrived

    @property
    def quiet(self) -> bool:
        """Return whether the node has sent nothing more and not hung up."""
        return not self._early.nbytes and not self._news.poll(0)

    def close(self) -> None:
        """Close the socket; the node frees all that it holds for it."""
        self._sock.close()

    # ---- the stream of the steps ---------------------------------------------------------

    async def exchange(self, op: str, request: Any) -> tuple[Any, int]:
        """Send a request; return (reply, bytes of the payload behind it)."""
        await self._send_frame(request_header(op, request))
        header_nbytes, payload_nbytes = unpack_fixed(
            await self._recv(FIXED_NBYTES), MESSAGE_NBYTES_MAX
        )
        return parse_reply(op, await self._recv(header_nbytes)), payload_nbytes

    async def send_pages(self, nbytes: int, pages: Iterable[Pieces]) -> list[bytes]:
        """Send pages of so many bytes as a payload; return the leaves of each one's sent bytes."""
        await self._send_frame(b"", nbytes)
        return [await self._send_page(page) for page in pages]

    async def _send_page(self, page: Pieces) -> bytes:
        running = Leaves(segments_nbytes(page))
        for chunk in chunks(page, itertools.repeat(CHUNK_NBYTES)):
            for piece in chunk:
                await self._send(piece)
                running.update(piece)
        return running.digest()

    async def recv_pages(self, pages: Iterable[Pieces]) -> list[bytes]:
        """Receive pages; return the leaves of each one's received bytes."""
        return [await self._recv_page(page) for page in pages]

    async def _recv_page(self, page: Pieces) -> bytes:
        running = Leaves(segments_nbytes(page))
        for chunk in chunks(page, itertools.repeat(CHUNK_NBYTES)):
            for piece in chunk:
                await self._recv_into(piece)
                running.update(piece)
        return running.digest()

    # ---- bytes ---------------------------------------------------------------------------

    async def _send_frame(self, header: bytes, payload_nbytes: int = 0) -> None:
        await self._send(
            memoryview(pack_fixed(len(header), payload_nbytes, self._version) + header)
        )

    async def _send(self, view: memoryview) -> None:
        while view.nbytes:
            try:
                count = self._sock.send(view)
            except BlockingIOError:
                await self._ready("send")
                continue
            view = view[count:]
            await self._moved(count)

    async def _recv(self, nbytes: int) -> bytes:
        """Receive bytes of a frame's beginning."""
        if self._early.nbytes < nbytes:
            buffer = bytearray(max(nbytes, AHEAD_NBYTES))
            view = memoryview(buffer)
            have = self._early.nbytes
            view[:have] = self._early
            while have < nbytes:
                have += await self._some(view[have:])
            self._early = view[:have]
        data, self._early = bytes(self._early[:nbytes]), self._early[nbytes:]
        return data

    async def _recv_into(self, view: memoryview) -> None:
        if early := min(self._early.nbytes, view.nbytes):
            view[:early] = self._early[:early]
            self._early, view = self._early[early:], view[early:]
        while view.nbytes:
            count = await self._some(view)
            view = view[count:]
            await self._moved(count)

    async def _some(self, view: memoryview) -> int:
        """Receive a byte or more."""
        while True:
            try:
                count = self._sock.recv_into(view)
            except BlockingIOError:
                await self._ready("receive")
                continue
            if not count:
                raise ConnectionResetError("the peer closed the connection")
            self.heard = True
            return count

    async def _moved(self, nbytes: int) -> None:
        """Give other tasks a turn, and check the deadline, if bytes flow without a wait."""
        self._unyielded += nbytes
        if self._unyielded >= TURN_NBYTES:
            self._unyielded = 0
            if self.deadline.passed:
                raise TimeoutError("the deadline passed while bytes were moved")
            await asyncio.sleep(0)

    async def _ready(self, doing: str) -> None:
        """Wait until the socket can send or receive. Raises TimeoutError at the deadline."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        sending = doing == "send"
        (loop.add_writer if sending else loop.add_reader)(self._sock, _wake, ready)
        late = TimeoutError(f"the deadline passed while trying to {doing}")
        timer = loop.call_later(self.deadline.left(), _fail, ready, late)
        try:
            await ready
        finally:
            timer.cancel()
            if not loop.is_closed():
                (loop.remove_writer if sending else loop.remove_reader)(self._sock)
        self._unyielded = 0


def _wake(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


def _fail(waiting: "asyncio.Future[Any]", error: Exception) -> None:
    if not waiting.done():
        waiting.set_exception(error)


class AsyncBulkWire:
    """The methods of `Wire` as coroutines, on at most `count_max` connections to one node.

    For one event loop at a time. `connect` opens a connection; `wire` names errors.
    """

    def __init__(self, wire: BulkWire, connect: Connect, count_max: int) -> None:
        self.wire = wire
        self._connect = connect
        self._count_max = count_max
        self._count = 0  # connections that are in use, idle or being made
        self._idle: list[AsyncConnection] = []
        self._waiting: collections.deque[asyncio.Future[AsyncConnection | None]] = (
            collections.deque()
        )
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def serves(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether the loop's calls may use this; if not, make another.

        A loop that was closed in mid-call leaves connections and waits that never end. Raises
        InvalidRequest while another loop runs.
        """
        if loop is not self._loop:
            if self._loop is not None and self._loop.is_running():
                raise InvalidRequest(
                    "this client is in use in another event loop; make a client for each loop"
                )
            if self._count > len(self._idle):
                return False
            self._loop = loop
        return True

    async def call(self, op: str, request: Any, deadline: Deadline) -> Any:
        """Send one request and return its reply."""
        reply, _ = await self._run(lambda connection: connection.exchange(op, request), deadline)
        return reply

    async def put(
        self,
        request: pb.PutRequest,
        pages: Sequence[Pieces],
        deadline: Deadline,
        hmacs: PageHmacs | None = None,
    ) -> list[int]:
        """Put pages; return a status per key."""
        found: list[int] = await self._run(
            lambda connection: run_async(put_steps(connection, request, pages, hmacs)), deadline
        )
        return found

    async def get(
        self,
        request: pb.GetRequest,
        buffers: Sequence[Pieces],
        seeds: Sequence[int],
        deadline: Deadline,
        hmacs: PageHmacs | None = None,
    ) -> tuple[list[bool], list[int]]:
        """Read pages into the buffers and verify them; see `Wire.get`."""
        return hits_of(
            await self._run(
                lambda connection: run_async(get_steps(connection, request, buffers, seeds, hmacs)),
                deadline,
            )
        )

    async def _run(
        self, exchange: Callable[[AsyncConnection], Coroutine[Any, Any, Any]], deadline: Deadline
    ) -> Any:
        """Make an exchange, again if the node had closed an idle connection before it arrived."""
        while True:
            fresh, connection = await self._lease(deadline)
            try:
                async with self._exchange(connection, deadline):
                    return await exchange(connection)
            except Unavailable:
                if fresh or connection.heard:
                    raise

    @contextlib.asynccontextmanager
    async def _exchange(
        self, connection: AsyncConnection, deadline: Deadline
    ) -> AsyncIterator[None]:
        """Translate errors, and return the connection if the exchange has ended in step."""
        connection.deadline, connection.heard = deadline, False
        in_step = False
        try:
            yield
            in_step = True
        except Refused as error:  # after a ProtocolError the node hangs up
            in_step = not isinstance(error.error, ProtocolError)
            raise error.error from None
        except OSError as error:
            self.wire.raise_named(error, deadline)
            raise
        finally:
            self._return(connection, in_step)

    async def _lease(self, deadline: Deadline) -> tuple[bool, AsyncConnection]:
        """Return (whether it is new, a connection)."""
        while True:
            while self._idle:
                connection = self._idle.pop()
                if connection.quiet:
                    return False, connection
                self._return(connection, in_step=False)
            if self._count < self._count_max:
                break
            handed = await self._wait(deadline)
            if handed is not None:
                return False, handed
        self._count += 1
        try:
            return True, AsyncConnection(await self._connect(deadline))
        except BaseException:
            self._count -= 1
            self._hand_over(None)
            raise

    async def _wait(self, deadline: Deadline) -> AsyncConnection | None:
        """Wait for a connection that another call returns; None if one may be made instead."""
        loop = asyncio.get_running_loop()
        place: asyncio.Future[AsyncConnection | None] = loop.create_future()
        self._waiting.append(place)
        busy = Exhausted(
            f"all {self._count_max} connections (connections_max) stayed busy for "
            f"{deadline.seconds:g} s"
        )
        timer = loop.call_later(deadline.left(), _fail, place, busy)
        try:
            return await place
        except BaseException:
            # Cancelled. What was handed over just before is for the next call
            if place.done() and not place.cancelled() and place.exception() is None:
                handed = place.result()
                if handed is None:
                    self._hand_over(None)
                else:
                    self._return(handed, in_step=True)
            raise
        finally:
            timer.cancel()

    def _return(self, connection: AsyncConnection, in_step: bool) -> None:
        if in_step and not self._closed:
            if not self._hand_over(connection):
                self._idle.append(connection)
        else:
            connection.close()
            self._count -= 1
            self._hand_over(None)

    def _hand_over(self, connection: AsyncConnection | None) -> bool:
        """Give a connection, or the right to make one, to the call that waits longest."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done() and not place.get_loop().is_closed():
                place.set_result(connection)
                return True
        return False

    def close(self) -> None:
        """Close idle connections now, and those in use when their call ends."""
        self._closed = True
        while self._idle:
            self._return(self._idle.pop(), in_step=False)
