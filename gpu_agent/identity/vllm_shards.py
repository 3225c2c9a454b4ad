"""Cut a rank's cache groups of vLLM into shards (`shards.py`).

Attention is cut by heads where a cell of the view `[rows, heads, tokens, cell]` has the KV of one
head only, whatever the number of ranks. Everything else keeps the names of ranks.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gpu_agent.identity.shards import (
    Shard,
    ShardOptions,
    head_shards,
    layer_shards,
    shards_of_rank,
)
from gpu_agent.layouts.vllm import table_pool
from gpu_agent.pool import KVPool
from kvstore.errors import ConfigError

log = logging.getLogger(__name__)

# Exact classes: a subclass may have another meaning.
_BY_HEADS = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
_REPLICATED = ("MLAAttentionSpec", "SlidingWindowMLASpec")
# Backends whose code was read: each head of a block is apart from the others in the view. Others
# keep K and V of all heads apart (B12X, ROCm's), or pack heads (NVFP4, TurboQuant).
_BACKENDS = frozenset({"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "CPU_ATTN"})
_QUANTISATIONS = frozenset(
    {
        *("NONE", "FP8_PER_TENSOR"),
        *("INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD"),
    }
)


class GroupShard(NamedTuple):
    """Heads and layers of a cache group, which are pages of their own.

    `layers`: vLLM's names of the layers. `axes`: a namespace's `tp_rank`, `tp_size` and so on.
    """

    pool: KVPool
    layers: tuple[str, ...]
    axes: dict[str, int]


def rank_axes(parallel: Any, ranks: Mapping[str, int], copies: int) -> dict[str, int]:
    """Return the axes of a rank's namespace.

    `ranks` has tp, pp and cp (prefill context parallel). `copies`: number of consecutive
    tensor-parallel ranks with the same KV.
    """
    return {
        "tp_rank": ranks["tp"] // copies,
        "tp_size": parallel.tensor_parallel_size // copies,
        "pp_rank": ranks["pp"],
        "pp_size": parallel.pipeline_parallel_size,
        "cp_rank": ranks["cp"],
        "cp_size": getattr(parallel, "prefill_context_parallel_size", 1),
    }


def group_shards(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    pools: Sequence[KVPool | None],
    axes: Mapping[str, int],
    wanted: ShardOptions,
) -> list[list[GroupShard]]:
    """Return this rank's shards of each cache group; none for a group without layers here.

    `pools`: the rank's whole groups. `axes`: of `rank_axes`. Raises ConfigError for options that
    do not fit the model or its ranks.
    """
    groups = [group.layer_names for group in kv_cache_config.kv_cache_groups]
    reason = why_by_rank(vllm_config, kv_cache_config, kv_caches, axes)
    if reason:
        if wanted != ShardOptions():
            log.warning("head_shards and layer_shards are ignored: this engine has %s", reason)
        return [
            [GroupShard(pool, tuple(names), dict(axes))] if pool else []
            for names, pool in zip(groups, pools, strict=True)
        ]
    layers = _layer_shards(vllm_config, wanted.layers, axes)
    return [
        list(_cut(names, pool, kv_caches, axes, layers, wanted.heads)) if pool else []
        for names, pool in zip(groups, pools, strict=True)
    ]


def _cut(
    names: Sequence[str],
    pool: KVPool,
    kv_caches: Mapping[str, torch.Tensor],
    axes: Mapping[str, int],
    layers: Sequence[Shard],
    wanted_heads: int | None,
) -> Iterator[GroupShard]:
    """Yield this rank's shards of a group; `pool` is the rank's whole group."""
    here = [name for name in names if name in kv_caches]
    heads = min(kv_caches[name].shape[1] for name in here)
    ranks, blocks = axes["tp_size"], pool.spaces["block"].slots
    outside = [name for name in here if not any(_number(name) in _range(part) for part in layers)]
    if len(layers) > 1 and outside:
        raise ConfigError(
            f"layer_shards does not fit: {outside[0]} is none of the layers {layers[0].first} to "
            f"{layers[-1].end - 1} that this pipeline rank should have; leave the option out"
        )
    for layer in layers:
        some, known, whole = here, names, pool  # `known`: as in names by rank
        if len(layers) > 1:
            some = known = [name for name in here if _number(name) in _range(layer)]
            if not some:
                continue
            views = {name: kv_caches[name] for name in some}
            whole = table_pool(views, blocks, pool.layout.page_tokens)
        # From bytes of all heads of the model, so that engines of all sizes choose one number
        count = head_shards(wanted_heads, heads * ranks, ranks, whole.layout.page_nbytes * ranks)
        by_heads = shards_of_rank(count, axes["tp_rank"], ranks, heads)
        for head in by_heads:
            part = whole
            if len(by_heads) > 1:
                views = {name: kv_caches[name][:, head.first : head.end] for name in some}
                part = table_pool(views, blocks, pool.layout.page_tokens)
            shard = {
                "tp_rank": head.number,
                "tp_size": head.total,
                "pp_rank": layer.number,
                "pp_size": layer.total,
            }
            yield GroupShard(part, tuple(known), {**axes, **shard})


def _layer_shards(vllm_config: Any, wanted: int | None, axes: Mapping[str, int]) -> list[Shard]:
    """Return the rank's layer shards, with the model's layer numbers."""
    rank, ranks = axes["pp_rank"], axes["pp_size"]
    if wanted is None or wanted == ranks:
        return [Shard(rank, ranks, 0, 0)]  # all layers that the rank has
    total = int(vllm_config.model_config.hf_text_config.num_hidden_layers)
    count = layer_shards(wanted, total, ranks)
    first = total // ranks * rank
    return [
        shard._replace(first=first + shard.first, end=first + shard.end)
        for shard in shards_of_rank(count, rank, ranks, total // ranks)
    ]


def _range(layers: Shard) -> range:
    return range(layers.first, layers.end)


def _number(name: str) -> int:
    match = re.search(r"\d+", name)
    return int(match.group()) if match else -1


def why_by_rank(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    axes: Mapping[str, int],
) -> str:
    """Return why this engine's pages are named by rank; empty if they are named by shard."""
    if vllm_config.parallel_config.decode_context_parallel_size > 1 or axes["cp_size"] > 1:
        return "context parallelism, which divides tokens among ranks"
    if vllm_config.speculative_config:
        return "speculative decoding, whose own layers are not divided like the model's"
    for group in kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            spec = specs.get(name, group.kv_cache_spec)
            kind = type(spec).__name__
            if kind in _REPLICATED and axes["tp_size"] == 1:
                continue
            if kind not in _BY_HEADS:
                return f"a cache group of {kind}"
            if reason := _why_not_by_heads(vllm_config, name, spec, kv_caches, axes):
                return reason
    return ""


def _why_not_by_heads(
    vllm_config: Any,
    name: str,
    spec: Any,
    kv_caches: Mapping[str, torch.Tensor],
    axes: Mapping[str, int],
) -> str:
    layer = vllm_config.compilation_config.static_forward_context.get(name)
    backend = layer.get_attn_backend().get_name() if hasattr(layer, "get_attn_backend") else "?"
    if backend not in _BACKENDS:
        return f"the attention backend {backend}"
    heads = spec.num_kv_heads
    total = vllm_config.model_config.get_total_num_kv_heads()
    if heads * axes["tp_size"] != total:
        return f"{heads} KV heads on each of {axes['tp_size']} different ranks, and {total} in all"
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    packed = getattr(spec, "num_head_slots", None) is not None or (
        name in kv_caches and kv_caches[name].shape[1] != heads
    )
    if packed or mode not in _QUANTISATIONS:
        return f"cells that are not of one head (quantisation {mode})"
    return ""
