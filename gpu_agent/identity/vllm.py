"""Name the KV of vLLM from its configuration, for both routes.

Everything that changes the bytes of a block, or their meaning, is in the namespace; what an
engine's block hash covers (tokens, LoRA's name and path, images, cache salt) is in the key.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_agent.identity.checkpoint import (
    config_digest,
    length_dependent,
    named,
    secondary_weights,
    text_digest,
)
from gpu_agent.identity.vllm_shards import GroupShard
from gpu_agent.options import Identity, facts_text
from kvstore.errors import ConfigError
from kvstore.keys import Namespace
from kvstore.layout import PAGE_TOKENS_MAX, PageLayout, opaque_layout

GENERATION = "0.29"  # the release since which a layer's cache is [blocks, heads, tokens, cell]
# Load formats that read all weights from the model's path. Others (tensorizer, ipc_cache,
# modelexpress, a plugin's) read them from elsewhere: a file, a process, a service, whose content
# has no name here.
_FROM_ITS_PATH = {
    *(
        "auto",
        "hf",
        "dummy",
        "safetensors",
        "pt",
        "npcache",
        "mistral",
        "gguf",
        "bitsandbytes",
        "sharded_state",
    ),
    *("fastsafetensors", "instanttensor", "runai_streamer", "runai_streamer_sharded"),
}
_NUMBERED_IMAGES = (
    "images that are numbered in the order of their arrival, in each process anew "
    "(mm_processor_cache_gb 0 without prefix caching: turn"
)
# Flags of the processor of images, sound and video that change the input made from a file.
_PROCESSING = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "video_pruning_method",
    "mm_encoder_attn_dtype",
    "mm_device_do_normalize",
)


def not_shareable(vllm_config: Any) -> str:
    """Return why this engine's blocks cannot be shared; empty if they can."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if not getattr(model, "is_prefix_caching_supported", True):
        return "KV that does not depend on the tokens before it alone"
    if getattr(cache, "calculate_kv_scales", False):
        return "scales that every process measures for itself (calculate_kv_scales)"
    if kinds := _moving_angles(model):
        return (
            f"rotary embeddings of the kind {kinds[0]!r} computed by transformers' code "
            "(--model-impl), whose angles depend on the longest prompt of a batch and on those "
            "before it"
        )
    if _numbers_images(vllm_config):
        return f"{_NUMBERED_IMAGES} prefix caching on)"
    if not cache.enable_prefix_caching:
        # vLLM turns prefix caching off by itself where a prompt must not continue earlier KV, or
        # where KV depends on more than the tokens: MLA on a CPU without AMX (other answers, and no
        # error), batch-invariant kernels.
        return (
            "no prefix caching of its own (if you did not turn it off, vLLM did: see its "
            "log; --enable-prefix-caching)"
        )
    return ""


def _numbers_images(vllm_config: Any) -> bool:
    """Return whether vLLM names images by a number, not by their content."""
    processing = getattr(vllm_config.model_config, "multimodal_config", None)
    cached = vllm_config.cache_config.enable_prefix_caching
    return bool(processing and processing.mm_processor_cache_gb == 0 and not cached)


def _moving_angles(model: Any) -> list[str]:
    """Return kinds of rotary embeddings that vary at run time; vLLM's own code has none."""
    by_transformers = getattr(model, "using_transformers_backend", None)
    return (
        length_dependent(model.hf_config.to_dict()) if by_transformers and by_transformers() else []
    )


def weights_of(vllm_config: Any, identity: Identity, from_hub: bool = True) -> Identity:
    """Return `identity` with the weights named. Raises ConfigError.

    `from_hub`: names are the Hugging Face hub's.
    """
    model, form = vllm_config.model_config, str(vllm_config.load_config.load_format)
    if not identity.revision and form not in _FROM_ITS_PATH:
        raise ConfigError(
            f"vLLM loads weights by {form!r}, from elsewhere than {model.model}, so their "
            "version is unknown; set the option revision (a commit, a date), and another "
            "one after every change of the weights"
        )
    place = getattr(model, "model_weights", "") or model.model
    return named(identity, place, model.revision or "", _cache(vllm_config, from_hub))


def _cache(vllm_config: Any, from_hub: bool) -> str | None:
    return (vllm_config.load_config.download_dir or "") if from_hub else None


