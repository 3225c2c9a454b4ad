"""Puts and gets in one message each way over gRPC, and the streams where those do not serve."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from known_pages import Pages
from local_nodes import Connect

from kvstore import Client, PutOutcome
from kvstore.checksum import leaves
from kvstore.config import GRPC_CHUNK_NBYTES
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from kvstore.transports.grpc_wire import GrpcWire
from node.memory.inventory import Inventory
from node.server import Node

PAGE = 5000
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
def stub(node: Node) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
        yield KVStoreStub(channel)  # type: ignore[no-untyped-call]


@pytest.fixture
def space(request: pytest.FixtureRequest, node: Node, connect: Connect) -> Pages:
    pages = Pages(request.node.name, PAGE)
    pages.put(connect(node), pages.keys(0, 1))
    return pages


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the methods by which clients transfer pages from now on."""
    names: list[str] = []

    def note(name: str) -> None:
        method = getattr(GrpcWire, name)

        def noted(wire: GrpcWire, *given: Any) -> Any:
            names.append(name)
            return method(wire, *given)

        monkeypatch.setattr(GrpcWire, name, noted)

    for name in ("_put_all", "_get_all", "_call_whole"):
        note(name)
    return names


def put_request(space: Pages, *numbers: int) -> pb.PutWholeRequest:
    keys = space.keys(*numbers)
    pages = [space.content(key) for key in keys]
    begin = pb.PutRequest(
        namespace=space.namespace.digest, prefix_hashes=keys, page_nbytes=space.nbytes
    )
    return pb.PutWholeRequest(
        begin=begin,
        chunk=pb.PageChunk(data=b"".join(pages)),
        commit=pb.CommitRequest(leaves=[leaves(page) for page in pages]),
    )


def stored(node: Node, space: Pages) -> int:
    return len(Inventory(node.tier).list_pages(space.namespace.digest, b"", b"", 1000)[0])


def test_pages_that_exist_are_dropped_from_the_message(
    node: Node, stub: Any, space: Pages, connect: Connect
) -> None:
    reply = stub.PutWhole(put_request(space, 0, 5, 1, 6), timeout=60.0)
    assert list(reply.verdicts) == [pb.EXISTS, pb.WRITE, pb.EXISTS, pb.WRITE]
    assert space.get(connect(node), space.keys(0, 1, 5, 6)) == [True] * 4
    assert stored(node, space) == 4
    reply = stub.PutWhole(put_request(space, 5, 6), timeout=60.0)
    assert list(reply.verdicts) == [pb.EXISTS] * 2


def test_get_in_one_message(stub: Any, space: Pages) -> None:
    keys = space.keys(0, 9, 1)
    request = pb.GetRequest(namespace=space.namespace.digest, prefix_hashes=keys)
    reply = stub.GetWhole(request, timeout=60.0)
    assert list(reply.begin.hits) == [True, False, True]
    assert reply.chunk.data == space.content(keys[0]) + space.content(keys[2])
    request.prefix_hashes[:] = keys[1:2]
    assert list(stub.GetWhole(request, timeout=60.0).begin.hits) == [False]


REFUSED = (INVALID, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)
WRONG = {
    "a byte too few": lambda put: put.chunk.MergeFrom(pb.PageChunk(data=put.chunk.data[:-1])),
    "no page bytes": lambda put: put.ClearField("chunk"),
    "no commit": lambda put: put.ClearField("commit"),
    "leaves of one": lambda put: put.commit.leaves.pop(),
    "leaves of three": lambda put: put.commit.leaves.append(b"leaves.."),
    "no begin": lambda put: put.ClearField("begin"),
    "another size": lambda put: put.begin.MergeFrom(pb.PutRequest(page_nbytes=PAGE * 2)),
}


@pytest.mark.parametrize("numbers", [(5, 6), (0, 5)])
@pytest.mark.parametrize("what", WRONG)
def test_wrong_put_gets_one_status_and_stores_nothing(
    node: Node, stub: Any, space: Pages, connect: Connect, what: str, numbers: tuple[int, int]
) -> None:
    put = put_request(space, *numbers)
    WRONG[what](put)
    with pytest.raises(grpc.RpcError) as caught:
        stub.PutWhole(put, timeout=60.0)
    assert caught.value.code() in REFUSED, caught.value.details()
    assert stored(node, space) == 2
    assert space.put(connect(node, "grpc"), space.keys(5, 6)) == [PutOutcome.STORED] * 2


def test_no_message(stub: Any, node: Node) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
        put: Any = channel.unary_unary("/kvstore.KVStore/PutWhole")
        with pytest.raises(grpc.RpcError) as caught:
            put(b"\xff\xff", timeout=60.0)
    assert caught.value.code() is INVALID


def test_more_than_a_message_is_refused_and_streamed(
    node: Node, stub: Any, connect: Connect, called: list[str]
) -> None:
    pages, client = Pages("large", GRPC_CHUNK_NBYTES // 2), connect(node, "grpc")
    keys = pages.keys(0, 1, 2)
    assert pages.put(client, keys) == [PutOutcome.STORED] * 3
    assert pages.get(client, keys) == [True] * 3
    assert called == ["_put_all", "_get_all"]
    assert pages.get(client, keys[:2]) == [True] * 2
    assert called[2:] == ["_call_whole"]
    request = pb.GetRequest(namespace=pages.namespace.digest, prefix_hashes=keys)
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetWhole(request, timeout=60.0)
    assert caught.value.code() is INVALID
    assert "call Get" in caught.value.details()


def transfers(client: Client, space: Pages) -> None:
    assert space.put(client, space.keys(1, 5, 6)) == [
        PutOutcome.EXISTS,
        PutOutcome.STORED,
        PutOutcome.STORED,
    ]
    assert space.get(client, space.keys(0, 9, 5, 6)) == [True, False, True, True]


def test_client_sends_small_transfers_whole(
    node: Node, space: Pages, connect: Connect, called: list[str]
) -> None:
    transfers(connect(node, "grpc"), space)
    assert called == ["_call_whole"] * 2


def test_client_of_an_older_node_streams(
    node: Node, space: Pages, connect: Connect, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call_whole = GrpcWire._call_whole

    def absent(wire: GrpcWire, call: Any, *given: Any) -> Any:
        newer: Any = wire._channel.unary_unary("/kvstore.KVStore/Newer", lambda request: b"")
        return call_whole(wire, newer, *given)

    monkeypatch.setattr(GrpcWire, "_call_whole", absent)
    transfers(connect(node, "grpc"), space)
    assert called == ["_call_whole", "_put_all", "_get_all"], "it is asked once"
