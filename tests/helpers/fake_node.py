"""Fake nodes for clients: a gRPC service with chosen answers, and a scriptable bulk port."""

import socket
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc

from kvstore.config import PROTOCOL_VERSION
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb import kvstore_pb2_grpc as pb_grpc
from kvstore.transports.frames import FrameSocket, pack_fixed

Talk = Callable[[FrameSocket], None]
LIMITS = pb.Limits(
    batch_keys_max=64,
    batch_nbytes_max=1 << 20,
    page_nbytes_max=1 << 20,
    message_nbytes_max=2 << 20,
    pin_ttl_ms_max=1000,
)


class FakeNode(pb_grpc.KVStoreServicer):
    """A node that answers hello and lookups; each namespace is unknown until it is opened."""

    def __init__(self) -> None:
        self.bulk_port = 0
        self.shm_socket = ""
        self.version = PROTOCOL_VERSION
        self.opened: set[bytes] = set()
        self.calls: list[str] = []
        self.refuse: grpc.StatusCode | None = None
        self.hold: threading.Event | None = None  # if set, lookups wait for it
        server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_KVStoreServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        self.port = server.add_insecure_port("127.0.0.1:0")
        self.server = server
        self.address = f"127.0.0.1:{self.port}"
        server.start()

    def Hello(self, request: Any, context: Any) -> Any:
        self.calls.append("hello")
        if request.protocol_version != self.version:
            context.abort(
                grpc.StatusCode.UNIMPLEMENTED,
                f"client speaks another protocol, this node {self.version}",
            )
        return pb.HelloReply(
            protocol_version=PROTOCOL_VERSION,
            instance_id=b"fakenode",
            bulk_port=self.bulk_port,
            shm_socket=self.shm_socket,
            limits=LIMITS,
        )

    def OpenNamespace(self, request: Any, context: Any) -> Any:
        self.calls.append("open_namespace")
        self.opened.add(request.digest)
        return pb.OpenNamespaceReply(page_nbytes=4096)

    def Lookup(self, request: Any, context: Any) -> Any:
        self.calls.append("lookup")
        if self.hold is not None:
            self.hold.wait(30.0)
        if self.refuse is not None:
            context.abort(self.refuse, "refused by the test")
        if request.namespace not in self.opened:
            context.abort(grpc.StatusCode.NOT_FOUND, "unknown")
        return pb.LookupReply(
            present=[True] * len(request.prefix_hashes), prefix_pages=len(request.prefix_hashes)
        )


class BulkPort:
    """Accept bulk connections and run `talk(connection)` for each in its own thread."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.accepted: list[FrameSocket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            connection = FrameSocket(sock)
            connection.arm(5.0)
            self.accepted.append(connection)
            thread = threading.Thread(target=self._run, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _run(self, connection: FrameSocket) -> None:
        try:
            self._talk(connection)
        except OSError:
            pass  # the client hung up

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.accepted:
            connection.shutdown()
        for thread in self._threads:
            thread.join()
        for connection in self.accepted:
            connection.close()


ServeBulk = Callable[[Talk], BulkPort]


def scripted(*answers: bytes) -> Talk:
    """Return a talk that answers hello, then sends one of `answers` per request."""

    def talk(connection: FrameSocket) -> None:
        hello = pb.BulkReply(
            hello=pb.HelloReply(protocol_version=PROTOCOL_VERSION)
        ).SerializeToString()
        for answer in (pack_fixed(len(hello), 0) + hello, *answers):
            connection.recv_frame(1 << 20)
            connection.send(answer)

    return talk
