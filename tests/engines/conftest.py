"""Tests on the engines' own code: `make test-vllm` and its sisters. `make test` has no engine and leaves them out.

Each folder's install.sh fills an environment with one engine; a folder is collected where its engine
can be imported. The node runs in the project's own environment.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.measure.node_process import NodeProcess

HERE = Path(__file__).parent
collect_ignore = [
    folder.name for folder in HERE.iterdir() if folder.is_dir() and importlib.util.find_spec(folder.name) is None
]


def start_node(*flags: str) -> NodeProcess:
    """A node in the environment that has one."""
    defaults = ("--ram-bytes", "256MiB", "--extent-bytes", "16MiB")
    return NodeProcess(*(flags or defaults), python=os.environ.get("KVSTORE_NODE_PYTHON", sys.executable))


@pytest.fixture
def node() -> Iterator[NodeProcess]:
    with start_node() as node:
        yield node
