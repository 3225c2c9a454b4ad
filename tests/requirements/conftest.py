"""Fixtures for end-to-end tests of the requirements: real clients over real sockets.

A node runs in the test's process where a test accesses its memory. `chain` is a namespace whose
page contents are derived from their keys.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from known_pages import Pages
from local_nodes import Connect, StartNode, connecting, stop_all

from node.config import NodeConfig
from node.server import Node


@pytest.fixture(params=["shm", "bulk", "grpc"])
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def start_node() -> Iterator[StartNode]:
    """Yield a function that starts a node in this process; its arguments are NodeConfig fields.

    At the end of the module, all nodes are checked and stopped together, as each takes half a
    second to stop.
    """
    nodes: list[Node] = []

    def start(**settings: Any) -> Node:
        ports = {"host": "127.0.0.1", "port": 0, "bulk_port": 0, "metrics_port": 0}
        node = Node(
            NodeConfig(
                **{
                    **ports,
                    "ram_nbytes": 1 << 20,
                    "extent_nbytes": 64 << 10,
                    "drain_s": 0.5,
                    **settings,
                }
            )
        )
        node.start()
        nodes.append(node)
        return node

    yield start
    violations = [violation for node in nodes for violation in node.check()]
    stop_all(nodes)
    assert violations == []


@pytest.fixture
def connect() -> Iterator[Connect]:
    with connecting() as connect:
        yield connect


@pytest.fixture
def chain(request: pytest.FixtureRequest) -> Pages:
    return Pages(request.node.name)
