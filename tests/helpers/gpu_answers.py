"""A vLLM engine on a GPU whose agents' processes are ready."""

import time
from collections.abc import Sequence
from typing import Any

from engine_handle import EngineHandle

READY_S = (
    120.0  # importing torch and page-locking the node's memory, beside other engines that start
)


def agents_ready(engine: EngineHandle) -> list[dict[str, Any]]:
    """Waits until all workers' agents take loads; their processes.

    In the engine's own, a test would be none.
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
    """Has an engine compute these prompts; they are in the store afterwards."""
    agents_ready(writer)
    writer.reset()
    found = writer.generate(*prompts, **order)
    writer.settle()
    return found
