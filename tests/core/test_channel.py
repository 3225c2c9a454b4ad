"""The channel to a node: its choice of wire, reconnects, and pauses after failures."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from fake_node import FakeNode, ServeBulk, scripted
from waiting import wait_until

from kvstore import (
    Client,
    ClientConfig,
    DeadlineExceeded,
    Exhausted,
    InvalidRequest,
    KVStoreError,
    Namespace,
    ProtocolError,
    Unavailable,
    UnknownNamespace,
    opaque_layout,
)
from kvstore.config import PROTOCOL_VERSION
from kvstore.deadline import Deadline
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.channel import BETTER_RETRY_S, REOPENS_MAX, NodeChannel, NodeConnection
from kvstore.transports.grpc_wire import GrpcWire

NAMESPACE = Namespace("m", opaque_layout(4096))
KEYS = [b"k" * 32]


def config(fake: Any, **fields: Any) -> ClientConfig:
    return ClientConfig(
        **{"address": fake.address, "timeout_s": 60.0, "connect_timeout_s": 3.0, **fields}
    )


def refusing(fake: Any, code: grpc.StatusCode) -> None:
    fake.refuse = code


@pytest.mark.parametrize("trouble", ["unserved", "silent", "none"])
def test_client_without_a_bulk_wire_uses_grpc_and_warns(
    fake_node: FakeNode,
    unserved_port: int,
    silent_port: int,
    caplog: pytest.LogCaptureFixture,
    trouble: str,
) -> None:
    fake_node.bulk_port = {"unserved": unserved_port, "silent": silent_port, "none": 0}[trouble]
    with Client(config(fake_node)) as client, caplog.at_level(logging.WARNING):
        assert client.lookup(NAMESPACE, KEYS).prefix_pages == 1
        assert client.lookup(NAMESPACE, KEYS).prefix_pages == 1
        assert client.wire_name == "grpc"
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "using gRPC, which is slower"
    ]
    assert fake_node.calls.count("hello") == 1


@pytest.mark.parametrize("trouble", ["unserved", "silent", "none"])
def test_client_with_wire_bulk_uses_no_other(
    fake_node: FakeNode, unserved_port: int, silent_port: int, trouble: str
) -> None:
    fake_node.bulk_port = {"unserved": unserved_port, "silent": silent_port, "none": 0}[trouble]
    with Client(config(fake_node, wire="bulk")) as client, pytest.raises(Unavailable):
        client.lookup(NAMESPACE, KEYS)
    assert "lookup" not in fake_node.calls


def test_client_with_wire_grpc_does_not_try_bulk(fake_node: FakeNode, bulk_port: ServeBulk) -> None:
    bulk = bulk_port(scripted())
    fake_node.bulk_port = bulk.port
    with Client(config(fake_node, wire="grpc")) as client:
        assert client.lookup(NAMESPACE, KEYS).prefix_pages == 1
    assert not bulk.accepted


def eventually(true: Callable[[], bool], seconds: float = 10.0) -> None:
    end = Deadline(seconds)
    while not true():
        end.remaining()
        threading.Event().wait(0.005)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fallen_back(fake: Any, unserved_port: int) -> tuple[NodeChannel, Clock]:
    """Return a link that took gRPC because no bulk port answered, and its clock."""
    clock = Clock()
    link = NodeChannel(fake.address, config(fake), clock)
    fake.bulk_port = unserved_port
    link.run(lambda link, deadline: None, None, Deadline(5))
    assert link.wire_name == "grpc"
    return link, clock


def test_bulk_is_tried_again_after_a_while(
    fake_node: FakeNode, unserved_port: int, bulk_port: ServeBulk
) -> None:
    link, clock = fallen_back(fake_node, unserved_port)
    fake_node.bulk_port = bulk_port(scripted()).port
    clock.now += BETTER_RETRY_S - 1
    link.run(lambda link, deadline: None, None, Deadline(5))
    assert link.wire_name == "grpc"
    clock.now += 1
    link.run(lambda link, deadline: None, None, Deadline(5))
    eventually(lambda: link.wire_name == "bulk")
    link.close()


def looked_up(link: Any, deadline: Deadline) -> int:
    request = pb.LookupRequest(namespace=NAMESPACE.digest, prefix_hashes=KEYS)
    return int(link.wire.call("lookup", request, deadline).prefix_pages)


def test_better_wire_is_tried_in_the_background(
    fake_node: FakeNode, unserved_port: int, silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the try hangs, calls do not wait, keep their channel, and start no second try."""
    link, clock = fallen_back(fake_node, unserved_port)
    clock.now += BETTER_RETRY_S
    fake_node.bulk_port = silent_port
    tries, ended = [], threading.Event()
    negotiate = link._negotiation.open

    def slow(deadline: Deadline) -> Any:
        tries.append(threading.current_thread())
        try:
            return negotiate(deadline)
        finally:
            ended.wait(60.0)

    monkeypatch.setattr(link._negotiation, "open", slow)
    old = link._connection
    for _ in range(50):
        assert link.run(looked_up, NAMESPACE, Deadline(5)) == 1
    assert link._connection is old
    assert (link.failure_count, link.connect_count) == (0, 1)
    assert len(tries) == 1
    assert tries[0] is not threading.current_thread()
    ended.set()
    tries[0].join()
    assert link._connection is old
    link.close()


