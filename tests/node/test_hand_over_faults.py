"""Replication to members that are away, hang, are full or stop."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fleet import counts, present, tell, view_of, wait_replicated
from known_pages import Pages
from local_nodes import Connect, StartNode
from ports import free_port
from waiting import wait_until

from kvstore import Keep, PutOutcome
from kvstore.pb import kvstore_pb2 as pb
from kvstore.tools.node_process import NodeProcess
from node.cluster import replication_queue, replicator
from node.config import NodeConfig
from node.server import Node
from node.serving.session import Session

NUMBERS = range(24)
PATIENT_S = 15.0  # half of a call that waits for a paused member
STOP_S = 4.0  # less than the HAND_S of a transfer


@pytest.fixture
def pair(start_node: StartNode) -> list[Node]:
    nodes = [start_node() for _ in range(2)]
    tell(nodes, view_of(nodes, 2))
    return nodes


@pytest.fixture
def hung() -> Iterator[str]:
    """Listen at an address that accepts connections and never answers; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def mixed(start_node: StartNode) -> Iterator[tuple[Node, NodeProcess]]:
    """Start a node here and one in its own process, each the replica of the other."""
    node, port = start_node(ram_nbytes=16 << 20), free_port()
    list_ = f"static:fleet/n0=127.0.0.1:{node.grpc.port},n1=127.0.0.1:{port}"
    ram = ("--ram-bytes", "16MiB", "--shm-socket", "none")
    with NodeProcess("--port", str(port), "--cluster", list_, "--member", "n1", *ram) as process:
        node.membership.become(view_of([node, node], 2, elsewhere={1: f"127.0.0.1:{port}"}), "n0")
        yield node, process


def test_returned_member_gets_its_pages(
    pair: list[Node], hung: str, connect: Connect, pages: Pages
) -> None:
    tell(pair[:1], view_of(pair, 2, 2, elsewhere={1: "127.0.0.1:9"}))
    client, keys = connect(pair[0], direct=True), pages.keys(*NUMBERS)
    assert pages.put(client, keys) == [PutOutcome.STORED] * len(keys)
    wait_until(lambda: pair[0].peers.channels.channel("n1").failure_count >= 2)
    assert counts(pair[0]).queue_pages == len(keys)
    tell(pair, view_of(pair, 2, 3))
    wait_replicated(pair)
    assert pages.get(connect(pair[1], direct=True), keys) == [True] * len(keys)


