"""Fixtures for nodes in the test's process, and for examinations of them by `kvstore doctor`."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from examined import Examined, examined
from fleets import checked_nodes
from local_nodes import StartNode

from kvstore import ClientConfig
from node.server import Node


@pytest.fixture(scope="module")
def start_node() -> Iterator[StartNode]:
    with checked_nodes(settle_s=1e6) as start:
        yield start


@pytest.fixture(scope="module")
def node(start_node: StartNode) -> Node:
    return start_node()


@pytest.fixture
def doctor() -> Callable[..., Examined]:
    """Return a function that examines a node in this process, or a given address."""

    def examine(node: Node | None = None, **settings: Any) -> Examined:
        at = {} if node is None else {"address": f"127.0.0.1:{node.grpc.port}"}
        return examined(
            ClientConfig(**{"timeout_s": 20.0, "connect_timeout_s": 10.0, **at, **settings})
        )

    return examine
