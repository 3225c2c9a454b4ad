"""Large calls over gRPC: worked on beside the event loop, few, and peers take turns with them."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from node.serve.grpc import LOOP_NBYTES_MAX

from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from node.access.caller import Caller
from node.server import Node

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
SERVING = health_pb2.HealthCheckResponse.SERVING


def channel_to(node: Node) -> grpc.Channel:
    return grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}", [("grpc.use_local_subchannel_pool", 1)])


@pytest.fixture(scope="module")
def node(start_node: Callable[..., Node]) -> Node:
    return start_node(grpc_threads=4, stall_s=30.0)


def test_large_calls_leave_the_loop_to_others_and_are_few(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 of one address that took 0.1 s each: a health check waited 10 s, and new clients gave up."""
    go_on, running = threading.Event(), threading.Semaphore(0)

    def wait(request: Any, caller: Any) -> Any:
        running.release()
        assert go_on.wait(20.0)
        return pb.StatReply()

    monkeypatch.setitem(node.service._unary, "stat", wait)
    large = pb.StatRequest(prefix_hashes=[bytes(32)] * (LOOP_NBYTES_MAX // 32))
    with channel_to(node) as channel, channel_to(node) as other:
        stat = KVStoreStub(channel).Stat
        calls = [stat.future(large, timeout=60.0) for _ in range(4)]
        try:
            assert running.acquire(timeout=10.0)
            check = health_pb2_grpc.HealthStub(other).Check
            assert check(health_pb2.HealthCheckRequest(), timeout=5.0).status == SERVING
            assert KVStoreStub(other).Hello(pb.HelloRequest(), timeout=5.0).bulk_port
            while node.grpc._servicer._large.used < 4:
                threading.Event().wait(0.01)
            with pytest.raises(grpc.RpcError) as caught:
                stat(large, timeout=10.0)
            assert caught.value.code() is EXHAUSTED
            assert "gRPC calls over 1 KiB: 4 of 127.0.0.1 and 4 in all" in caught.value.details()
            assert not running.acquire(timeout=0.2), "one at a time"
        finally:
            go_on.set()
            for call in calls:
                call.result()


def test_peers_take_turns_with_large_calls(node: Node) -> None:
    served: list[str] = []

    class LargeCall:
        def __init__(self, peer: str) -> None:
            self.peer, self.caller = peer, Caller(peer)

        async def in_thread(self, *_: Any) -> None:
            served.append(self.peer)
            await asyncio.sleep(0.01)

    async def serve() -> None:
        calls: list[Any] = [LargeCall(peer) for peer in ["greedy"] * 9 + ["second", "third"]]
        await asyncio.gather(*(node.grpc._servicer._in_turn(call, "stat", None) for call in calls))

    node.grpc._run(serve())
    assert served[:4] == ["greedy", "second", "third", "greedy"]
    assert not node.grpc._servicer._turns
