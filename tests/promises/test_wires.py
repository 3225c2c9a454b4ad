"""Compatibility over gRPC and shared memory with protocol N, whose messages are in
golden/wires-N.json: the old client with today's node, and the old node with today's client.

test_conversation.py does the same for bulk.
"""

import concurrent.futures
import contextlib
import fcntl
import json
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from conversation import unlike
from wires import (
    CALL_S,
    FIXED,
    KEYS,
    PAGE_NBYTES,
    PAGES,
    SETTINGS,
    SPACE,
    receive_frame,
    send_frame,
    talk,
)

from kvstore import Client, ClientConfig
from kvstore.config import speaks
from kvstore.pb import kvstore_pb2 as pb
from node.config import NodeConfig
from node.server import Node

GOLDEN = Path(__file__).parents[1] / "golden"
RECORDED = {
    version: json.loads((GOLDEN / f"wires-{version}.json").read_text()) for version in (3, 4)
}
VERSIONS = [version for version in RECORDED if speaks(version)]
METHODS = pb.DESCRIPTOR.services_by_name["KVStore"].methods_by_name
UNIX = (socket.AF_UNIX, socket.SOCK_STREAM)


def reply_type(method: str) -> Any:
    return getattr(pb, METHODS[method].output_type.name)


def header_of(frame: bytes) -> bytes:
    """Return the header of a frame, which has no payload on this wire."""
    _, _, _, header_nbytes, payload_nbytes = FIXED.unpack(frame[: FIXED.size])
    assert (len(frame), payload_nbytes) == (FIXED.size + header_nbytes, 0)
    return frame[FIXED.size :]


@pytest.fixture
def today(tmp_path: Path) -> Iterator[Node]:
    node = Node(NodeConfig(**SETTINGS, shm_socket=str(tmp_path / "today.sock")))
    node.start()
    yield node
    node.stop()


def test_recordings_have_supported_versions_and_both_wires() -> None:
    assert VERSIONS, "no recording has a supported protocol"
    for version in VERSIONS:
        assert {name for name, _, _ in RECORDED[version]["grpc"]["calls"]} >= {
            "Hello",
            "Put",
            "Get",
            "Remove",
        }
        assert [fds for _, fds, _ in RECORDED[version]["shm"]["frames"]][:3] == [1, 1, 0]


