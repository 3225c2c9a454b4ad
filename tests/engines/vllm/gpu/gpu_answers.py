"""What an engine on a GPU answers, and when two answers are the same.

What a GPU computes depends in its last bits on which tokens are computed together. So the reference for a hit in the
store is a hit in an engine's own cache, which computes the same tokens over the same KV: equal to the last bit. Where
an engine computes what another found, `agree` allows what rounding to bfloat16 makes, which wrong KV is far from.
"""

import time
from collections.abc import Sequence
from typing import Any

from engine_handle import EngineHandle

READY_S = 120.0  # importing torch and page-locking the node's memory, beside other engines that start
ROUNDING = 0.35  # of a log probability; see test_wrong_kv_would_show
UNLIKELY = -1e9


def agents_ready(engine: EngineHandle) -> list[dict[str, Any]]:
    """Waits until all workers' agents take loads; their processes. In the engine's own, a test would be none."""
    end = time.monotonic() + READY_S
    while True:
        workers: list[dict[str, Any]] = engine.ask("agents")["workers"]
        assert {worker["home"] for worker in workers} == {"AgentProcess"}
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


def found_locally(engine: EngineHandle, *prompts: Sequence[int], **order: Any) -> list[dict[str, Any]]:
    """What an engine answers that has the full blocks of a prompt in its own cache, one prompt after the other."""
    found = []
    for one in prompts:
        engine.reset()
        engine.generate(one, **order)
        found += engine.generate(one, **order)
    return found


def agree(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> bool:
    """Whether these are the same answers but for rounding: each token's log probability is near, up to the first that
    differs (behind it all may), and there both found the other's nearly as likely as the other did."""
    return all(_agree(one, other) for one, other in zip(found, expected, strict=True))


def _agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one["finish"] != other["finish"] or len(one["tokens"]) != len(other["tokens"]):
        return False
    for mine, yours, token, same in zip(one["likely"], other["likely"], one["tokens"], other["tokens"], strict=True):
        likely, expected = dict(map(tuple, mine)), dict(map(tuple, yours))
        if not all(abs(likely.get(it, UNLIKELY) - expected.get(it, UNLIKELY)) < ROUNDING for it in (token, same)):
            return False
        if token != same:
            break
    return True
