"""The number of connections of a gateway to its node, and a gateway that can open none."""

import os
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from fleets import small_nodes
from gateway_store import PAGE_NBYTES, SPACE, Store, chunk, committed, content
from gateways import in_loop, servicer_of
from request_stream import RequestStream
from waiting import wait_until

from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from kvstore.transports.frames import FrameSocket
from node.server import Node
from node.serving.gateway import GatewayDoor

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture
def node() -> Iterator[Node]:
    with small_nodes() as start:
        yield start()


@pytest.fixture(scope="module")
def store(start_store: Callable[..., Store]) -> Store:
    made = start_store()
    made.watch()
    return made


def test_gateway_connections_to_its_node_are_limited(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compromised gateway can not open connections without limit, each a thread of the node."""
    monkeypatch.setattr(node.grpc.calls, "connections_max", 3)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door = GatewayDoor("many", theirs, node.service, node.grpc.calls, 1.0)
    door.start()
    made = []
    for _ in range(5):
        end, its_end = socket.socketpair()
        with its_end:
            socket.send_fds(ours, [b"c"], [its_end.fileno()])
        made.append(FrameSocket(end))
    refused = 0
    for connection in made[3:]:
        connection.arm(20.0)
        reply = pb.BulkReply.FromString(connection.recv_frame(1 << 16)[0])
        refused += reply.error.code == EXHAUSTED.value[0]
    assert refused == 2
    assert door.count == 3
    for connection in made:
        connection.close()
    ours.close()
    door.stop(0.0)


def test_idle_connections_are_reused_and_trimmed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.gateway.upstream.KEPT_MAX", 1)
    upstream = servicer_of(node).upstream
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
        stub = KVStoreStub(channel)
        for _ in range(20):
            stub.Hello(pb.HelloRequest(), timeout=30.0)
        assert upstream.count == 1
        calls = [stub.NodeStatus.future(pb.NodeStatusRequest(), timeout=30.0) for _ in range(4)]
        for call in calls:
            call.result()
        in_loop(node, upstream.trim)
        assert upstream.count == 1
        assert stub.Hello(pb.HelloRequest(), timeout=30.0).bulk_port


def test_connection_closed_by_the_node_fails_no_call(node: Node) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
        stub = KVStoreStub(channel)
        stub.Hello(pb.HelloRequest(), timeout=30.0)
        (idle,) = servicer_of(node).upstream._idle
        idle._sock.shutdown(socket.SHUT_RDWR)
        assert stub.Hello(pb.HelloRequest(), timeout=30.0).bulk_port
        assert idle not in servicer_of(node).upstream._idle


# ---- a gateway without descriptors -----------------------------------------------------------


def allow(pid: int, count: int) -> tuple[int, int]:
    """Limit the descriptors of a process to `count`; return the limits before."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(count, before[1]), before[1]))
    return before


@pytest.mark.parametrize("phase", ["before its bytes", "before its commit"])
def test_gateway_without_descriptors_refuses_new_calls_and_completes_running_ones(
    store: Store, frames: RequestStream, phase: str
) -> None:
    key = store.key()
    with store.channel() as channel:
        stub = KVStoreStub(channel)
        put: Any = store.put(channel, key, frames)
        assert next(put).begin.verdicts == [pb.WRITE]
        if phase == "before its commit":
            frames.say(chunk(content(key)))
        pid = store.pid
        before = allow(pid, len(os.listdir(f"/proc/{pid}/fd")))
        try:
            codes: set[Any] = set()
            wait_until(lambda: EXHAUSTED in _codes(stub, codes))
            assert codes <= {EXHAUSTED, None}, "only calls on idle connections may succeed"
            if phase == "before its bytes":
                frames.say(chunk(content(key)))
            frames.say(committed(key))
            assert next(put).commit.stored == 1
            frames.end()
            assert list(put) == []
        finally:
            allow(pid, before[0])
        assert stub.Hello(pb.HelloRequest(), timeout=30.0).bulk_port
    assert store.pid == pid, "the gateway was restarted"
    assert store.read(key) == content(key)
    store.serves()


def _codes(stub: Any, found: set[Any]) -> set[Any]:
    """Send eight calls at a time; return `found` with their status codes, None for success."""
    calls = [stub.NodeStatus.future(pb.NodeStatusRequest(), timeout=30.0) for _ in range(8)]
    found |= {call.code() if call.exception() else None for call in calls}
    return found


def test_get_continues_while_its_gateway_has_no_descriptors(store: Store) -> None:
    keys = store.stored(16)
    pid = store.pid
    with store.channel() as channel:
        call = KVStoreStub(channel).Get(
            pb.GetRequest(namespace=SPACE.digest, prefix_hashes=keys), timeout=60.0
        )
        assert list(next(call).begin.hits) == [True] * 16
        before = allow(pid, len(os.listdir(f"/proc/{pid}/fd")))
        try:
            got = b"".join(frame.chunk.data for frame in call)
        finally:
            allow(pid, before[0])
    assert len(got) == 16 * PAGE_NBYTES
    assert got == b"".join(map(content, keys))
    store.serves()
