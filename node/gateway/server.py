"""Serve the public gRPC methods: calls become frames to the node, and its frames become replies.

    unary call   request bytes -> frame -> reply bytes              nothing is parsed here
    put          begin -> statuses -> chunks, as they come -> commit
    get          request -> reply, then page bytes, which the node has framed as chunks
    small ones   the same frames to and from the node; the caller's are in one message each way

Health, reflection and views are answered here, from the state that the node has sent. The node
decides who may request them:

    node --control--> NodeState --> Health.Check, Health.Watch, KVStore.Follow

Watchers get the newest state; states in between may be skipped. A silent node counts as not
serving.
"""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.messages import FRAME_NBYTES, chunk_of, delimited, put_parts
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.status import status_code
from node.gateway.call import Call
from node.gateway.upstream import NodeConnection, Refused, Upstream
from node.serving.limits import (
    FEED_S_MAX,
    FEEDS_MAX,
    FOLLOW_S_MAX,
    FOLLOWERS_MAX,
    HEALTH_CALLS_MAX,
    HEALTH_WATCH_S_MAX,
    REFLECTION_S_MAX,
    REFLECTION_STREAMS_MAX,
    ConnectionLimiter,
    make_limit,
)

log = logging.getLogger(__name__)

_SCHEMA = pb.DESCRIPTOR.services_by_name["KVStore"]
SERVICE_NAME: str = _SCHEMA.full_name
# Requests are named by their field in BulkRequest.
_OPS = {
    field.message_type.full_name: field.name
    for field in pb.BulkRequest.DESCRIPTOR.fields
    if field.message_type
}
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_BEGIN, _COMMIT = pb.PutFrameReply.BEGIN_FIELD_NUMBER, pb.PutFrameReply.COMMIT_FIELD_NUMBER
_GET_BEGIN = pb.GetFrame.BEGIN_FIELD_NUMBER

# concurrent admission requests to the node: each takes a connection from other calls
ADMITTED_MAX = 64

HEALTH_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
HealthRequest = health_pb2.HealthCheckRequest
HealthReply = health_pb2.HealthCheckResponse
# a node sends heartbeats several times a second; one that is silent for so long hangs
SILENT_S_MAX = 10.0
FEED_WAIT_S = 10.0  # without news, a sign of life

Result = TypeVar("Result")
Messages = AsyncIterator[Any]
Behaviour = Callable[[Call, Messages], Awaitable[Any]]


