"""Forgetting a tenant in a cluster erases its pages at every member, also at an absent one
later.
"""

from functools import partial
from pathlib import Path

import pytest
from fake_etcd import FakeEtcd
from fleet import present, tell, view_of, wait_replicated
from fleets import Start, stop
from known_pages import Pages
from local_nodes import Connect, StartNode
from memory_search import found, found_in
from waiting import wait_until

from kvstore.cluster.routing import Away
from kvstore.errors import KVStoreError
from node.server import Node

NUMBERS = range(30)
DISK = {"disk_nbytes": 16 << 20, "disk_extent_nbytes": 1 << 20, "scrub_nbytes_per_s": 0}


def beginnings(pages: Pages) -> list[bytes]:
    return [pages.content(key)[:64] for key in pages.keys(*NUMBERS)]


def in_ram(node: Node, pages: Pages) -> int:
    """Return how many of the pages have their first bytes anywhere in the node's RAM."""
    return len(found(bytes(node.arena.view(0, node.arena.nbytes)), beginnings(pages)))


def in_rows(directory: Path, text: bytes) -> bool:
    return bool(found_in(directory / "rows", [text]))


@pytest.mark.parametrize("replicas", [1, 2])
def test_forget_erases_pages_at_all_members(
    start_node: StartNode, connect: Connect, replicas: int
) -> None:
    nodes = [start_node() for _ in range(3)]
    tell(nodes, view_of(nodes, replicas))
    gone, kept = Pages("gone", tenant="gone"), Pages("kept", tenant="kept")
    client, keys = connect(nodes[0], timeout_s=20.0), gone.keys(*NUMBERS)
    for pages in (gone, kept):
        pages.put(client, keys)
        # So that n1 also has near copies
        assert pages.get(connect(nodes[1], timeout_s=20.0), keys) == [True] * len(keys)
    wait_replicated(nodes)
    assert sum(in_ram(node, gone) for node in nodes) >= replicas * len(keys)
    away: Away = {}
    report = client.forget("gone", 30.0, away)
    assert (report.left, away) == (0, {})
    assert report.pages >= replicas * len(keys)
    assert [in_ram(node, gone) for node in nodes] == [0, 0, 0]
    assert gone.get(client, keys) == [False] * len(keys)
    assert kept.get(client, keys) == [True] * len(keys)


def test_forget_erases_pages_queued_for_an_absent_member(
    start_node: StartNode, connect: Connect
) -> None:
    nodes = [start_node(), start_node()]
    view = view_of(nodes, 2, elsewhere={1: "127.0.0.1:9"})
    nodes[0].membership.become(view, "n0")
    gone = Pages("gone", tenant="gone")
    client = connect(nodes[0], direct=True, timeout_s=20.0)
    gone.put(client, gone.keys(*NUMBERS))
    assert nodes[0].peers.status().queue_pages > 0
    report = client.forget("gone", 30.0)
    assert report.left == 0
    assert nodes[0].peers.status().queue_pages == 0
    assert in_ram(nodes[0], gone) == 0


def test_returned_member_erases_a_forgotten_tenant(
    fleet: Start, etcd: FakeEtcd, connect: Connect, tmp_path: Path
) -> None:
    one = fleet("n1")
    two = fleet("n2", data_dir=str(tmp_path), **DISK)
    wait_until(lambda: all(len(node.membership.view.members) == 2 for node in (one, two)))  # type: ignore[union-attr]
    gone, kept = Pages("a secret model", tenant="gone"), Pages("kept", tenant="kept")
    at_two = connect(two, direct=True, timeout_s=20.0)
    for pages in (gone, kept):
        pages.put(at_two, pages.keys(*NUMBERS))
        connect(one, direct=True).open(pages.namespace)
    wait_replicated([one, two])
    at_two.flush()
    stop(two)
    assert in_rows(tmp_path, b"a secret model")
    wait_until(lambda: len(one.membership.view.members) == 1)  # type: ignore[union-attr]
    assert connect(one, timeout_s=20.0).forget("gone", 30.0).left == 0
    assert in_ram(one, gone) == 0
    wait_until(lambda: any("/removed/" in key for key in etcd.names()))
    two = fleet("n2", data_dir=str(tmp_path), **DISK)
    assert present(two, gone.namespace, gone.keys(*NUMBERS)).count(True) == 0
    wait_until(lambda: not in_rows(tmp_path, b"a secret model"))
    assert present(two, kept.namespace, kept.keys(*NUMBERS)).count(True) > 0


def test_page_put_after_a_forget_stays(fleet: Start, etcd: FakeEtcd, connect: Connect) -> None:
    """Members receive the removal once more, from etcd, after the call has ended."""
    nodes = [fleet(f"n{i}") for i in range(2)]
    wait_until(lambda: all(len(node.membership.view.members) == 2 for node in nodes))  # type: ignore[union-attr]
    client, etcd.late_s = connect(nodes[0], timeout_s=20.0), 0.3
    gone = Pages("gone", tenant="gone")
    keys = gone.keys(*NUMBERS)
    removed = f"/kvstore/fleet/removed/{gone.namespace.digest.hex()}".encode()

    def is_newer(number: int) -> bool:
        return removed in etcd.kvs and etcd.kvs[removed].mod_revision > number

    def has_applied(node: Node, number: int) -> bool:
        return node.registry is not None and node.registry._identity.applied >= number

    for _ in range(2):
        before = etcd.revision
        gone.put(client, keys)
        assert client.forget("gone", 30.0).left == 0
        gone.put(client, keys)
        wait_until(partial(is_newer, before))
        for node in nodes:
            wait_until(partial(has_applied, node, etcd.kvs[removed].mod_revision))
        assert gone.get(client, keys) == [True] * len(keys)


def test_forget_names_a_member_that_does_not_answer(
    start_node: StartNode, connect: Connect
) -> None:
    nodes = [start_node(), start_node()]
    tell(nodes, view_of(nodes, elsewhere={1: "127.0.0.1:9"}))
    gone = Pages("gone", tenant="gone")
    client = connect(nodes[0], timeout_s=20.0)
    gone.put(client, gone.keys(*NUMBERS))
    with pytest.raises(KVStoreError):
        client.forget("gone", 20.0)
    away: Away = {}
    assert client.forget("gone", 20.0, away).left == 0
    assert set(away) == {"n1"}
    assert in_ram(nodes[0], gone) == 0
