"""Puts through a near node that return once the owners have the pages, in RAM or on disk."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet import KB16, MB, NUMBERS, owned, owners, present, renewed, tell, view_of, wait_replicated
from known_pages import Pages
from local_nodes import ClusterClient, Connect, StartNode

from kvstore import Client, Exhausted, InvalidRequest, Keep, PutOutcome
from kvstore.checksum import leaves
from kvstore.cluster.view import State, View
from kvstore.config import PROTOCOL_VERSION
from kvstore.pb import kvstore_pb2 as pb
from node.auth.access import Caller
from node.config import NodeConfig
from node.server import Node

DURABLE = Keep(durable=True)
StartNodes = Callable[..., list[Node]]


@pytest.fixture(scope="module")
def start(start_node: StartNode, tmp_path_factory: pytest.TempPathFactory) -> StartNodes:
    """Return a function that starts a cluster; `disks` has "d" for each node with a disk.

    Tests share the clusters.
    """
    started: dict[str, list[Node]] = {}

    def made(disks: str, replicas: int = 1) -> list[Node]:
        if disks not in started:
            folder = tmp_path_factory.mktemp("disks")
            flags = [
                {"data_dir": str(folder / str(number)), "disk_nbytes": 64 << 20}
                if disk == "d"
                else {}
                for number, disk in enumerate(disks)
            ]
            started[disks] = [start_node(**some) for some in flags]
        nodes = renewed(started[disks])
        tell(nodes, view_of(nodes, replicas, number=2))
        return nodes

    return made


def put(
    client: Client, pages: Pages, keys: list[bytes], keep: Keep = DURABLE, **how: Any
) -> list[PutOutcome]:
    return client.put(pages.namespace, keys, [pages.content(key) for key in keys], keep, **how)


def safe(nodes: list[Node], pages: Pages, key: bytes) -> list[str]:
    """Return the members that have the page on disk."""
    digest = pages.namespace.digest
    return [
        f"n{i}"
        for i, node in enumerate(nodes)
        if node.disk is not None and node.disk.safe(digest, [key]) == [True]
    ]


def refuse_clients(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the node fail on puts of clients, which must go through the near node."""
    begin = node.service.begin_put

    def begun(session: Any, request: pb.PutRequest) -> Any:
        assert request.forwarded_by, "a client put at an owner directly"
        return begin(session, request)

    monkeypatch.setattr(node.service, "begin_put", begun)


@pytest.mark.parametrize("disks", ["dd", "-dd"])
def test_durable_put_returns_when_owners_have_it_on_disk(
    start: StartNodes,
    near: ClusterClient,
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
    disks: str,
) -> None:
    """The near node has the pages, too; it needs no disk if it owns none of them."""
    nodes = start(disks)
    for node in nodes[1:]:
        refuse_clients(node, monkeypatch)
    every, view = pages.keys(*NUMBERS), view_of(nodes)
    keys = [key for key in every if disks[0] == "d" or key not in owned(view, pages, every, "n0")]
    client = near(nodes)
    assert put(client, pages, keys) == [PutOutcome.STORED] * len(keys)
    whose = owners(view, pages.namespace, keys)
    assert [tuple(safe(nodes, pages, key)) for key in keys] == whose
    assert present(nodes[0], pages.namespace, keys) == [True] * len(keys)
    assert put(client, pages, keys) == [PutOutcome.EXISTS] * len(keys)


def test_near_copy_is_replicated_for_an_acknowledged_put(
    start: StartNodes, near: ClusterClient, pages: Pages
) -> None:
    nodes = start("dd")
    keys, client = pages.keys(*NUMBERS), near(nodes)
    put(client, pages, keys, Keep())
    assert nodes[0].peers.replicator.wait_empty(10.0)
    theirs = owned(view_of(nodes), pages, keys, "n1")
    nodes[1].tier.remove(pages.namespace.digest, theirs)
    assert put(client, pages, keys) == [PutOutcome.EXISTS] * len(keys)
    assert [safe(nodes, pages, key) for key in theirs] == [["n1"]] * len(theirs)


def test_near_node_without_owners_acknowledges_nothing(
    start: StartNodes, connect: Connect, pages: Pages
) -> None:
    nodes = start("dd")
    tell(nodes, view_of(nodes, number=2, n0=State.DRAINING, n1=State.DRAINING))
    keys = pages.keys(*NUMBERS)
    with pytest.raises(Exhausted, match="not on disk"):
        put(connect(nodes[0], direct=True), pages, keys)


