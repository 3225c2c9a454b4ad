"""Nodes in this process, whose internals tests can check, and raw bulk connections.

A raw connection can break every rule of the protocol.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_etcd import FakeEtcd
from fleet import MB, renewed
from fleets import SMALL, Start, registered_nodes
from fleets import etcd as etcd
from known_pages import Pages
from local_nodes import (
    ClusterClient,
    Connect,
    ConnectRaw,
    Raw,
    StartNode,
    connecting,
    leave_cluster,
    settle,
    stop_all,
)
from visits import nothing_is_left_at_the_console as nothing_is_left_at_the_console

from node.config import NodeConfig
from node.server import Node

RAM_NBYTES = 4 << 20  # a start fills all page tables, which takes 2 ms of CPU for each MiB


@pytest.fixture(scope="session", autouse=True)
def patient_members() -> Iterator[None]:
    """Let members wait for connections to each other as long as a busy machine needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("node.cluster.remote_pages.CONNECT_TIMEOUT_S", 10.0)
        yield


@pytest.fixture(scope="module")
def start_node() -> Iterator[StartNode]:
    """Return a function that starts a small node in this process.

    Its keyword arguments are NodeConfig fields. At the end of the module each node must be
    consistent, hold nothing, and stop.
    """
    nodes: list[Node] = []

    def start(**settings: Any) -> Node:
        node = Node(NodeConfig(**{**SMALL, "ram_nbytes": RAM_NBYTES, **settings}))
        node.peers.rebalancer.settle_s = 1e6  # no sweep unless a test starts one
        node.start()
        nodes.append(node)
        return node

    yield start
    try:
        for node in nodes:
            leave_cluster(node)
            settle(node, sessions=None)
    finally:
        stop_all(nodes)


@pytest.fixture
def fleet(etcd: FakeEtcd) -> Iterator[Start]:
    """Return a function that starts registered nodes."""
    with registered_nodes(etcd, ram_nbytes=RAM_NBYTES) as start:
        yield start


@pytest.fixture(scope="module")
def node(start_node: StartNode) -> Node:
    """Return one node that the tests of a module share.

    Use a namespace of your own, and leave the node as it was.
    """
    return start_node(ram_nbytes=16 << 20)


@pytest.fixture(name="settle")
def settle_fixture() -> Callable[..., None]:
    return settle


@pytest.fixture
def pages(request: pytest.FixtureRequest) -> Pages:
    return Pages(request.node.name)


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Return a function that connects clients to a node; they are closed at the end."""
    with connecting() as connect:
        yield connect


@pytest.fixture
def raw() -> Iterator[ConnectRaw]:
    """Return a function that opens raw connections to a node, or to a bulk port."""
    connections: list[Raw] = []

    def to(where: Node | int) -> Raw:
        connections.append(Raw(where.bulk.port if isinstance(where, Node) else where))
        return connections[-1]

    yield to
    for connection in connections:
        connection.close()


@pytest.fixture(scope="module")
def three(start_node: StartNode) -> list[Node]:
    return [start_node() for _ in range(3)]


@pytest.fixture(scope="module")
def two(start_node: StartNode) -> list[Node]:
    """Start two nodes; the first has room for 256 pages of 16 KiB, 64 of them copies."""
    return [start_node(ram_nbytes=4 * MB, extent_nbytes=MB // 4, copies_share=0.25), start_node()]


@pytest.fixture
def cluster(three: list[Node]) -> list[Node]:
    return renewed(three)


@pytest.fixture
def pair(two: list[Node]) -> list[Node]:
    return renewed(two)


@pytest.fixture
def far(connect: Connect) -> ClusterClient:
    """Return a function that makes a client that asks the owners directly."""
    return lambda nodes: connect(nodes[-1], near="none", timeout_s=30.0)


@pytest.fixture
def near(connect: Connect) -> ClusterClient:
    """Return a function that makes a client that asks the first node for everything."""
    return lambda nodes: connect(nodes[0], "auto", near="n0", timeout_s=30.0)
