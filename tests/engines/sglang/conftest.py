"""SGLang on a CPU: a stub for torchvision, the harness, and engines attached to a node
of our own.
"""

import importlib.util
import os
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.tools.node_process import NodeProcess

HERE = Path(__file__).parent
if importlib.util.find_spec("torchvision") is None:
    sys.path.insert(0, str(HERE / "stubs"))
# install.sh's ninja
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """These tests have SGLang in their own process, those on a GPU in others.

    What it warns of is not ours.
    """
    if module_path.parent == HERE:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import harness  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session", autouse=True)
def _one_rank() -> Iterator[None]:
    import harness

    context = harness.parallel()
    context.__enter__()
    # Builds SGLang's extension now, not within a test's deadline
    harness.hashes(list(range(16)), 16)
    yield
    context.__exit__(None, None, None)


@pytest.fixture(scope="session")
def shared_node() -> Iterator[NodeProcess]:
    """For all tests that neither stop it nor fill it; every test has weights of its own."""
    import harness

    with harness.start_node("--ram-bytes", "512MiB", "--extent-bytes", "16MiB") as node:
        yield node


@pytest.fixture
def config(shared_node: NodeProcess) -> dict[str, Any]:
    import harness

    return harness.options(shared_node.address, revision=str(uuid.uuid4()))


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of small pools, too, are sent from there and received there, where they are
    not mapped.
    """
    monkeypatch.setattr("gpu_agent.host.slot_copies.PIECE_NBYTES_MIN", 1)


@pytest.fixture
def engine(config: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    """`engine(entry, ..., model="other")`: a rank with these pools and options, detached at the
    end.
    """
    import harness

    made: list[Any] = []

    def make(*entries: Any, settings: dict[str, Any] | None = None, **options: Any) -> Any:
        made.append(harness.Engine(entries, {**config, **options}, **(settings or {})))
        return made[-1]

    yield make
    for one in made:
        one.detach()
