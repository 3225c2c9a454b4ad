"""The frame `follow`, a request that waits for the next view: its answers, cost and limits."""

import os
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from fleet import tell, view_of
from known_pages import Pages
from local_nodes import Connect, ConnectRaw, StartNode
from waiting import wait_until

from kvstore import Client, ClientConfig
from kvstore.cluster import follower
from kvstore.errors import ProtocolError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.bulk import BulkWire
from kvstore.transports.grpc_wire import GrpcWire
from kvstore.transports.status import Code
from node.server import Node

LONG_MS = 60_000


@pytest.fixture
def one(start_node: StartNode) -> Node:
    node: Node = start_node(drain_s=60.0)
    tell([node], view_of([node]))
    return node


def following(raw: ConnectRaw, node: Node, number: int = 1, wait_ms: int = LONG_MS) -> Any:
    """Connect and send a `follow` request that waits; return the connection."""
    connection, before = raw(node), node.service.followers.count
    connection.request(follow=pb.FollowRequest(number=number, wait_ms=wait_ms))
    wait_until(lambda: node.service.followers.count == before + 1)
    return connection


def test_follow_answers_another_view_at_once_and_waits_for_a_newer(
    one: Node, raw: ConnectRaw
) -> None:
    client = raw(one)
    view = client.ask(follow=pb.FollowRequest(wait_ms=LONG_MS)).follow
    assert view == view_of([one]).with_ports(one.membership.view).message
    assert client.ask(follow=pb.FollowRequest(number=1)).follow == pb.View(), (
        "a request without wait_ms must not wait"
    )
    assert client.ask(follow=pb.FollowRequest(number=1, wait_ms=50)).follow == pb.View()
    assert client.ask(follow=pb.FollowRequest(number=7, wait_ms=LONG_MS)).follow.number == 1, (
        "an older view of the node is also another view"
    )


def test_waiting_followers_get_a_new_view(one: Node, raw: ConnectRaw) -> None:
    connections = [following(raw, one) for _ in range(3)]
    tell([one], view_of([one], number=2))
    assert [connection.reply()[0].follow.number for connection in connections] == [2, 2, 2]
    again = following(raw, one, number=2)
    tell([one], view_of([one], number=3))
    assert again.reply()[0].follow.number == 3
    assert one.service.followers.count == 0


def test_no_view_is_missed_between_two_requests(one: Node, raw: ConnectRaw) -> None:
    """Many views change between two requests, and one just before a wait begins."""
    client, latest, last = raw(one), 1, 60
    views = threading.Thread(
        target=lambda: [tell([one], view_of([one], number=n)) for n in range(2, last + 1)]
    )
    views.start()
    while latest < last:
        latest = client.ask(follow=pb.FollowRequest(number=latest, wait_ms=LONG_MS)).follow.number
    views.join()


def test_follow_without_a_cluster_is_refused(start_node: StartNode, raw: ConnectRaw) -> None:
    connection = raw(start_node())
    error = connection.ask(follow=pb.FollowRequest(wait_ms=LONG_MS)).error
    assert (error.code, "in no cluster" in error.message) == (Code.INVALID_ARGUMENT, True)
    assert connection.ask(hello=pb.HelloRequest()).hello.instance_id, (
        "the connection must still serve"
    )


def test_closed_follower_is_not_awaited(one: Node, raw: ConnectRaw) -> None:
    following(raw, one).close()
    wait_until(lambda: one.service.followers.count == 0, 10.0)


def test_waiting_followers_use_no_processor_time(one: Node, raw: ConnectRaw) -> None:
    """The threads of 50 waiting followers do not wake up, by their context switches."""
    threads = {thread.native_id for thread in threading.enumerate()}
    for _ in range(50):
        following(raw, one)
    mine = {thread.native_id for thread in threading.enumerate()} - threads
    assert len(mine) >= 50

    def switches() -> int:
        total = 0
        for thread in mine:
            with open(f"/proc/self/task/{thread}/status") as status:
                total += sum(
                    int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt")
                )
        return total

    time.sleep(0.3)  # until all of them sleep
    before = switches()
    time.sleep(1.0)
    assert switches() - before < 50, "waiting threads woke up"


def test_descriptors_do_not_grow_with_views(one: Node, raw: ConnectRaw) -> None:
    client = raw(one)
    client.ask(hello=pb.HelloRequest())
    counts = []
    for number in range(2, 30):
        client.request(follow=pb.FollowRequest(number=number - 1, wait_ms=LONG_MS))
        wait_until(lambda: one.service.followers.count == 1)
        tell([one], view_of([one], number=number))
        assert client.reply()[0].follow.number == number
        counts.append(len(os.listdir("/proc/self/fd")))
    assert max(counts[-5:]) <= counts[0] + 2


