"""A compromised gateway has only the rights of its callers, and can not harm its node."""

import os
import socket
from collections.abc import Callable, Iterator

import pytest
from rogue import Rogue, asked, rogue_node
from waiting import wait_until

from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.identities import add, new_token, token_line
from kvstore.transports.frames import FrameSocket
from kvstore.transports.status import Code
from node.server import Node
from node.serving.gateway import GatewayConnection
from node.serving.limits import REQUEST_NBYTES_FREE

REQUESTS = {
    f.name: getattr(pb, f.message_type.name)()
    for f in pb.BulkRequest.DESCRIPTOR.fields
    if f.message_type
}
OF_PUTS_AND_GETS = ("commit", "release")  # without effect unless a put or get was allowed


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Rogue, str]]:
    """Yield a node with authentication, its rogue gateway, and a reader's token that it knows."""
    path = tmp_path_factory.mktemp("rogue") / "identities"
    token = new_token("team-a")
    add(path, token_line("reader", token, tenant="team-a", role="read"))
    add(path, token_line("boss", new_token("*"), tenant="*", role="admin"))
    with path.open("a") as file:
        file.write("certificate gpu-7 tenant=team-b role=write\n")
    with rogue_node(identities=str(path)) as (node, rogues):
        yield node, rogues[0], token


# ---- rights ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "caller",
    [
        {},
        {"address": "192.0.2.1:5"},
        {"address": "192.0.2.1:5", "certificate": True},
        {"address": "192.0.2.1:5", "certificate": True, "names": ["boss", "node", ""]},
        {
            "address": "192.0.2.1:5",
            "authorization": "Bearer boss",
            "certificate": True,
            "names": ["gpu-7"],
        },
        {"address": "192.0.2.1:5", "authorization": "the node itself"},
    ],
    ids=["nobody", "address", "no names", "unknown names", "wrong token", "no token"],
)
def test_gateway_without_a_credential_is_refused_each_request(
    secure: tuple[Node, Rogue, str], caller: dict[str, object]
) -> None:
    for op, request in REQUESTS.items():
        if op == "on_behalf":  # gets no reply
            continue
        with secure[1].connection(**caller) as frames:
            asks = pb.AdmitRequest(op="reflection") if op == "admit" else request
            reply = asked(frames, **{op: asks})
            wanted = Code.UNIMPLEMENTED if op in OF_PUTS_AND_GETS else Code.UNAUTHENTICATED
            if op == "follow":  # a gateway serves this by itself
                wanted = Code.UNIMPLEMENTED
            assert reply.error.code == wanted, (op, reply)


def test_gateway_with_a_reader_token_can_only_read(secure: tuple[Node, Rogue, str]) -> None:
    _, rogue, token = secure
    may = {"hello", "list_namespaces", "node_status", "lookup", "get", "verify", "list", "stat"}
    may |= {"feed", "query"}
    for op, request in REQUESTS.items():
        if op in ("on_behalf", "admit", "follow", "open_namespace", *OF_PUTS_AND_GETS):
            continue
        with rogue.connection(address="192.0.2.1:5", authorization=f"Bearer {token}") as frames:
            reply = asked(frames, **{op: request})
            assert (reply.error.code == Code.PERMISSION_DENIED) == (op not in may), (op, reply)


def test_admit_grants_no_rights(secure: tuple[Node, Rogue, str]) -> None:
    with secure[1].connection(address="192.0.2.1:5", authorization=f"Bearer {secure[2]}") as frames:
        assert asked(frames, admit=pb.AdmitRequest(op="follow")).WhichOneof("op") == "admit"
        assert (
            asked(frames, admit=pb.AdmitRequest(op="reflection")).error.code
            == Code.PERMISSION_DENIED
        )
        assert asked(frames, flush=pb.FlushRequest()).error.code == Code.PERMISSION_DENIED
        assert asked(frames, admit=pb.AdmitRequest(op="flush")).error.code == Code.UNIMPLEMENTED