def test_in_place(start: StartNodes, near: ClusterClient, pages: Pages) -> None:
    nodes = start("dd")
    keys, client = pages.keys(*NUMBERS), near(nodes)
    with client.open_put(pages.namespace, keys, DURABLE) as slots:
        for view, key in zip(slots.pages, keys, strict=True):
            view[:] = pages.content(key)
        slots.commit([leaves(pages.content(key)) for key in keys])
    whose = owners(view_of(nodes), pages.namespace, keys)
    assert [tuple(safe(nodes, pages, key)) for key in keys] == whose


def test_ack_decides_whether_one_or_all_replicas_are_durable(
    start: StartNodes, near: ClusterClient, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = start("ddd", replicas=2)
    for node in nodes[1:]:
        refuse_clients(node, monkeypatch)
    keys, client = pages.keys(*NUMBERS), near(nodes)
    whose = owners(view_of(nodes, 2), pages.namespace, keys)
    put(client, pages, keys, DURABLE)
    assert all(
        set(safe(nodes, pages, key)) & set(some) for key, some in zip(keys, whose, strict=True)
    )
    put(client, pages, keys, Keep(durable=True, ack="all"))
    assert [set(safe(nodes, pages, key)) for key in keys] == [set(some) for some in whose]


@pytest.mark.parametrize("disks", ["-d", "d-", "--"])
def test_durable_put_with_a_diskless_owner_is_refused(
    start: StartNodes, near: ClusterClient, pages: Pages, disks: str
) -> None:
    """The owner without a disk is the near node, another member, or both."""
    nodes = start(disks)
    with pytest.raises(InvalidRequest, match="no disk tier"):
        put(near(nodes), pages, pages.keys(*NUMBERS))


def test_second_owner_needs_no_disk(start: StartNodes, near: ClusterClient, pages: Pages) -> None:
    nodes = start("-d", replicas=2)
    keys = owned(view_of(nodes, 2), pages, pages.keys(*NUMBERS), "n1")
    assert put(near(nodes), pages, keys) == [PutOutcome.STORED] * len(keys)
    assert [safe(nodes, pages, key) for key in keys] == [["n1"]] * len(keys)


@pytest.mark.parametrize("replicas", [1, 2])
def test_owner_killed_during_a_durable_put_is_reported_or_replaced(
    start_node: StartNode,
    near: ClusterClient,
    pages: Pages,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replicas: int,
) -> None:
    """Another owner has the pages on disk, or the put reports AWAY."""
    disk: dict[str, Any] = {"disk_nbytes": 64 << 20}
    ports: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "bulk_port": 0,
        "metrics_port": 0,
        "drain_s": 0.1,
    }
    dies = Node(NodeConfig(**ports, **disk, ram_nbytes=16 << 20, data_dir=str(tmp_path / "dies")))
    dies.start()
    nodes = [start_node(), dies, start_node(**disk, data_dir=str(tmp_path / "lives"))]
    view = view_of(nodes, replicas)
    tell(nodes, view)
    wanted = ("n1",) if replicas == 1 else ("n1", "n2")
    keys = [
        key for key in pages.keys(*range(400)) if owners(view, pages.namespace, [key]) == [wanted]
    ][:16]
    carry = nodes[0].peers.replicator._send
    dead: list[bool] = []

    def killed(batch: Any) -> list[bytes]:
        if not dead:
            dead.append(True)
            dies.stop()
        return carry(batch)

    monkeypatch.setattr(nodes[0].peers.replicator, "_send", killed)
    client = near(nodes)
    if replicas == 1:
        assert put(client, pages, keys, timeout_s=5.0) == [PutOutcome.AWAY] * len(keys)
    else:
        put(client, pages, keys)
        # n2, which is the only node of the list
        assert [safe(nodes[2:], pages, key) for key in keys] == [["n0"]] * len(keys)
    assert dead
    tell([nodes[0], nodes[2]], View("fleet", 2, (view.members[0], view.members[2]), 1))


