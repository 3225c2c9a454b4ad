"""Run SGLang on a CPU: a torchvision stub, the harness, and engines attached to a test node."""

import importlib.util
import json
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
# The folder of the ninja that install.sh installs.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Import SGLang before the tests that run it in this process, hiding its warnings.

    The GPU tests run SGLang in other processes.
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
    # Build SGLang's extension now, not within a test's deadline.
    harness.hashes(list(range(16)), 16)
    yield
    context.__exit__(None, None, None)


@pytest.fixture(scope="session")
def shared_node() -> Iterator[NodeProcess]:
    """Start a node for all tests that neither stop nor fill it; each test has its own revision."""
    import harness

    with harness.start_node("--ram-bytes", "512MiB", "--extent-bytes", "16MiB") as node:
        yield node


@pytest.fixture
def config(shared_node: NodeProcess) -> dict[str, Any]:
    import harness

    return harness.options(shared_node.address, revision=str(uuid.uuid4()))


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfer pages of small pools directly between sockets and the pool too.

    This applies to wires that do not map the node's memory.
    """
    monkeypatch.setattr("gpu_agent.host.slot_copies.PIECE_NBYTES_MIN", 1)


@pytest.fixture
def engine(config: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    """Return `engine(entry, ..., model="other")`, which makes a rank with these pools and options.

    The ranks are detached at the end of the test.
    """
    import harness

    made: list[Any] = []

    def make(*entries: Any, settings: dict[str, Any] | None = None, **options: Any) -> Any:
        made.append(harness.Engine(entries, {**config, **options}, **(settings or {})))
        return made[-1]

    yield make
    for one in made:
        one.detach()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Return `served(num_hidden_layers=4, ...)`: adapters see a server with a Llama of this kind.

    Arguments and model configuration are SGLang's own.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.server_args import ServerArgs

    from gpu_agent.engines import sglang_weights

    def serve(**config: Any) -> None:
        given = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256}
        given |= {"num_attention_heads": 8, "intermediate_size": 64, "vocab_size": 64, **config}
        (tmp_path / "config.json").write_text(json.dumps(given))
        arguments = ServerArgs(model_path=str(tmp_path))
        monkeypatch.setattr(sglang_weights, "get_server_args", lambda: arguments)
        monkeypatch.setattr(
            sglang_weights, "process_model_config", lambda: model_config_of(arguments)
        )

    return serve
