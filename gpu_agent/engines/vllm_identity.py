"""Translate vLLM's cache groups for connector and tier.

    block_groups, check_tier_groups   which groups are stored, or why the model is refused
    full_hits, block_sizes           where a hit may end
    replicas, group_pools             which ranks have the same KV, and its tensors

The names of the KV are made in `gpu_agent/identity/vllm.py`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import vllm
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput

from gpu_agent.blocks.groups import BlockGroup, state_group
from gpu_agent.engines.vllm_specs import LIMITS, SPECS, kind_of, layer_specs, refusal
from gpu_agent.identity.checkpoint import text_digest
from gpu_agent.identity.vllm import not_shareable, state_facts
from gpu_agent.layouts.vllm import table_pool
from gpu_agent.pool import KVPool
from kvstore.errors import ConfigError

# Fields of vLLM's messages for connectors. Without one of them, a step would raise.
HOOKS = (
    *("kv_connector_block_state", "scheduled_spec_decode_tokens"),
    *("kv_connector_worker_meta", "invalid_block_ids"),
)
# Whether the tier takes recurrent states: those of this vLLM were tested.
STATES_SERVED = [int(n) for n in re.findall(r"\d+", vllm.__version__)[:2]] >= [0, 33]

# Fields of a model's configuration, in any of its parts: numbers of KV heads of some layers
_KV_HEADS = re.compile(r"kv_heads|key_value_heads|head_kv|attention_groups|query_group_num")


def block_sizes(vllm_config: Any, kv_cache_config: Any) -> tuple[int, int]:
    """Return the tokens that hits are multiples of, and the tokens of one block hash."""
    step_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return step_tokens, hash_tokens


def block_groups(vllm_config: Any, kv_cache_config: Any) -> list[BlockGroup | None] | str:
    """Return the cache groups, or why their blocks cannot be stored.

    None is a group of which a hit needs no page.
    """
    reason = _missing_hooks() or not_shareable(vllm_config)
    if reason := reason or _states_not_offered(vllm_config, kv_cache_config):
        return reason
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    found: list[BlockGroup | None] = []
    for group in kv_cache_config.kv_cache_groups:
        specs, on_host = layer_specs(group.kv_cache_spec), getattr(group, "host_resident", False)
        if refused := sorted({refusal(spec, on_host) for spec in specs} - {""}):
            return f"a group of {', '.join(refused)}"
        layers = {_block_group(spec, dcp) for spec in specs}
        if len(layers) != 1:  # they would need different blocks of one table
            return f"a group of several of {', '.join(sorted({type(s).__name__ for s in specs}))}"
        found.append(layers.pop())
    return found if any(found) else "no KV cache"


def _missing_hooks() -> str:
    """Return which fields this vLLM lacks that our steps read; empty if it has all."""
    has = {field.name for kind in (SchedulerOutput, KVConnectorOutput) for field in fields(kind)}
    lacks = [name for name in HOOKS if name not in has]
    return f"a vLLM ({vllm.__version__}) without {', '.join(lacks)}" if lacks else ""


def _block_group(spec: Any, dcp: int) -> BlockGroup | None:
    """Return the group of a spec that is not refused; None if a hit needs no page of it."""
    kind = kind_of(spec)
    if SPECS[kind].connector == LIMITS:
        return None
    if isinstance(spec, MambaSpec):
        return state_group(spec.block_size)
    block_tokens = spec.block_size * (dcp if getattr(spec, "dcp_sharded", True) else 1)
    window = getattr(spec, "sliding_window", None) if "SlidingWindow" in kind else None
    retained = getattr(spec, "extra_retained_tokens", 0)
    return BlockGroup(
        block_tokens,
        window_tokens=window - 1 + retained if window else 0,
        chunk_tokens=spec.attention_chunk_size if kind == "ChunkedLocalAttentionSpec" else 0,
    )


def _states_not_offered(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return why vLLM's recurrent states cannot be stored; empty if they can, or there are none."""
    if not any(isinstance(spec, MambaSpec) for spec in _all_layer_specs(kv_cache_config)):
        return ""
    if not offers_states():
        return "recurrent states (MambaSpec), which this vLLM does not offer to connectors"
    if option := _completing_option(vllm_config):
        return f"recurrent states (MambaSpec) that are completed from other memory ({option})"
    return _wrongly_offered(vllm_config, kv_cache_config)


