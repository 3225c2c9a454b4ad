"""Compatibility with release 0.1 over bulk: golden/protocol-4.json has its recorded frames.

Today's node serves the old client, and today's client understands the old node.
"""

import concurrent.futures
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from conversation import FIXED, KEYS, PAGES, SPACE, Caller, unlike
from told import SMALL

from kvstore import Client, ClientConfig, PutOutcome
from kvstore.config import speaks
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreServicer, add_KVStoreServicer_to_server
from kvstore.transports.frames import pack_fixed
from node.config import NodeConfig
from node.server import Node

VERSION = 4  # the protocol version of the recording
RECORDED = json.loads(
    (Path(__file__).parents[1] / "golden" / f"protocol-{VERSION}.json").read_text()
)
ORDER: tuple[str, ...] = (
    "hello",
    "unknown",
    "open",
    "miss",
    "put",
    "commit",
    "put again",
    "lookup",
    "get",
    "ranges",
    "stat",
    "verify",
)
ORDER += ("pin", "unpin", "list", "namespaces", "status", "sweep", "remove", "remove all")

pytestmark = pytest.mark.skipif(
    not speaks(VERSION), reason=f"protocol {VERSION} is no longer supported"
)


def reply(name: str) -> pb.BulkReply:
    return pb.BulkReply.FromString(bytes.fromhex(RECORDED[name]["reply"]))


def test_old_client_gets_the_recorded_replies() -> None:
    assert set(ORDER) == set(RECORDED)
    node = Node(NodeConfig(**SMALL))
    node.start()
    try:
        caller = Caller(node.bulk.port)
        for name in ORDER:
            version, header, payload = caller.ask(
                bytes.fromhex(RECORDED[name]["request"]), RECORDED[name]["data"]
            )
            now = pb.BulkReply.FromString(header)
            assert (name, version, now.WhichOneof("op")) == (
                name,
                VERSION,
                reply(name).WhichOneof("op"),
            )
            if name not in ("hello", "status"):  # values that differ between nodes
                assert (name, unlike(reply(name), now)) == (name, [])
            if name == "get":
                assert payload == b"".join(PAGES)
            elif name == "ranges":
                assert payload == b"".join(page[512:768] for page in PAGES)
        caller.close()
    finally:
        node.stop()


class OldNode(KVStoreServicer):
    """An old node that sends the recorded reply of each operation and records the requests."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.asked: list[tuple[int, str]] = []
        self.took = b""

    def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloReply:
        hello = reply("hello").hello
        hello.bulk_port, hello.shm_socket = self.listener.getsockname()[1], ""
        return hello

    def OpenNamespace(
        self, request: pb.OpenNamespaceRequest, context: Any
    ) -> pb.OpenNamespaceReply:
        return reply("open").open_namespace

    def serve(self) -> None:
        sock, _ = self.listener.accept()
        names = {"open_namespace": "open", "list_namespaces": "namespaces", "node_status": "status"}
        with sock, sock.makefile("rb") as stream:
            while fixed := stream.read(FIXED.size):
                _, version, _, header_nbytes, payload_nbytes = FIXED.unpack(fixed)
                header = stream.read(header_nbytes)
                self.took += stream.read(payload_nbytes)
                if not header:
                    continue  # the pages of a put
                op = str(pb.BulkRequest.FromString(header).WhichOneof("op"))
                self.asked.append((version, op))
                frame_header, payload = (
                    bytes.fromhex(RECORDED[names.get(op, op)]["reply"]),
                    b"".join(PAGES) * (op == "get"),
                )
                sock.sendall(
                    pack_fixed(len(frame_header), len(payload), version) + frame_header + payload
                )


@pytest.fixture
def old_node() -> Iterator[tuple[OldNode, str]]:
    node, server = OldNode(), grpc.server(concurrent.futures.ThreadPoolExecutor(4))
    add_KVStoreServicer_to_server(node, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield node, f"127.0.0.1:{port}"
    server.stop(0.0).wait()
    node.listener.close()


def test_client_understands_an_old_node(old_node: tuple[OldNode, str]) -> None:
    node, address = old_node
    buffers = [bytearray(SPACE.layout.page_nbytes) for _ in KEYS]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        serving = pool.submit(node.serve)
        with Client(
            ClientConfig(address=address, wire="bulk", connect_timeout_s=20.0, timeout_s=60.0)
        ) as client:
            assert client.put(SPACE, KEYS, PAGES) == [PutOutcome.STORED] * 2
            assert client.lookup(SPACE, KEYS).prefix_pages == 2
            assert client.get(SPACE, KEYS, buffers) == [True] * 2
            assert [stat.nbytes for stat in client.stat(SPACE, KEYS)] == [
                SPACE.layout.page_nbytes
            ] * 2
        serving.result(30.0)
    assert (buffers, node.took) == (PAGES, b"".join(PAGES))
    assert {version for version, _ in node.asked} == {VERSION}
