"""Refused requests: none of their memory stays."""

import gc
import threading
import time
from typing import Any

import grpc
import pytest
from known_pages import Pages
from local_nodes import Connect, ConnectRaw

from kvstore import Namespace, opaque_layout
from kvstore.config import GET_RANGES_MAX
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.layout import ByteRange
from kvstore.messages import namespace_message
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from node.auth.access import THE_NODE
from node.server import Node
from node.serving import limits


class Errors:
    """Errors that a service raises, counted while they live.

    Each error keeps its stack frames, and these keep the request.
    """

    SAID = "no, and watched"

    def alive(self) -> int:
        return sum(
            isinstance(one, InvalidRequest) and one.args == (self.SAID,) for one in gc.get_objects()
        )

    def fail(self, *_: Any) -> Any:
        raise InvalidRequest(self.SAID)


@pytest.mark.parametrize("count", [1, 1000], ids=["small", "large"])
def test_refused_grpc_calls_leave_no_garbage(
    node: Node, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Regression: 267 refused calls of 2 MiB, one after the other, took 5 GiB."""
    errors = Errors()
    monkeypatch.setitem(node.service._unary, "stat", errors.fail)
    monkeypatch.setattr(node.service, "begin_get", errors.fail)
    keys = [bytes(32)] * count
    gc.collect()
    gc.disable()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
            stub = KVStoreStub(channel)
            for _ in range(5):
                with pytest.raises(grpc.RpcError, match="no"):
                    stub.Stat(pb.StatRequest(prefix_hashes=keys), timeout=20.0)
                with pytest.raises(grpc.RpcError, match="no"):
                    list(stub.Get(pb.GetRequest(prefix_hashes=keys), timeout=20.0))
        end = time.monotonic() + 60.0
        # The task of the last call ends after its status was sent
        while errors.alive() and time.monotonic() < end:
            threading.Event().wait(0.05)
        assert errors.alive() == 0
    finally:
        gc.enable()


def refusals(node: Node, raw: ConnectRaw, op: str, body: bytes) -> list[str]:
    """Send an encoded request over gRPC and bulk; return the error messages.

    The bulk connection must still serve afterwards.
    """
    messages = []
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream(f"/kvstore.KVStore/{op.capitalize()}")(body, timeout=20.0))
        messages.append(caught.value.details())
    connection = raw(node)
    connection.arm(20.0)
    connection.ask(hello=pb.HelloRequest())
    number = pb.BulkRequest.DESCRIPTOR.fields_by_name[op].number
    assert 1 << 14 <= len(body) < 1 << 21
    length = bytes([len(body) & 127 | 128, len(body) >> 7 & 127 | 128, len(body) >> 14])
    connection.send_frame(bytes([number << 3 | 2]) + length + body)
    messages.append(connection.reply()[0].error.message)
    assert connection.ask(hello=pb.HelloRequest()).hello.bulk_port
    return messages


@pytest.mark.parametrize("op", ["stat", "lookup", "get"])
def test_oversized_request_is_refused_before_parsing(
    node: Node, raw: ConnectRaw, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """Regression: parsing a million empty keys or ranges held the GIL for 60 ms, and gets from RAM
    waited for seconds.
    """

    class Unparsed:
        @staticmethod
        def FromString(data: bytes) -> Any:
            raise AssertionError("the request was parsed")

    with monkeypatch.context() as patch:
        patch.setitem(limits._TYPES, op, (0, Unparsed))
        for body in (b"\x12\x00" * 1_000_000, b"\x1a\x00" * 500_000):
            for message in refusals(node, raw, op, body):
                assert "split the batch" in message


def test_ranges_of_large_gets_count_as_request_bytes(
    node: Node, raw: ConnectRaw, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: they did not count over gRPC."""
    connect(node).open(pages.namespace)
    budget, seen = node.service.requests, []
    begin = node.service.begin_get
    monkeypatch.setattr(
        node.service, "begin_get", lambda *some: seen.append(budget.used) or begin(*some)
    )
    get = pb.GetRequest(namespace=pages.namespace.digest, prefix_hashes=pages.keys(*range(16)))
    get.ranges.extend([pb.ByteRange(offset=1 << 40, nbytes=1 << 40)] * GET_RANGES_MAX)
    body = get.SerializeToString()
    assert all("leaves the page" in message for message in refusals(node, raw, "get", body))
    assert len(seen) == 2
    assert min(seen) >= 8 * len(body)
    end = time.monotonic() + 60.0
    while budget.used and time.monotonic() < end:
        threading.Event().wait(0.01)
    assert budget.used == 0


def test_get_of_too_many_ranges_is_refused_on_every_wire(
    node: Node, raw: ConnectRaw, connect: Connect, pages: Pages
) -> None:
    client = connect(node)
    client.open(pages.namespace)
    get = pb.GetRequest(namespace=pages.namespace.digest, prefix_hashes=pages.keys(1))
    # A request small enough to be parsed at once, and a large one
    for count in (
        GET_RANGES_MAX + 1,
        8 * GET_RANGES_MAX,
    ):
        del get.ranges[:]
        get.ranges.extend([pb.ByteRange(offset=4, nbytes=1)] * count)
        for message in refusals(node, raw, "get", get.SerializeToString()):
            assert f"{count} ranges" in message
            assert f"at most {GET_RANGES_MAX}" in message
    buffer = bytearray(GET_RANGES_MAX + 1)
    with pytest.raises(InvalidRequest, match=f"at most {GET_RANGES_MAX}"):
        client.get_ranges(
            pages.namespace, pages.keys(1), [ByteRange(0, 1)] * (GET_RANGES_MAX + 1), [buffer]
        )


def test_error_shortens_a_long_digest(node: Node) -> None:
    """Regression: a digest of 2 MiB made 4 MiB of text for each refused call."""
    digest = bytes(60_000)
    opening = pb.OpenNamespaceRequest(
        namespace=namespace_message(Namespace("m", opaque_layout(4096))), digest=digest
    )
    lookup = pb.LookupRequest(namespace=digest, prefix_hashes=[bytes(32)])
    for op, request in (("open_namespace", opening), ("lookup", lookup)):
        with pytest.raises(KVStoreError, match="of 60000 bytes") as caught:
            node.service.call(op, request, THE_NODE)
        assert len(str(caught.value)) < 1000
