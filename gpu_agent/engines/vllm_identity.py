"""Read from vLLM's cache groups which blocks a request needs.

Names of the KV are in `gpu_agent/identity/vllm.py`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from gpu_agent.blocks.groups import BlockGroup
from gpu_agent.identity.vllm import not_shareable
from gpu_agent.layouts.vllm import table_pool
from gpu_agent.pool import KVPool
from kvstore.errors import ConfigError

# KV cache kinds that were tested with the tier in vLLM's own scheduler. Exact classes: a subclass
# is another kind.
TIER_SPECS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)


def block_sizes(vllm_config: Any, kv_cache_config: Any) -> tuple[int, int]:
    """Return the tokens that hits are multiples of, and the tokens of one block hash."""
    step_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return step_tokens, hash_tokens


def block_groups(vllm_config: Any, kv_cache_config: Any) -> list[BlockGroup] | str:
    """Return the cache groups, or why their blocks cannot be stored."""
    if reason := not_shareable(vllm_config):
        return reason
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    found = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if not spec.prefix_cacheable or getattr(group, "host_resident", False):
            return f"a group of {type(spec).__name__} that vLLM itself does not cache"
        specs = (
            list(spec.kv_cache_specs.values())
            if isinstance(spec, UniformTypeKVCacheSpecs)
            else [spec]
        )
        kinds = {_kind(layer, spec.block_size * dcp) for layer in specs}
        if len(kinds) != 1 or None in kinds:
            return f"a group of {', '.join(sorted({type(layer).__name__ for layer in specs}))}"
        found += [kind for kind in kinds if kind]
    return found or "no KV cache"


def _kind(spec: Any, block_tokens: int) -> BlockGroup | None:
    """Return a group; None for recurrent states and others that do not follow from tokens."""
    if getattr(spec, "non_causal", False):
        return None
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return BlockGroup(block_tokens)
    if type(spec) in (SlidingWindowSpec, SlidingWindowMLASpec):
        return BlockGroup(
            block_tokens,
            window_tokens=spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0),
        )
    if type(spec) is ChunkedLocalAttentionSpec:
        return BlockGroup(block_tokens, chunk_tokens=spec.attention_chunk_size)
    return None


def check_tier_groups(kv_cache_config: Any) -> None:
    """Raise ConfigError for a model with a cache group that the tier was not tested with.

    A recurrent state (Mamba, linear attention) sums up all earlier tokens. A state of another
    prefix length makes all later tokens wrong, and no checksum detects it.
    """
    tested = ", ".join(kind.__name__ for kind in TIER_SPECS)
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        specs = (
            list(spec.kv_cache_specs.values())
            if isinstance(spec, UniformTypeKVCacheSpecs)
            else [spec]
        )
        for layer in specs:
            if type(layer) not in TIER_SPECS or getattr(layer, "non_causal", False):
                kind = "non-causal " * getattr(layer, "non_causal", False) + type(layer).__name__
                raise ConfigError(
                    f"KVStoreTier does not support this model: KV cache group {number} "
                    f"({group.layer_names[0]}) is a {kind}, and the tier was tested with causal "
                    f"groups of {tested} only, not with recurrent state (Mamba, linear attention). "
                    "Remove the tier of type KVStoreTier from secondary_tiers"
                )


def scales_in_blocks(kv_cache_config: Any) -> bool:
    """Return whether a block holds its tokens' scales, overwritten at their first forward."""
    modes = [
        getattr(group.kv_cache_spec, "kv_quant_mode", None)
        for group in kv_cache_config.kv_cache_groups
    ]
    return any(mode is not None and mode.is_per_token_head for mode in modes)


def replicas(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return how many consecutive tensor-parallel ranks have the same KV in every layer."""
    known = int(getattr(kv_cache_config, "kv_tp_replicas", 1))  # 0.33, for latents only
    parallel, tp = vllm_config.parallel_config, vllm_config.parallel_config.tensor_parallel_size
    if known > 1 or parallel.decode_context_parallel_size > 1:
        return known
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if all(isinstance(spec, MLAAttentionSpec) for spec in specs):
        return int(tp)
    heads = vllm_config.model_config.get_total_num_kv_heads()
    plain = all(type(spec) in (FullAttentionSpec, SlidingWindowSpec) for spec in specs)
    return tp // heads if plain and tp > heads and tp % heads == 0 else 1


def group_pools(kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]) -> list[KVPool | None]:
    """Return a pool per cache group; None for one without layers on this rank."""
    pools: list[KVPool | None] = []
    for group in kv_cache_config.kv_cache_groups:
        views = {name: kv_caches[name] for name in group.layer_names if name in kv_caches}
        block_tokens = group.kv_cache_spec.block_size
        pools.append(table_pool(views, kv_cache_config.num_blocks, block_tokens) if views else None)
    return pools
