"""vLLM's own scheduler while our agents' process starts: no request waits for it."""

import sys
import time
from pathlib import Path

import pytest
from scheduler_engine import Engines, answer, start_node, tokens

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
