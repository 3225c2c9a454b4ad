"""Fixtures for nodes with a disk tier: in the test's process on a file layer that fails on demand,
or with an I/O process in which faults are planted.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_nodes import Clock, FaultyLayer, Nodes, Pages, settle
from planted import PORTS, SMALL, Fault, children, io_process_of
from ranged import LEAF, PAGE

from kvstore import checksum
from node.config import NodeConfig
from node.disk.data_dir import DataDir
from node.server import Node


@pytest.fixture
def layer() -> FaultyLayer:
    return FaultyLayer()


@pytest.fixture
def nodes(tmp_path: Path, layer: FaultyLayer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Yield a factory of nodes that use `layer`; check and stop them all at the end of the test."""

    def open_here(*arguments: Any, pulse: Callable[[], None], **settings: Any) -> DataDir:
        return DataDir(*arguments, **{**settings, "layer": layer})

    monkeypatch.setattr("node.server.ProcessStorage", open_here)
    nodes = Nodes(tmp_path / "data", layer)
    yield nodes
    nodes.close()


@pytest.fixture(name="settle")
def settle_fixture() -> Callable[[Node], None]:
    return settle


@pytest.fixture
def pages(request: pytest.FixtureRequest) -> Pages:
    return Pages(request.node.name)


@pytest.fixture
def node(nodes: Nodes) -> Node:
    return nodes.start()


@pytest.fixture
def large(request: pytest.FixtureRequest) -> Iterator[Pages]:
    """Yield pages of several checksum leaves each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum, "LEAF_NBYTES", LEAF)
        checksum.cuts.cache_clear()
        yield Pages(request.node.name, PAGE)
    checksum.cuts.cache_clear()


@pytest.fixture
def stored(node: Node, nodes: Nodes, large: Pages) -> list[bytes]:
    """Return the keys of two pages that are on disk only."""
    keys = large.keys(1, 2)
    large.put(nodes.connect(node), keys, durable=True)
    large.drop_from_ram(node)
    return keys


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fault]:
    fault = Fault(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(fault.sitecustomize), os.environ.get("PYTHONPATH", "")])
    )
    yield fault
    fault.clear()


@pytest.fixture
def kept(tmp_path: Path, fault: Fault) -> Iterator[Node]:
    """Yield a node in the test's process with its I/O process beside it.

    No child process may be left at the end.
    """
    others = set(children(os.getpid()))  # such as the node that other tests share
    node = Node(NodeConfig(**PORTS, **SMALL, data_dir=str(tmp_path / "data")))
    node.start()
    yield node
    fault.clear()
    with contextlib.suppress(ProcessLookupError):
        os.kill(io_process_of(node), signal.SIGCONT)
    node.stop()
    assert node.check() == []
    assert set(children(os.getpid())) <= others
