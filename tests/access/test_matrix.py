"""Which identity may send which request; an RPC without a rule fails here.

matrix    each identity sends each request of the schema to the service of a node in this process.
          Callers are made as connections make them; no byte is sent
sample    32 of these over each wire: each request is refused once, with each kind of rule and of
          refusal. Each wire decides by itself who a caller is and whether it may use that wire
"""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from people import PAGE_NBYTES, People, client, namespace

from kvstore import ClientConfig, Forbidden, KVStoreError, Unauthenticated, UnknownNamespace
from kvstore.config import PROTOCOL_VERSION
from kvstore.deadline import Deadline
from kvstore.messages import namespace_message
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from kvstore.security.identities import Role
from kvstore.transports.bulk import BulkWire
from kvstore.transports.frames import FrameSocket, pack_fixed
from kvstore.transports.grpc_wire import GrpcWire
from kvstore.transports.shm import ShmWire
from node.auth.access import Caller
from node.auth.authorizer import RULES
from node.server import Node

SERVICE = pb.DESCRIPTOR.services_by_name["KVStore"]
REQUESTS = {
    field.message_type.name: field.name
    for field in pb.BulkRequest.DESCRIPTOR.fields
    if field.message_type
}
# Only a gateway of the node may send these, on a socket of its own
GATEWAYS_OPS = ("admit", "on_behalf")
OPS = [op for op in REQUESTS.values() if op not in GATEWAYS_OPS]
PARTS = ("commit", "release")  # follow a put or get that was allowed
KEY = b"k" * 32
WHO = (
    "nobody",
    "wrong",
    "revoked",
    "expired",
    "read",
    "write",
    "admin",
    "other",
    "narrow",
    "modeller",
    "watcher",
    "member",
    "operator",
)
ROLES = {
    "other": Role.ADMIN,
    "narrow": Role.ADMIN,
    "modeller": Role.ADMIN,
    "watcher": Role.READ,
    "member": Role.NODE,
    "operator": Role.ADMIN,
} | {role.name.lower(): role for role in Role}
# The rules once more, independent of `RULES`, to find mistakes there
NEEDS = {
    Role.READ: "hello follow open_namespace list_namespaces node_status metrics lookup get verify "
    "list stat release events feed query",
    Role.WRITE: "put commit remove pin unpin hint",
    Role.ADMIN: "remove_namespace reflection",
}
# For identities of all tenants
ALL_TENANTS = ["events"]
# For administrators of all tenants
OF_NODE = [
    "flush",
    "scrub",
    "recover",
    "drain",
    "sweep",
    "record",
    "forget",
    "push_identities",
]
ROLE_OF = {op: role for role, ops in NEEDS.items() for op in ops.split()} | dict.fromkeys(
    OF_NODE, Role.ADMIN
)
REFUSALS = (Unauthenticated, Forbidden, UnknownNamespace)


OF_STREAMS = {"PutFrame": "put", "PutWholeRequest": "put", "FollowRequest": "follow"}


def op_of(method: Any) -> str:
    return REQUESTS.get(method.input_type.name) or OF_STREAMS[method.input_type.name]


def request(op: str) -> Any:
    """Return a request; if it names a namespace, it is one of team-a."""
    kind = pb.BulkRequest.DESCRIPTOR.fields_by_name[op].message_type.name
    made = getattr(pb, kind)()
    fields = made.DESCRIPTOR.fields_by_name
    about = namespace()
    if op == "open_namespace":
        return pb.OpenNamespaceRequest(namespace=namespace_message(about), digest=about.digest)
    if "namespace" in fields:
        made.namespace = about.digest
    if "prefix_hashes" in fields:
        made.prefix_hashes.append(KEY)
    if "page_nbytes" in fields:
        made.page_nbytes = PAGE_NBYTES
    if "ttl_ms" in fields:
        made.ttl_ms = 1000
    if "dry" in fields:
        made.dry = True
    return made