def test_paused_member_gets_its_replicas_later(
    mixed: tuple[Node, NodeProcess], connect: Connect
) -> None:
    node, process = mixed
    pages = Pages("paused", 1 << 18)
    client, keys = connect(node, direct=True), pages.keys(*range(8))
    pages.put(client, keys[:1])
    wait_replicated([node])
    os.kill(process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert pages.put(client, keys) == [PutOutcome.EXISTS] + [PutOutcome.STORED] * 7
        assert time.monotonic() - began < PATIENT_S, "a put must not wait for the paused member"
        threading.Event().wait(0.5)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    wait_replicated([node])
    other = connect(node, address=process.address, direct=True)
    assert pages.get(other, keys) == [True] * len(keys)


def test_member_killed_during_replication_frees_its_queue(
    mixed: tuple[Node, NodeProcess], connect: Connect
) -> None:
    node, process = mixed
    pages = Pages("killed", 1 << 18)
    client, keys = connect(node, direct=True), pages.keys(*range(8))
    os.kill(process.pid, signal.SIGSTOP)
    pages.put(client, keys)
    process.kill()
    assert pages.get(client, keys) == [True] * len(keys)
    wait_until(lambda: node.peers.channels.channel("n1").failure_count >= 2)
    node.membership.become(view_of([node], 2, 2), "n0")  # it leaves the cluster
    wait_until(lambda: not counts(node).queue_pages)
    assert counts(node).pages_dropped == len(keys)
    assert node.check() == []


def test_full_member_gets_its_replicas_later(
    start_node: StartNode, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [start_node() for _ in range(2)]
    tell(nodes, view_of(nodes, 2))
    pages, large = Pages("refused"), Pages("large", 1 << 18)
    client, other = connect(nodes[0], direct=True), connect(nodes[1], "shm", direct=True)
    keys = pages.keys(*NUMBERS)
    with contextlib.ExitStack() as held:
        for start in range(0, 16, 4):  # all of its RAM
            held.enter_context(
                other.open_put(large.namespace, large.keys(*range(start, start + 4)))
            )
        assert pages.put(client, keys) == [PutOutcome.STORED] * len(keys)
        threading.Event().wait(0.4)
        assert counts(nodes[0]).queue_pages == len(keys)
    wait_replicated(nodes)
    assert present(nodes[1], pages.namespace, keys) == [True] * len(keys)


def test_full_queue_drops_replicas_and_fails_no_put(
    start_node: StartNode, hung: str, connect: Connect
) -> None:
    nodes = [start_node(hand_over_queue_nbytes=1 << 20), start_node()]
    tell(nodes[:1], view_of(nodes, 2, elsewhere={1: hung}))
    pages = Pages("queue", 1 << 16)
    client = connect(nodes[0], direct=True)
    for start in range(0, 64, 8):
        assert pages.put(client, pages.keys(*range(start, start + 8))) == [PutOutcome.STORED] * 8
        status = client.node_status().peers
        assert status.queue_nbytes <= status.queue_nbytes_max == 1 << 20
    assert status.pages_dropped == 64 - (1 << 20) // (1 << 16)
    assert nodes[0].tier.held_count == status.queue_pages == 16
    tell(nodes, view_of(nodes, 2, 2))
    wait_replicated(nodes)
    there = present(nodes[1], pages.namespace, pages.keys(*range(64)))
    assert there.count(True) == 16
    assert all(there[-8:]), "the oldest pages must be dropped"


def test_page_removed_during_replication_does_not_come_back(
    pair: list[Node], connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal reaches the replica when it has the page's bytes and is about to commit them."""
    reached, go, commit = threading.Event(), threading.Event(), Session.commit

    def late(self: Session, *arguments: Any) -> int:
        if self.put_request.forwarded_by:
            reached.set()
            assert go.wait(60.0)
        return commit(self, *arguments)

    monkeypatch.setattr(Session, "commit", late)
    client, keys = connect(pair[0]), pages.keys(*range(4))
    direct = connect(pair[0], direct=True)
    pages.put(direct, keys)
    assert reached.wait(60.0)
    assert client.remove(pages.namespace, keys[:2]) == [True, True]
    go.set()
    wait_replicated(pair)
    wait_until(lambda: present(pair[1], pages.namespace, keys) == [False, False, True, True])
    assert pages.get(client, keys) == [False, False, True, True]
    pages.put(direct, keys)  # a later put must stay
    wait_replicated(pair)
    assert present(pair[1], pages.namespace, keys) == [True] * 4


def test_page_removed_before_arrival_is_never_visible(
    pair: list[Node], connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the sender died then, no member would know of the page.

    The other pages of the batch are sent again.
    """
    reached, go, service = threading.Event(), threading.Event(), pair[1].service
    begin, commit, committed = service.begin_put, service.commit_put, set[bytes]()

    def late(*arguments: Any) -> Any:
        reached.set()
        assert go.wait(60.0)
        return begin(*arguments)

    def recorded(session: Session, request: pb.CommitRequest) -> pb.CommitReply:
        committed.update(page.prefix_hash for page in session.reserved)
        return commit(session, request)

    client, keys = connect(pair[0]), pages.keys(*range(4))
    client.lookup(pages.namespace, keys)
    monkeypatch.setattr(service, "begin_put", late)
    monkeypatch.setattr(service, "commit_put", recorded)
    pages.put(connect(pair[0], direct=True), keys)
    assert reached.wait(60.0)
    assert client.remove(pages.namespace, keys[:2]) == [True, True]
    go.set()
    wait_replicated(pair)
    assert committed == set(keys[2:])
    assert present(pair[1], pages.namespace, keys) == [False, False, True, True]
    assert not counts(pair[0]).pages_dropped


def test_page_replicated_during_a_removal_is_removed_again(
    pair: list[Node], connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal reaches the replica before the page does, and the sender after it has replicated
    it.
    """
    keys, direct, client = pages.keys(*range(4)), connect(pair[0], direct=True), connect(pair[0])
    client.lookup(pages.namespace, keys)
    direct.open(pages.namespace)  # opened before, so that only the put runs below
    remove, done = pair[0].service._unary["remove"], threading.Event()

    def replicate_first(request: pb.RemoveRequest, caller: Any) -> pb.RemoveReply:
        if not done.is_set():  # by now the replica has answered, or is about to
            done.set()
            threading.Event().wait(0.3)
            pages.put(direct, keys)
            wait_replicated(pair)
        return remove(request, caller)

    monkeypatch.setitem(pair[0].service._unary, "remove", replicate_first)
    assert client.remove(pages.namespace, keys) == [True] * 4
    assert [present(node, pages.namespace, keys) for node in pair] == [[False] * 4] * 2


@pytest.mark.parametrize("target", ["hangs", "is paused in a transfer", "is dead"])
def test_node_stops_in_time_with_unresponsive_members(
    hung: str, connect: Connect, target: str
) -> None:
    ports: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "bulk_port": 0, "metrics_port": 0}
    node = Node(NodeConfig(**ports, ram_nbytes=64 << 20, drain_s=0.5, shm_socket="none"))
    node.start()
    pages = Pages("stops", 1 << 20)
    with contextlib.ExitStack() as stack:
        address = {"hangs": hung, "is dead": "127.0.0.1:9"}.get(target)
        if address is None:
            port = free_port()
            address = f"127.0.0.1:{port}"
            list_ = f"static:fleet/n0=127.0.0.1:{node.grpc.port},n1={address}"
            flags = (
                "--port",
                str(port),
                "--cluster",
                list_,
                "--member",
                "n1",
                "--shm-socket",
                "none",
                "--ram-bytes",
                "64MiB",
            )
            process = stack.enter_context(NodeProcess(*flags))
        node.membership.become(view_of([node, node], 2, elsewhere={1: address}), "n0")
        client = connect(node, direct=True)
        pages.put(client, pages.keys(0))
        if target == "is paused in a transfer":
            wait_replicated([node])
            os.kill(process.pid, signal.SIGSTOP)
        pages.put(client, pages.keys(*range(1, 9)))
        threading.Event().wait(0.3)
        assert counts(node).queue_pages >= 8
        client.close()
        began = time.monotonic()
        node.stop()
        assert time.monotonic() - began < STOP_S
    for thread in node.peers.replicator._threads:
        thread.join(2 * replicator.HAND_S)
        assert not thread.is_alive()
    assert node.tier.held_count == 0


def test_stop_replicates_queued_pages(
    start_node: StartNode, connect: Connect, pages: Pages
) -> None:
    """At a stop the rate limit does not apply: with it, the queue would take minutes."""
    other = start_node()
    ports: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "bulk_port": 0, "metrics_port": 0}
    node = Node(NodeConfig(**ports, ram_nbytes=16 << 20, drain_s=5.0, hand_over_nbytes_per_s=1000))
    node.start()
    nodes = [node, other]
    tell(nodes, view_of(nodes, 2))
    client, keys = connect(node, direct=True), pages.keys(*NUMBERS)
    for key in keys:
        pages.put(client, [key])
    assert counts(node).queue_pages > 1
    node.stop()
    assert present(other, pages.namespace, keys) == [True] * len(keys)


def test_patience_ends(
    pair: list[Node], hung: str, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication_queue, "PATIENCE_S", 0.3)
    tell(pair[:1], view_of(pair, 2, 2, elsewhere={1: "127.0.0.1:9"}))
    client = connect(pair[0], direct=True)
    pages.put(client, pages.keys(*NUMBERS))
    wait_until(lambda: counts(pair[0]).pages_dropped == len(NUMBERS))
    assert pair[0].tier.held_count == 0


def test_replica_expires_with_its_page(pair: list[Node], connect: Connect, pages: Pages) -> None:
    """A replica does not live longer than the time that its page has left."""
    tell(pair[:1], view_of(pair, 2, 2, elsewhere={1: "127.0.0.1:9"}))
    client, key = connect(pair[0], direct=True), pages.key(1)
    client.put(pages.namespace, [key], [pages.content(key)], Keep(ttl_s=1.0))
    threading.Event().wait(2.1)
    tell(pair, view_of(pair, 2, 3))
    wait_replicated(pair)
    wait_until(lambda: present(pair[1], pages.namespace, [key]) == [False])