def model_facts(vllm_config: Any, revision_given: bool, from_hub: bool = True) -> dict[str, Any]:
    """Return what decides an engine's KV beside the weights' name and the cache's shape.

    `revision_given`: the user named a revision. Raises ConfigError for a draft model without a
    name.
    """
    model, loading = vllm_config.model_config, vllm_config.load_config
    config = model.hf_config.to_dict()
    facts = {
        "config": config_digest(config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "load": loading.load_format,
        "hash": vllm_config.cache_config.prefix_caching_hash_algo,
    }
    processing = getattr(model, "multimodal_config", None)
    more = {
        "classes": getattr(model, "model_class_overrides", None),
        "quantization_how": getattr(model, "quantization_config", None),
        "load_how": getattr(loading, "model_loader_extra_config", None),
        "kv_dtype_not_of": getattr(vllm_config.cache_config, "kv_cache_dtype_skip_layers", None),
        "processing": processing
        and {name: getattr(processing, name, None) for name in _PROCESSING},
    }
    facts |= {name: text_digest(value)[:16] for name, value in more.items() if value}
    if vllm_config.speculative_config:
        facts["draft"] = _draft(vllm_config, revision_given, from_hub)
    # vLLM 0.33 has none beside a connector
    if lookahead := getattr(vllm_config, "num_hash_lookahead_tokens", 0):
        facts["hash_lookahead"] = lookahead  # tokens after a block that its hash covers
    if length_dependent(config):
        # Longrope is chosen once, by the longest allowed prompt
        facts["max_len"] = model.max_model_len
    return facts


def _draft(vllm_config: Any, revision_given: bool, from_hub: bool) -> str:
    """Return the name of a draft model, whose layers may be in the model's own blocks.

    A method without weights has its own name for a model.
    """
    draft, model = vllm_config.speculative_config, vllm_config.model_config
    if not draft.model or draft.model in (model.model, draft.method):
        return f"{draft.method}"
    revision = getattr(draft, "revision", None) or ""
    cache = _cache(vllm_config, from_hub)
    return f"{draft.method}:{secondary_weights(revision_given, draft.model, revision, cache)}"


# ---- the connector ----------------------------------------------------------------------------


def namespaces(
    vllm_config: Any,
    kv_cache_config: Any,
    identity: Identity,
    shards: Sequence[Sequence[GroupShard]],
    seed: str,
    from_hub: bool = True,
) -> list[list[Namespace]]:
    """Return the namespaces of this rank's shards, per cache group. Raises ConfigError.

    `seed`: that of the first block's hash.
    """
    facts = model_facts(vllm_config, bool(identity.revision), from_hub) | _cache_facts(
        vllm_config, seed
    )
    identity = weights_of(vllm_config, identity, from_hub)
    groups, found = kv_cache_config.kv_cache_groups, list[list[Namespace]]()
    common = _common(facts, groups, shards)
    for number, (group, parts) in enumerate(zip(groups, shards, strict=True)):
        place = identity.part(common, number, len(groups)) if common else ""
        texts = [
            facts_text("vllm", **facts, **_group_facts(vllm_config, group, part.layers))
            for part in parts
        ]
        found.append(
            [
                identity.namespace(part.pool.layout, text, place, **part.axes)
                for part, text in zip(parts, texts, strict=True)
            ]
        )
    return found


def _common(
    facts: Mapping[str, Any], groups: Sequence[Any], shards: Sequence[Sequence[GroupShard]]
) -> str:
    """Return what the namespaces of all groups and ranks have in common.

    Empty for one group on one pipeline rank: its namespaces differ in their ranks only.
    """
    sizes = [
        [parts[0].pool.layout.page_tokens, *sorted(parts[0].axes.items() - _ranks(parts[0]))]
        if parts
        else []
        for parts in shards
    ]
    stages = max((part.axes["pp_size"] for parts in shards for part in parts), default=1)
    if len(groups) <= 1 and stages == 1:
        return ""
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    return f"{facts_text('vllm', **facts)} {text_digest([kinds, sizes])}"


def _ranks(part: GroupShard) -> set[tuple[str, int]]:
    return {(name, rank) for name, rank in part.axes.items() if name.endswith("_rank")}


def _cache_facts(vllm_config: Any, seed: str) -> dict[str, Any]:
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    return {
        "generation": GENERATION,
        "kv_dtype": cache.cache_dtype,
        "kv_layout": getattr(cache, "kv_cache_layout", None),
        "seed": hashlib.sha256(seed.encode()).hexdigest()[:8],
        "dcp": parallel.decode_context_parallel_size,
        "interleave": getattr(parallel, "cp_kv_cache_interleave_size", 1),
    }


def _group_facts(vllm_config: Any, group: Any, layer_names: Sequence[str]) -> dict[str, Any]:
    spec, names = group.kv_cache_spec, sorted(layer_names)
    layers = vllm_config.compilation_config.static_forward_context
    backends = {
        layers[name].get_attn_backend().get_name() + _packing(layers[name])
        for name in names
        if hasattr(layers.get(name), "get_attn_backend")
    }
    window = (
        getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0
    )
    return {
        "kind": type(spec).__name__,
        "window": window,
        "backend": "+".join(sorted(backends)),
        "layers": hashlib.sha256("\n".join(names).encode()).hexdigest()[:16],
    } | state_facts(vllm_config, spec)


def _packing(layer: Any) -> str:
    """Return how a backend orders the bytes of a block, where it has several ways.

    On CPUs by the instruction set: with AMX, K is packed in tiles. TurboQuant separates data and
    scales where FlyDSL is installed, on gfx950.
    """
    separate = getattr(getattr(layer, "impl", None), "_soa_store", False)
    return getattr(layer, "isa", "") + "-separate" * bool(separate)


def state_facts(vllm_config: Any, spec: Any) -> dict[str, Any]:
    """Return what decides the bytes of a group's recurrent states; nothing for other groups.

    The page's layout has only their length: vLLM registers them as bytes. The model's configuration
    has the chunk size of its kernels.
    """
    specs = list(getattr(spec, "kv_cache_specs", {"": spec}).values())
    if not any(hasattr(state, "mamba_type") for state in specs):
        return {}
    mamba, cache = getattr(vllm_config, "mamba_config", None), vllm_config.cache_config
    states = [
        (
            [tuple(shape) for shape in state.shapes],
            list(map(str, state.dtypes)),
            getattr(state.mamba_type, "name", state.mamba_type),
            state.mamba_cache_mode,
            getattr(state, "tp_replicated", False),
        )
        for state in specs
    ]
    rounding = getattr(mamba, "enable_stochastic_rounding", False)
    backend = getattr(mamba, "backend", "")
    how = (getattr(backend, "name", backend), rounding, getattr(cache, "mamba_ssm_cache_dtype", ""))
    return {"states": text_digest([states, how])[:16]}


# ---- the tier behind vLLM's CPU offloading ----------------------------------------------------


def check_tier(vllm_config: Any, lora: str) -> None:
    """Raise ConfigError for an engine whose requests' keys do not distinguish their KV.

    `lora`: the option.
    """
    if reason := not_shareable(vllm_config):
        raise ConfigError(f"vLLM has {reason}; its blocks can not be shared: leave KVStoreTier out")
    if vllm_config.lora_config and lora != "named":
        raise ConfigError(
            "vLLM serves LoRA: its block hashes hold the name and the path of one, not its "
            "weights, and a tier can not "
            "tell such requests apart. Where name and path mean the same weights wherever the "
            "store is shared, set "
            '"lora": "named" in the tier\'s options; else use KVStoreConnector, which lets such '
            "requests pass by"
        )


def tier_facts(
    vllm_config: Any, release: str, device: str, facts: Mapping[str, Any]
) -> dict[str, str]:
    """Return what the rows' shape does not show: how the engine computes, and its backend.

    A backend that vLLM chooses by itself follows from its release and the device.
    """
    backend = vllm_config.attention_config.backend
    found = {
        **facts,
        "vllm": ".".join(release.split(".")[:2]),
        "device": device,
        "backend": backend.name if backend else "auto",
    }
    return {name: str(fact) for name, fact in found.items()}


def tier_namespace(
    config: Any, identity: Identity, facts: Mapping[str, str], row_nbytes: int
) -> Namespace:
    """Return the namespace of an engine's rows.

    `config` is vLLM's OffloadingConfig. A row holds all ranks, so the sizes of the parallel groups
    are included, and ranks are not; rows in canonical layout are the same for every size. The
    hash's seed is not included, because every key is made from it.
    """
    parallel = config.parallel
    portable = config.canonical_layout and parallel.is_parallelism_agnostic
    shard = {} if portable else {"tp_size": parallel.tp_size, "pp_size": parallel.pp_size}
    groups = [
        (group.group_id, group.tokens_per_block, group.layer_names) for group in config.groups
    ]
    shape = {
        "kv_dtype": config.model.dtype,
        "kv_layout": config.kv_cache_layout,
        "canonical": int(config.canonical_layout),
        "replicated": int(config.replicated_layout),
        "cp": "any" if portable else f"{parallel.pcp_size}x{parallel.dcp_size}",
        "chunk_blocks": config.cache.blocks_per_chunk,
        "hash_tokens": config.cache.tokens_per_hash,
        "groups": text_digest(groups),
    }
    text = facts_text("vllm-tier", **shape, **facts)
    whole = identity.part(f"{text} {row_nbytes} {shard}", 0, 1, ranks=1)
    return identity.namespace(_row_layout(config, row_nbytes), text, whole, **shard)


def _row_layout(config: Any, row_nbytes: int) -> PageLayout:
    """Return an opaque layout; of groups with different block lengths the shortest counts."""
    tokens = min(group.tokens_per_block for group in config.groups) * config.cache.blocks_per_chunk
    return opaque_layout(row_nbytes, min(tokens, PAGE_TOKENS_MAX))


# ---- outputs of the encoder (images, sound, video) --------------------------------------------


def check_encoder(vllm_config: Any) -> None:
    """Raise ConfigError for an engine whose encoder outputs have no name of their own."""
    model, lora = vllm_config.model_config, vllm_config.lora_config
    processing = getattr(model, "multimodal_config", None)
    reason = ""
    if processing is None:
        reason = "no encoder: the model takes text only"
    elif getattr(model, "is_encoder_decoder", False):
        reason = "an encoder-decoder model, whose encoder outputs it does not keep"
    elif _numbers_images(vllm_config):
        reason = f"{_NUMBERED_IMAGES} one of them on)"
    elif lora and getattr(lora, "enable_tower_connector_lora", False):
        reason = (
            "LoRAs on the encoder (enable_tower_connector_lora), and names an output by a LoRA's "
            "name, not by its weights"
        )
    elif getattr(vllm_config, "weight_transfer_config", None):
        reason = (
            "weights that change while it runs (weight_transfer_config), and does not tell an "
            "encoder connector"
        )
    elif getattr(model, "enable_sleep_mode", False):
        reason = (
            "a sleep mode, after which it may have other weights, and does not tell an encoder "
            "connector (leave --enable-sleep-mode out)"
        )
    elif getattr(processing, "mm_encoder_attn_dtype", None) and not getattr(
        processing, "mm_encoder_fp8_scale_path", None
    ):
        reason = (
            "scales of the encoder that every process measures for itself (mm_encoder_attn_dtype; "
            "set mm_encoder_fp8_scale_path)"
        )
    elif vllm_config.parallel_config.distributed_executor_backend == "external_launcher":
        reason = "a scheduler in every rank (external_launcher), and all must decide the same"
    if reason:
        raise ConfigError(
            f"this engine has {reason}; its encoder outputs can not be shared: leave "
            "KVStoreEncoderConnector out of ec_transfer_config"
        )


def encoder_namespace(
    vllm_config: Any,
    identity: Identity,
    layout: PageLayout,
    environment: Mapping[str, str],
    from_hub: bool = True,
) -> Namespace:
    """Return the namespace of an engine's encoder outputs. Raises ConfigError.

    `environment`: the device, and releases of the packages whose code decides an output. The number
    of ranks is not a fact: it changes the rounding, as the other images of a batch do.
    """
    model, loading = vllm_config.model_config, vllm_config.load_config
    processing = model.multimodal_config
    facts = {
        **environment,
        "config": config_digest(model.hf_config.to_dict()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "load": loading.load_format,
    }
    more = {
        "classes": getattr(model, "model_class_overrides", None),
        "quantization_how": getattr(model, "quantization_config", None),
        "load_how": getattr(loading, "model_loader_extra_config", None),
        "processing": {name: getattr(processing, name, None) for name in _PROCESSING},
        "attention": getattr(processing, "mm_encoder_attn_backend", None),
        "attention_scales": _content(getattr(processing, "mm_encoder_fp8_scale_path", None)),
    }
    facts |= {name: text_digest(value)[:16] for name, value in more.items() if value}
    named_weights = weights_of(vllm_config, identity, from_hub)
    return named_weights.namespace(layout, facts_text("vllm-encoder", **facts))


def _content(path: str | None) -> str:
    try:
        return Path(path).read_text() if path else ""
    except OSError as error:
        raise ConfigError(f"the scales of the encoder can not be read: {error}") from error
