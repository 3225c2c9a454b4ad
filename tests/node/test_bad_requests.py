"""Well-formed but invalid requests over all wires get one clear error each.

Other clients are not disturbed, and nothing leaks.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from known_pages import Pages
from local_nodes import Bystander, Connect, StartNode, settle

from kvstore import ClientConfig, PutOutcome, opaque_layout
from kvstore.config import MESSAGE_NBYTES_MAX
from kvstore.deadline import Deadline
from kvstore.errors import (
    Exhausted,
    InvalidRequest,
    KVStoreError,
    LayoutMismatch,
    ProtocolError,
    Unavailable,
    UnknownNamespace,
)
from kvstore.keys import Namespace
from kvstore.messages import namespace_message
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.bulk import BulkWire
from kvstore.transports.grpc_wire import GrpcWire
from kvstore.transports.shm import ShmWire
from kvstore.transports.wire import Wire
from node.server import Node

Builder = Callable[[bytes], Any]
KEY = b"k" * 32
HUGE = 1 << 63


@pytest.fixture(scope="module")
def node(start_node: StartNode) -> Node:
    return start_node(batch_keys_max=8, batch_nbytes_max=1 << 20)


@pytest.fixture(params=["shm", "bulk", "grpc"])
def wire(request: pytest.FixtureRequest, node: Node) -> Iterator[Wire]:
    if request.param == "bulk":
        wire: Wire = BulkWire("127.0.0.1", node.bulk.port, ClientConfig())
    elif request.param == "shm":
        assert node.shm is not None
        wire = ShmWire(node.shm.path, node.service.instance_id, ClientConfig())
    else:
        wire = GrpcWire(f"127.0.0.1:{node.grpc.port}")
    yield wire
    wire.close()


def send(wire: Wire, op: str, request: Any) -> Any:
    if op == "put":
        return wire.put(
            request, [(memoryview(bytes(4096)),)] * len(request.prefix_hashes), Deadline(5)
        )
    if op == "get":
        return wire.get(
            request,
            [(memoryview(bytearray(4096)),)] * len(request.prefix_hashes),
            [0] * 99,
            Deadline(5),
        )
    return wire.call(op, request, Deadline(5))


def keyed(op: str, message: Callable[..., Any], **fields: Any) -> list[Any]:
    """Return the cases of invalid key batches for `op`."""

    def with_keys(*keys: bytes) -> Builder:
        return lambda digest: message(namespace=digest, prefix_hashes=keys, **fields)

    cases = [
        pytest.param(op, with_keys(), InvalidRequest, "no key", id=f"{op} without keys"),
        pytest.param(
            op,
            with_keys(b""),
            InvalidRequest,
            "0 bytes; allowed are 16 to 64",
            id=f"{op} with an empty key",
        ),
        pytest.param(
            op, with_keys(b"x" * 15), InvalidRequest, "15 bytes", id=f"{op} with a short key"
        ),
        pytest.param(
            op, with_keys(KEY, b"x" * 65), InvalidRequest, "65 bytes", id=f"{op} with a long key"
        ),
        pytest.param(
            op,
            with_keys(*(bytes([i]) * 32 for i in range(9))),
            InvalidRequest,
            r"9 keys, at most 8 \(batch_keys_max\)",
            id=f"{op} of too many keys",
        ),
        pytest.param(
            op,
            lambda digest: message(namespace=b"n" * 16, prefix_hashes=[KEY], **fields),
            UnknownNamespace,
            f"namespace {(b'n' * 16).hex()} is not open here",
            id=f"{op} in an unknown namespace",
        ),
        pytest.param(
            op,
            lambda digest: message(prefix_hashes=[KEY], **fields),
            UnknownNamespace,
            r"namespace \(empty\)",
            id=f"{op} in no namespace",
        ),
    ]
    if op not in ("lookup", "get", "stat"):
        cases.append(
            pytest.param(
                op, with_keys(KEY, KEY), InvalidRequest, "twice", id=f"{op} of a key twice"
            )
        )
    return cases


def put_of(page_nbytes: int) -> Builder:
    return lambda digest: pb.PutRequest(
        namespace=digest, prefix_hashes=[KEY], page_nbytes=page_nbytes
    )


def get_of(*ranges: tuple[int, int]) -> Builder:
    parts = [pb.ByteRange(offset=offset, nbytes=nbytes) for offset, nbytes in ranges]
    return lambda digest: pb.GetRequest(namespace=digest, prefix_hashes=[KEY], ranges=parts)


def pin_of(ttl_ms: int) -> Builder:
    return lambda digest: pb.PinRequest(namespace=digest, prefix_hashes=[KEY], ttl_ms=ttl_ms)


def opening(change: Callable[[pb.OpenNamespaceRequest], object]) -> Builder:
    def build(_: bytes) -> pb.OpenNamespaceRequest:
        namespace = Namespace("new", opaque_layout(4096))
        request = pb.OpenNamespaceRequest(
            namespace=namespace_message(namespace), digest=namespace.digest
        )
        change(request)
        return request

    return build


def larger_plane(request: pb.OpenNamespaceRequest) -> None:
    request.namespace.layout.groups[0].planes[0].unit_shape[0] = 8192


def page_of_2_mib(request: pb.OpenNamespaceRequest) -> None:
    namespace = Namespace("new", opaque_layout(2 << 20))
    request.CopyFrom(
        pb.OpenNamespaceRequest(namespace=namespace_message(namespace), digest=namespace.digest)
    )


CASES = [
    *keyed("lookup", pb.LookupRequest),
    *keyed("put", pb.PutRequest, page_nbytes=4096),
    *keyed("get", pb.GetRequest),
    *keyed("verify", pb.VerifyRequest),
    *keyed("remove", pb.RemoveRequest),
    *keyed("pin", pb.PinRequest, ttl_ms=1),
    *keyed("unpin", pb.UnpinRequest),
    *keyed("hint", pb.HintRequest, action=pb.HINT_NAME),
    *keyed("stat", pb.StatRequest),
    pytest.param(
        "put",
        put_of(8192),
        LayoutMismatch,
        "pages of 8192 bytes; namespace .* has 4096",
        id="larger page",
    ),
    pytest.param("put", put_of(0), LayoutMismatch, "pages of 0 bytes", id="empty page"),
    pytest.param(
        "put",
        put_of(HUGE),
        InvalidRequest,
        r"at most 1048576 \(batch_nbytes_max\)",
        id="too many bytes",
    ),
    pytest.param("get", get_of((0, 0)), InvalidRequest, r"range 0\+0 is empty", id="empty range"),
    pytest.param(
        "get",
        get_of((4095, 2)),
        InvalidRequest,
        "leaves the page of 4096 bytes",
        id="range over the end",
    ),
    pytest.param(
        "get", get_of((HUGE, HUGE)), InvalidRequest, "leaves the page", id="range far away"
    ),
    pytest.param(
        "get",
        get_of((0, 100), (99, 1)),
        InvalidRequest,
        "range 0.100 overlaps",
        id="overlapping ranges",
    ),
    pytest.param(
        "get",
        get_of((9, 9), (0, 10)),
        InvalidRequest,
        "range 0.10 overlaps",
        id="overlaps out of order",
    ),
    pytest.param(
        "get", get_of(*[(0, 4096)] * 257), InvalidRequest, "overlaps", id="the same range again"
    ),
    pytest.param(
        "get",
        get_of(*[(0, 1)] * 4097),
        InvalidRequest,
        "4097 ranges in one get, at most 4096",
        id="ranges",
    ),
    pytest.param(
        "pin", pin_of(0), InvalidRequest, r"ttl_ms 0 is not in 1\.\.604800000", id="pin for no time"
    ),
    pytest.param("pin", pin_of(HUGE), InvalidRequest, "pin_ttl_ms_max", id="pin for ever"),
    pytest.param(
        "remove_namespace",
        lambda digest: pb.RemoveNamespaceRequest(namespace=digest, removal=bytes(17)),
        InvalidRequest,
        "a removal has 17 bytes; send 16",
        id="a removal that is long to remember",
    ),
    pytest.param(
        "forget",
        lambda _: pb.ForgetRequest(tenant="none", removal=b"x"),
        InvalidRequest,
        "a removal has 1 bytes",
        id="an erasure without a name",
    ),
    pytest.param(
        "list", lambda _: pb.ListRequest(), UnknownNamespace, "is not open", id="list of nothing"
    ),
    pytest.param(
        "hello",
        lambda _: pb.HelloRequest(protocol_version=9),
        ProtocolError,
        "protocol 9",
        id="version",
    ),
    pytest.param(
        "open_namespace",
        opening(larger_plane),
        LayoutMismatch,
        "digest .* does not belong",
        id="layout disagrees",
    ),
    pytest.param(
        "open_namespace",
        opening(lambda request: setattr(request, "digest", b"")),
        LayoutMismatch,
        "does not belong",
        id="no digest",
    ),
    pytest.param(
        "open_namespace",
        opening(lambda request: request.namespace.layout.Clear()),
        InvalidRequest,
        "page_tokens 0",
        id="empty layout",
    ),
    pytest.param(
        "open_namespace",
        opening(lambda request: request.ClearField("namespace")),
        InvalidRequest,
        "layout is missing",
        id="no namespace",
    ),
    pytest.param(
        "open_namespace",
        opening(page_of_2_mib),
        InvalidRequest,
        "2097152 bytes, this node takes at most",
        id="too large",
    ),
]


@pytest.mark.parametrize(("op", "build", "error", "named"), CASES)
def test_invalid_request_gets_one_clear_error(
    node: Node,
    wire: Wire,
    op: str,
    build: Builder,
    error: type[KVStoreError],
    named: str,
) -> None:
    namespace = Namespace("bad requests", opaque_layout(4096))
    opened = pb.OpenNamespaceRequest(
        namespace=namespace_message(namespace), digest=namespace.digest
    )
    wire.call("open_namespace", opened, Deadline(5))
    with pytest.raises(error, match=named):
        send(wire, op, build(namespace.digest))
    # The connection still serves, and after the next request nothing is held.
    assert wire.call(
        "lookup", pb.LookupRequest(namespace=namespace.digest, prefix_hashes=[KEY]), Deadline(5)
    )
    settle(node, sessions=0 if wire.name == "grpc" else 1)


def test_message_over_the_limit_is_refused(node: Node, wire: Wire) -> None:
    too_large = pb.ListRequest(key_prefix=bytes(MESSAGE_NBYTES_MAX + 1))
    # Without gRPC the node closes while the rest is still being sent, so its error may get lost.
    expected: Any = Exhausted if wire.name == "grpc" else (ProtocolError, Unavailable)
    with Bystander(node), pytest.raises(expected, match=r"at most 2097152|failed|larger than max"):
        wire.call("list", too_large, Deadline(5))
    settle(node)


def test_namespace_limit_evicts_empty_namespaces(start_node: StartNode, connect: Connect) -> None:
    client = connect(start_node(namespaces_max=8))  # one peer may have half of them
    namespaces = [Namespace(f"model-{n}", opaque_layout(4096)) for n in range(6)]
    for namespace in namespaces[:5]:
        client.open(namespace)
    assert {namespace for namespace, _ in client.namespaces()} == set(namespaces[1:5])
    for namespace in namespaces[1:5]:
        assert client.put(namespace, [KEY], [bytes(4096)]) == [PutOutcome.STORED]
    with pytest.raises(Exhausted, match=r"4 namespaces of 127\.0\.0\.1 with pages are open"):
        client.open(namespaces[5])
    client.remove(namespaces[2], [KEY])
    client.open(namespaces[5])


def test_namespace_descriptions_are_limited_in_bytes(
    start_node: StartNode, connect: Connect
) -> None:
    """One peer may use 512 KiB of descriptions, so that one message can list them all."""
    client = connect(start_node())
    opened = 0

    def open_all() -> None:
        nonlocal opened
        for number in range(200):
            text = f"{number:03}".ljust(1000, "x")
            namespace = Namespace(text, opaque_layout(64), tenant=text, revision=text, salt=text)
            client.put(namespace, [KEY], [bytes(64)])
            opened += 1

    with pytest.raises(
        Exhausted, match=r"127\.0\.0\.1 with pages are open, described by .* 524288 bytes"
    ):
        open_all()
    assert 120 < opened < 131
    assert len(client.namespaces()) == opened


@pytest.mark.parametrize("name", ["shm", "bulk", "grpc"])
def test_arena_full_of_pinned_pages_refuses_at_once(
    start_node: StartNode, connect: Connect, name: str
) -> None:
    """The error comes long before the deadline, with the numbers that explain it."""
    node = start_node(ram_nbytes=1 << 20, extent_nbytes=1 << 20)
    client = connect(node, wire=name, timeout_s=600.0)
    pages = Pages("pinned")
    keys = pages.keys(*range(256))
    pages.put(client, keys)
    assert all(client.pin(pages.namespace, keys[:128], 60.0))
    with pytest.raises(
        Exhausted, match=r"with 1 more, pinned pages would occupy .* \(half of ram_nbytes\)"
    ):
        client.pin(pages.namespace, keys[128:129], 60.0)
    held = [
        page
        for page in node.tier.acquire(pages.namespace.digest, keys[128:], False, 0).pages
        if page
    ]
    with pytest.raises(
        Exhausted, match=r"all pages are pinned or in use \(128 pinned, 128 being read"
    ):
        pages.put(client, pages.keys(1000))
    assert all(pages.get(client, keys))
    assert client.unpin(pages.namespace, keys[:1]) == [True]
    assert pages.put(client, pages.keys(1000)) == [PutOutcome.STORED]
    node.tier.release(held)
