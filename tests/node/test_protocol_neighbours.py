"""Protocol versions: the versions before and after ours work, others are refused with the reason.

golden/protocol-3.json has recorded frames of a client of version 3.
"""

import concurrent.futures
import json
import pathlib
import socket
import struct
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from local_nodes import Connect

from kvstore import (
    Client,
    ClientConfig,
    Exhausted,
    InvalidRequest,
    Keep,
    Namespace,
    ProtocolError,
    opaque_layout,
)
from kvstore.cluster.view import Member, View, view_message
from kvstore.config import PROTOCOL_VERSION
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreServicer, add_KVStoreServicer_to_server
from kvstore.transports.frames import FIXED_NBYTES, pack_fixed
from node.auth.access import THE_NODE
from node.server import Node

RECORDED = {
    name: bytes.fromhex(text)
    for name, text in json.loads(
        (pathlib.Path(__file__).parent.parent / "golden" / "protocol-3.json").read_text()
    ).items()
}
PAGE = bytes(i % 251 for i in range(4096))
MAGIC = struct.Struct("<2sBBIQ")


class VersionedClient:
    """A bulk connection of a client with another protocol version."""

    def __init__(self, node: Node, version: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", node.bulk.port), timeout=10.0)
        self._version = version

    def ask(self, *frames: bytes) -> tuple[pb.BulkReply, bytes]:
        for frame in frames:
            self._sock.sendall(
                frame[:2] + bytes([self._version]) + frame[3:] if frame[:2] == b"KV" else frame
            )
        magic, version, _, header_nbytes, payload_nbytes = MAGIC.unpack(self._receive(FIXED_NBYTES))
        assert (magic, version) == (b"KV", self._version), (
            "a client takes only frames of its own version"
        )
        return pb.BulkReply.FromString(self._receive(header_nbytes)), self._receive(payload_nbytes)

    def _receive(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            data += self._sock.recv(nbytes - len(data)) or pytest.fail(
                "the node closed the connection"
            )
        return data

    def close(self) -> None:
        self._sock.close()


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_client_of_a_neighbour_version_is_served_in_its_version(node: Node, version: int) -> None:
    client = VersionedClient(node, version)
    assert client.ask(RECORDED["hello"])[0].hello.protocol_version == PROTOCOL_VERSION
    assert client.ask(RECORDED["open_namespace"])[0].open_namespace.page_nbytes == len(PAGE)
    verdicts = client.ask(RECORDED["put"])[0].put.verdicts
    if verdicts == [pb.WRITE]:
        assert client.ask(RECORDED["data"], PAGE, RECORDED["commit"])[0].commit.stored == 1
    assert client.ask(RECORDED["lookup"])[0].lookup.present == [True]
    reply, data = client.ask(RECORDED["get"])
    assert (list(reply.get.hits), data) == ([True], PAGE)
    client.close()


def test_pages_of_a_version_3_client_are_read(node: Node, connect: Connect) -> None:
    older = VersionedClient(node, PROTOCOL_VERSION - 1)
    older.ask(RECORDED["open_namespace"])
    if older.ask(RECORDED["put"])[0].put.verdicts == [pb.WRITE]:
        older.ask(RECORDED["data"], PAGE, RECORDED["commit"])
    older.close()
    buffer = bytearray(4096)
    space = Namespace(model="protocol-3", layout=opaque_layout(4096))
    assert connect(node).get(space, [bytes(range(32))], [buffer]) == [True]
    assert buffer == PAGE


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 2, PROTOCOL_VERSION + 2])
def test_peer_two_versions_away_gets_the_reason(node: Node, version: int) -> None:
    with pytest.raises(
        ProtocolError, match=f"client speaks protocol {version}, this node {PROTOCOL_VERSION}"
    ):
        node.service.call("hello", pb.HelloRequest(protocol_version=version), THE_NODE)


