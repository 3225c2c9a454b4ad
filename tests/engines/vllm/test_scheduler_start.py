"""vLLM's own scheduler while our agents' process starts: no request waits for it."""

import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_engine import Engines, answer, start_node, tokens
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

import gpu_agent.engines.vllm as adapter
from gpu_agent.worker import choice, worker_process
from gpu_agent.worker.worker_process import WorkerTimeouts

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("batch_tokens", [128, 1024], ids=["in chunks", "at once"])
def test_request_needing_blocks_of_staged_saves_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_tokens: int
) -> None:
    """The request needs more than three quarters of all blocks.

    A quarter is pinned until the agents' process is ready.
    """
    monkeypatch.setattr(
        worker_process, "_command", lambda: [sys.executable, "-c", "import time; time.sleep(600)"]
    )
    monkeypatch.setattr(choice, "READY_S", 0.1)
    with start_node() as node:
        make = Engines(tmp_path, monkeypatch, node.address)
        engine = make(store={"agents": "process"}, blocks=64, batch_tokens=batch_tokens)
        try:
            engine.add("first", tokens(7, 300), 2)
            engine.run(until=engine.requests["first"].is_finished)
            assert engine.pool.get_num_free_blocks() == engine.free_blocks - 16
            began = time.monotonic()
            engine.add("second", tokens(11, 900), 2)
            engine.run(until=engine.requests["second"].is_finished)
            assert time.monotonic() - began < WorkerTimeouts().start_s / 3
            assert engine.outputs["second"] == answer(tokens(11, 900), 2)
        finally:
            make.close()


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        (SchedulerOutput, "kv_connector_block_state"),
        (SchedulerOutput, "scheduled_spec_decode_tokens"),
        (KVConnectorOutput, "kv_connector_worker_meta"),
        (KVConnectorOutput, "invalid_block_ids"),
    ],
)
def test_vllm_without_a_hook_runs_without_the_store(
    make: Engines, monkeypatch: pytest.MonkeyPatch, message: Any, lost: str
) -> None:
    """Regression: the first step raised, and ended the engine."""
    monkeypatch.delitem(message.__dataclass_fields__, lost)
    warnings: list[str] = []
    monkeypatch.setattr(adapter.logger, "warning", lambda *text: warnings.append(str(text)))
    engine = make()

    def without(call: Any, found: Any) -> Any:
        return call(SimpleNamespace(**{k: v for k, v in vars(found).items() if k != lost}))

    for name in ("build_connector_meta", "update_connector_output"):
        call = getattr(engine.connector, name)
        monkeypatch.setattr(engine.connector, name, partial(without, call))
    assert engine.generate(tokens(7, 60)) == answer(tokens(7, 60), 8)
    assert len([text for text in warnings if lost in text]) == 1
