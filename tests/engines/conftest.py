"""Tests against the real engines: `make test-vllm` and the like.

`make test` has no engine installed and skips them.

Each folder's install.sh creates an environment with one engine. A folder is collected only where
its engine can be imported. The node runs in the project's own environment.
"""

import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_host import local_pid
from restartable_node import RestartableNode

from kvstore import KVStoreError
from kvstore.tools.node_process import NodeProcess

HERE = Path(__file__).parent


collect_ignore = [
    folder.name
    for folder in HERE.iterdir()
    if folder.is_dir() and importlib.util.find_spec(folder.name) is None
]


def start_node(*flags: str) -> NodeProcess:
    """Start a node with the Python environment in which the node is installed."""
    defaults = ("--ram-bytes", "256MiB", "--extent-bytes", "16MiB")
    return NodeProcess(
        *(flags or defaults), python=os.environ.get("KVSTORE_NODE_PYTHON", sys.executable)
    )


@pytest.fixture
def node() -> Iterator[NodeProcess]:
    with start_node() as node:
        yield node


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Return the variables of a user without a node, and end the node that an engine starts."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield {
        "XDG_RUNTIME_DIR": str(tmp_path),
        "KVSTORE_ADDRESS": "local",
        "KVSTORE_NODE_RAM_BYTES": "64MiB",
        "KVSTORE_AGENT_LOOKUP_TIMEOUT_S": "30",  # on a busy machine
    }
    with contextlib.suppress(KVStoreError):
        os.kill(local_pid(), signal.SIGTERM)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that makes a tiny model once and returns its directory.

    For example, `models("llama", seed=1)`.
    """
    made: dict[str, str] = {}

    def directory(kind: str, **changes: Any) -> str:
        from tiny_models import save_model

        name = f"tiny_{kind}"
        key = f"{name} {sorted(changes.items())}"
        if key not in made:
            # Models share the last path component, so only their bytes tell them apart.
            path = tmp_path_factory.mktemp("model") / name
            save_model(kind, path, **changes)
            made[key] = str(path)
        return made[key]

    return directory


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestartableNode]:
    """Start a node, one per test file, that can be killed and restarted with its pages."""
    with RestartableNode(tmp_path_factory.mktemp("node")) as node:
        yield node
