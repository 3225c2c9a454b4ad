"""Tests on the engines' own code: `make test-vllm` and its sisters.

`make test` has no engine and leaves them out.

Each folder's install.sh fills an environment with one engine; a folder is collected where its
engine can be imported. The node runs in the project's own environment.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from restartable_node import RestartableNode

from kvstore.tools.node_process import NodeProcess

HERE = Path(__file__).parent


collect_ignore = [
    folder.name
    for folder in HERE.iterdir()
    if folder.is_dir() and importlib.util.find_spec(folder.name) is None
]


def start_node(*flags: str) -> NodeProcess:
    """A node in the environment that has one."""
    defaults = ("--ram-bytes", "256MiB", "--extent-bytes", "16MiB")
    return NodeProcess(
        *(flags or defaults), python=os.environ.get("KVSTORE_NODE_PYTHON", sys.executable)
    )


@pytest.fixture
def node() -> Iterator[NodeProcess]:
    with start_node() as node:
        yield node


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`models("llama", seed=1)`: the directory of a tiny model, made once."""
    made: dict[str, str] = {}

    def directory(kind: str, **changes: Any) -> str:
        from tiny_models import save_model

        name = f"tiny_{kind}"
        key = f"{name} {sorted(changes.items())}"
        if key not in made:
            # Other weights under the same last path component: only their bytes tell them apart.
            path = tmp_path_factory.mktemp("model") / name
            save_model(kind, path, **changes)
            made[key] = str(path)
        return made[key]

    return directory


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestartableNode]:
    """A node of this file's own that can be killed and started again with its pages."""
    with RestartableNode(tmp_path_factory.mktemp("node")) as node:
        yield node