def test_call_under_way_ends_on_its_first_wire(
    fake_node: FakeNode, unserved_port: int, bulk_port: ServeBulk
) -> None:
    link, clock = fallen_back(fake_node, unserved_port)
    fake_node.hold = threading.Event()
    results: list[Any] = []
    under_way = threading.Thread(
        target=lambda: results.append(link.run(looked_up, NAMESPACE, Deadline(20)))
    )
    under_way.start()
    eventually(lambda: "lookup" in fake_node.calls)
    fake_node.bulk_port = bulk_port(scripted()).port
    old = link._connection
    assert old is not None
    clock.now += BETTER_RETRY_S
    link.run(lambda link, deadline: None, None, Deadline(5))
    eventually(lambda: link.wire_name == "bulk")
    assert not old.enter()
    fake_node.hold.set()
    under_way.join()
    assert results == [1]
    with pytest.raises(Unavailable):  # the wire closed with its last call
        old.wire.call("lookup", pb.LookupRequest(), Deadline(5))
    link.close()


@pytest.mark.parametrize("how", ["dropped", "closed"])
def test_dropped_link_lets_its_calls_end(fake_node: FakeNode, how: str) -> None:
    """A failed call, or closing the client, must not abort another call that is about to end."""
    link = NodeChannel(fake_node.address, config(fake_node, wire="grpc"))
    fake_node.hold = threading.Event()
    results: list[Any] = []
    under_way = threading.Thread(
        target=lambda: results.append(link.run(looked_up, NAMESPACE, Deadline(20)))
    )
    under_way.start()
    eventually(lambda: "lookup" in fake_node.calls)
    if how == "closed":
        link.close()
    else:
        attempts = []

        def fail_once(link: Any, deadline: Deadline) -> None:
            attempts.append(link)
            if len(attempts) == 1:
                raise Unavailable("gone")

        link.run(fail_once, None, Deadline(5))
        assert attempts[0] is not attempts[1]
    fake_node.hold.set()
    under_way.join()
    assert results == [1]
    assert fake_node.calls.count("lookup") == 1
    link.close()


