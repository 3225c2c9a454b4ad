"""The gRPC wire, node side: the schema's service with health and reflection.

One event loop in one thread of its own; short requests are served there, long ones and what may wait for
the disk in threads beside it. Put and Get stream pages in chunks; each such call is a session of its own, so a
cancelled or broken call gives back all it held.
"""

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent import futures
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvstore.errors import KVStoreError
from kvstore.messages import chunk_frame
from kvstore.pb import kvstore_pb2 as pb
from kvstore.wires.chunks import runs
from kvstore.wires.status import status_code
from node.garbage import refused
from node.serve.calls import Call, address_of
from node.serve.grpc_connections import GrpcConnections
from node.serve.grpc_options import server_options
from node.serve.grpc_stop import stopped
from node.serve.grpc_tls import server_credentials
from node.serve.health import SERVICE_NAME as HEALTH_NAME
from node.serve.health import Health, Reply, Request
from node.serve.knocks import Knocks
from node.serve.limits import (
    FOLLOW_S_MAX,
    FOLLOWERS_MAX,
    HEALTH_CALLS_MAX,
    HEALTH_WATCH_S_MAX,
    LONG_CALLS,
    REFLECTION_S_MAX,
    REFLECTION_STREAMS_MAX,
    REQUEST_NBYTES_FACTOR,
    TRANSFER_NBYTES_PER_S_MIN,
    Budget,
    Places,
    cap,
)
from node.serve.put_frames import fill, part
from node.serve.service import Service
from node.serve.session import Session
from node.serve.views import Views
from node.tls import Certificates

log = logging.getLogger(__name__)

_SCHEMA = pb.DESCRIPTOR.services_by_name["KVStore"]
SERVICE_NAME: str = _SCHEMA.full_name
DISK_NAME = "kvstore.Disk"  # health of the disk tier alone; unknown on a node without one
# A request is named by its field in BulkRequest, on every wire.
_OPS = {field.message_type.full_name: field.name for field in pb.BulkRequest.DESCRIPTOR.fields if field.message_type}

# A larger request may take more than 1 ms, in which the loop would answer nobody: a stat takes 10 to 20 us a key.
LOOP_NBYTES_MAX = 1 << 10
STOP_S_MAX = 1.0  # what calls may take to end after they are cancelled

Messages = AsyncIterator[Any]
Behaviour = Callable[[Call, Messages], Awaitable[Any]]