@pytest.mark.parametrize("version", VERSIONS)
def test_old_grpc_client_gets_the_recorded_replies(today: Node, version: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{today.grpc.port}") as channel:
        for method, requests, replies in RECORDED[version]["grpc"]["calls"]:
            call = cast("Callable[..., Any]", channel.stream_stream(f"/kvstore.KVStore/{method}"))
            answers = list(
                call(iter([bytes.fromhex(request) for request in requests]), timeout=CALL_S)
            )
            assert (method, len(answers)) == (method, len(replies))
            if method == "Hello":  # its values differ between nodes
                continue
            for was, now in zip(replies, answers, strict=True):
                kind = reply_type(method)
                assert (
                    method,
                    unlike(kind.FromString(bytes.fromhex(was)), kind.FromString(now)),
                ) == (method, [])


@pytest.mark.parametrize("version", VERSIONS)
def test_old_shm_client_gets_the_recorded_replies(
    today: Node, version: int, tmp_path: Path
) -> None:
    """An old shared-memory client gets the recorded replies.

    It maps the arena of the hello, writes at the offsets of a put, and reads at those of a get.
    """
    asked = pb.BulkRequest()
    offsets: list[int] = []
    with contextlib.ExitStack() as ends:
        sock = ends.enter_context(socket.socket(*UNIX))
        sock.settimeout(CALL_S)
        sock.connect(str(tmp_path / "today.sock"))
        pidfd = os.pidfd_open(os.getpid())
        ends.callback(os.close, pidfd)
        arena: Any = None
        for name, fds, frame in RECORDED[version]["shm"]["frames"]:
            if name == "client":
                asked = pb.BulkRequest.FromString(header_of(bytes.fromhex(frame)))
                if asked.WhichOneof("op") == "commit":
                    for offset, page in zip(offsets, PAGES, strict=True):
                        arena[offset : offset + PAGE_NBYTES] = page
                send_frame(sock, bytes.fromhex(frame), [pidfd] * fds)
                continue
            now, came = receive_frame(sock) or pytest.fail("the node hung up")
            assert (now[:3], len(came)) == (b"KV" + bytes([version]), fds)
            was, reply = (
                pb.BulkReply.FromString(header_of(data)) for data in (bytes.fromhex(frame), now)
            )
            op = was.WhichOneof("op")
            assert reply.WhichOneof("op") == op, reply
            if op == "hello":
                arena = ends.enter_context(mmap.mmap(came[0], reply.hello.arena_nbytes))
                os.close(came[0])
                continue
            assert (op, unlike(was, reply)) == (op, [])
            if op == "put":
                offsets = list(reply.put.offsets)
            elif op == "get":
                assert [arena[at : at + PAGE_NBYTES] for at in reply.get.offsets] == PAGES


class OldNode(grpc.GenericRpcHandler):
    """An old node of protocol `version` that sends the recorded replies of each method in order."""

    def __init__(self, version: int, wire: str, path: str) -> None:
        self.version = version
        self.took: list[bytes] = []  # received page bytes
        self.shm_ops: list[str] = []
        self._path = path
        self._calls: dict[str, list[list[bytes]]] = {}
        for method, _, replies in RECORDED[version][wire]["calls"]:
            self._calls.setdefault(method, []).append([bytes.fromhex(reply) for reply in replies])
        self._frames: dict[str, list[bytes]] = {}
        for name, _, frame in RECORDED[version][wire]["frames"]:
            if name == "node":
                op = str(pb.BulkReply.FromString(header_of(bytes.fromhex(frame))).WhichOneof("op"))
                self._frames.setdefault(op, []).append(bytes.fromhex(frame))

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method.rpartition("/")[2]
        if method not in self._calls:
            return None  # UNIMPLEMENTED: it is newer than this node

        def answer(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            first = next(requests)
            if method == "Hello":
                spoken = pb.HelloRequest.FromString(first).protocol_version
                if spoken not in (0, self.version):  # as nodes of protocol 3 did
                    message = f"client speaks protocol {spoken}, this node {self.version}"
                    context.abort(grpc.StatusCode.UNIMPLEMENTED, message)
                hello = pb.HelloReply.FromString(self._calls[method][0][0])
                hello.shm_socket = self._path
                yield hello.SerializeToString()
                return
            begin, *rest = self._calls[method].pop(0)
            yield begin
            if method == "Put":
                frames = [pb.PutFrame.FromString(request) for request in requests]
                self.took.append(b"".join(frame.chunk.data for frame in frames))
            yield from rest

        return grpc.stream_stream_rpc_method_handler(answer)

    def serve_shm(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            frame = receive_frame(sock)
            assert frame is not None
            header, fds = frame
            assert (header[2], len(fds)) == (self.version, 1), "the first frame has no pidfd"
            os.close(fds[0])
            hello = self._frames["hello"].pop(0)
            arena_nbytes = pb.BulkReply.FromString(header_of(hello)).hello.arena_nbytes
            memory = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
            os.ftruncate(memory, arena_nbytes)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            with mmap.mmap(memory, arena_nbytes) as arena:
                send_frame(sock, hello, [memory])
                os.close(memory)
                while frame := receive_frame(sock):
                    self._answer_frame(sock, frame[0], arena)

    def _answer_frame(self, sock: socket.socket, frame: bytes, arena: mmap.mmap) -> None:
        assert frame[2] == self.version
        op = str(pb.BulkRequest.FromString(header_of(frame)).WhichOneof("op"))
        self.shm_ops.append(op)
        if op == "release":
            return
        reply = self._frames[op].pop(0)
        recorded_reply = pb.BulkReply.FromString(header_of(reply))
        if op == "put":
            self._reserved = list(recorded_reply.put.offsets)
        elif op == "commit":
            self.took.append(b"".join(arena[at : at + PAGE_NBYTES] for at in self._reserved))
        elif op == "get":
            for at, page in zip(recorded_reply.get.offsets, PAGES, strict=True):
                arena[at : at + PAGE_NBYTES] = page
        send_frame(sock, reply, [])


@pytest.mark.parametrize("wire", ["grpc", "shm"])
@pytest.mark.parametrize("version", VERSIONS)
def test_client_understands_an_old_node(version: int, wire: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "then.sock")
    node = OldNode(version, wire, path)
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((node,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with contextlib.ExitStack() as ends:
        ends.callback(lambda: server.stop(0.0).wait())
        listener = ends.enter_context(socket.socket(*UNIX))
        listener.bind(path)
        listener.listen(1)
        serving = threading.Thread(target=node.serve_shm, args=(listener,), daemon=True)
        if wire == "shm":
            serving.start()
        config = ClientConfig(
            address=f"127.0.0.1:{port}",
            wire=wire,
            connect_timeout_s=CALL_S / 2,
            timeout_s=CALL_S,
            connections_max=1,
        )
        with Client(config) as client:
            talk(client)
            assert (client.wire_name, client.stats.corrupt_pages) == (wire, 0)
        if wire == "shm":
            serving.join(CALL_S)
            assert not serving.is_alive()
    assert node.took == [b"".join(PAGES)]
    if wire == "shm":
        recorded = [
            pb.BulkRequest.FromString(header_of(bytes.fromhex(frame)))
            for frame in _of_client(version)
        ]
        assert node.shm_ops == [request.WhichOneof("op") for request in recorded][1:]


def _of_client(version: int) -> list[str]:
    return [frame for name, _, frame in RECORDED[version]["shm"]["frames"] if name == "client"]


def test_namespaces_in_recordings_have_todays_digest() -> None:
    for version in VERSIONS:
        frames = [
            pb.BulkRequest.FromString(header_of(bytes.fromhex(frame)))
            for frame in _of_client(version)
        ]
        put = next(request.put for request in frames if request.WhichOneof("op") == "put")
        assert (put.namespace, list(put.prefix_hashes)) == (SPACE.digest, KEYS)
