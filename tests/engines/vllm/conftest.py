"""vLLM's real engine on the CPU, in processes of its own, with a real node.

An engine takes 15 to 25 s to start. So the tests of a file share engines, each with one role (such
as writer or reader), and each test uses prompts of its own.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engine_apart import close_all
from engine_handle import EngineHandle
from vllm_server import store_config

from kvstore.tools.node_process import NodeProcess

collect_ignore = [] if torch.cuda.is_available() else ["gpu"]

if TYPE_CHECKING:
    from scheduler_engine import Engines

# Long timeouts, for tests that do not test timing. Options that a test sets take precedence.
PATIENT = {
    "lookup_timeout_s": 30.0,
    "load_timeout_s": 60.0,
    "save_timeout_s": 60.0,
    "timeout_s": 30.0,
    # An engine that starts beside others may wait for a CPU for seconds.
    "connect_timeout_s": 30.0,
    "backoff_s_max": 0.1,
    "slow_hits": "take",  # on a busy machine a load may seem slower than computing
}


def pytest_configure(config: pytest.Config) -> None:
    """Show warnings of the engine and its imports without failing on them."""
    config.addinivalue_line("filterwarnings", "default")


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[..., EngineHandle]]:
    """Return `engines(name, model=..., store={...}, ...)`, which starts each named engine once per
    file.

    `store` has options of the connector; without it the engine has no connector. Other arguments go
    to vllm.LLM.
    """
    running: dict[str, EngineHandle] = {}

    def engine(name: str, store: dict[str, Any] | None = None, **arguments: Any) -> EngineHandle:
        if name not in running:
            if store is not None:
                arguments["kv_transfer_config"] = store_config(**{**PATIENT, **store})
            running[name] = EngineHandle(name, arguments)
        return running[name]

    yield engine
    close_all(running)


@pytest.fixture(scope="session")
def plain(models: Callable[..., str]) -> Iterator[Callable[..., EngineHandle]]:
    """Return `plain("llama", dtype=...)`: reference engines without a connector, shared by all
    files.
    """
    running: dict[str, EngineHandle] = {}

    def engine(kind: str = "llama", **arguments: Any) -> EngineHandle:
        key = f"{kind} {sorted(arguments.items())}"
        if key not in running:
            running[key] = EngineHandle(f"plain {key}", {"model": models(kind), **arguments})
        return running[key]

    yield engine
    close_all(running)


@pytest.fixture(scope="module")
def scheduler_node() -> Iterator[NodeProcess]:
    from scheduler_engine import start_node  # imports vLLM into this process

    with start_node() as node:
        yield node


@pytest.fixture
def make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler_node: NodeProcess
) -> "Iterator[Engines]":
    """Make engines that run vLLM's scheduler without a model, with one node."""
    from scheduler_engine import Engines

    engines = Engines(tmp_path, monkeypatch, scheduler_node.address)
    yield engines
    engines.close()