def test_call_that_lost_its_link_waits_only_for_its_deadline(
    fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = NodeChannel(fake_node.address, config(fake_node, wire="grpc"))
    link.run(lambda link, deadline: None, None, Deadline(5))
    connecting, go_on, lose = threading.Event(), threading.Event(), threading.Event()
    results: list[Exception] = []

    def hang(deadline: Deadline) -> Any:
        connecting.set()
        go_on.wait(60.0)
        raise Unavailable("after all")

    def losing(link: Any, deadline: Deadline) -> None:
        lose.wait(60.0)
        raise Unavailable("lost")

    def run(call: Any, seconds: float) -> None:
        with pytest.raises(KVStoreError) as caught:
            link.run(call, None, Deadline(seconds))
        results.append(caught.value)

    second = threading.Thread(target=run, args=(losing, 0.5))
    second.start()
    monkeypatch.setattr(link._negotiation, "open", hang)
    first = threading.Thread(
        target=run, args=(lambda link, deadline: losing(link, lose.set() or deadline), 20.0)
    )
    first.start()
    assert connecting.wait(60.0)
    second.join(60.0)
    assert [type(error) for error in results] == [DeadlineExceeded]
    closing = threading.Thread(target=link.close)
    closing.start()
    closing.join(60.0)
    assert not closing.is_alive()
    go_on.set()
    first.join()


def test_forgotten_namespace_is_opened_again(fake_node: FakeNode) -> None:
    with Client(config(fake_node, wire="grpc")) as client:
        client.lookup(NAMESPACE, KEYS)
        fake_node.opened.clear()
        assert client.lookup(NAMESPACE, KEYS).prefix_pages == 1
    assert fake_node.calls == [
        "hello",
        "open_namespace",
        "lookup",
        "lookup",
        "open_namespace",
        "lookup",
    ]


def test_namespace_that_stays_unknown_is_an_error(fake_node: FakeNode) -> None:
    refusing(fake_node, grpc.StatusCode.NOT_FOUND)
    with Client(config(fake_node, wire="grpc")) as client, pytest.raises(UnknownNamespace):
        client.lookup(NAMESPACE, KEYS)
    assert fake_node.calls.count("lookup") == 1 + REOPENS_MAX


def test_namespace_that_others_remove_again_and_again_is_no_error(
    fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, removals = NodeConnection.open, iter(range(3))

    def open_then_removed(*args: Any) -> None:
        opened(*args)
        if next(removals, None) is not None:
            fake_node.opened.clear()

    monkeypatch.setattr(NodeConnection, "open", open_then_removed)
    with Client(config(fake_node, wire="grpc")) as client:
        assert client.lookup(NAMESPACE, KEYS).prefix_pages == 1


def test_other_protocol_version_is_refused_at_connect(fake_node: FakeNode) -> None:
    fake_node.version = PROTOCOL_VERSION + 1
    with (
        Client(config(fake_node)) as client,
        pytest.raises(ProtocolError, match=f"this node {PROTOCOL_VERSION + 1}"),
    ):
        client.lookup(NAMESPACE, KEYS)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Exhausted),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.INTERNAL, KVStoreError),
    ],
)
def test_refusal_by_the_node_closes_the_breaker(
    fake_node: FakeNode, code: grpc.StatusCode, error: type[KVStoreError]
) -> None:
    clock = Clock()
    link = NodeChannel(fake_node.address, config(fake_node, wire="grpc"), clock)

    def lookup(link: Any, deadline: Deadline) -> Any:
        return link.wire.call(
            "lookup", pb.LookupRequest(namespace=NAMESPACE.digest, prefix_hashes=KEYS), deadline
        )

    def fail(link: Any, deadline: Deadline) -> Any:
        raise Unavailable("slow")  # not DeadlineExceeded, after which the link checks liveness

    with pytest.raises(Unavailable):
        link.run(fail, None, Deadline(5))
    with pytest.raises(Unavailable, match="last: slow"):
        link.run(lookup, None, Deadline(5))
    clock.now += 1
    refusing(fake_node, code)
    for _ in range(3):  # no pause between the calls
        with pytest.raises(error):
            link.run(lookup, None, Deadline(5))
    link.close()