def test_put_with_a_slow_disk_is_exhausted(
    start: StartNodes, near: ClusterClient, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = start("dd")

    def slow(digest: bytes, prefix_hashes: Any, wait: Any) -> None:
        raise Exhausted("pages are visible but were not durable in the time")

    monkeypatch.setattr(nodes[1].service.durability, "keep", slow)
    with pytest.raises(Exhausted, match="visible but"):
        put(near(nodes), pages, pages.keys(*NUMBERS), timeout_s=5.0)


def test_durable_put_survives_a_view_change(
    start: StartNodes, near: ClusterClient, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owners are decided once per put: between two views a page could otherwise have none."""
    nodes = start("dd")
    view, replicator = view_of(nodes), nodes[0].peers.replicator
    keys = owned(view, pages, pages.keys(*NUMBERS), "n0")
    offer = replicator.offer

    def offered(*arguments: Any, **more: Any) -> Any:
        waiter = offer(*arguments, **more)
        nodes[0].membership.become(replace(view, number=2, members=view.members[1:]), "n0")
        return waiter

    monkeypatch.setattr(replicator, "offer", offered)
    put(near(nodes), pages, keys)
    assert all(safe(nodes, pages, key) for key in keys)


def test_put_at_a_full_near_node_goes_to_the_owners(
    start_node: StartNode, near: ClusterClient, tmp_path: Path
) -> None:
    nodes = [
        start_node(
            ram_nbytes=ram << 20,
            data_dir=str(tmp_path / f"{ram}"),
            disk_nbytes=64 << 20,
            copies_share=0.25,
        )
        for ram in (4, 16)
    ]
    tell(nodes, view_of(nodes))
    large = Pages("full", KB16)
    theirs = owned(view_of(nodes), large, large.keys(*range(400)), "n1")[: MB // KB16 + 2]
    client, room = near(nodes), MB // KB16
    nodes[0].peers.replicator._queue.nbytes_max = 4 * MB  # pages that it drops would be n0's own
    held, more = theirs[: room - 4], theirs[room - 4 :]
    put(client, large, held, Keep())
    with client.open_get(large.namespace, held) as slots:
        assert all(slots.hits)
        assert put(client, large, more, Keep()).count(PutOutcome.FULL) == len(more) - 4
        assert nodes[0].peers.replicator.wait_empty(10.0)
        assert {outcome.kept for outcome in put(client, large, more)} == {True}
        assert [safe(nodes, large, key) for key in more] == [["n1"]] * len(more)


def test_older_near_node_is_not_used(
    start: StartNodes, near: ClusterClient, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of version 3 neither fetch nor replicate, and would keep pages of other owners
    on disk.
    """
    nodes = start("dd")
    hello = nodes[0].service._unary["hello"]

    def older(request: pb.HelloRequest, caller: Caller) -> pb.HelloReply:
        reply: pb.HelloReply = hello(request, caller)
        reply.protocol_version = PROTOCOL_VERSION - 1
        return reply

    monkeypatch.setitem(nodes[0].service._unary, "hello", older)
    keys, client = pages.keys(*NUMBERS), near(nodes)
    whose = owners(view_of(nodes), pages.namespace, keys)
    for keep in (Keep(), DURABLE):
        assert {outcome.kept for outcome in put(client, pages, keys, keep)} == {True}
        mine = [some == ("n0",) for some in whose]
        assert present(nodes[0], pages.namespace, keys) == mine
    assert pages.get(client, keys) == [True] * len(keys)
    assert [tuple(safe(nodes, pages, key)) for key in keys] == whose
    with (
        pytest.raises(InvalidRequest, match="needs one node"),
        client.open_put(pages.namespace, keys, DURABLE),
    ):
        pass


def test_pages_visible_without_an_ack_reach_all_owners(
    start: StartNodes, near: ClusterClient, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The near node's own disk fails.

    The client then puts the pages itself, finds them at one owner, and replicates nothing.
    """
    nodes = start("ddd", replicas=2)

    def full(*_: Any) -> None:
        raise Exhausted("pages are visible but the disk is full")

    monkeypatch.setattr(nodes[0].service.durability, "keep", full)
    keys = pages.keys(*NUMBERS)
    whose = owners(view_of(nodes, 2), pages.namespace, keys)
    put(near(nodes), pages, keys)
    wait_replicated(nodes)
    for key, some in zip(keys, whose, strict=True):
        if "n0" not in some:
            assert [present(node, pages.namespace, [key]) for node in nodes[1:]] == [[True], [True]]


@pytest.mark.parametrize("rate", [1 << 20, 0], ids=["slow", "full"])
def test_a_flush_saves_pages_that_still_wait_for_their_owners(
    start: StartNodes, near: ClusterClient, monkeypatch: pytest.MonkeyPatch, rate: int
) -> None:
    """Regression: a flush returned before a near node had replicated what was put there.

    Pages that the full queue dropped are kept by the near node itself.
    """
    nodes, pages = start("ddd"), Pages("flushed", KB16)
    queue = nodes[0].peers.replicator._queue
    if rate:
        monkeypatch.setattr(queue, "_nbytes_per_s", rate)
    else:
        monkeypatch.setattr(queue, "nbytes_max", 8 * KB16)
    client, keys = near(nodes), pages.keys(*range(48))
    assert pages.put(client, keys) == [PutOutcome.STORED] * 48
    client.flush()
    assert [key for key in keys if not safe(nodes, pages, key)] == []
