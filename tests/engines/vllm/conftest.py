"""vLLM's real engine on the CPU, in processes of its own, with a real node beside it.

An engine takes 15 to 25 s to start. So the tests of a file share engines, each with one role (the
one that computes, the one that finds what another computed), and use prompts of their own.
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

# For tests that are not about time: a busy machine answers late. A test's own options go first.
PATIENT = {
    "lookup_timeout_s": 30.0,
    "load_timeout_s": 60.0,
    "save_timeout_s": 60.0,
    "timeout_s": 30.0,
    # an engine that starts beside others may get no processor for seconds
    "connect_timeout_s": 30.0,
    "backoff_s_max": 0.1,
    "slow_hits": "take",  # on a busy machine a load may seem slower than computing so little
}


def pytest_configure(config: pytest.Config) -> None:
    """The engine and what it imports warn as they like."""
    config.addinivalue_line("filterwarnings", "default")


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[..., EngineHandle]]:
    """`engines(name, model=..., store={...}, ...)`: the engine of that name in this file, started
    when first asked for.

    `store`: options of the connector; without, a plain engine. Everything else goes to vllm.LLM.
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
    """`plain("llama", dtype=...)`: an engine without a connector, for all files; the reference."""
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
    from scheduler_engine import start_node  # it needs vLLM in this process

    with start_node() as node:
        yield node


@pytest.fixture
def make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler_node: NodeProcess
) -> "Iterator[Engines]":
    """Engines of vLLM's scheduler without a model, with one node."""
    from scheduler_engine import Engines

    engines = Engines(tmp_path, monkeypatch, scheduler_node.address)
    yield engines
    engines.close()