def test_full_connection_pool_does_not_close_the_breaker(
    fake_node: FakeNode, bulk_port: ServeBulk
) -> None:
    """The trial call never reached the node, so its error says nothing about the node."""
    clock = Clock()
    fake_node.bulk_port = bulk_port(scripted()).port
    link = NodeChannel(fake_node.address, config(fake_node, wire="bulk", connections_max=1), clock)

    def fail(link: Any, deadline: Deadline) -> Any:
        raise Unavailable("slow")

    def ask_while_all_are_busy(link: Any, deadline: Deadline) -> Any:
        with link.wire._pool.connection(deadline):
            link.wire.call("lookup", pb.LookupRequest(), Deadline(0.01))

    with pytest.raises(Unavailable):
        link.run(fail, None, Deadline(5))
    clock.now += 1
    with pytest.raises(Exhausted, match="connections_max"):
        link.run(ask_while_all_are_busy, None, Deadline(5))
    with pytest.raises(Unavailable, match="last: slow"):
        link.run(fail, None, Deadline(5))
    link.close()


def test_call_past_its_deadline_does_not_open_the_breaker(fake_node: FakeNode) -> None:
    with Client(config(fake_node, wire="grpc")) as client:
        for _ in range(3):
            with pytest.raises(DeadlineExceeded):
                client.lookup(NAMESPACE, KEYS, timeout_s=0.0)
        assert client.lookup(NAMESPACE, KEYS).prefix_pages == 1
        assert client.stats.failures == 0


def test_call_on_a_closed_client_is_refused(fake_node: FakeNode) -> None:
    client = Client(config(fake_node, wire="grpc"))
    client.lookup(NAMESPACE, KEYS)
    client.close()
    with pytest.raises(Unavailable, match="this client is closed"):
        client.lookup(NAMESPACE, KEYS)


def test_closed_grpc_channel_is_unavailable(fake_node: FakeNode) -> None:
    """The call is then retried on a new link, as after any lost connection."""
    wire = GrpcWire(fake_node.address)
    wire.close()
    put = pb.PutRequest(namespace=NAMESPACE.digest, prefix_hashes=KEYS, page_nbytes=4096)
    get = pb.GetRequest(namespace=NAMESPACE.digest, prefix_hashes=KEYS)
    with pytest.raises(Unavailable):
        wire.call("hello", pb.HelloRequest(), Deadline(5))
    with pytest.raises(Unavailable):
        wire.put(put, [(memoryview(bytes(4096)),)], Deadline(5))
    with pytest.raises(Unavailable):
        wire.get(get, [(memoryview(bytearray(4096)),)], [0], Deadline(5))


def test_threads_that_lose_a_link_share_a_new_one(fake_node: FakeNode) -> None:
    with Client(config(fake_node, wire="grpc")) as client:
        client.lookup(NAMESPACE, KEYS)
        old = client._fan_out.nodes.only._connection
        assert old is not None
        barrier = threading.Barrier(8)
        results: list[Any] = []

        def work() -> None:
            barrier.wait()
            results.append(client.lookup(NAMESPACE, KEYS).prefix_pages)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        old.negotiated.close()
        for thread in threads:
            thread.join()
        assert results == [1] * 8
        assert client.stats.connects <= 2


def test_open_breaker_refuses_calls_to_a_dead_node(
    unserved_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.transports.channel.PAUSE_S_MIN", 600.0)
    settings = ClientConfig(address=f"127.0.0.1:{unserved_port}", backoff_s_max=600.0)
    with Client(settings) as client:
        with pytest.raises(Unavailable):
            client.lookup(NAMESPACE, KEYS)
        with pytest.raises(Unavailable, match="failed 1 times, next try in"):
            client.lookup(NAMESPACE, KEYS)
        assert client.wire_name == "none"


def test_refused_grpc_put_leaves_no_thread_behind(fake_node: FakeNode) -> None:
    """gRPC's sending thread must not wait until the deadline for verdicts that never come."""
    wire = GrpcWire(fake_node.address)
    request = pb.PutRequest(namespace=NAMESPACE.digest, prefix_hashes=KEYS, page_nbytes=4096)
    wire.call("hello", pb.HelloRequest(protocol_version=PROTOCOL_VERSION), Deadline(5))
    before = threading.active_count()
    for _ in range(20):
        with pytest.raises(ProtocolError):  # the fake does not implement Put
            wire.put(request, [(memoryview(bytes(4096)),)], Deadline(600))
    # The fake's own pool may have grown
    wait_until(lambda: threading.active_count() <= before + 4)
    wire.close()