class NodeState:
    """The node's last state, and its watchers.

    Use it from the event loop's thread only.
    """

    def __init__(self) -> None:
        self._good: dict[str, bool] = {}
        self._view: pb.View | None = None
        self._alone = True
        self._heard_s = time.monotonic()
        self._watchers: set[asyncio.Event] = set()

    # ---- from the node -------------------------------------------------------------------------

    def heard(self) -> None:
        """Note a sign of life of the node."""
        silent = self._silent
        self._heard_s = time.monotonic()
        if silent:
            self._tell()

    def set_health(self, good: dict[str, bool]) -> None:
        """Store the status of every service, by its name."""
        self._good = good
        self._tell()

    def set_view(self, view: pb.View | None, alone: bool) -> None:
        """Store the view.

        None: there is none yet; None and `alone`: the node has no cluster.
        """
        self._view, self._alone = view, alone
        self._tell()

    @property
    def _silent(self) -> bool:
        return time.monotonic() - self._heard_s > SILENT_S_MAX

    def look(self) -> None:
        """Wake watchers if the node has gone silent.

        Call it periodically.
        """
        if self._silent:
            self._tell()

    def _tell(self) -> None:
        for changed in self._watchers:
            changed.set()

    # ---- for callers ---------------------------------------------------------------------------

    def health(self, name: str) -> Any:
        """Return the status of a service.

        Raises KeyError for an unknown name.
        """
        good = self._good[name] and not self._silent
        return HealthReply(status=HealthReply.SERVING if good else HealthReply.NOT_SERVING)

    async def watch_health(self, name: str) -> AsyncIterator[Any]:
        """Yield the status now and after each change.

        Raises KeyError for an unknown name.
        """
        sent = None
        async for _ in self._changes():
            status = self.health(name)
            if status != sent:
                sent = status
                yield status

    async def watch_views(self, known: int) -> AsyncIterator[pb.View]:
        """Yield the view now, unless its number is `known`, and every later one.

        Raises InvalidRequest if the node has no cluster.
        """
        if self._alone:
            raise InvalidRequest("this node is in no cluster: it has no view")
        sent: pb.View | None = None
        async for _ in self._changes():
            view = self._view
            if view is not None and view is not sent and (sent or view.number != known):
                yield view
            sent = view

    async def _changes(self) -> AsyncIterator[None]:
        """Yield now, and after each change."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while True:
                yield
                await changed.wait()
                changed.clear()
        finally:
            self._watchers.discard(changed)


class Servicer:
    """The gRPC methods, their limits and their handlers.

    Calls that may last are registered as streaming, so that a call without a request can be ended
    here; the bytes on the wire are the same. Other calls are unary: their handler starts when the
    request is complete. As streams they would cost a quarter more.
    """

    def __init__(self, door: socket.socket, state: NodeState, threads: int, stall_s: float) -> None:
        """Prepare the service. `door` is `Upstream`'s; four calls are admitted per thread.

        `threads`: the setting grpc_threads.
        """
        self.upstream = Upstream(door, max(1, threads * 3 // 4))
        self._state = state
        self._stall_s = stall_s
        remedy = "make fewer at a time"
        self._calls = ConnectionLimiter(
            make_limit("gRPC calls", 4 * threads, f"{remedy}, or raise grpc_threads")
        )
        self._health_calls = ConnectionLimiter(make_limit("health calls", HEALTH_CALLS_MAX, remedy))
        self._followers = ConnectionLimiter(
            make_limit("followers of views", FOLLOWERS_MAX, "make fewer clients, and share them")
        )
        self._feeds = ConnectionLimiter(make_limit("feeds", FEEDS_MAX, "share one among readers"))
        self._reflections = ConnectionLimiter(
            make_limit("reflection streams", REFLECTION_STREAMS_MAX, remedy)
        )
        self.limiters = (
            *(self._calls, self._health_calls, self._followers, self._feeds),
            self._reflections,
        )
        self._admitting = asyncio.Semaphore(ADMITTED_MAX)
        self._reflection = reflection.ReflectionServicer(
            (SERVICE_NAME, HEALTH_NAME, reflection.SERVICE_NAME)
        )

    @property
    def call_count(self) -> int:
        """Return how many calls have a running handler."""
        return sum(limiter.count for limiter in self.limiters)

    def end_idle(self) -> None:
        """End calls that wait for a request or a change, so that a stop is quick."""
        for limiter in self.limiters:
            limiter.close()

    # ---- how methods are called ----------------------------------------------------------

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """Return the handlers of all services, and one for unknown methods."""
        streams = {
            "Put": self._handler(self._put, self._calls),
            "Get": self._handler(self._get, self._calls),
            "PutWhole": self._handler(self._put_whole, self._calls),
            "GetWhole": self._handler(self._get_whole, self._calls),
            "Feed": self._handler(self._feed, self._feeds),
            "Follow": self._handler(
                self._follow,
                self._followers,
                pb.FollowRequest.FromString,
                pb.View.SerializeToString,
            ),
        }
        ours = {m.name: self._unary(m) for m in _SCHEMA.methods if m.name not in streams} | streams
        health_forms = HealthRequest.FromString, HealthReply.SerializeToString
        health = {
            "Check": self._handler(self._check, self._health_calls, *health_forms),
            "Watch": self._handler(self._watch, self._health_calls, *health_forms),
        }
        request, reply = (
            reflection_pb2.ServerReflectionRequest,
            reflection_pb2.ServerReflectionResponse,
        )
        info = {
            "ServerReflectionInfo": self._handler(
                self._reflect, self._reflections, request.FromString, reply.SerializeToString
            )
        }
        services = {SERVICE_NAME: ours, HEALTH_NAME: health, reflection.SERVICE_NAME: info}
        known = (
            grpc.method_handlers_generic_handler(name, methods)
            for name, methods in services.items()
        )
        return (*known, _Others(self._handler(self._unknown, self._health_calls)))

    def _handler(
        self, behaviour: Behaviour, limiter: ConnectionLimiter, read: Any = None, write: Any = None
    ) -> grpc.RpcMethodHandler:
        """Return a handler for a method that is registered as streaming.

        `read` and `write` parse and serialise messages; None leaves them as bytes.
        """

        async def run(messages: Messages, context: Any) -> None:
            await self._served(
                Call(context, limiter, self._stall_s), lambda call: behaviour(call, messages)
            )

        return grpc.stream_stream_rpc_method_handler(run, read, write)

    async def _served(
        self, call: Call, behaviour: Callable[[Call], Awaitable[Result]]
    ) -> Result | None:
        """Run a call within its limits, and return its result.

        Return None if it failed; its status has the reason.
        """
        try:
            with call:
                return await behaviour(call)
        except Refused as error:
            _end(call, _CODES.get(error.code, grpc.StatusCode.UNKNOWN), str(error))
        except KVStoreError as error:
            _end(call, _CODES[status_code(error)], str(error))
        except DecodeError:
            log.info(
                "grpc: a call of %s is refused: its request is no message of the schema", call.peer
            )
            _end(
                call, grpc.StatusCode.INVALID_ARGUMENT, "a request that is no message of the schema"
            )
        except asyncio.CancelledError:
            if not call.ended_because:
                raise
            log.info("grpc: a call of %s was ended: %s", call.peer, call.ended_because)
            if call.untaken:
                raise  # gRPC takes no status before that reply was sent
            _end(
                call,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the call was ended: {call.ended_because}",
            )
        except grpc.aio.BaseError:
            raise  # gRPC's own: its connection is gone
        except Exception as error:
            log.exception("grpc: a call of %s failed", call.peer)
            _end(
                call,
                grpc.StatusCode.INTERNAL,
                f"failed inside the gateway ({type(error).__name__})",
            )
        return None

    def _unary(self, method: Any) -> grpc.RpcMethodHandler:
        """Return a handler for a method whose request is forwarded unparsed."""
        op = _OPS[method.input_type.full_name]

        async def run(request: bytes, context: Any) -> bytes | None:
            async def exchanged(call: Call) -> bytes:
                with self.upstream.lease(call.on_behalf) as connection:
                    return bytes(await connection.exchange(op, request, call.trace))

            return await self._served(Call(context, self._calls, self._stall_s), exchanged)

        return grpc.unary_unary_rpc_method_handler(run)

    # ---- transfers -----------------------------------------------------------------------

    async def _put(self, call: Call, messages: Messages) -> None:
        begin = part(await call.request(messages), "begin")
        with self.upstream.lease(call.on_behalf) as connection:
            reply, _ = await connection.begin("put", begin.SerializeToString(), call.trace)
            wanted = (
                list(pb.PutReply.FromString(bytes(reply)).verdicts).count(pb.WRITE)
                * begin.page_nbytes
            )
            if not wanted:
                connection.clean = True
                await call.write(delimited(_BEGIN, reply))
                return
            await connection.begin_payload(wanted)
            await call.write(delimited(_BEGIN, reply))
            call.limit_transfer("put", wanted)
            frame = await _send_chunks(wanted, messages, call, connection)
            commit = part(frame, "commit")
            call.untimed()
            reply = await connection.exchange("commit", commit.SerializeToString())
            await call.write(delimited(_COMMIT, reply))

    async def _get(self, call: Call, messages: Messages) -> None:
        request = await call.request(messages)
        with self.upstream.lease(call.on_behalf) as connection:
            reply, left = await connection.begin("get", request, call.trace)
            call.limit_transfer("get", left)
            await call.write(delimited(_GET_BEGIN, reply))
            connection.clean = not left
            if left:
                await self._send_frames(left, call, connection)

    async def _put_whole(self, call: Call, messages: Messages) -> None:
        begin, data, commit = put_parts(await call.request(messages))
        with self.upstream.lease(call.on_behalf) as connection:
            reply, _ = await connection.begin("put", begin, call.trace)
            verdicts = pb.PutReply.FromString(bytes(reply)).verdicts
            wanted = [i for i, verdict in enumerate(verdicts) if verdict == pb.WRITE]
            if wanted:
                page_nbytes, count = (
                    pb.PutRequest.FromString(bytes(begin)).page_nbytes,
                    len(verdicts),
                )
                if data.nbytes != count * page_nbytes:
                    raise InvalidRequest(
                        f"{data.nbytes} page bytes for {count} pages of {page_nbytes}"
                    )
                if len(wanted) < count:
                    data, commit = chosen(wanted, page_nbytes, data, commit)
                connection.add_payload(data)
                await connection.exchange("commit", commit)
            connection.clean = True
        await call.write(bytes(reply))

    async def _get_whole(self, call: Call, messages: Messages) -> None:
        request = await call.request(messages)
        with self.upstream.lease(call.on_behalf) as connection:
            reply, nbytes = await connection.begin("get", request, call.trace)
            if nbytes > FRAME_NBYTES:
                raise InvalidRequest(f"pages of {nbytes} bytes do not fit one message; call Get")
            frame = await connection.payload(nbytes) if nbytes else b""
            connection.clean = True
        await call.write(delimited(_GET_BEGIN, reply) + frame)

    async def _send_frames(self, left: int, call: Call, connection: NodeConnection) -> None:
        """Forward framed page bytes, receiving one frame while sending another."""
        coming = asyncio.ensure_future(connection.payload(min(left, FRAME_NBYTES)))
        try:
            while True:
                frame = await coming
                left -= len(frame)
                connection.clean = not left
                if left:
                    coming = asyncio.ensure_future(connection.payload(min(left, FRAME_NBYTES)))
                await call.write(frame)
                call.moved(len(frame))
                if not left:
                    return
        finally:
            _drop(coming)

    # ---- what the gateway answers itself -------------------------------------------------

    async def _admitted(self, call: Call, op: str) -> None:
        """Ask the node whether the caller may do `op`.

        Raises the node's error if not.
        """
        async with self._admitting:
            with self.upstream.lease(call.on_behalf) as connection:
                await connection.exchange("admit", pb.AdmitRequest(op=op).SerializeToString())

    async def _follow(self, call: Call, messages: Messages) -> None:
        call.stay_idle()
        await self._admitted(call, "follow")
        known = (await call.request(messages)).number
        call.stay_idle()
        call.limit(FOLLOW_S_MAX, f"a view is followed for at most {FOLLOW_S_MAX:g} s; follow again")
        async for view in self._state.watch_views(known):
            await call.write(view)

    async def _feed(self, call: Call, messages: Messages) -> None:
        """Poll the node, one reply after another; a caller that does not read is not waited for."""
        call.stay_idle()
        request = pb.FeedRequest.FromString(await call.request(messages))
        call.stay_idle()
        is_poll = request.wait_ms > 0
        if not is_poll:
            request.wait_ms = round(1000 * FEED_WAIT_S)
            call.limit(FEED_S_MAX, f"a feed lasts {FEED_S_MAX:g} s; continue from its last cursor")
        while True:
            with self.upstream.lease(call.on_behalf) as connection:
                asked = request.SerializeToString()
                reply = bytes(await connection.exchange("feed", asked, call.trace))
            await call.write(reply)
            if is_poll:
                return
            request.cursor = pb.FeedReply.FromString(reply).cursor

    async def _check(self, call: Call, messages: Messages) -> None:
        name = (await call.request(messages)).service
        try:
            status = self._state.health(name)
        except KeyError:
            return _end(call, grpc.StatusCode.NOT_FOUND, "the node has no service of this name")
        await call.write(status)

    async def _watch(self, call: Call, messages: Messages) -> None:
        name = (await call.request(messages)).service
        call.stay_idle()
        call.limit(
            HEALTH_WATCH_S_MAX, f"a watch lasts at most {HEALTH_WATCH_S_MAX:g} s; watch again"
        )
        try:
            async for status in self._state.watch_health(name):
                await call.write(status)
        except KeyError:
            _end(call, grpc.StatusCode.NOT_FOUND, "the node has no service of this name")

    async def _unknown(self, call: Call, messages: Messages) -> None:
        _end(call, grpc.StatusCode.UNIMPLEMENTED, "the node has no such method")

    async def _reflect(self, call: Call, messages: Messages) -> None:
        call.stay_idle()
        await self._admitted(call, "reflection")
        call.limit(
            REFLECTION_S_MAX,
            f"a reflection stream lasts at most {REFLECTION_S_MAX:g} s; open another",
        )
        async for message in messages:
            for reply in self._reflection.ServerReflectionInfo(iter([message]), None):
                await call.write(reply)


def part(frame: bytes | None, kind: str) -> Any:
    """Return the message of that kind in a PutFrame.

    Raises InvalidRequest if it holds another kind.
    """
    if frame is None:
        raise InvalidRequest(f"the put ended where a {kind} frame was expected")
    try:
        message = pb.PutFrame.FromString(frame)
    except DecodeError as error:
        raise InvalidRequest("a frame that is no PutFrame message") from error
    got = message.WhichOneof("frame")
    if got != kind:
        raise InvalidRequest(f"a {got} frame where a {kind} frame was expected")
    return getattr(message, kind)


def chosen(
    wanted: list[int], page_nbytes: int, data: memoryview, commit: memoryview
) -> tuple[memoryview, memoryview]:
    """Return the bytes of the wanted pages, and the commit of their leaves, serialised.

    Raises InvalidRequest if the commit has not the leaves of all pages.
    """
    leaves = pb.CommitRequest.FromString(bytes(commit)).leaves
    if len(leaves) * page_nbytes != data.nbytes:
        raise InvalidRequest(f"the leaves of {len(leaves)} pages for {data.nbytes} page bytes")
    pages = (data[i * page_nbytes : (i + 1) * page_nbytes] for i in wanted)
    only = pb.CommitRequest(leaves=[leaves[i] for i in wanted])
    return memoryview(b"".join(pages)), memoryview(only.SerializeToString())


async def _send_chunks(
    nbytes: int, messages: Messages, call: Call, connection: NodeConnection
) -> bytes | None:
    """Forward page bytes to the node: send a chunk while the next one is received.

    Return the frame after them.
    """
    sending: asyncio.Future[None] | None = None
    frame = await anext(messages, None)
    try:
        while nbytes:
            data = chunk_of(frame) if frame is not None else None
            if data is None:
                data = memoryview(part(frame, "chunk").data)
            if not data.nbytes:
                raise InvalidRequest(f"page bytes ended early: {nbytes} bytes are missing")
            if data.nbytes > nbytes:
                raise InvalidRequest(f"{data.nbytes - nbytes} page bytes more than announced")
            if sending is not None:
                await sending
            sending = asyncio.ensure_future(connection.send_payload(data))
            nbytes -= data.nbytes
            frame = await anext(messages, None)
            call.moved(data.nbytes)
        if sending is not None:
            await sending
        return frame
    finally:
        _drop(sending)


def _drop(future: "asyncio.Future[Any] | None") -> None:
    """Cancel a future, and ignore its result."""
    if future is not None:
        future.cancel()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())


class _Others(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The handler of all unknown methods."""

    def __init__(self, handler: grpc.RpcMethodHandler) -> None:
        self._handler = handler

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        return self._handler


def _end(call: Call, code: grpc.StatusCode, details: str) -> None:
    """Set the status with which a call ends when its handler returns.

    Not `abort`: gRPC keeps the exception that it raises, with its stack frames, and so the request.
    """
    call.context.set_code(code)
    call.context.set_details(details)