class GrpcServer:
    """Binds in the constructor; `start` begins to serve."""

    def __init__(
        self,
        host: str,
        port: int,
        service: Service,
        threads: int,
        stall_s: float,
        connections_max: int,
        certificates: Certificates | None = None,
    ) -> None:
        """`certificates`: None: without TLS."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grpc", daemon=True)
        self._thread.start()
        self._health = Health(self._loop)
        self._views = Views(self._loop, service.membership)
        self._servicer = Servicer(service, self._health, self._views, threads, stall_s)
        where = f"{'[' + host + ']' if ':' in host else host}:{port}"
        try:
            self.port: int = self._run(self._bind(where, server_options(connections_max), certificates))
        except RuntimeError as error:
            self._end_loop()
            raise OSError(f"gRPC port {port} on {host} can not be bound; is another node running?") from error
        what = cap("gRPC connections", connections_max, "use fewer channels")
        self._connections = GrpcConnections(self.port, what, tls=certificates is not None)
        self._servicer.hang_up = lambda name: self._connections.hang_up(*address_of(name))
        self._servicer.knocks.ban = self._connections.bans.ban

    async def _bind(self, where: str, options: list[tuple[str, int]], certificates: Certificates | None) -> int:
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers(self._servicer.handlers())
        if certificates is None:
            return int(self._server.add_insecure_port(where))
        return int(self._server.add_secure_port(where, server_credentials(certificates)))

    def _run(self, coroutine: Any, timeout_s: float | None = None) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def start(self) -> None:
        self._run(self._server.start())
        self._connections.start()
        self.set_serving(True)

    def set_serving(self, serving: bool) -> None:
        """What the standard health service answers, for the whole server and for KVStore."""
        for name in ("", SERVICE_NAME):
            self._health.set(name, serving)

    @property
    def serving(self) -> bool:
        """What the health service answers, or would if its loop turned."""
        return self._health.serving

    def set_disk_healthy(self, healthy: bool) -> None:
        """A failed disk does not make the node unhealthy: RAM serves on. It has a name of its own."""
        self._health.set(DISK_NAME, healthy)

    def stop(self, drain_s: float) -> None:
        """Running calls have `drain_s`, then they are cancelled; one that does not notice is left behind."""
        self._connections.stop()
        try:
            self._run(self._servicer.end_idle())
            self._run(stopped(self._server, drain_s, lambda: self._servicer.call_count), drain_s + STOP_S_MAX)
        except futures.TimeoutError:
            log.warning("grpc: calls that were cancelled have not ended after %g s", STOP_S_MAX)
        self._servicer.close()
        self._end_loop()

    def _end_loop(self) -> None:
        self._views.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Servicer:
    """Translates between gRPC's calling convention and the service's.

    Every method is registered as one that takes a stream, so that a call that sends no request is ours to
    end; on the wire there is no difference.
    """

    def __init__(self, service: Service, health: Health, views: Views, threads: int, stall_s: float) -> None:
        self._service = service
        self._health = health
        self._views = views
        self._stall_s = stall_s
        remedy = "make fewer at a time"
        quoted = service.tenants.quoted("connections", "connections")
        self._calls = Places(cap("gRPC calls", 4 * threads, f"{remedy}, or raise grpc_threads"), quoted)
        self.knocks = Knocks()
        self._health_calls = Places(cap("health calls", HEALTH_CALLS_MAX, remedy))
        self._followers = Places(cap("followers of views", FOLLOWERS_MAX, "make fewer clients, and share them"))
        self._reflections = Places(cap("reflection streams", REFLECTION_STREAMS_MAX, remedy))
        self._places = (self._calls, self._health_calls, self._followers, self._reflections)
        transfers = max(1, threads * 3 // 4)
        self._transfers = Budget(cap("gRPC transfers", transfers, f"{remedy}, or raise grpc_threads"))
        # Of them, those that may wait for the disk or for other members: however long these hang, the others are left
        # for pages in RAM.
        self._durable = Budget(cap("gRPC durable puts", max(1, transfers // 2), f"{remedy}, or raise grpc_threads"))
        self._loads = Budget(cap("gRPC gets from disk", max(1, transfers * 3 // 4), "make fewer at a time"))
        # Neither pool has a queue: what it runs is counted before.
        self._transfer_threads = futures.ThreadPoolExecutor(transfers, "grpc-transfer")
        self._long_threads = futures.ThreadPoolExecutor(sum(LONG_CALLS.values()), "grpc-long")
        large = cap(f"gRPC calls over {LOOP_NBYTES_MAX >> 10} KiB", 2 * threads, f"{remedy}, or raise grpc_threads")
        self._large = Budget(large)  # half of all calls, so that a peer with its share of them can make small ones
        self._large_thread = futures.ThreadPoolExecutor(1, "grpc-large")
        self._turn = asyncio.Lock()  # of that thread
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()  # of each peer's
        self.hang_up: Callable[[str], None] = lambda name: None  # ends the connection of gRPC's peer `name`
        names = (SERVICE_NAME, HEALTH_NAME, reflection.SERVICE_NAME)
        self._reflection = reflection.ReflectionServicer(names)

    def close(self) -> None:
        for threads in (self._transfer_threads, self._long_threads, self._large_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def call_count(self) -> int:
        return sum(places.count for places in self._places)

    async def end_idle(self) -> None:
        """Calls that wait, for a request or for something to tell, do not delay a stop."""
        for places in self._places:
            places.close()
        self.knocks.close()

    # ---- how methods are called ----------------------------------------------------------

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        # Frames with page bytes stay in their wire form: see `chunk_frame`.
        streams = {
            "Put": self._handler("put", self._put, self._calls, None, pb.PutFrameReply.SerializeToString),
            "Get": self._handler("get", self._get, self._calls, None, None),
            "Follow": self._handler(
                "follow", self._follow, self._followers, pb.FollowRequest.FromString, pb.View.SerializeToString
            ),
        }
        ours = {m.name: self._unary(m) for m in _SCHEMA.methods if m.name not in streams} | streams
        health_forms = Request.FromString, Reply.SerializeToString
        health = {
            "Check": self._handler("", self._check, self._health_calls, *health_forms),
            "Watch": self._handler("", self._watch, self._health_calls, *health_forms),
        }
        request, reply = reflection_pb2.ServerReflectionRequest, reflection_pb2.ServerReflectionResponse
        info = {
            "ServerReflectionInfo": self._handler(
                "reflection", self._reflect, self._reflections, request.FromString, reply.SerializeToString
            )
        }
        services = {SERVICE_NAME: ours, HEALTH_NAME: health, reflection.SERVICE_NAME: info}
        known = (grpc.method_handlers_generic_handler(name, methods) for name, methods in services.items())
        return (*known, _Others(self._handler("", self._unknown, self._health_calls, None, None)))

    def _handler(self, op: str, behaviour: Behaviour, places: Places, read: Any, write: Any) -> grpc.RpcMethodHandler:
        """`op`: empty for what everybody may ask. `read` and `write`: from and to the wire form; None leaves it."""

        async def run(messages: Messages, context: Any) -> Any:
            call = Call(context, places, self._stall_s)
            try:
                if not self.knocks.welcome(call, self._service.gate, op):
                    await self.knocks.wait()
                    self.hang_up(call.name)
                    return _end(call, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls without a credential")
                with call.timed(self._service.traffic, op), call.traced(op), call:
                    return await behaviour(call, messages)
            except KVStoreError as error:
                _end(call, status_code(error), str(error))
            except DecodeError:
                log.info("grpc: a call of %s is refused: its request is no message of the schema", call.peer)
                _end(call, grpc.StatusCode.INVALID_ARGUMENT, "a request that is no message of the schema")
            except asyncio.CancelledError:
                if not call.ended_because:
                    raise
                log.info("grpc: a call of %s was ended: %s", call.peer, call.ended_because)
                if call.writing:
                    self.hang_up(call.name)  # a status would wait behind the reply, in memory
                    raise
                _end(call, grpc.StatusCode.RESOURCE_EXHAUSTED, f"the call was ended: {call.ended_because}")
            except grpc.aio.BaseError:
                raise  # gRPC's own: its connection is gone
            except Exception as error:
                log.exception("grpc: a call of %s failed", call.peer)
                _end(call, grpc.StatusCode.INTERNAL, f"failed inside the node ({type(error).__name__})")

        return grpc.stream_stream_rpc_method_handler(run, read, write)

    def _unary(self, method: Any) -> grpc.RpcMethodHandler:
        op = _OPS[method.input_type.full_name]
        long = op in LONG_CALLS

        async def answer(call: Call, data: bytes) -> Any:
            with self._service.forms.lent(call.peer, op, len(data)):
                if long:
                    return await call.in_thread(self._long_threads, self._service.answer, op, data, call.caller)
                if len(data) <= LOOP_NBYTES_MAX:
                    return self._service.answer(op, data, call.caller)
                with self._large.lent(call.peer):
                    return await self._in_turn(call, op, data)

        async def behaviour(call: Call, messages: Messages) -> None:
            await call.write(await answer(call, await call.request(messages)))

        reply = getattr(pb, method.output_type.name)
        return self._handler(op, behaviour, self._calls, None, reply.SerializeToString)

    async def _in_turn(self, call: Call, op: str, data: bytes) -> Any:
        """One at a time beside the loop. Of each peer one call waits for that, and its others for that one, so
        peers take turns however many calls they have."""
        async with self._turns.setdefault(call.peer, asyncio.Lock()), self._turn:
            return await call.in_thread(self._large_thread, self._service.answer, op, data, call.caller)

    # ---- transfers -----------------------------------------------------------------------

    async def _put(self, call: Call, messages: Messages) -> None:
        frame = await call.request(messages)  # frames are in their wire form
        with self._service.forms.lent(call.peer, "put", len(frame)):
            begin = part(frame, "begin")
            waits = self._durable.lent(call.peer, int(begin.durable or begin.ack_all))
            with waits, self._transfers.lent(call.peer), self._service.sessions.open(call.caller) as session:
                await self._put_pages(call, messages, session, begin)

    async def _put_pages(self, call: Call, messages: Messages, session: Session, begin: Any) -> None:
        reply, slots = await self._in_thread(call, self._service.begin_put, session, begin)
        await call.write(pb.PutFrameReply(begin=reply))
        if not slots:
            return
        self._limit(call, "put", sum(slot.nbytes for slot in slots))
        await fill(slots, messages, call)
        frame = await anext(messages, None)
        with self._service.forms.lent(call.peer, "commit", len(frame or b"")):
            commit = part(frame, "commit")
            call.untimed()
            reply = await self._in_thread(call, self._service.commit_put, session, commit)
        await call.write(pb.PutFrameReply(commit=reply))

    async def _get(self, call: Call, messages: Messages) -> None:
        data = await call.request(messages)
        with (
            self._service.forms.lent(call.peer, "get", len(data)),
            self._transfers.lent(call.peer),
            contextlib.ExitStack() as more,
            self._service.sessions.open(call.caller) as session,
        ):
            session.loading = lambda: self._loads.lent(call.peer)
            nbytes, reply, pieces = await self._in_thread(call, self._begin_get, session, (data, more))
            self._limit(call, "get", nbytes)
            await call.write(pb.GetFrame(begin=reply).SerializeToString())
            for run in runs(pieces):
                frame = chunk_frame(run)
                await call.write(frame)
                call.moved(len(frame))

    def _begin_get(self, session: Session, request: tuple[bytes, contextlib.ExitStack]) -> Any:
        """`more` gives back what the parsed request takes of the budget."""
        data, more = request
        give = self._service.requests.give
        parsed = self._service.forms.parsed(
            "get", data, session.peer, lambda took: more.callback(give, session.peer, took)
        )
        return self._service.begin_get(session, parsed)

    async def _in_thread(self, call: Call, function: Any, session: Session, request: Any) -> Any:
        """It may read pages from the disk, or wait until they are safe there."""
        return await call.in_thread(self._transfer_threads, function, session, request)

    def _limit(self, call: Call, op: str, nbytes: int) -> None:
        seconds = nbytes / TRANSFER_NBYTES_PER_S_MIN + self._stall_s
        call.limit(seconds, f"a {op} of {nbytes} bytes was not over after {seconds:.1f} s")
        call.watch_stalls()

    # ---- views, health and reflection -----------------------------------------------------------

    async def _follow(self, call: Call, messages: Messages) -> None:
        self._service.gate.admit("follow", None, call.caller)
        known = (await call.request(messages)).number
        call.stay_idle()
        call.limit(FOLLOW_S_MAX, f"a view is followed for at most {FOLLOW_S_MAX:g} s; follow again")
        async for view in self._views.watch(known):
            await call.write(view)

    async def _check(self, call: Call, messages: Messages) -> None:
        name = (await call.request(messages)).service
        try:
            status = self._health.status(name)
        except KeyError:
            return _end(call, grpc.StatusCode.NOT_FOUND, "the node has no service of this name")
        await call.write(status)

    async def _watch(self, call: Call, messages: Messages) -> None:
        name = (await call.request(messages)).service
        call.stay_idle()
        call.limit(HEALTH_WATCH_S_MAX, f"a watch lasts at most {HEALTH_WATCH_S_MAX:g} s; watch again")
        try:
            async for status in self._health.watch(name):
                await call.write(status)
        except KeyError:
            _end(call, grpc.StatusCode.NOT_FOUND, "the node has no service of this name")

    async def _unknown(self, call: Call, messages: Messages) -> None:
        _end(call, grpc.StatusCode.UNIMPLEMENTED, "the node has no such method")

    async def _reflect(self, call: Call, messages: Messages) -> None:
        self._service.gate.admit("reflection", None, call.caller)
        call.stay_idle()
        call.limit(REFLECTION_S_MAX, f"a reflection stream lasts at most {REFLECTION_S_MAX:g} s; open another")
        async for message in messages:
            for reply in self._reflection.ServerReflectionInfo(iter([message]), None):
                await call.write(reply)


class _Others(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Methods that nobody has."""

    def __init__(self, handler: grpc.RpcMethodHandler) -> None:
        self._handler = handler

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        return self._handler


def _end(call: Call, code: grpc.StatusCode, said: str) -> None:
    """The status with which a call ends when its handler returns. Not `abort`: gRPC keeps the error that it
    raises, which keeps the frames that it went through, and they the request."""
    call.context.set_code(code)
    call.context.set_details(said)
    refused(call.request_nbytes * REQUEST_NBYTES_FACTOR)