def test_followers_over_the_limit_are_refused(
    one: Node, raw: ConnectRaw, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = one.service.followers._budget
    monkeypatch.setattr(budget, "cap", replace(budget.cap, total=4, per_peer=2))
    for _ in range(2):
        following(raw, one)
    more = raw(one)
    error = more.ask(follow=pb.FollowRequest(number=1, wait_ms=LONG_MS)).error
    assert (error.code, "followers of views" in error.message) == (Code.RESOURCE_EXHAUSTED, True)
    assert more.ask(follow=pb.FollowRequest()).follow.number == 1, (
        "a request that need not wait takes no place"
    )


def test_full_node_evicts_a_follower(start_node: StartNode, raw: ConnectRaw) -> None:
    small = start_node(sessions_max=4)  # two of them for one peer
    tell([small], view_of([small]))
    first = following(raw, small)
    for _ in range(2):
        assert raw(small).ask(hello=pb.HelloRequest()).hello.instance_id
    with pytest.raises(ConnectionError):
        first.reply()
    wait_until(lambda: small.service.followers.count == 0)


def test_followers_do_not_delay_a_stop(one: Node, raw: ConnectRaw) -> None:
    connection = following(raw, one)
    began = time.monotonic()
    one.bulk.stop(60.0)
    assert time.monotonic() - began < 30.0
    one.bulk.stop = lambda drain_s: None  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        connection.reply()


def test_follower_that_sends_another_request_is_answered(one: Node, raw: ConnectRaw) -> None:
    connection = following(raw, one)
    connection.request(hello=pb.HelloRequest())
    assert connection.reply()[0].follow == pb.View()
    assert connection.reply()[0].hello.instance_id


@pytest.mark.parametrize("wire", ["bulk", "shm"])
def test_clients_follow_by_frames(
    one: Node, connect: Connect, pages: Pages, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvstore.transports.grpc_wire.GrpcWire.follow",
        lambda *_: pytest.fail("a client of frames followed over gRPC"),
    )
    client = connect(one, wire)
    pages.put(client, pages.keys(1))
    wait_until(lambda: one.service.followers.count == 1)
    for number in (2, 3, 4):
        tell([one], view_of([one], number=number))
        wait_until(lambda number=number: client._fan_out.nodes.view.number == number)
    client.close()
    wait_until(lambda: one.service.followers.count == 0)


def test_client_does_not_poll_a_member_with_an_older_view(
    start_node: StartNode, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member with an older view answers at once unless it is asked for a view other than
    its own.
    """
    nodes = [start_node() for _ in range(2)]
    tell(nodes, view_of(nodes, number=1))
    asked, wait = list[int](), nodes[0].service.followers.view

    def view(known: int) -> pb.View | None:
        asked.append(known)
        return wait(known)

    monkeypatch.setattr(nodes[0].service.followers, "view", view)
    client = connect(nodes[0])
    assert client.view().number == 1
    client._fan_out.nodes._take(view_of(nodes, number=5).message)  # as if from the other member
    wait_until(lambda: nodes[0].service.followers.count or nodes[1].service.followers.count)
    time.sleep(0.5)
    assert len(asked) < 20


def test_older_node_is_followed_over_grpc(
    one: Node, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older node finds no operation in the frame, and hangs up."""
    parse = type(one.bulk).connection

    def older(self: Any, sock: Any, address: Any) -> Any:
        connection = parse(self, sock, address)
        known = connection.parse

        def parsed(header: bytes, payload_nbytes: int) -> Any:
            op, request = known(header, payload_nbytes)
            if op == "follow":
                raise ProtocolError("a request without an operation")
            return op, request

        connection.parse = parsed
        return connection

    monkeypatch.setattr(type(one.bulk), "connection", older)
    followed, over_grpc = list[int](), GrpcWire.follow
    monkeypatch.setattr(
        GrpcWire, "follow", lambda *arguments: followed.append(1) or over_grpc(*arguments)
    )
    client = connect(one)
    pages.put(client, pages.keys(1))
    wait_until(lambda: followed)
    tell([one], view_of([one], number=2))
    wait_until(lambda: client._fan_out.nodes.view.number == 2)
    assert pages.get(client, pages.keys(1)) == [True]
    assert client.stats.failures == 0


def test_client_leaves_a_member_that_does_not_answer_follow(
    start_node: StartNode, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client asks another member when one accepts the request and never answers."""
    monkeypatch.setattr(follower, "FOLLOW_S", 0.5)
    monkeypatch.setattr("kvstore.transports.view_stream.ANSWER_S", 0.2)
    nodes = [start_node() for _ in range(2)]
    tell(nodes, view_of(nodes, number=1))
    client = connect(nodes[0])
    pages.put(client, pages.keys(*range(30)))
    stop = threading.Event()
    monkeypatch.setattr(nodes[0].service.followers, "wait", lambda *_: stop.wait(60.0) and None)
    nodes[1].membership.become(view_of(nodes, number=2), "n1")
    wait_until(lambda: client._fan_out.nodes.view.number == 2)
    stop.set()


def test_fork_does_not_restart_following_by_frames(one: Node) -> None:
    client = Client(
        ClientConfig(f"bulk://127.0.0.1:{one.bulk.port}", connect_timeout_s=20.0, timeout_s=30.0)
    )
    with client:
        assert client.view() is not None
        wait_until(lambda: one.service.followers.count == 1)
        asked: list[Any] = []
        follow = BulkWire.follow
        BulkWire.follow = lambda *arguments: asked.append(1) or follow(*arguments)  # type: ignore[method-assign]
        try:
            for _ in range(3):
                if not (pid := os.fork()):
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
            tell([one], view_of([one], number=2))
            wait_until(lambda: client._fan_out.nodes.view.number == 2)
        finally:
            BulkWire.follow = follow  # type: ignore[method-assign]
        assert len(asked) <= 1, "following restarted after each fork"
