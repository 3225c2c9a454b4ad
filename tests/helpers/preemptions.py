"""Let vLLM's scheduler preempt requests by priority, and see what it preempts."""

import functools
from typing import Any

import pytest


def schedule_by_priority(harness: Any, patch: pytest.MonkeyPatch) -> None:
    """Let the harness, a module, make schedulers in which a request can lose its step."""
    config = functools.partial(
        harness.SchedulerConfig, policy="priority", long_prefill_token_threshold=48
    )
    patch.setattr(harness, "SchedulerConfig", config)


def watch_preemptions(scheduler: Any, block_tokens: int, patch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets, for each preemption, whether the request loses uncomputed blocks."""
    preempt, found = scheduler._preempt_request, list[bool]()

    def preempted(request: Any, *more: Any, **others: Any) -> None:
        tables = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        found.append(len(tables[0]) * block_tokens > request.num_computed_tokens + block_tokens)
        preempt(request, *more, **others)

    patch.setattr(scheduler, "_preempt_request", preempted)
    return found
