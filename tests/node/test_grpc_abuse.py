"""gRPC transfers that end early, come in the wrong order, stall or are cancelled get one status.

Other clients are not disturbed, and no slot, hold or session leaks.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from known_pages import Pages
from local_nodes import Bystander, Connect, StartNode, settle

from kvstore.checksum import leaves
from kvstore.config import PROTOCOL_VERSION
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from node.memory.inventory import Inventory
from node.server import Node

PAGE = 64 << 10


@pytest.fixture(scope="module")
def node(start_node: StartNode) -> Node:
    """Return a node that soon ends transfers that stall."""
    return start_node(ram_nbytes=16 << 20, stall_s=2.0)


INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
def stub(node: Node) -> Iterator[KVStoreStub]:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}", options) as channel:
        yield KVStoreStub(channel)


@pytest.fixture
def space(request: pytest.FixtureRequest, node: Node, connect: Connect) -> Pages:
    pages = Pages(request.node.name, PAGE)
    pages.put(connect(node), pages.keys(*range(8)))
    return pages


def begin(space: Pages, *numbers: int) -> pb.PutFrame:
    request = pb.PutRequest(
        namespace=space.namespace.digest,
        prefix_hashes=space.keys(*numbers),
        page_nbytes=space.nbytes,
    )
    return pb.PutFrame(begin=request)


def chunk(nbytes: int) -> pb.PutFrame:
    return pb.PutFrame(chunk=pb.PageChunk(data=bytes(nbytes)))


def commit(*of_pages: bytes) -> pb.PutFrame:
    return pb.PutFrame(commit=pb.CommitRequest(leaves=of_pages))


def stored(node: Node, space: Pages) -> int:
    return len(Inventory(node.tier).list_pages(space.namespace.digest, b"", b"", 1000)[0])


BAD_STREAMS: dict[str, tuple[Callable[[Any], list[pb.PutFrame]], str]] = {
    "no frame": (lambda space: [], "ended where a request was expected"),
    "empty frame": (lambda space: [pb.PutFrame()], "a None frame where a begin frame"),
    "chunk first": (lambda space: [chunk(5)], "a chunk frame where a begin frame"),
    "commit first": (lambda space: [commit()], "a commit frame where a begin frame"),
    "nothing after begin": (lambda space: [begin(space, 100, 101)], "ended where a chunk frame"),
    "begin twice": (
        lambda space: [begin(space, 100, 101)] * 2,
        "a begin frame where a chunk frame",
    ),
    "commit without data": (
        lambda space: [begin(space, 100, 101), commit(b"c" * 16, b"c" * 16)],
        "a commit frame",
    ),
    "half of the data": (
        lambda space: [begin(space, 100, 101), chunk(PAGE)],
        "ended where a chunk frame",
    ),
    "half, then commit": (
        lambda space: [begin(space, 100, 101), chunk(PAGE), commit()],
        "a commit frame where a chunk",
    ),
    "one byte too many": (
        lambda space: [begin(space, 100, 101), chunk(2 * PAGE + 1)],
        "1 page bytes more than",
    ),
    "a chunk too many": (
        lambda space: [begin(space, 100, 101), chunk(2 * PAGE), chunk(1)],
        "a chunk frame where a commit frame",
    ),
    "empty chunk": (lambda space: [begin(space, 100, 101), chunk(0)], "page bytes ended early"),
    "no commit": (
        lambda space: [begin(space, 100, 101), chunk(2 * PAGE)],
        "ended where a commit frame",
    ),
    "no leaves": (
        lambda space: [begin(space, 100, 101), chunk(2 * PAGE), commit()],
        "the leaves of 0 pages for 2",
    ),
    "short leaves": (
        lambda space: [begin(space, 100, 101), chunk(2 * PAGE), commit(b"c" * 8, b"c")],
        "send 8 bytes for each",
    ),
}


@pytest.mark.parametrize("what", BAD_STREAMS)
def test_put_out_of_order_gets_one_status_and_stores_nothing(
    node: Node, stub: KVStoreStub, space: Pages, what: str
) -> None:
    frames, message = BAD_STREAMS[what]
    with Bystander(node), pytest.raises(grpc.RpcError) as caught:
        list(stub.Put(iter(frames(space)), timeout=5.0))
    assert caught.value.code() is INVALID
    assert message in caught.value.details()
    assert stored(node, space) == 8
    settle(node, sessions=1)


def test_put_of_existing_pages_needs_no_commit(stub: KVStoreStub, space: Pages) -> None:
    replies = list(stub.Put(iter([begin(space, 0, 1)]), timeout=5.0))
    assert [list(reply.begin.verdicts) for reply in replies] == [[pb.EXISTS, pb.EXISTS]]


def test_handmade_put_is_stored(
    stub: KVStoreStub, space: Pages, node: Node, connect: Connect
) -> None:
    (key,) = space.keys(100)
    content = space.content(key)
    frames = [begin(space, 100), pb.PutFrame(chunk=pb.PageChunk(data=content[:100]))]
    frames.append(pb.PutFrame(chunk=pb.PageChunk(data=content[100:])))
    frames.append(commit(leaves(content)))
    replies = list(stub.Put(iter(frames), timeout=5.0))
    assert replies[1].commit.stored == 1
    assert space.get(connect(node), [key]) == [True]


class Held:
    """A stream of frames sent one by one; it stays open until `end`."""

    def __init__(self, *frames: pb.PutFrame) -> None:
        self._queue: queue.SimpleQueue[pb.PutFrame | None] = queue.SimpleQueue()
        for frame in frames:
            self._queue.put(frame)

    def send(self, frame: pb.PutFrame) -> None:
        self._queue.put(frame)

    def end(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[pb.PutFrame]:
        return iter(self._queue.get, None)


def test_stalled_puts_are_cancelled(node: Node, stub: KVStoreStub, space: Pages) -> None:
    """The puts stall after the begin, within the data, and before the commit."""
    stalling = [
        Held(begin(space, 100, 101)),
        Held(begin(space, 102, 103), chunk(1000)),
        Held(begin(space, 104, 105), chunk(2 * PAGE)),
    ]
    with Bystander(node):
        calls = [stub.Put(iter(held), timeout=30.0) for held in stalling]
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "(stall_s)" in caught.value.details()
    for held in stalling:
        held.end()
    assert stored(node, space) == 8
    settle(node, sessions=1)


def test_trickling_put_is_cancelled(node: Node, stub: KVStoreStub, space: Pages) -> None:
    """A byte now and then is no progress: otherwise the put would keep its slots for hours."""
    held = Held(begin(space, 100, 101))
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.02):
            held.send(chunk(1))

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Put(iter(held), timeout=30.0))
    stop.set()
    thread.join()
    held.end()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    settle(node, sessions=1)


@pytest.mark.parametrize("stage", ["after begin", "within the data"])
def test_put_cancelled_by_the_client_leaves_nothing(
    node: Node, stub: KVStoreStub, space: Pages, stage: str
) -> None:
    held = Held(begin(space, 100, 101))
    with Bystander(node):
        call = stub.Put(iter(held), timeout=30.0)
        assert list(next(call).begin.verdicts) == [pb.WRITE, pb.WRITE]
        if stage == "within the data":
            held.send(chunk(PAGE))
        call.cancel()
        held.end()
        settle(node, sessions=None)
    assert stored(node, space) == 8
    settle(node, sessions=1)


@pytest.mark.parametrize("how", ["cancels", "never reads"])
def test_unread_get_releases_its_pages(
    start_node: StartNode,
    connect: Connect,
    how: str,
) -> None:
    """The reply of 16 MiB exceeds the buffers of gRPC and the sockets."""
    node = start_node(ram_nbytes=32 << 20, batch_nbytes_max=16 << 20, stall_s=2.0)
    space = Pages(how, 1 << 20)
    space.put(connect(node), space.keys(*range(16)))
    request = pb.GetRequest(namespace=space.namespace.digest, prefix_hashes=space.keys(*range(16)))
    with Bystander(node), grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
        call = KVStoreStub(channel).Get(request, timeout=30.0)
        assert all(next(call).begin.hits)
        assert node.tier.held_count >= 16, "the node must still be sending"
        if how == "cancels":
            call.cancel()
        settle(node, sessions=None)
    settle(node, sessions=1)


def test_transfers_over_the_limit_are_refused_and_small_calls_still_served(
    start_node: StartNode, connect: Connect
) -> None:
    node = start_node(grpc_threads=4, stall_s=30.0)
    space = Pages("transfers", PAGE)
    connect(node).open(space.namespace)
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
        stub = KVStoreStub(channel)
        stalled = [Held(begin(space, number)) for number in range(2)]  # half of three, rounded up
        calls = [stub.Put(iter(held), timeout=30.0) for held in stalled]
        assert all(next(call).begin.verdicts == [pb.WRITE] for call in calls)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Put(iter([begin(space, 9)]), timeout=5.0))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "gRPC transfers" in caught.value.details()
        assert "grpc_threads" in caught.value.details()
        assert stub.Hello(pb.HelloRequest(), timeout=5.0).protocol_version == PROTOCOL_VERSION
        for held, call in zip(stalled, calls, strict=True):
            held.end()
            with pytest.raises(grpc.RpcError):
                next(call)
    settle(node, sessions=1)


def test_invalid_messages_are_refused(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """Each invalid message gives one log line; tracebacks are for unexpected errors."""
    caplog.set_level(logging.INFO, "node")
    methods = [
        f"/kvstore.KVStore/{name}" for name in ("Lookup", "OpenNamespace", "Stat", "Get", "Put")
    ]
    methods += [
        "/grpc.health.v1.Health/Check",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ]
    with Bystander(node), grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
        for method in methods:
            with pytest.raises(grpc.RpcError) as caught:
                list(channel.unary_stream(method)(b"\xff\xff\xff", timeout=5.0))
            assert caught.value.code() is INVALID
        logged = [
            record for record in caplog.records if "is no message of the schema" in record.message
        ]
        assert {record.levelno for record in logged} == {logging.INFO}
        assert len(logged) == len(methods) - 1, "invalid frames of a put are not logged so"
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/kvstore.KVStore/Nothing")(b"", timeout=5.0)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    settle(node)