class OlderNode(KVStoreServicer):
    """A fake node of version 3, which refuses every other version, also in frames."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.frames: list[int] = []
        self.requests: list[pb.BulkRequest] = []
        self.view: pb.View | None = None
        self.listener = socket.create_server(("127.0.0.1", 0))

    def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloReply:
        if request.protocol_version not in (0, self.version):
            message = f"client speaks protocol {request.protocol_version}, this node {self.version}"
            context.abort(grpc.StatusCode.UNIMPLEMENTED, message)
        return pb.HelloReply(
            view=self.view,
            protocol_version=self.version,
            instance_id=b"an older",
            bulk_port=self.listener.getsockname()[1],
            limits=pb.Limits(batch_keys_max=16, batch_nbytes_max=1 << 20, page_nbytes_max=1 << 20),
        )

    def OpenNamespace(
        self, request: pb.OpenNamespaceRequest, context: Any
    ) -> pb.OpenNamespaceReply:
        return pb.OpenNamespaceReply(page_nbytes=4096)

    def serve(self) -> None:
        sock, _ = self.listener.accept()
        with sock, sock.makefile("rb") as stream:
            while fixed := stream.read(FIXED_NBYTES):
                _, version, _, header_nbytes, _ = MAGIC.unpack(fixed)
                self.frames.append(version)
                self.requests.append(pb.BulkRequest.FromString(stream.read(header_nbytes)))
                op = self.requests[-1].WhichOneof("op")
                known = {
                    "hello": pb.BulkReply(
                        hello=pb.HelloReply(protocol_version=3, instance_id=b"an older")
                    ),
                    "open_namespace": pb.BulkReply(
                        open_namespace=pb.OpenNamespaceReply(page_nbytes=4096)
                    ),
                    "lookup": pb.BulkReply(lookup=pb.LookupReply(prefix_pages=1, present=[True])),
                }
                header = known[op].SerializeToString()
                sock.sendall(pack_fixed(len(header), 0, self.version) + header)


@pytest.fixture
def older() -> Iterator[Any]:
    found = []

    def start(version: int) -> tuple[OlderNode, str]:
        node = OlderNode(version)
        server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
        add_KVStoreServicer_to_server(node, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        found.append((node, server))
        return node, f"127.0.0.1:{port}"

    yield start
    for node, server in found:
        server.stop(0.0).wait()
        node.listener.close()


def test_node_of_version_3_gets_frames_of_version_3(older: Any) -> None:
    node, address = older(PROTOCOL_VERSION - 1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        serving = pool.submit(node.serve)
        with Client(ClientConfig(address=address, wire="bulk", connect_timeout_s=5.0)) as client:
            space = Namespace(model="protocol-3", layout=opaque_layout(4096))
            assert client.lookup(space, [bytes(32)]).present == (True,)
        serving.result(60.0)
    assert node.frames == [PROTOCOL_VERSION - 1] * 3


def test_node_of_version_3_is_not_near(older: Any) -> None:
    """It would answer only for its own pages."""
    nodes = [older(PROTOCOL_VERSION - 1) for _ in range(2)]
    view = View(
        "fleet",
        1,
        tuple(Member(f"n{number}", address) for number, (_, address) in enumerate(nodes)),
    )
    for node, _ in nodes:
        node.view = view_message(view)
    space = Namespace(model="protocol-3", layout=opaque_layout(4096))
    key = next(
        k
        for k in (bytes([n]) * 32 for n in range(99))
        if view.owners.owners(space.digest, [k]) == [("n0",)]
    )
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        serving = [pool.submit(node.serve) for node, _ in nodes]
        with Client(
            ClientConfig(address=nodes[0][1], wire="bulk", near="n1", connect_timeout_s=5.0)
        ) as client:
            for _ in range(2):  # the first call connects, the second uses the known node
                assert client.lookup(space, [key]).present == (True,)
            with (
                pytest.raises(InvalidRequest, match="name a member of the cluster"),
                client.open_get(space, [key]),
            ):
                pass
        for served in serving:
            served.result(60.0)
    asked = [[request.WhichOneof("op") for request in node.requests] for node, _ in nodes]
    assert (asked[0].count("lookup"), asked[1].count("lookup")) == (2, 0)
    assert not any(request.lookup.near for request in nodes[0][0].requests)


def test_acks_beyond_owners_of_version_3_are_refused(older: Any) -> None:
    nodes = [older(PROTOCOL_VERSION - 1) for _ in range(2)]
    members = tuple(Member(f"n{number}", address) for number, (_, address) in enumerate(nodes))
    for node, _ in nodes:
        node.view = view_message(View("fleet", 1, members, 2))
    space, message = (
        Namespace(model="protocol-3", layout=opaque_layout(4096)),
        "speaks protocol 3, .* update it to 4",
    )
    with Client(ClientConfig(address=nodes[0][1], wire="grpc", connect_timeout_s=5.0)) as client:
        with pytest.raises(Exhausted, match=message):
            client.put(space, [bytes(32)], [bytes(4096)], Keep(ack="all"))
        assert client.stats.failures == 0, "the refusal must not count as a failure"


def test_node_two_versions_away_is_refused(older: Any) -> None:
    _, address = older(PROTOCOL_VERSION - 2)
    with (
        Client(ClientConfig(address=address, connect_timeout_s=5.0)) as client,
        pytest.raises(ProtocolError, match=f"client speaks protocol {PROTOCOL_VERSION}, this node"),
    ):
        client.node_status()