def test_request_in_a_frame_with_a_credential_does_not_use_it(
    secure: tuple[Node, Rogue, str],
) -> None:
    """A frame with a credential and a request does not give the request that credential's rights.

    The request belongs to the caller named before.
    """
    whose = pb.OnBehalfRequest(address="192.0.2.1:5", authorization=f"Bearer {secure[2]}")
    both = pb.BulkRequest(on_behalf=whose).SerializeToString()
    both += pb.BulkRequest(list_namespaces=pb.ListNamespacesRequest()).SerializeToString()
    with secure[1].connection(address="192.0.2.1:5") as frames:
        frames.send_frame(both)
        assert (
            pb.BulkReply.FromString(frames.recv_frame(1 << 16)[0]).error.code
            == Code.UNAUTHENTICATED
        )


@pytest.mark.parametrize(
    "address", ["tenant team-b:7", "tenant team-b", "[tenant team-b]:7", "", "node-7:7"]
)
def test_address_like_a_tenant_name_does_not_use_its_share(
    secure: tuple[Node, Rogue, str], monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """An address that looks like a tenant's name does not count for that tenant's share."""
    shares: list[str] = []
    real = GatewayConnection._take_caller

    def spied(connection: GatewayConnection, request: pb.OnBehalfRequest) -> None:
        real(connection, request)
        shares.append(connection.peer)

    monkeypatch.setattr(GatewayConnection, "_take_caller", spied)
    with secure[1].connection(address=address) as frames:
        assert (
            asked(frames, list_namespaces=pb.ListNamespacesRequest()).error.code
            == Code.UNAUTHENTICATED
        )
    assert shares == ["gateway"]


@pytest.mark.parametrize("op", ["on_behalf", "admit"])
@pytest.mark.parametrize(
    "nbytes", [10, REQUEST_NBYTES_FREE - 8, REQUEST_NBYTES_FREE - 2, REQUEST_NBYTES_FREE]
)
def test_gateway_requests_on_the_bulk_wire_are_refused(
    secure: tuple[Node, Rogue, str], op: str, nbytes: int
) -> None:
    """Requests of gateways are refused on the bulk wire, whatever their size.

    Large requests are parsed in another way than small ones. The client has a token, as without one
    it can send no more than a hello.
    """
    text = "x" * nbytes
    request = pb.OnBehalfRequest(address=text) if op == "on_behalf" else pb.AdmitRequest(op=text)
    with socket.create_connection(("127.0.0.1", secure[0].bulk.port)) as sock:
        frames = FrameSocket(sock)
        frames.arm(20.0)
        assert asked(frames, hello=pb.HelloRequest(token=secure[2])).WhichOneof("op") == "hello"
        reply = asked(frames, **{op: request})
        assert (reply.error.code, reply.error.message) == (
            Code.UNIMPLEMENTED,
            f"{op} is for the node's own gateways",
        )


# ---- descriptors that it sends as connections ------------------------------------------------


def _file() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def _pipe() -> int:
    ends = os.pipe()
    os.close(ends[1])
    return ends[0]


def _unconnected() -> int:
    return socket.socket().detach()


def _listener() -> int:
    return socket.create_server(("127.0.0.1", 0)).detach()


def _datagrams() -> int:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach()


@pytest.mark.parametrize("make", [_file, _pipe, _unconnected, _listener, _datagrams])
def test_descriptor_that_is_no_connection_affects_no_other(
    secure: tuple[Node, Rogue, str], make: Callable[[], int]
) -> None:
    _, rogue, token = secure
    fd = make()
    try:
        before = len(os.listdir("/proc/self/fd"))
        rogue.give(fd)
        with rogue.connection(address="192.0.2.1:5", authorization=f"Bearer {token}") as frames:
            assert (
                asked(frames, list_namespaces=pb.ListNamespacesRequest()).WhichOneof("op")
                == "list_namespaces"
            )
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    finally:
        os.close(fd)
