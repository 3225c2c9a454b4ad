"""Nodes that register themselves in an etcd of the test, and are stopped with it."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_etcd import FakeEtcd

from kvstore.pb import kvstore_pb2 as pb
from node.auth.access import THE_NODE
from node.config import NodeConfig
from node.server import Node

SMALL: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 0,
    "bulk_port": 0,
    "metrics_port": 0,
    "ram_nbytes": 16 << 20,
    "extent_nbytes": 1 << 20,
    "drain_s": 0.3,
    "log_level": "ERROR",
}
Start = Callable[..., Node]
LEASE_S = 1


@pytest.fixture
def etcd() -> Iterator[FakeEtcd]:
    etcd = FakeEtcd()
    yield etcd
    etcd.stop()


@pytest.fixture
def fleet(etcd: FakeEtcd) -> Iterator[Start]:
    """Return a function that starts registered nodes."""
    with registered_nodes(etcd) as start:
        yield start


@contextlib.contextmanager
def registered_nodes(etcd: FakeEtcd, **common: Any) -> Iterator[Start]:
    """Yield a function that starts nodes registered in `etcd`, with the settings `common`."""
    cluster = f"etcd://127.0.0.1:1,{etcd.endpoint}/fleet"  # the first endpoint is dead
    known = {"cluster": cluster, "lease_s": LEASE_S, "cluster_wait_s": 10.0, **common}
    with small_nodes() as start:
        yield lambda member="", **settings: start(**{**known, "member": member, **settings})


@contextlib.contextmanager
def small_nodes() -> Iterator[Start]:
    """Yield a function that starts nodes; stop them at the end and check for leaked threads."""
    nodes: list[Node] = []

    def start(**settings: Any) -> Node:
        node = Node(NodeConfig(**{**SMALL, **settings}))
        node.start()
        nodes.append(node)
        return node

    yield start
    for node in nodes:
        stop(node)
    left = [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith(("registry", "removals"))
    ]
    assert left == []


@contextlib.contextmanager
def checked_nodes(settle_s: float | None = None) -> Iterator[Start]:
    """Yield a function that starts nodes; at the end, check their consistency and stop them.

    `settle_s`: the delay of their rebalancers.
    """
    nodes: list[Node] = []

    def start(**settings: Any) -> Node:
        node = Node(NodeConfig(**{**SMALL, **settings}))
        nodes.append(node)
        if settle_s is not None:
            node.peers.rebalancer.settle_s = settle_s
        node.start()
        return node

    yield start
    for node in nodes:
        check_and_stop(node)


def check_and_stop(node: Node) -> None:
    """Check a node's consistency and stop it, unless it has stopped already."""
    if not node.service.draining:
        assert node.check() == []
        node.stop()


def stop(node: Node) -> None:
    if not node.service.draining:
        began = time.monotonic()
        node.stop()
        assert time.monotonic() - began < 20.0


def kill(node: Node, etcd: FakeEtcd, expires: bool = True) -> None:
    """Stop a node without revoking its lease, as if it had crashed; then its lease expires."""
    assert node.registry is not None
    node.registry._etcd.revoke = lambda lease: None  # type: ignore[method-assign]
    lease = node.registry._lease
    stop(node)
    if expires:
        etcd.lose_lease(lease)


def members(node: Node) -> list[str]:
    view = node.membership.view
    return [member.id for member in view.members] if view else []


def peers(node: Node) -> pb.PeersStatus:
    status: pb.NodeStatusReply = node.service.call("node_status", pb.NodeStatusRequest(), THE_NODE)
    return status.peers


def value(etcd: FakeEtcd, key: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(etcd.kvs[f"/kvstore/fleet/{key}".encode()].value)
    return found
