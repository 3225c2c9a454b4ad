"""Silent, endless or many gRPC calls use no threads, end after a time, and block no other calls."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateways import in_loop, servicer_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from known_pages import Pages
from local_nodes import Connect, StartNode, settle
from request_stream import RequestStream
from waiting import wait_until

from kvstore import Exhausted, PutOutcome
from kvstore.config import PROTOCOL_VERSION
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from node.config import NodeConfig
from node.disk.scrub import scrub
from node.gateway.gateway import STREAMS_OF_CONNECTION_MAX
from node.server import Node
from node.serving.limits import REFLECTION_STREAMS_MAX, REQUEST_NBYTES_FREE

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
SERVING = health_pb2.HealthCheckResponse.SERVING
PAGE = 1 << 20


@pytest.fixture
def silence() -> Iterator[Callable[[], RequestStream]]:
    made: list[RequestStream] = []

    def one() -> RequestStream:
        made.append(RequestStream())
        return made[-1]

    yield one
    for each in made:
        each.end()


def channel_to(node: Node) -> grpc.Channel:
    """Return a channel with its own connection, so that it is not full of another's calls."""
    return grpc.insecure_channel(
        f"127.0.0.1:{node.grpc.port}", [("grpc.use_local_subchannel_pool", 1)]
    )


@pytest.fixture
def channels(node: Node) -> Iterator[Callable[[], grpc.Channel]]:
    made: list[grpc.Channel] = []

    def one() -> grpc.Channel:
        made.append(channel_to(node))
        return made[-1]

    yield one
    for channel in made:
        channel.close()


@pytest.fixture(scope="module")
def node(start_node: StartNode) -> Node:
    return start_node(grpc_threads=4, stall_s=30.0)


def answers(node: Node) -> None:
    """Assert that a new client is served at once."""
    with channel_to(node) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        assert (
            check(health_pb2.HealthCheckRequest(), timeout=5.0, wait_for_ready=True).status
            == SERVING
        )
        assert (
            KVStoreStub(channel).Hello(pb.HelloRequest(), timeout=5.0).protocol_version
            == PROTOCOL_VERSION
        )


def at_rest(node: Node) -> None:
    wait_until(lambda: not servicer_of(node)._calls.count)


def test_calls_without_a_request_do_not_block_others(
    node: Node, channels: Callable[[], grpc.Channel], silence: Callable[[], RequestStream]
) -> None:
    """Regression: 32 unary calls opened as silent streams, as any client can, blocked gRPC."""
    calls = []
    for _ in range(2):
        channel = channels()
        methods = [
            "/kvstore.KVStore/Lookup",
            "/kvstore.KVStore/Put",
            "/grpc.health.v1.Health/Check",
        ]
        for method in methods * 10:
            calls.append(
                channel.stream_unary(method).future(
                    iter(silence()), timeout=60.0, wait_for_ready=True
                )
            )
    for _ in range(3):
        answers(node)
    assert len(calls) == 60
    for call in calls:
        call.cancel()


