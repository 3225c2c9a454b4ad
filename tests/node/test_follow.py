"""Clients that follow the views of a cluster: which member sends them, and when following ends."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from fleet import tell, view_of
from fleets import SMALL
from gateways import servicer_of
from known_pages import Pages
from local_nodes import Connect, StartNode
from waiting import wait_until

from kvstore import Client, ClientConfig
from kvstore.cluster import follower, nodes
from kvstore.cluster.view import Member, State, View
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from node.config import NodeConfig
from node.server import Node

THREAD = "kvstore-views"


@pytest.fixture
def cluster(start_node: StartNode) -> list[Node]:
    found = [start_node() for _ in range(2)]
    tell(found, view_of(found, number=1))
    return found


@pytest.fixture
def stub(cluster: list[Node]) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{cluster[0].grpc.port}") as channel:
        yield KVStoreStub(channel)


def known(client: Client) -> int:
    view = client._fan_out.nodes.view
    return view.number if view else 0


def followers() -> int:
    return sum(thread.name == THREAD for thread in threading.enumerate())


def test_follow_sends_the_current_and_all_later_views(cluster: list[Node], stub: Any) -> None:
    views = stub.Follow(pb.FollowRequest(), timeout=20.0)
    assert next(views).number == 1
    tell(cluster, view_of(cluster, number=2))
    assert next(views) == view_of(cluster, number=2).message
    unknown = stub.Follow(pb.FollowRequest(number=2), timeout=20.0)
    threading.Timer(0.3, tell, (cluster, view_of(cluster, number=3))).start()
    assert next(unknown).number == 3, "the follower already knew view 2"


def test_node_without_a_cluster_has_no_view(start_node: StartNode) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{start_node().grpc.port}") as channel:
        views = KVStoreStub(channel).Follow(pb.FollowRequest(), timeout=20.0)
        with pytest.raises(grpc.RpcError, match="in no cluster"):
            next(views)


def test_oldest_follower_is_evicted_at_the_limit(
    cluster: list[Node], stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = servicer_of(cluster[0])._followers
    monkeypatch.setattr(places, "cap", replace(places.cap, total=3, per_peer=2))
    streams = []
    for _ in range(3):
        streams.append(stub.Follow(pb.FollowRequest(), timeout=20.0))
        assert next(streams[-1]).number == 1
    wait_until(streams[0].done)
    assert streams[0].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not streams[1].done()


def test_followers_do_not_delay_a_stop(start_node: StartNode) -> None:
    one = start_node(drain_s=60.0)
    tell([one], view_of([one]))
    with grpc.insecure_channel(f"127.0.0.1:{one.grpc.port}") as channel:
        views = KVStoreStub(channel).Follow(pb.FollowRequest(), timeout=20.0)
        next(views)
        began = time.monotonic()
        one.grpc.stop(60.0)
        assert time.monotonic() - began < 30.0
        one.grpc.stop = lambda drain_s: None


def test_client_receives_a_view_without_a_call(
    cluster: list[Node], connect: Connect, pages: Pages
) -> None:
    client = connect(cluster[0])
    pages.put(client, pages.keys(1))
    wait_until(lambda: followers() == 1)
    time.sleep(follower.FIRST_S_MAX + 0.1)
    tell(cluster, view_of(cluster, number=2))
    wait_until(lambda: known(client) == 2)
    cluster[1].membership.become(view_of(cluster, number=1))  # an older view must be ignored
    tell(cluster[:1], view_of(cluster[:1], number=3))
    wait_until(lambda: known(client) == 3)
    client.close()
    wait_until(lambda: followers() == 0)


def test_client_follows_another_member_when_one_stops(
    cluster: list[Node], connect: Connect, pages: Pages
) -> None:
    stops = Node(NodeConfig(**SMALL))
    stops.start()
    three = [stops, *cluster]
    tell(three, view_of(three, number=1))
    client = connect(three[0])
    pages.put(client, pages.keys(*range(30)))
    time.sleep(2 * follower.FIRST_S_MAX)
    dead = view_of(three, number=2)
    stops.stop()
    for number in (1, 2):
        three[number].membership.become(dead, f"n{number}")
    wait_until(lambda: known(client) == 2)


def test_client_leaves_a_member_that_sends_no_views(
    cluster: list[Node], connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "FOLLOW_S", 0.5)
    client = connect(cluster[0])
    pages.put(client, pages.keys(*range(30)))  # connects to both members
    wait_until(lambda: followers() == 1)
    time.sleep(1.0)
    # The first member never gets the view
    cluster[1].membership.become(view_of(cluster, number=2), "n1")
    wait_until(lambda: known(client) == 2)


def test_client_without_a_cluster_starts_no_follower(
    start_node: StartNode, connect: Connect, pages: Pages, cluster: list[Node]
) -> None:
    for client in (connect(start_node()), connect(cluster[0], direct=True)):
        pages.put(client, pages.keys(1))
    time.sleep(2 * follower.FIRST_S_MAX)
    assert followers() == 0


def test_garbage_collected_client_stops_its_follower(
    cluster: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "FOLLOW_S", 0.5)
    client = Client(
        ClientConfig(
            address=f"127.0.0.1:{cluster[0].grpc.port}", wire="grpc", connect_timeout_s=5.0
        )
    )
    assert client.view() is not None
    wait_until(lambda: followers() == 1)
    del client
    wait_until(lambda: gc.collect() >= 0 and followers() == 0)


# Python 3.12 and newer warn of each fork of a process with threads; these tests fork on purpose.
SCRIPT = (sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c")
ENDS = """
import os, sys, threading, time
from kvstore import Client, ClientConfig
client = Client(ClientConfig(address=sys.argv[1], timeout_s=60.0, connect_timeout_s=20.0))