def _all_layer_specs(kv_cache_config: Any) -> list[Any]:
    groups = kv_cache_config.kv_cache_groups
    return [spec for group in groups for spec in layer_specs(group.kv_cache_spec)]


def _completing_option(vllm_config: Any) -> str:
    """Return the option by which vLLM completes states from other memory; empty without any."""
    options = ("use_replayssm", "use_kda_recoverssm")
    return next((name for name in options if getattr(vllm_config.cache_config, name, False)), "")


def _wrongly_offered(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return why vLLM offers recurrent states under wrong keys; empty if it does not.

    A hit may end inside a block. If layers export checkpoints of their states, vLLM 0.33 then lets
    a step pass the end of that block. The block keeps the state of the hit, but vLLM caches and
    offers it as the state at the block's end.
    """
    exporting = [
        spec.block_size
        for spec in _all_layer_specs(kv_cache_config)
        if getattr(spec, "num_prefill_checkpoint_blocks", 0)
    ]
    if exporting and block_sizes(vllm_config, kv_cache_config)[1] < max(exporting):
        return (
            "recurrent states (MambaSpec) and hits inside blocks, where vLLM caches wrong states "
            "(leave prefix_match_unit unset)"
        )
    return ""


def offers_states() -> bool:
    """Return whether this vLLM tells connectors which blocks hold states."""
    from vllm.v1.core.sched import output

    state = getattr(output, "KVConnectorBlockState", None)
    return "boundary_state_offloads" in getattr(state, "__dataclass_fields__", {})


def full_hits(kv_cache_config: Any) -> bool:
    """Return whether vLLM can compute the last token again over a hit that covers it.

    Not where it would write into a state, a ring or a compressed cell that has the token already.
    """
    return all(
        SPECS[kind_of(spec)].connector != LIMITS
        and not isinstance(spec, MambaSpec)
        and getattr(spec, "tokens_per_state", 1) <= 1
        for spec in _all_layer_specs(kv_cache_config)
    )


def with_groups(kv_cache_config: Any, numbers: Sequence[int]) -> Any:
    """Return the cache configuration with these groups only."""
    groups = [kv_cache_config.kv_cache_groups[number] for number in numbers]
    return replace(kv_cache_config, kv_cache_groups=groups)


def check_tier_groups(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ConfigError for a model with a cache group that the tier does not take.

    A recurrent state (Mamba, linear attention) sums up all earlier tokens. A state of another
    prefix length makes all later tokens wrong, and no checksum detects it.
    """
    if wrong := _wrongly_offered(vllm_config, kv_cache_config):
        raise ConfigError(
            f"KVStoreTier does not support this configuration: it has {wrong}; or remove the tier "
            "of type KVStoreTier from secondary_tiers"
        )
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        specs, on_host = layer_specs(group.kv_cache_spec), getattr(group, "host_resident", False)
        reasons = (_not_for_tier(vllm_config, spec, on_host) for spec in specs)
        reason = next(filter(None, reasons), "")
        if len({_reach(layer) for layer in specs}) > 1:  # vLLM takes the first layer's for all
            reason = "has layers of several kinds"
        if reason:
            raise ConfigError(
                f"KVStoreTier does not support this model: KV cache group {number} "
                f"({group.layer_names[0]}) {reason}. "
                "Remove the tier of type KVStoreTier from secondary_tiers"
            )


def _not_for_tier(vllm_config: Any, spec: Any, on_host: bool) -> str:
    """Return why the tier cannot take a layer's cache; empty if it can."""
    name = type(spec).__name__
    if isinstance(spec, MambaSpec) and not STATES_SERVED:
        return f"is a {name}, a recurrent state, which needs vLLM 0.33 or newer"
    if refused := refusal(spec, on_host, route="tier"):
        return f"is a {refused}"
    if not isinstance(spec, MambaSpec):
        return ""
    if spec.num_speculative_blocks:
        return f"is a {name}, and the tier was not tested with recurrent state of drafted tokens"
    if option := _completing_option(vllm_config):
        return f"is a {name} whose state is completed from other memory ({option})"
    return ""


def _reach(spec: Any) -> Any:
    """Return what decides which blocks of a layer a prefix needs."""
    if isinstance(spec, MambaSpec):
        return "state"
    window = getattr(spec, "sliding_window", None), getattr(spec, "extra_retained_tokens", 0)
    return window, getattr(spec, "attention_chunk_size", None)


def tier_state_facts(vllm_config: Any, kv_cache_config: Any) -> dict[str, str]:
    """Return what decides the bytes of all groups' recurrent states; empty without any."""
    groups = [
        (number, state_facts(vllm_config, group.kv_cache_spec))
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
    ]
    states = [(number, facts) for number, facts in groups if facts]
    return {"states": text_digest(states)[:16]} if states else {}


def prefill_context_rank() -> int:
    """Return this process's rank in prefill context parallelism; 0 before vLLM had it."""
    try:
        from vllm.distributed.parallel_state import get_pcp_group
    except ImportError:
        return 0
    return int(get_pcp_group().rank_in_group)


def scales_in_blocks(kv_cache_config: Any) -> bool:
    """Return whether a block holds its tokens' scales, overwritten at their first forward."""
    modes = [getattr(spec, "kv_quant_mode", None) for spec in _all_layer_specs(kv_cache_config)]
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
    heads = _most_kv_heads(vllm_config.model_config)
    plain = all(type(spec) in (FullAttentionSpec, SlidingWindowSpec) for spec in specs)
    plain &= not hasattr(vllm_config.model_config.hf_text_config, "block_configs")  # Nemotron-NAS
    return tp // heads if plain and tp > heads and tp % heads == 0 else 1


def _most_kv_heads(model: Any) -> int:
    """Return the KV heads of the layer that has most; vLLM's total is that of one kind of layers.

    Ranks may share the heads of that kind and have different ones of another kind, as with
    `swa_num_key_value_heads` (MiMo-V2).
    """

    def heads(config: Mapping[str, Any]) -> Iterator[int]:
        for name, value in config.items():
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Mapping):
                    yield from heads(part)
                elif isinstance(part, int) and _KV_HEADS.search(name):
                    yield part

    return max([int(model.get_total_num_kv_heads()), *heads(model.hf_text_config.to_dict())])