def expected(op: str, who: str) -> type[KVStoreError] | None:
    if who in WHO[:4]:
        return Unauthenticated
    if ROLES[who] < ROLE_OF[op] or (
        op in (*OF_NODE, *ALL_TENANTS) and who not in ("watcher", "member", "operator")
    ):
        return Forbidden
    about_a_namespace = "namespace" in request(op).DESCRIPTOR.fields_by_name if op in OPS else False
    if about_a_namespace and who in ("other", "narrow", "modeller"):
        return Forbidden if op == "open_namespace" else UnknownNamespace
    return None


def refusal(call: Callable[[], Any]) -> type[KVStoreError] | None:
    """Return the type of the refusal, or None; other errors come from an allowed call."""
    try:
        call()
    except REFUSALS as error:
        return type(error)
    except KVStoreError:
        return None
    return None


# Requests of each identity over each wire: refused before the bar, served after it. Each request
# is refused to some identity, to show that none bypasses the check on a wire
SAMPLE = {
    "nobody": "node_status |",
    "wrong": "follow |",
    "revoked": "list_namespaces |",
    "expired": "hello feed query |",
    "read": "remove pin record events | hello lookup get",
    "write": "remove_namespace scrub | put pin",
    "admin": "recover drain | remove_namespace",
    "other": "open_namespace get put verify |",
    "narrow": "lookup stat | list_namespaces",
    "modeller": "list flush |",
    "watcher": "unpin hint | get",
    "member": "sweep forget push_identities | put",
    "operator": "| flush",
}
SAMPLED = [(op, who) for who, ops in SAMPLE.items() for op in ops.replace("|", "").split()]
Refusals = dict[tuple[str, str], type[KVStoreError] | None]


@pytest.fixture(scope="module")
def grpc_wires(node: Node, people: People) -> Iterator[dict[str, GrpcWire]]:
    with client(node, people.tokens["write"], wire="bulk") as writer:
        writer.put(namespace(), [KEY], [bytes(PAGE_NBYTES)])
    wires = {who: GrpcWire(f"127.0.0.1:{node.grpc.port}", token=people.tokens[who]) for who in WHO}
    yield wires
    for wire in wires.values():
        wire.close()


@pytest.fixture
def refusals(node: Node, people: People) -> Callable[..., Refusals]:
    """Return a function that sends all cases and returns the refusal of each.

    It opens the namespace again before each case, as an earlier one may have removed it.
    """
    writer = caller_of(node, people, "write")

    def answered(cases: list[tuple[str, str]], ask: Callable[[str, str], object]) -> Refusals:
        found: Refusals = {}
        for op, who in cases:
            node.service.call("open_namespace", request("open_namespace"), writer)
            found[op, who] = refusal(lambda op=op, who=who: ask(op, who))
        return found

    return answered


def caller_of(node: Node, people: People, who: str) -> Caller:
    """Return a caller as a connection makes it from a token."""
    return Caller(
        f"the address of {who}",
        principal=node.access.credential(people.tokens[who], ()),
        wire="bulk",
    )


def direct(node: Node, caller: Caller, op: str) -> None:
    """Send a request to the service as connections do.

    A request that connections answer themselves is only authorized.
    """
    if op in ("follow", "reflection", "metrics"):
        node.service.authorizer.admit(op, request(op) if op == "follow" else None, caller)
    elif op in ("put", "get"):
        with node.sessions.open(caller) as session:
            begin: Any = node.service.begin_put if op == "put" else node.service.begin_get
            begin(session, request(op))
    else:
        node.service.call(op, request(op), caller)


@pytest.mark.parametrize("op", [op for op in RULES if op not in PARTS])
def test_each_identity_is_served_or_refused_by_the_rules(
    node: Node, people: People, refusals: Callable[..., Refusals], op: str
) -> None:
    callers = {who: caller_of(node, people, who) for who in WHO}
    cases = [(op, who) for who in WHO]
    assert refusals(cases, lambda op, who: direct(node, callers[who], op)) == {
        case: expected(*case) for case in cases
    }