def followers():
    return [thread.name for thread in threading.enumerate()].count("kvstore-views")

assert client.view() is not None
while followers() != 1:
    time.sleep(0.01)
if sys.argv[2] == "fork":
    for _ in range(3):
        pid = os.fork()
        if not pid:
            own = Client(client.config)
            assert own.view() is not None
            own.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    while followers() != 1:
        time.sleep(0.01)
    time.sleep(0.4)
    assert followers() == 1
"""


@pytest.mark.parametrize("how", ["end", "fork"])
def test_follower_keeps_no_process_alive(cluster: list[Node], how: str) -> None:
    address = f"127.0.0.1:{cluster[0].grpc.port}"
    done = subprocess.run(
        [*SCRIPT, ENDS, address, how], capture_output=True, timeout=120.0, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


FORKS_WHILE_ALL_MEMBERS_ARE_AWAY = """
import os, sys, time
from kvstore.cluster import follower
from kvstore.errors import Unavailable

class Owner:
    def ask(self, turn, seconds):
        asked.append(turn)
        raise Unavailable("all members are gone")

    def heard(self, view):
        pass

asked, owner = [], Owner()
follower.PAUSE_S_MIN = follower.PAUSE_S_MAX = 60.0
one = follower.Follower(owner.ask, owner.heard)
one.begin()
while not asked:
    time.sleep(0.01)
time.sleep(0.2)
follower.FORK_S_MAX = 60.0
for _ in range(3):
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
one.close()
"""


def test_fork_does_not_wait_for_a_waiting_follower() -> None:
    """Regression: while all members were away each fork of an engine took 0.5 s."""
    command = [*SCRIPT, FORKS_WHILE_ALL_MEMBERS_ARE_AWAY]
    done = subprocess.run(command, capture_output=True, timeout=120.0, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_all_addresses_of_a_name_are_tried(
    cluster: list[Node], connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first address is dead, and gRPC would not try the other by itself."""
    port = cluster[0].grpc.port
    monkeypatch.setattr(
        nodes, "_records", lambda address, limit: ["127.0.0.2:9", f"127.0.0.1:{port}"]
    )
    client = connect(cluster[0], address="127.0.0.3:9")
    assert pages.put(client, pages.keys(*range(5)))
    assert known(client) == 1


def test_addresses_of_localhost_are_not_expanded() -> None:
    from kvstore.deadline import Deadline

    assert nodes._records("127.0.0.1:7440", Deadline(5.0)) == []
    assert nodes._records("localhost:7440", Deadline(5.0)) == []


def test_placement_is_reused_for_an_equal_view() -> None:
    first = View("fleet", 1, (Member("a", "a:1"), Member("b", "b:1")))
    first.owners, first.by_id  # noqa: B018 -- computes and caches them
    assert replace(first, number=2).after(first).owners is first.owners
    drained = replace(first.members[1], state=State.DRAINING)
    other = replace(first, number=3, members=(first.members[0], drained)).after(first)
    assert other.owners is not first.owners
