"""Nodes in this process that form a cluster, and functions to inspect them."""

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from waiting import wait_until

from kvstore.checksum import checksum
from kvstore.cluster.view import Member, State, View
from kvstore.keys import Namespace
from kvstore.pb import kvstore_pb2 as pb
from node.memory.page import Reservation
from node.memory.removal import remove_namespace
from node.server import Node
from node.serving.bulk import BulkConnection

NUMBERS = range(48)
KB16, MB = 16 << 10, 1 << 20
Addresses = dict[int, str]  # addresses that differ from those of the nodes, by number


def is_quiet(node: Node) -> bool:
    """Return whether a node has no open session and no page is held or written."""
    return not (node.sessions.count or node.tier.held_count or node.tier.writing_count)


def view_of(
    nodes: Sequence[Node],
    replicas: int = 1,
    number: int = 1,
    elsewhere: Addresses | None = None,
    **states: State | None,
) -> View:
    """Return a view of nodes; `states` by id: the state of a member, or None to leave it out."""
    members = [
        Member(f"n{i}", (elsewhere or {}).get(i, f"127.0.0.1:{node.grpc.port}"), state=state)
        for i, node in enumerate(nodes)
        if (state := states.get(f"n{i}", State.SERVING)) is not None
    ]
    return View("fleet", number, tuple(members), replicas)


def tell(nodes: Sequence[Node], view: View) -> None:
    """Give a view to all nodes that are members of it."""
    for number, node in enumerate(nodes):
        if f"n{number}" in view.by_id:
            node.membership.become(view, f"n{number}")


def present(node: Node, namespace: Namespace, keys: Sequence[bytes]) -> list[bool]:
    """Return which pages a node has itself."""
    with node.tier.lock:
        known = namespace.digest in {index.digest for index in node.tier.namespaces.all()}
    return node.tier.lookup(namespace.digest, keys, False) if known else [False] * len(keys)


def owners(view: View, namespace: Namespace, keys: Sequence[bytes]) -> list[tuple[str, ...]]:
    return view.owners.owners(namespace.digest, keys)


def wait_replicated(nodes: Sequence[Node], timeout_s: float = 60.0) -> None:
    """Wait until the replication queues of all nodes are empty."""
    for node in nodes:
        assert node.peers.replicator.wait_empty(timeout_s), (
            f"{node.membership.member} still replicates pages"
        )


def counts(node: Node) -> pb.PeersStatus:
    status = node.peers.status()
    assert status is not None
    return status


def plant(node: Node, pages: Any, keys: Sequence[bytes], ttl_s: int = 0) -> None:
    """Store pages on a node without replicating them, as if it had owned them in an older view."""
    node.tier.open_namespace(pages.namespace, pages.namespace.digest)
    reservation = node.tier.reserve(pages.namespace.digest, keys, pages.nbytes)
    commit(node, pages, reservation, ttl_s)


def commit(node: Node, pages: Any, reservation: Reservation, ttl_s: int = 0) -> None:
    checksums = []
    for page in reservation.pages:
        content = pages.content(page.prefix_hash)
        node.arena.view(page.offset, pages.nbytes)[:] = content
        checksums.append(checksum(content, page.namespace.seed(page.prefix_hash)))
    node.tier.commit(reservation, checksums, ttl_s)


def renewed(nodes: list[Node]) -> list[Node]:
    """Return the nodes as one cluster again, emptied, idle and with new links between them."""
    for node in nodes:  # alone in a cluster, so that links to the others are closed
        node.membership.become(View("fleet", 1, (Member("n9", "127.0.0.1:9"),)), "n9")
    for node in nodes:
        wait_until(partial(is_quiet, node))
        for index in node.tier.namespaces.all():
            remove_namespace(node.tier, index.digest)
        remote = node.peers.remote_pages
        remote.pages_fetched = remote.nbytes_fetched = remote.pages_fetch_failed = 0
    tell(nodes, view_of(nodes))
    return nodes


def owned(view: View, pages: Any, keys: Sequence[bytes], member: str) -> list[bytes]:
    owners = view.owners.owners(pages.namespace.digest, keys)
    return [key for key, some in zip(keys, owners, strict=True) if some[0] == member]


def copies(node: Node) -> tuple[int, int]:
    return node.tier.eviction.copy_count, node.tier.eviction.copy_nbytes


def hang_gets(node: Node, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Block a node's gets over the bulk wire, and return the event that releases them.

    Released gets are answered normally.
    """
    go, get = threading.Event(), BulkConnection._get

    def slow(self: BulkConnection, *arguments: Any) -> None:
        if self.service is node.service:
            go.wait(60.0)
        get(self, *arguments)

    monkeypatch.setattr(BulkConnection, "_get", slow)
    return go