def test_sample_refuses_each_request_and_has_each_kind_of_rule() -> None:
    refused = {(op, who) for op, who in SAMPLED if expected(op, who)}
    assert refused == {
        (op, who) for who, ops in SAMPLE.items() for op in ops.partition("|")[0].split()
    }
    assert {op for op, _ in refused} == set(OPS) - set(PARTS)
    assert {who for _, who in SAMPLED} == set(WHO)
    assert {expected(op, who) for op, who in refused if ROLE_OF[op] is Role.READ} == set(REFUSALS)
    assert {ROLE_OF[op] for op, who in refused if expected(op, who) is Forbidden} == set(NEEDS)
    assert {ROLE_OF[op] for op, who in SAMPLED if not expected(op, who)} == set(NEEDS)


def moved(wire: Any, op: str, deadline: Deadline) -> None:
    """Send a put or a get in the way of the wire."""
    message = request(op)
    if isinstance(wire, ShmWire):
        if op == "put":
            with wire.reserving(message, deadline):
                pass
        else:
            with wire.acquiring(message, PAGE_NBYTES, deadline):
                pass
    elif op == "put":
        wire.put(message, [(memoryview(bytes(PAGE_NBYTES)),)], deadline)
    else:
        wire.get(message, [(memoryview(bytearray(PAGE_NBYTES)),)], [0], deadline)


def asked(wire: Any, op: str) -> None:
    deadline = Deadline(20.0)
    if op in ("put", "get"):
        moved(wire, op, deadline)
    elif op == "follow" and isinstance(wire, GrpcWire):
        list(wire.follow(0, 0.2))
    else:
        wire.call(op, request(op), deadline)


def test_each_method_has_a_rule() -> None:
    ops = [op_of(method) for method in SERVICE.methods]
    assert set(ops) | set(OPS) | {"reflection", "metrics"} == set(RULES) == set(ROLE_OF)
    assert {op for op, rule in RULES.items() if rule.is_act} == {*OF_NODE, "remove_namespace"}


@pytest.mark.parametrize("whole", [True, False])
def test_sample_is_refused_by_the_rules_over_grpc(
    grpc_wires: dict[str, GrpcWire],
    refusals: Callable[..., Refusals],
    monkeypatch: pytest.MonkeyPatch,
    whole: bool,
) -> None:
    """Puts and gets are refused as single messages, and as streams."""
    if not whole:
        monkeypatch.setattr("kvstore.transports.grpc_wire.WHOLE_PAGES_MAX", 0)
    assert refusals(SAMPLED, lambda op, who: asked(grpc_wires[who], op)) == {
        case: expected(*case) for case in SAMPLED
    }


@pytest.mark.parametrize("who", ["nobody", "write", "member", "admin"])
def test_schema_is_for_administrators_only(node: Node, people: People, who: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
        ask = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            lambda data: data,
            lambda data: data,
        )
        token = people.tokens[who]
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        listing = b"\x3a\x01*"  # list_services: "*"
        try:
            replies = list(ask(iter([listing]), metadata=metadata, timeout=20.0))
            code = grpc.StatusCode.OK
        except grpc.RpcError as error:
            replies, code = [], error.code()
    wanted: dict[type[KVStoreError] | None, grpc.StatusCode] = {
        Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
        Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    }
    assert code is wanted.get(expected("reflection", who), grpc.StatusCode.OK)
    assert bool(replies) is (code is grpc.StatusCode.OK)


@pytest.fixture(scope="module")
def bulk_wires(node: Node, people: People) -> Iterator[dict[str, BulkWire]]:
    wires = {
        who: BulkWire(
            "127.0.0.1",
            node.bulk.port,
            ClientConfig(token=people.tokens[who], timeout_s=60.0, connect_timeout_s=30.0),
        )
        for who in WHO
    }
    yield wires
    for wire in wires.values():
        wire.close()


def test_sample_is_refused_by_the_rules_over_bulk(
    bulk_wires: dict[str, BulkWire], refusals: Callable[..., Refusals]
) -> None:
    assert refusals(SAMPLED, lambda op, who: asked(bulk_wires[who], op)) == {
        case: expected(*case) for case in SAMPLED
    }


@pytest.fixture(scope="module")
def shm_wires(node: Node, people: People) -> Iterator[dict[str, ShmWire]]:
    assert node.shm is not None
    wires = {
        who: ShmWire(
            node.shm.path,
            node.service.instance_id,
            ClientConfig(token=people.tokens[who], timeout_s=60.0, connect_timeout_s=30.0),
        )
        for who in WHO
    }
    yield wires
    for wire in wires.values():
        wire.close()


