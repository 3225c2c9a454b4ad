"""A call has the rights of its own credential, whichever connection of the gateway carries it."""

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from authorities import of_client, of_node, pair
from fleets import small_nodes
from gateway_people import MODEL, Crew, known_by
from gateways import servicer_of
from waiting import wait_until

from kvstore import Client, Forbidden, Namespace, PutOutcome, Unauthenticated, opaque_layout
from kvstore.cli.authority import Authority
from kvstore.deadline import Deadline
from kvstore.errors import UnknownNamespace
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from kvstore.security.identities import share_of
from kvstore.transports.frames import FrameSocket
from kvstore.transports.grpc_wire import GrpcWire
from kvstore.transports.unix_sockets import DescriptorSocket
from node.server import Node
from node.serving.gateway import GatewayConnection
from node.serving.limits import REQUEST_NBYTES_FREE

PAGE_NBYTES = 4096
ROUNDS = 12
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Node]]:
    with small_nodes() as start:
        yield start


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Crew:
    made = Crew(tmp_path_factory.mktemp("rights") / "identities")
    made.join("a", "team-a", "write")
    made.join("b", "team-b", "write")
    made.join("late", "team-a", "write")
    # The name in the client certificate of `authorities`
    made.say("certificate team-a tenant=team-a role=write")
    return made


@pytest.fixture(scope="module")
def node(start: Callable[..., Node], crew: Crew) -> Node:
    made: Node = start(identities=str(crew.path), shm_trust="team-a,team-b")
    return made


# ---- frames that only gateways may send ------------------------------------------------------

ON_BEHALF = {
    "on_behalf": pb.OnBehalfRequest(address="127.0.0.1:9", certificate=True, names=["team-a"])
}
ADMIT = {"admit": pb.AdmitRequest(op="follow")}


@pytest.mark.parametrize("frame", [ON_BEHALF, ADMIT], ids=["on_behalf", "admit"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "behind a hello"])
@pytest.mark.parametrize("wire", ["bulk", "shm"])
def test_frames_of_gateways_are_refused_from_all_others(
    node: Node, crew: Crew, wire: str, first: bool, frame: Any
) -> None:
    hello = pb.BulkRequest(hello=pb.HelloRequest(token=crew.tokens["a"])).SerializeToString()
    asked = pb.BulkRequest(**frame).SerializeToString()
    with _dialled(node, wire) as sock:
        frames = DescriptorSocket(sock) if wire == "shm" else FrameSocket(sock)
        frames.arm(20.0)
        pidfd = os.pidfd_open(os.getpid())
        for number, header in enumerate([asked] if first else [hello, asked]):
            if wire == "shm" and not number:
                frames.send_frame_with(pidfd, header)  # type: ignore[attr-defined]
            else:
                frames.send_frame(header)
        os.close(pidfd)
        replies: list[Any] = []
        with pytest.raises(ConnectionError):
            _receive_all(frames, replies)
    assert replies[-1].error.last
    assert "for the node's own gateways" in replies[-1].error.message or first
    assert [reply.WhichOneof("op") for reply in replies] == (
        ["error"] if first else ["hello", "error"]
    )


def _receive_all(frames: FrameSocket, replies: list[Any]) -> None:
    while True:
        replies.append(pb.BulkReply.FromString(frames.recv_frame(1 << 20)[0]))


def _dialled(node: Node, wire: str) -> socket.socket:
    if wire == "bulk":
        return socket.create_connection(("127.0.0.1", node.bulk.port))
    assert node.shm is not None
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(node.shm.path)
    return sock


# ---- callers that follow one another on one connection ---------------------------------------


class Engine:
    """A client that puts and gets pages of its own tenant, and tries to read another one's."""

    def __init__(self, node: Node, tenant: str, other: str, **known: Any) -> None:
        self._client = Client(known_by(node, wire="grpc", **known))
        self._own = Namespace(MODEL, opaque_layout(PAGE_NBYTES), tenant)
        self._others = Namespace(MODEL, opaque_layout(PAGE_NBYTES), other)
        self._page = tenant[-1:].encode() * PAGE_NBYTES
        self._name = os.urandom(4)

    def round(self, number: int) -> None:
        key, found = (self._name + number.to_bytes(4, "big")) * 4, bytearray(PAGE_NBYTES)
        assert self._client.put(self._own, [key], [self._page]) == [PutOutcome.STORED]
        assert self._client.get(self._own, [key], [found]) == [True]
        assert found == self._page, "a page of another tenant"
        with pytest.raises((Forbidden, UnknownNamespace)):
            self._client.lookup(self._others, [key])
        with pytest.raises((Forbidden, UnknownNamespace)):
            self._client.get(self._others, [key], [found])

    def close(self) -> None:
        self._client.close()


