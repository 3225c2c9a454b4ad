"""Caches other than plain attention in bfloat16, on a GPU.

They are MLA, two groups of layers, fp8, and two ranks, also of models with recurrent layers.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_answers import agree, answers, cached, found_locally, prompt
from engine_handle import EngineHandle
from gpu_answers import FULL_GRAPHS, agents_ready, stored
from restartable_node import RestartableNode

Engines = Callable[..., EngineHandle]
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
# Name -> (model, vLLM's arguments, number of agent processes per engine).
CACHES: dict[str, tuple[str, dict[str, Any], int]] = {
    "fp8": ("llama", {"kv_cache_dtype": "fp8"}, 1),
    "MLA": ("mla", {"block_size": 64}, 1),
    "sliding window hybrid": ("hybrid", {}, 1),
    "blocks of 16 tokens": ("llama", {"block_size": 16}, 1),
    "two ranks": ("llama", TWO_RANKS, 2),
    "two ranks, full graphs": ("llama", {**TWO_RANKS, **FULL_GRAPHS}, 2),
    "two ranks, MLA": ("mla", {**TWO_RANKS, "block_size": 64}, 2),
    "two ranks, MLA, full graphs": ("mla", {**TWO_RANKS, **FULL_GRAPHS, "block_size": 64}, 2),
    "two ranks, Mamba-2": ("mamba2", {**TWO_RANKS, "block_size": 160}, 2),
    "two ranks, gated delta net": (
        "gated_delta",
        {
            **TWO_RANKS,
            "block_size": 160,
            "additional_config": {"gdn_prefill_backend": "triton"},
        },
        2,
    ),
}
# Kinds of models with recurrent layers, which write to the null block.
RECURRENT = ("mamba2", "gated_delta")


@pytest.mark.parametrize("cache", CACHES)
def test_store_hit_answers_like_a_local_hit(
    cache: str, on_gpu: Engines, store: RestartableNode
) -> None:
    kind, arguments, ranks = CACHES[cache]
    if ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs")
    block = arguments.get("block_size", 32)
    options = {"address": store.address}
    writer, reader = (
        on_gpu(f"{role} {cache}", kind, store=options, **arguments) for role in ("writer", "reader")
    )
    assert len(agents_ready(writer)) == len(agents_ready(reader)) == ranks
    before = store.pages().keys()
    # Each cache has its own prompts, since one rank and two ranks share the pages of MLA.
    number = 2 * list(CACHES).index(cache)
    prompts = [prompt(number + 1, 2 * block + 36), prompt(number + 2, 300)]
    computed = stored(writer, *prompts)
    assert store.pages().keys() > before
    expected = found_locally(writer, *prompts)
    assert agree(expected, computed)
    found = reader.alone(*prompts)
    assert cached(found) == cached(expected) == [(len(one) - 1) // block * block for one in prompts]
    assert answers(found) == answers(expected)
    assert answers(found) == answers(found_locally(reader, *prompts))
    for engine in (writer, reader):
        engine.settle()
        cache = engine.ask("cache")
        assert cache["null_block_is_zero"] or len(cache["groups"]) == 1 or kind in RECURRENT
        engine.close()