def test_call_without_a_request_is_timed_out(
    node: Node, silence: Callable[[], RequestStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.gateway.call.REQUEST_S_MAX", 0.2)
    with channel_to(node) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary("/kvstore.KVStore/Put")(iter(silence()), timeout=30.0)
    assert caught.value.code() is EXHAUSTED
    assert "no request came in 0.2 s" in caught.value.details()


def test_oldest_call_without_a_request_is_evicted_at_the_peer_limit(
    node: Node, silence: Callable[[], RequestStream]
) -> None:
    """Four threads allow 16 calls in all, eight of one peer."""
    at_rest(node)
    with channel_to(node) as channel:
        silent = channel.stream_unary("/kvstore.KVStore/Put")
        calls = []
        for number in range(10):
            calls.append(silent.future(iter(silence()), timeout=60.0, wait_for_ready=True))
            while servicer_of(node)._calls.count < min(number + 1, 8) and not calls[0].done():
                threading.Event().wait(0.01)
        assert [call.code() for call in calls[:2]] == [EXHAUSTED] * 2
        assert "it was evicted for another call of its peer" in calls[0].details()
        assert not any(call.done() for call in calls[2:])
        for call in calls:
            call.cancel()


def test_call_over_the_limit_of_busy_calls_is_refused(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_rest(node)
    go_on, running = threading.Event(), threading.Semaphore(0)

    def wait(request: Any, caller: Any) -> Any:
        running.release()
        assert go_on.wait(60.0)
        return pb.ListReply() if isinstance(request, pb.ListRequest) else pb.NodeStatusReply()

    for op in ("list", "node_status"):
        monkeypatch.setitem(node.service._unary, op, wait)
    with channel_to(node) as channel:
        stub = KVStoreStub(channel)
        calls = [stub.List.future(pb.ListRequest(), timeout=60.0) for _ in range(4)]
        calls += [stub.NodeStatus.future(pb.NodeStatusRequest(), timeout=60.0) for _ in range(4)]
        try:
            assert all(running.acquire(timeout=60.0) for _ in calls)
            with pytest.raises(grpc.RpcError) as caught:
                stub.Hello(pb.HelloRequest(), timeout=10.0)
            assert caught.value.code() is EXHAUSTED
            assert (
                "gRPC calls: 8 of 127.0.0.1 and 8 in all; allowed are 8 for one peer"
                in caught.value.details()
            )
        finally:
            go_on.set()
            for call in calls:
                call.result()
        at_rest(node)
        assert stub.Hello(pb.HelloRequest(), timeout=10.0).bulk_port


def test_streams_of_a_connection_are_limited(
    start_node: StartNode, silence: Callable[[], RequestStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine takes long to start so many calls
    monkeypatch.setattr("node.gateway.call.REQUEST_S_MAX", 600.0)
    node = start_node(grpc_threads=64, stall_s=30.0)
    counted = servicer_of(node)._calls
    with channel_to(node) as channel:
        silent = channel.stream_unary("/kvstore.KVStore/Put")
        calls = [
            silent.future(iter(silence()), timeout=60.0)
            for _ in range(2 * STREAMS_OF_CONNECTION_MAX)
        ]
        wait_until(lambda: counted.count >= STREAMS_OF_CONNECTION_MAX)
        threading.Event().wait(0.2)
        assert counted.count == STREAMS_OF_CONNECTION_MAX
        for call in calls:
            call.cancel()


def test_silent_reflection_streams_do_not_block_others(
    node: Node, channels: Callable[[], grpc.Channel], silence: Callable[[], RequestStream]
) -> None:
    streams = []
    for _ in range(4):
        stub = reflection_pb2_grpc.ServerReflectionStub(channels())
        streams += [
            stub.ServerReflectionInfo(iter(silence()), timeout=60.0, wait_for_ready=True)
            for _ in range(8)
        ]
    while sum(stream.done() for stream in streams) < len(streams) - -(-REFLECTION_STREAMS_MAX // 2):
        threading.Event().wait(0.01)
    ended = [stream for stream in streams if stream.done()]
    assert all(
        "it was evicted for another call of its peer" in stream.details() for stream in ended
    )
    answers(node)
    with channel_to(node) as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (reply,) = list(stub.ServerReflectionInfo(iter([request]), timeout=5.0))
        assert len(reply.list_services_response.service) == 3
    for stream in streams:
        stream.cancel()


def test_busy_reflection_stream_is_timed_out(
    node: Node,
    channels: Callable[[], grpc.Channel],
    silence: Callable[[], RequestStream],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("node.gateway.server.REFLECTION_S_MAX", 0.5)
    stream_in = silence()
    stream = reflection_pb2_grpc.ServerReflectionStub(channels()).ServerReflectionInfo(
        iter(stream_in), timeout=30.0
    )

    def talk() -> None:
        for _ in range(600):
            stream_in.say(reflection_pb2.ServerReflectionRequest(list_services=""))
            next(stream)
            threading.Event().wait(0.05)

    with pytest.raises(grpc.RpcError) as caught:
        talk()
    assert caught.value.code() is EXHAUSTED
    assert "a reflection stream lasts at most 0.5 s" in caught.value.details()


def test_health_watch_of_an_unknown_name_is_refused(
    node: Node, channels: Callable[[], grpc.Channel]
) -> None:
    """Regression: the unknown name, of up to 2 MB per call, stayed in memory."""
    stub = health_pb2_grpc.HealthStub(channels())
    for name in ("nobody", "n" * 2_000_000):
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=10.0))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_health_watch_reports_changes_and_the_oldest_is_evicted(
    node: Node, channels: Callable[[], grpc.Channel]
) -> None:
    request = health_pb2.HealthCheckRequest(service="kvstore.KVStore")
    first = health_pb2_grpc.HealthStub(channels()).Watch(request, timeout=300.0)
    assert next(first).status == SERVING
    node.grpc.set_serving(False)
    assert next(first).status == health_pb2.HealthCheckResponse.NOT_SERVING
    node.grpc.set_serving(True)
    assert next(first).status == SERVING
    others = []  # kept, because gRPC cancels collected calls
    for _ in range(2):
        stub = health_pb2_grpc.HealthStub(channels())
        # One after the other, because a call without a request is evicted first
        for _ in range(20):
            others.append(stub.Watch(request, timeout=60.0))
            assert next(others[-1]).status == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        next(first)
    assert caught.value.code() is EXHAUSTED
    answers(node)


def test_waiting_calls_do_not_delay_a_stop(silence: Callable[[], RequestStream]) -> None:
    ports: dict[str, Any] = {"port": 0, "bulk_port": 0, "metrics_port": 0}
    node = Node(NodeConfig(host="127.0.0.1", ram_nbytes=16 << 20, drain_s=60.0, **ports))
    node.start()
    with channel_to(node) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=120.0
        )
        assert next(watch).status == SERVING
        channel.stream_unary("/kvstore.KVStore/Lookup").future(iter(silence()), timeout=120.0)
        began = time.monotonic()
        node.stop()
        assert time.monotonic() - began < 30.0


def test_call_during_a_stop_does_not_delay_it(
    start_node: StartNode, silence: Callable[[], RequestStream]
) -> None:
    """Regression: a call that came after the waiting ones had been ended got all of `drain_s`."""
    node = start_node()
    in_loop(node, servicer_of(node).end_idle)
    with channel_to(node) as channel:
        late = channel.stream_unary("/kvstore.KVStore/Put").future(iter(silence()), timeout=30.0)
        assert late.code() is EXHAUSTED


def test_health_watch_is_timed_out(
    node: Node, channels: Callable[[], grpc.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.gateway.server.HEALTH_WATCH_S_MAX", 0.3)
    with pytest.raises(grpc.RpcError) as caught:
        list(
            health_pb2_grpc.HealthStub(channels()).Watch(
                health_pb2.HealthCheckRequest(), timeout=30.0
            )
        )
    assert caught.value.code() is EXHAUSTED
    assert "watch again" in caught.value.details()


def test_steadily_trickling_grpc_put_is_timed_out(
    start_node: StartNode, connect: Connect, silence: Callable[[], RequestStream]
) -> None:
    node, nbytes = start_node(stall_s=1.0, batch_nbytes_max=4 << 20), PAGE
    pages = Pages("trickle", nbytes)
    connect(node, "grpc").open(pages.namespace)
    frames = silence()
    put = pb.PutRequest(
        namespace=pages.namespace.digest, prefix_hashes=pages.keys(1), page_nbytes=nbytes
    )
    frames.say(pb.PutFrame(begin=put))
    stop = threading.Event()

    def trickle() -> None:  # 320 KiB a second: more than 256 KiB, so no stall, but less than 1 MiB
        for _ in range(0, nbytes, 16 << 10):
            frames.say(pb.PutFrame(chunk=pb.PageChunk(data=bytes(16 << 10))))
            if stop.wait(0.05):
                return
        frames.say(pb.PutFrame(commit=pb.CommitRequest(leaves=[b"c" * 8])))

    thread = threading.Thread(target=trickle)
    thread.start()
    with channel_to(node) as channel, pytest.raises(grpc.RpcError) as caught:
        list(KVStoreStub(channel).Put(iter(frames), timeout=30.0))
    stop.set()
    thread.join()
    assert caught.value.code() is EXHAUSTED
    settle(node)
    assert node.tier.visible_count == 0


def test_put_without_a_thread_leaves_nothing(
    node: Node, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection from the gateway to the node needs a thread."""
    client = connect(node, "grpc")
    client.open(pages.namespace)
    upstream = servicer_of(node).upstream
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("gateway-0"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as short:
        # Close idle connections, which have threads
        in_loop(node, lambda: [upstream._close(upstream._idle.pop()) for _ in upstream._idle[:]])
        short.setattr(threading.Thread, "start", refuse)
        with pytest.raises(Exhausted, match="no more threads"):
            pages.put(client, pages.keys(1))
        short.setattr(threading.Thread, "start", start)
        assert pages.put(client, pages.keys(2)) == [PutOutcome.STORED]
    settle(node, sessions=None)
    assert pages.put(client, pages.keys(1)) == [PutOutcome.STORED]


def test_long_metadata_is_refused(node: Node, channels: Callable[[], grpc.Channel]) -> None:
    """All 20 calls are refused: gRPC by itself refuses metadata slightly over the limit at
    random.
    """
    stub = KVStoreStub(channels())
    for _ in range(20):
        with pytest.raises(grpc.RpcError) as caught:
            stub.Hello(pb.HelloRequest(), timeout=10.0, metadata=[("name", "x" * 9_000)])
        assert caught.value.code() is EXHAUSTED
    answers(node)


def test_large_requests_over_grpc_are_refused_by_name(
    node: Node, channels: Callable[[], grpc.Channel]
) -> None:
    requests = node.service.requests
    large = pb.LookupRequest(
        namespace=bytes(16), prefix_hashes=[bytes(64)] * (REQUEST_NBYTES_FREE // 64)
    )
    with (
        requests.lent("one peer", requests.cap.per_peer),
        requests.lent("another", requests.cap.per_peer),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            KVStoreStub(channels()).Lookup(large, timeout=10.0)
        assert caught.value.code() is EXHAUSTED
        assert "bytes of large requests: 0 of 127.0.0.1" in caught.value.details()
        answers(node)


def test_cancelled_scrubs_do_not_block_calls_or_the_stop(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: 40 scrubs without a limit kept all threads, and SIGTERM waited for 25 s."""
    settings: dict[str, Any] = {
        "port": 0,
        "bulk_port": 0,
        "metrics_port": 0,
        "ram_nbytes": 16 << 20,
        "drain_s": 0.1,
    }
    disk: dict[str, Any] = {
        "data_dir": str(tmp_path),
        "disk_nbytes": 64 << 20,
        "scrub_nbytes_per_s": 0,
    }
    node = Node(NodeConfig(host="127.0.0.1", grpc_threads=4, **settings, **disk))
    node.start()
    pages = Pages("scrub")
    client = connect(node, timeout_s=30.0)
    for first in range(0, 400, 50):
        pages.put(client, [number.to_bytes(2, "big") * 16 for number in range(first, first + 50)])
    client.flush(timeout_s=30.0)
    assert node.disk is not None
    verify, verified = node.disk.reading.verify, []
    running = list[int]()

    def counted(*arguments: Any) -> Any:
        running.append(1)
        try:
            return scrub(*arguments)
        finally:
            running.pop()

    def slowly(*arguments: Any) -> bool:
        threading.Event().wait(0.05)
        verified.append(1)
        good: bool = verify(*arguments)
        return good

    def until_more_than(count: int) -> None:
        while len(verified) <= count:
            threading.Event().wait(0.01)

    monkeypatch.setattr(node.disk.reading, "verify", slowly)
    monkeypatch.setattr("node.serving.admin_calls.scrub", counted)
    with channel_to(node) as channel:
        stub = KVStoreStub(channel)
        calls = [
            stub.Scrub.future(pb.ScrubRequest(nbytes_max=1 << 60), timeout=60.0) for _ in range(20)
        ]
        until_more_than(0)
        for call in calls:
            call.cancel()
        answers(node)
        wait_until(lambda: not running)
        count = len(verified)
        assert count < 400, "the cancelled scrub went on to the end"
        again = [
            stub.Scrub.future(pb.ScrubRequest(nbytes_max=1 << 60), timeout=60.0) for _ in range(20)
        ]
        until_more_than(count)
        began = time.monotonic()
        node.stop()
        assert time.monotonic() - began < 20.0
        for call in again:
            call.cancel()