class Stranger:
    """A caller with a revoked or unknown token, or none."""

    def __init__(self, node: Node, token: str) -> None:
        self._wire = GrpcWire(f"127.0.0.1:{node.grpc.port}", token=token)
        self._space = Namespace(MODEL, opaque_layout(PAGE_NBYTES), "team-a").digest

    def round(self, number: int) -> None:
        asked: dict[str, Any] = {
            "namespace": self._space,
            "prefix_hashes": [number.to_bytes(4, "big") * 8],
        }
        with pytest.raises(Unauthenticated):
            self._wire.call("lookup", pb.LookupRequest(**asked), Deadline(30.0))
        with pytest.raises(Unauthenticated):
            self._wire.put(
                pb.PutRequest(**asked, page_nbytes=PAGE_NBYTES),
                [(memoryview(bytes(PAGE_NBYTES)),)],
                Deadline(30.0),
            )

    def close(self) -> None:
        self._wire.close()


def storm(node: Node, actors: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each actor in a thread of its own, so that all share the gateway's connections.

    Each call takes the connection that was used last, for whichever caller.
    """
    taken: list[Any] = []
    take = GatewayConnection._take_caller
    monkeypatch.setattr("node.gateway.upstream.SEARCHED_MAX", 1)
    monkeypatch.setattr(
        GatewayConnection,
        "_take_caller",
        lambda self, caller: (taken.append(caller), take(self, caller))[1],
    )
    with ThreadPoolExecutor(len(actors)) as pool:
        running = [
            pool.submit(lambda one=one: [one.round(number) for number in range(ROUNDS)])
            for one in actors
        ]
        for done in running:
            done.result()
    for one in actors:
        one.close()
    assert servicer_of(node).upstream.count <= len(actors)
    assert len(taken) > 4 * len(actors), "the actors did not share connections"


def test_callers_on_pooled_connections_never_have_each_others_rights(
    node: Node, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew.leave("late")
    taken_up(node, lambda: "late" not in names(node, "team-a"))
    engines = [
        Engine(node, f"team-{one}", f"team-{other}", token=crew.tokens[one])
        for one, other in ("ab", "ba") * 3
    ]
    strangers = [Stranger(node, token) for token in (crew.tokens["late"], "team-a." + "x" * 43, "")]
    storm(node, [*engines, *strangers], monkeypatch)


def test_certificates_and_tokens_on_pooled_connections_are_distinguished(
    start: Callable[..., Node], crew: Crew, ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token takes precedence over a certificate; a certificate alone gives its own rights."""
    node = start(identities=str(crew.path), **of_node(ours))
    by_name, by_token = of_client(ours), {**of_client(ours), "token": crew.tokens["b"]}
    unknown = Engine(node, "team-a", "team-b", **{**pair(ours, "node"), "tls_ca": str(ours.path)})
    with pytest.raises(Unauthenticated):
        unknown.round(0)
    engines = [Engine(node, "team-a", "team-b", **by_name) for _ in range(3)]
    engines += [Engine(node, "team-b", "team-a", **by_token) for _ in range(3)]
    storm(node, engines, monkeypatch)
    with pytest.raises(Unauthenticated):
        unknown.round(0)
    unknown.close()


def test_token_that_changes_its_tenant_counts_for_the_new_one(node: Node, crew: Crew) -> None:
    """A token that changes its tenant counts for the new one, even on an existing connection."""
    token, peers = crew.join("moves", "team-a", "write"), []
    taken_up(node, lambda: "moves" in names(node, "team-a"))
    begin = node.service.peer_queue.begin
    spy: Any = lambda peer: (peers.append(peer), begin(peer))  # noqa: E731
    node.service.peer_queue.begin = spy
    try:
        with Client(known_by(node, wire="grpc", token=token)) as client:
            client.lookup(Namespace(MODEL, opaque_layout(PAGE_NBYTES), "team-a"), [bytes(32)])
            assert set(peers) == {share_of("team-a")}
            crew.change("moves", "team-b", "write")
            taken_up(node, lambda: "moves" in names(node, "team-b"))
            del peers[:]
            client.lookup(Namespace(MODEL, opaque_layout(PAGE_NBYTES), "team-b"), [bytes(32)])
            assert set(peers) == {share_of("team-b")}
    finally:
        node.service.peer_queue.begin = begin  # type: ignore[method-assign]


def taken_up(node: Node, holds: Callable[[], bool]) -> None:
    """Wait until the node has read the file again."""
    wait_until(lambda: (node.access.poll(), holds())[1])


def names(node: Node, tenant: str) -> set[str]:
    return {who.name for who in node.access.identities.tokens.values() if who.tenant == tenant}


def test_large_request_without_identity_is_refused_and_audited(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large request without an identity is refused before it is received, and is audited."""
    refused, taken, take = node.audit.refused_count, [], node.service.request_parser.take
    monkeypatch.setattr(
        node.service.request_parser, "take", lambda *some: (taken.append(some), take(*some))[1]
    )
    large = pb.LookupRequest(
        namespace=bytes(16), prefix_hashes=[bytes(64)] * (2 * REQUEST_NBYTES_FREE // 64)
    )
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            KVStoreStub(channel).Lookup(large, timeout=20.0)
        assert caught.value.code() is UNAUTHENTICATED
    assert node.audit.refused_count == refused + 1
    assert taken == []
