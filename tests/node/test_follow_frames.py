"""The frame `follow`: a request that waits for the next view, what it costs the node, and what ends
it.
"""

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
    """A connection whose request waits."""
    connection, before = raw(node), node.service.followers.count
    connection.request(follow=pb.FollowRequest(number=number, wait_ms=wait_ms))
    wait_until(lambda: node.service.followers.count == before + 1)
    return connection


def test_another_view_is_told_at_once_and_the_known_one_is_not(one: Node, raw: ConnectRaw) -> None:
    client = raw(one)
    view = client.ask(follow=pb.FollowRequest(wait_ms=LONG_MS)).follow
    assert view == view_of([one]).with_ports(one.membership.view).message
    assert client.ask(follow=pb.FollowRequest(number=1)).follow == pb.View(), (
        "without a time nobody waits"
    )
    assert client.ask(follow=pb.FollowRequest(number=1, wait_ms=50)).follow == pb.View()
    assert client.ask(follow=pb.FollowRequest(number=7, wait_ms=LONG_MS)).follow.number == 1, (
        "also an older one"
    )


def test_a_view_is_told_when_it_comes(one: Node, raw: ConnectRaw) -> None:
    connections = [following(raw, one) for _ in range(3)]
    tell([one], view_of([one], number=2))
    assert [connection.reply()[0].follow.number for connection in connections] == [2, 2, 2]
    again = following(raw, one, number=2)
    tell([one], view_of([one], number=3))
    assert again.reply()[0].follow.number == 3
    assert one.service.followers.count == 0


def test_no_view_is_missed_between_two_requests(one: Node, raw: ConnectRaw) -> None:
    """Many come while nobody waits, and one just before the wait begins."""
    client, heard, last = raw(one), 1, 60
    views = threading.Thread(
        target=lambda: [tell([one], view_of([one], number=n)) for n in range(2, last + 1)]
    )
    views.start()
    while heard < last:
        heard = client.ask(follow=pb.FollowRequest(number=heard, wait_ms=LONG_MS)).follow.number
    views.join()


def test_a_node_in_no_cluster_has_no_view(start_node: StartNode, raw: ConnectRaw) -> None:
    connection = raw(start_node())
    error = connection.ask(follow=pb.FollowRequest(wait_ms=LONG_MS)).error
    assert (error.code, "in no cluster" in error.message) == (Code.INVALID_ARGUMENT, True)
    assert connection.ask(hello=pb.HelloRequest()).hello.instance_id, "the connection is as it was"


def test_closed_follower_is_not_awaited(one: Node, raw: ConnectRaw) -> None:
    following(raw, one).close()
    wait_until(lambda: one.service.followers.count == 0, 10.0)


def test_waiting_costs_no_processor(one: Node, raw: ConnectRaw) -> None:
    """Fifty that wait wake nobody: context switches of their threads stay as they are."""
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

    time.sleep(0.3)  # until the last of them sleeps
    before = switches()
    time.sleep(1.0)
    assert switches() - before < 50, "each of them woke up"


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


def test_followers_are_bounded(one: Node, raw: ConnectRaw, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = one.service.followers._budget
    monkeypatch.setattr(budget, "cap", replace(budget.cap, total=4, per_peer=2))
    for _ in range(2):
        following(raw, one)
    more = raw(one)
    error = more.ask(follow=pb.FollowRequest(number=1, wait_ms=LONG_MS)).error
    assert (error.code, "followers of views" in error.message) == (Code.RESOURCE_EXHAUSTED, True)
    assert more.ask(follow=pb.FollowRequest()).follow.number == 1, (
        "who need not wait takes no place"
    )


def test_a_full_house_lets_a_follower_go(start_node: StartNode, raw: ConnectRaw) -> None:
    small = start_node(sessions_max=4)  # two for one peer
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


def test_an_older_view_is_not_asked_for_again_and_again(
    start_node: StartNode, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that has not heard yet answers each question at once, unless it is asked for another
    than its own.
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
    client._fan_out.nodes._take(view_of(nodes, number=5).message)  # by the other member
    wait_until(lambda: nodes[0].service.followers.count or nodes[1].service.followers.count)
    time.sleep(0.5)
    assert len(asked) < 20


def test_a_node_that_does_not_know_the_frame_is_followed_over_grpc(
    one: Node, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those before it are: they find no operation in that request, and hang up."""
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


def test_a_member_that_says_nothing_is_not_believed_for_ever(
    start_node: StartNode, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the request, and never answers: another is asked."""
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


def test_a_fork_does_not_end_what_is_followed_by_frames(one: Node) -> None:
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
        assert len(asked) <= 1, "it was begun anew after each fork"
