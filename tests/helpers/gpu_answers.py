"""A vLLM engine on a GPU whose agent processes are ready."""

import time
from collections.abc import Sequence
from typing import Any

from engine_answers import cached, prompt
from engine_handle import EngineHandle

# Arguments of an engine that replays its decodes from CUDA graphs, attention too
FULL_GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
# To import torch and page-lock the node's memory while other engines start
READY_S = 120.0
BACK_S = 90.0  # an agents' process takes ten seconds to start, after a backoff


def agents_ready(engine: EngineHandle) -> list[dict[str, Any]]:
    """Wait until the agents of all workers take loads, and return the workers.

    All agents must run in processes of their own; otherwise the tests would not test them.
    """
    end = time.monotonic() + READY_S
    while True:
        workers: list[dict[str, Any]] = engine.ask("agents")["workers"]
        assert {worker["home"] for worker in workers} == {"ProcessBackend"}
        assert [violation for worker in workers for violation in worker["violations"]] == []
        if all(worker["ready"] for worker in workers):
            return workers
        assert time.monotonic() < end, (
            f"the agents' processes are not ready after {READY_S} s:\n{engine.said()[-3000:]}"
        )
        time.sleep(0.1)


def stored(writer: EngineHandle, *prompts: Sequence[int], **order: Any) -> list[dict[str, Any]]:
    """Compute prompts and return the answers; their pages are in the store afterwards."""
    agents_ready(writer)
    writer.reset()
    found = writer.generate(*prompts, **order)
    writer.settle()
    return found


def hits_again(engine: EngineHandle, seed: int) -> None:
    """Wait until the engine's saves are stored and hit again."""
    end = time.monotonic() + BACK_S
    while True:
        one = prompt(seed, 100)
        engine.alone(one, max_tokens=1)
        if cached(engine.alone(one, max_tokens=1)) == [96]:
            return
        seed += 1
        assert time.monotonic() < end, (
            f"the engine does not use its store any more:\n{engine.said()[-3000:]}"
        )