def test_sample_is_refused_by_the_rules_over_shm(
    shm_wires: dict[str, ShmWire], refusals: Callable[..., Refusals]
) -> None:
    """Only writers of a trusted tenant or of all tenants may use shared memory.

    A process that maps the memory can read and write everything in it.
    """
    wanted = {case: expected(*case) for case in SAMPLED}
    for op, who in SAMPLED:
        if wanted[op, who] is not Unauthenticated and who not in (
            "write",
            "admin",
            "member",
            "operator",
        ):
            wanted[op, who] = Forbidden
    assert refusals(SAMPLED, lambda op, who: asked(shm_wires[who], op)) == wanted


@pytest.mark.parametrize("op", ["lookup", "put", "follow", "flush"])
def test_request_before_hello_is_refused(node: Node, op: str) -> None:
    with socket.create_connection(("127.0.0.1", node.bulk.port), timeout=60.0) as sock:
        frames = FrameSocket(sock)
        frames.arm(10.0)
        frames.send_frame(pb.BulkRequest(**{op: request(op)}).SerializeToString())
        header, _ = frames.recv_frame(1 << 20)
        assert (
            pb.BulkReply.FromString(header).error.code == grpc.StatusCode.UNAUTHENTICATED.value[0]
        )
        with pytest.raises(ConnectionError):  # the node has closed the connection
            frames.recv_frame(1 << 20)


def test_large_first_frame_without_identity_is_refused(node: Node) -> None:
    """A first frame larger than a hello can be is refused before it is received."""
    with socket.create_connection(("127.0.0.1", node.bulk.port), timeout=60.0) as sock:
        frames = FrameSocket(sock)
        frames.arm(10.0)
        frames.send(pack_fixed(1 << 20, 0))
        header, _ = frames.recv_frame(1 << 20)
        assert "at most 4096" in pb.BulkReply.FromString(header).error.message


def test_first_of_two_authorizations_counts(node: Node, people: People) -> None:
    right, wrong = (("authorization", f"Bearer {people.tokens[who]}") for who in ("read", "wrong"))
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
        hello = KVStoreStub(channel).Hello  # type: ignore[no-untyped-call]
        assert hello(pb.HelloRequest(), metadata=(right, wrong), timeout=20.0).tenant == "team-a"
        with pytest.raises(grpc.RpcError) as caught:
            hello(pb.HelloRequest(), metadata=(wrong, right), timeout=20.0)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_reservation_of_a_connection_counts_for_its_tenant(node: Node, people: People) -> None:
    with client(node, people.tokens["write"], wire="bulk") as writer:
        writer.lookup(namespace(), [KEY])
    with socket.create_connection(("127.0.0.1", node.bulk.port), timeout=60.0) as sock:
        frames = FrameSocket(sock)
        frames.arm(10.0)
        put = request("put")
        put.prefix_hashes[:] = [b"reserved" * 4]
        hello = pb.HelloRequest(protocol_version=PROTOCOL_VERSION, token=people.tokens["write"])
        for asked in (pb.BulkRequest(hello=hello), pb.BulkRequest(put=put)):
            frames.send_frame(asked.SerializeToString())
            frames.recv_frame(1 << 20)
        assert list(node.sessions.reserved._by_peer) == ["tenant team-a"]


def test_hello_over_grpc_returns_tenant_and_role(grpc_wires: dict[str, GrpcWire]) -> None:
    hello = grpc_wires["write"].call(
        "hello", pb.HelloRequest(protocol_version=PROTOCOL_VERSION), Deadline(20.0)
    )
    assert (hello.tenant, hello.role, hello.shm_refused) == ("team-a", "write", "")
    hello = grpc_wires["other"].call(
        "hello", pb.HelloRequest(protocol_version=PROTOCOL_VERSION), Deadline(20.0)
    )
    assert (hello.tenant, hello.role, hello.shm_socket) == ("team-b", "admin", "")
    assert "shm-trust" in hello.shm_refused
