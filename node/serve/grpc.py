"""The gRPC wire, node side: the schema's service with health and reflection.

Unary calls go to the service as they are. Put and Get stream pages in chunks; each such call is a
session of its own, so a cancelled or broken call gives back all it held.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.checksum import CHUNK_NBYTES
from kvstore.config import MESSAGE_NBYTES_MAX
from kvstore.errors import InvalidRequest, KVStoreError, status_code
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb import kvstore_pb2_grpc as pb_grpc
from kvstore.wires.chunks import fill, split
from node.serve.service import Service
from node.serve.session import Session

log = logging.getLogger(__name__)
Frame = TypeVar("Frame")

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["KVStore"].full_name
DISK_NAME = "kvstore.Disk"  # health of the disk tier alone; unknown on a node without one


class GrpcServer:
    """Binds in the constructor; `start` begins to serve."""

    def __init__(self, host: str, port: int, service: Service, threads: int, stall_s: float) -> None:
        self._server = grpc.server(
            futures.ThreadPoolExecutor(threads, thread_name_prefix="grpc"),
            # Beyond this, calls are refused at once instead of queueing for a thread.
            maximum_concurrent_rpcs=4 * threads,
            options=[
                ("grpc.max_receive_message_length", MESSAGE_NBYTES_MAX),
                ("grpc.max_send_message_length", MESSAGE_NBYTES_MAX),
                ("grpc.so_reuseport", 0),  # a second node on the same port must fail, not share it
            ],
        )
        transfers = threading.BoundedSemaphore(max(1, threads * 3 // 4))
        self._stalls = StallWatcher(stall_s)
        servicer = Servicer(service, transfers, self._stalls)
        pb_grpc.add_KVStoreServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        try:
            self.port: int = self._server.add_insecure_port(f"{'[' + host + ']' if ':' in host else host}:{port}")
        except RuntimeError as error:
            raise OSError(f"gRPC port {port} on {host} can not be bound; is another node running?") from error

    def start(self) -> None:
        self._stalls.start()
        self._server.start()
        self.set_serving(True)

    def set_serving(self, serving: bool) -> None:
        """What the standard health service answers, for the whole server and for KVStore."""
        for name in ("", SERVICE_NAME):
            self._set_health(name, serving)

    def set_disk_healthy(self, healthy: bool) -> None:
        """A failed disk does not make the node unhealthy: RAM serves on. It has a name of its own."""
        self._set_health(DISK_NAME, healthy)

    def _set_health(self, name: str, good: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if good else health_pb2.HealthCheckResponse.NOT_SERVING
        self._health.set(name, status)

    def stop(self, drain_s: float) -> None:
        self._server.stop(drain_s).wait()
        self._stalls.stop()


class Servicer(pb_grpc.KVStoreServicer):
    """Translates between gRPC's calling convention and the service's."""

    def __init__(self, service: Service, transfers: threading.BoundedSemaphore, stalls: "StallWatcher") -> None:
        self._service = service
        self._transfers = transfers
        self._stalls = stalls

    def _unary(self, op: str, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return self._service.call(op, request)
        except KVStoreError as error:
            context.abort(status_code(error), str(error))

    def Hello(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("hello", request, context)

    def OpenNamespace(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("open_namespace", request, context)

    def ListNamespaces(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("list_namespaces", request, context)

    def Lookup(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("lookup", request, context)

    def Verify(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("verify", request, context)

    def Remove(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("remove", request, context)

    def Pin(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("pin", request, context)

    def Unpin(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("unpin", request, context)

    def List(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("list", request, context)

    def Stat(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("stat", request, context)

    def NodeStatus(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("node_status", request, context)

    def RemoveNamespace(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("remove_namespace", request, context)

    def Flush(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("flush", request, context)

    def Scrub(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("scrub", request, context)

    def Recover(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("recover", request, context)

    def Put(self, frames: Iterator[pb.PutFrame], context: grpc.ServicerContext) -> Iterator[pb.PutFrameReply]:
        yield from self._transfer(context, lambda session, watch: self._put(session, watch, frames))

    def Get(self, request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[pb.GetFrame]:
        yield from self._transfer(context, lambda session, watch: self._get(session, watch, request))

    def _transfer(
        self, context: grpc.ServicerContext, run: Callable[[Session, "StallWatch"], Iterator[Frame]]
    ) -> Iterator[Frame]:
        """One streaming call: bounded in number, a session of its own, cancelled if it stalls."""
        if not self._transfers.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "all transfer threads are busy (grpc_threads)")
        watch = StallWatch(context, self._stalls)
        try:
            with self._service.sessions.open() as session:
                yield from run(session, watch)
        except KVStoreError as error:
            context.abort(status_code(error), str(error))
        finally:
            self._transfers.release()
            watch.close()

    def _put(self, session: Session, watch: "StallWatch", frames: Iterator[pb.PutFrame]) -> Iterator[pb.PutFrameReply]:
        begin = _frame(frames, "begin")
        reply, slots = self._service.begin_put(session, begin)
        yield pb.PutFrameReply(begin=reply)
        if not slots:
            return
        fill(slots, _chunks(frames, watch))
        yield pb.PutFrameReply(commit=self._service.commit_put(session, _frame(frames, "commit")))

    def _get(self, session: Session, watch: "StallWatch", request: pb.GetRequest) -> Iterator[pb.GetFrame]:
        reply, pieces = self._service.begin_get(session, request)
        yield pb.GetFrame(begin=reply)
        for data in split(pieces):
            yield pb.GetFrame(chunk=pb.PageChunk(data=data))
            watch.moved(len(data))


def _frame(frames: Iterator[pb.PutFrame], kind: str) -> Any:
    frame = next(frames, None)
    if frame is None:
        raise InvalidRequest(f"the put ended where a {kind} frame was expected")
    got = frame.WhichOneof("frame")
    if got != kind:
        raise InvalidRequest(f"a {got} frame where a {kind} frame was expected")
    return getattr(frame, kind)


def _chunks(frames: Iterator[pb.PutFrame], watch: "StallWatch") -> Iterator[bytes]:
    while True:
        data = _frame(frames, "chunk").data
        watch.moved(len(data))
        yield data


class StallWatch:
    """Cancels streaming calls that move nothing for `stall_s`, so that a client that never reads or
    never sends can not keep a thread and slots. A deadline of the client's may end a call sooner."""

    def __init__(self, context: grpc.ServicerContext, stalls: "StallWatcher") -> None:
        self.context = context
        self._stalls = stalls
        self._moved_nbytes = 0
        self.moved_at = time.monotonic()
        stalls.add(self)

    def moved(self, nbytes: int) -> None:
        """Only so many bytes count as progress: one of a byte now and then must not keep slots."""
        self._moved_nbytes += nbytes
        if self._moved_nbytes >= CHUNK_NBYTES:
            self._moved_nbytes = 0
            self.moved_at = time.monotonic()

    def close(self) -> None:
        self._stalls.discard(self)


class StallWatcher:
    """One thread that looks at all running calls, so that a chunk costs a call no more than a clock."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._running: set[StallWatch] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="grpc-stalls", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, watch: StallWatch) -> None:
        with self._lock:
            self._running.add(watch)

    def discard(self, watch: StallWatch) -> None:
        with self._lock:
            self._running.discard(watch)

    def _watch(self) -> None:
        while not self._stopped.wait(self._stall_s / 4):
            limit = time.monotonic() - self._stall_s
            with self._lock:
                stalled = [watch for watch in self._running if watch.moved_at < limit]
            for watch in stalled:
                log.info("grpc: a transfer moved nothing for %g s and is cancelled", self._stall_s)
                watch.context.cancel()

    def stop(self) -> None:
        self._stopped.set()