def group_pools(kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> list[KVPool | None]:
    """Return a pool per cache group; None for one without layers on this rank.

    Raises ConfigError for states in tensors that cannot be viewed as bytes.
    """
    pools: list[KVPool | None] = []
    for group in kv_cache_config.kv_cache_groups:
        views: dict[str, torch.Tensor] = {}
        for name in group.layer_names:
            if name in kv_caches:
                views |= _state_views(name, kv_caches[name])
        block_tokens = group.kv_cache_spec.block_size
        pools.append(table_pool(views, kv_cache_config.num_blocks, block_tokens) if views else None)
    return pools


def _state_views(name: str, cache: Any) -> dict[str, torch.Tensor]:
    """Return a layer's tensors, `[blocks, heads, tokens, cell]` each.

    vLLM 0.33 has one for each layer, also for states. Earlier releases have several tensors of
    states in other shapes, and each block's part of a tensor becomes one cell.
    """
    if isinstance(cache, torch.Tensor):
        return {name: cache}
    views = {}
    for number, state in enumerate(cache):
        if not state[0].is_contiguous():
            raise ConfigError(f"{name}: a state of {tuple(state.shape[1:])} is not contiguous")
        shape, strides = (state.shape[0], 1, 1, state[0].numel()), (state.stride(0), 1, 1, 1)
        views[f"{name}.{number}"] = state.as_strided(shape, strides)
    return views
