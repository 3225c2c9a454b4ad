"""vLLM: what its configuration says about whose KV this is, and which blocks a request needs.

Everything that changes the bytes of a block, or their meaning, is in the namespace; what an engine's
block hash covers (tokens, LoRA's name, images, cache salt) is in the key.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import get_none_hash_seed, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from gpu_agent.blocks.groups import BlockGroup
from gpu_agent.checkpoint import config_digest, named
from gpu_agent.layouts.vllm import table_pool
from gpu_agent.options import Identity, facts_text
from gpu_agent.pool import KVPool
from kvstore.keys import Namespace

GENERATION = "0.29"  # since when a layer's cache is [blocks, heads, tokens, cell]


def block_sizes(vllm_config: Any, kv_cache_config: Any) -> tuple[int, int]:
    """Tokens that hits are multiples of, and tokens of one of a request's block hashes."""
    step_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return step_tokens, hash_tokens


def block_groups(vllm_config: Any, kv_cache_config: Any) -> list[BlockGroup] | str:
    """The cache groups, or why their blocks can not be stored."""
    if not getattr(vllm_config.model_config, "is_prefix_caching_supported", True):
        return "KV that does not depend on the tokens before it alone"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "scales that every process measures for itself (calculate_kv_scales)"
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    found = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if not spec.prefix_cacheable or getattr(group, "host_resident", False):
            return f"a group of {type(spec).__name__} that vLLM itself does not cache"
        specs = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
        kinds = {_kind(layer, spec.block_size * dcp) for layer in specs}
        if len(kinds) != 1 or None in kinds:
            return f"a group of {', '.join(sorted({type(layer).__name__ for layer in specs}))}"
        found += [kind for kind in kinds if kind]
    return found or "no KV cache"


def _kind(spec: Any, block_tokens: int) -> BlockGroup | None:
    """None: recurrent states and other things whose blocks are no plain function of their tokens."""
    if getattr(spec, "non_causal", False):
        return None
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return BlockGroup(block_tokens)
    if type(spec) in (SlidingWindowSpec, SlidingWindowMLASpec):
        return BlockGroup(
            block_tokens, window_tokens=spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0)
        )
    if type(spec) is ChunkedLocalAttentionSpec:
        return BlockGroup(block_tokens, chunk_tokens=spec.attention_chunk_size)
    return None


def scales_in_blocks(kv_cache_config: Any) -> bool:
    """Whether a block holds its tokens' scales: backends overwrite all of them at their first forward."""
    modes = [getattr(group.kv_cache_spec, "kv_quant_mode", None) for group in kv_cache_config.kv_cache_groups]
    return any(mode is not None and mode.is_per_token_head for mode in modes)


def replicas(vllm_config: Any, kv_cache_config: Any) -> int:
    """Consecutive tensor-parallel ranks with the same KV in every layer."""
    known = getattr(kv_cache_config, "kv_tp_replicas", None)  # 0.33
    if known is not None:
        return int(known)
    parallel, tp = vllm_config.parallel_config, vllm_config.parallel_config.tensor_parallel_size
    if parallel.decode_context_parallel_size > 1:
        return 1
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if all(isinstance(spec, MLAAttentionSpec) for spec in specs):
        return int(tp)
    heads = vllm_config.model_config.get_total_num_kv_heads()
    plain = all(type(spec) in (FullAttentionSpec, SlidingWindowSpec) for spec in specs)
    return tp // heads if plain and tp > heads and tp % heads == 0 else 1


def group_pools(kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]) -> list[KVPool | None]:
    """A pool per cache group; None for one without layers on this rank."""
    pools: list[KVPool | None] = []
    for group in kv_cache_config.kv_cache_groups:
        views = {name: kv_caches[name] for name in group.layer_names if name in kv_caches}
        block_tokens = group.kv_cache_spec.block_size
        pools.append(table_pool(views, kv_cache_config.num_blocks, block_tokens) if views else None)
    return pools


def namespaces(
    vllm_config: Any,
    kv_cache_config: Any,
    identity: Identity,
    pools: list[KVPool | None],
    ranks: Mapping[str, int],
) -> list[Namespace | None]:
    """Of this rank, one per group. `ranks`: tp, pp and cp (prefill context parallel)."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    identity = named(identity, model.model, model.revision or "")
    copies = replicas(vllm_config, kv_cache_config)
    shard = {
        "tp_rank": ranks["tp"] // copies,
        "tp_size": parallel.tensor_parallel_size // copies,
        "pp_rank": ranks["pp"],
        "pp_size": parallel.pipeline_parallel_size,
        "cp_rank": ranks["cp"],
        "cp_size": getattr(parallel, "prefill_context_parallel_size", 1),
    }
    facts = model_facts(vllm_config) | _cache_facts(vllm_config)
    found: list[Namespace | None] = []
    for group, pool in zip(kv_cache_config.kv_cache_groups, pools, strict=True):
        text = facts_text("vllm", **facts, **_group_facts(vllm_config, group))
        found.append(identity.namespace(pool.layout, text, **shard) if pool else None)
    return found


def model_facts(vllm_config: Any) -> dict[str, Any]:
    """What decides an engine's KV beside the weights' name and the cache's shape; of both routes."""
    model, draft = vllm_config.model_config, vllm_config.speculative_config
    facts = {
        "config": config_digest(model.hf_config.to_dict()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "hash": vllm_config.cache_config.prefix_caching_hash_algo,
    }
    if draft:
        facts["draft"] = f"{draft.method}:{draft.model}"
    rope = str([getattr(model.hf_text_config, name, None) for name in ("rope_scaling", "rope_parameters")])
    if "longrope" in rope or "dynamic" in rope:
        facts["max_len"] = model.max_model_len  # such embeddings depend on how long a prompt may be
    return facts


def _cache_facts(vllm_config: Any) -> dict[str, Any]:
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    return {
        "generation": GENERATION,
        "kv_dtype": cache.cache_dtype,
        "kv_layout": getattr(cache, "kv_cache_layout", None),
        "seed": hashlib.sha256(get_none_hash_seed().encode()).hexdigest()[:8],
        "dcp": parallel.decode_context_parallel_size,
        "interleave": getattr(parallel, "cp_kv_cache_interleave_size", 1),
    }


def _group_facts(vllm_config: Any, group: Any) -> dict[str, Any]:
    spec, names = group.kv_cache_spec, sorted(group.layer_names)
    layers = vllm_config.compilation_config.static_forward_context
    backends = {
        layers[name].get_attn_backend().get_name() for name in names if hasattr(layers.get(name), "get_attn_backend")
    }
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0
    return {
        "kind": type(spec).__name__,
        "window": window,
        "backend": "+".join(sorted(backends)),
        "layers": hashlib.sha256("\n".join(names).encode()).hexdigest()[:16],
    }
