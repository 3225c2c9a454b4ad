"""Name the KV of SGLang from a server's arguments and its pools.

Its keys are a SHA-256 chain over token ids, which for an image derive from a hash of its content,
and over `extra_key` (a LoRA's id) and `cache_salt`. The rest is in the namespace.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_agent.identity.checkpoint import (
    config_digest,
    length_dependent,
    named,
    secondary_weights,
    text_digest,
)
from gpu_agent.identity.shards import Shard
from gpu_agent.options import Identity, facts_text
from kvstore.errors import ConfigError
from kvstore.keys import Namespace
from kvstore.layout import PageLayout

GENERATION = 1  # incremented when SGLang changes the meaning of bytes under the same shapes
# Arguments that decide a server's KV, and those that do so where they are used at all.
_ARGUMENTS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "json_model_override_args",
    "load_format",
    "weight_version",
)
_SELDOM = (
    "model_loader_extra_config",
    "modelopt_quant",
    "modelopt_checkpoint_restore_path",
    "quantize_and_serve",
    "rl_quant_profile",
    "torchao_config",
    "model_impl",
)
# Arguments that decide the bytes of recurrent states, and of the KV computed after them.
_STATES = (
    "mamba_ssm_dtype",
    "mamba_backend",
    "linear_attn_backend",
    "linear_attn_decode_backend",
    "linear_attn_prefill_backend",
    "linear_attn_verify_backend",
    "enable_mamba_cache_stochastic_rounding",
    "mamba_cache_philox_rounds",
)
# Load formats that read all weights from the model's path. Others (remote_instance, ipc_cache,
# private) read them from a server or a process, whose content has no name here.
_FROM_ITS_PATH = {
    *(
        "auto",
        "pt",
        "safetensors",
        "npcache",
        "dummy",
        "sharded_state",
        "presharded",
        "gguf",
        "bitsandbytes",
    ),
    *("mistral", "layered", "flash_rl", "instanttensor", "fastsafetensors", "runai_streamer"),
}
_UNUSED = (None, "", "auto", "{}", False)
_MAMBA = "mamba"


def weights(
    identity: Identity,
    args: Any,
    config: Mapping[str, Any],
    from_hub: bool = True,
    native: Callable[[], bool] = lambda: True,
) -> tuple[Identity, dict[str, Any]]:
    """Return the weights and all other facts of a server that decide its KV. Raises ConfigError.

    `args` are the server's arguments. `from_hub` says that names are the Hugging Face hub's.
    `native` says whether SGLang has its own code for the model; otherwise it runs transformers'.
    """

    def depends(kind: str) -> bool:
        return (
            "dynamic" not in kind
            or getattr(args, "model_impl", "auto") == "transformers"
            or not native()
        )

    kinds = [kind for kind in length_dependent(config) if depends(kind)]
    if kinds:
        raise ConfigError(
            f"the model has rotary embeddings of the kind {kinds[0]!r}, whose angles SGLang "
            "chooses by the longest prompt of a batch: the KV of a prompt depends on others, and "
            "its pages can not be shared. Start the server without the store, or replace the "
            "embedding by --json-model-override-args"
        )
    cache = (getattr(args, "download_dir", None) or "") if from_hub else None
    revision_given, form = (
        bool(identity.revision),
        str(getattr(args.load_format, "value", args.load_format)),
    )
    if not revision_given and form not in _FROM_ITS_PATH:
        raise ConfigError(
            f"SGLang loads weights by {form!r}, from elsewhere than {args.model_path}, so "
            "their version is unknown; set the option revision (a commit, a date), and "
            "another one after every change of the weights"
        )
    facts = {name: getattr(args, name) for name in _ARGUMENTS}
    facts["config"] = config_digest(config)
    seldom = {name: getattr(args, name, None) for name in _SELDOM}
    facts |= {
        name: text_digest(value)[:16] for name, value in seldom.items() if value not in _UNUSED
    }
    if getattr(args, "uses_mamba_radix_cache", False):
        states = {name: str(getattr(args, name, None)) for name in _STATES}
        facts["states"] = text_digest(sorted(states.items()))[:16]
    scales = args.quantization_param_path
    facts["scales"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest() if scales else ""
    loras = [
        f"{name}={secondary_weights(revision_given, path, '', cache)}"
        for name, path in _loras(args)
    ]
    facts["lora"] = text_digest(sorted(loras))[:16] if loras else ""
    draft = args.speculative_draft_model_path
    own = draft and draft != args.model_path
    facts["draft"] = (
        secondary_weights(revision_given, draft, args.speculative_draft_model_revision or "", cache)
        if own
        else draft
    )
    return named(identity, args.model_path, args.revision or "", cache), facts


def _loras(args: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, path) of the LoRAs of a server's start, whose ids are made of both.

    A LoRA that is loaded later has a random id, so its pages are never found by other servers.
    """
    given = getattr(args, "lora_paths", None) or []
    for lora in given.items() if isinstance(given, Mapping) else given:
        if isinstance(lora, str):
            name, _, path = lora.partition("=")
            yield name, path or name
        elif isinstance(lora, tuple):
            yield lora[0], str(getattr(lora[1], "lora_path", lora[1]))
        elif isinstance(lora, Mapping):
            yield lora["lora_name"], lora["lora_path"]
        else:
            yield lora.lora_name, lora.lora_path


def pool_namespace(
    identity: Identity,
    facts: Mapping[str, Any],
    engine: Any,
    name: str,
    host: Any,
    layout: PageLayout,
    heads: Shard | None = None,
    layers: Shard | None = None,
) -> Namespace:
    """Return the namespace of a host pool's pages.

    `facts` are those of `weights`; `engine` is SGLang's HiCacheStorageConfig. `heads`, `layers`:
    the pages' shard; None: named by rank.
    """
    packed = getattr(host, "layer_num", 0) > getattr(host, "target_layer_num", 1 << 30)
    text = facts_text(
        "sglang",
        generation=GENERATION,
        pool=name,
        kind=type(host).__name__,
        host_layout=host.layout,
        pool_dtype=host.dtype,
        layers=_layers(host, layers, engine.pp_size),
        format=getattr(host, "storage_format_tag", None),
        draft=facts["draft"] if packed or name.startswith("draft") else "",
        **_state_dtypes(host),
        **{fact: value for fact, value in facts.items() if fact != "draft"},
    )
    # Pools with heads, and Mamba's state, differ between ranks even if the KV is a latent that does
    # not.
    split = not engine.is_mla_model or name == _MAMBA or hasattr(host, "head_num")
    by_rank = (engine.tp_rank, engine.tp_size) if split else (0, 1)
    tp_rank, tp_size = heads[:2] if heads else by_rank
    pp_rank, pp_size = layers[:2] if layers else (engine.pp_rank, engine.pp_size)
    return identity.namespace(
        layout,
        text,
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=pp_rank,
        pp_size=pp_size,
        cp_rank=engine.attn_cp_rank,
        cp_size=engine.attn_cp_size,
    )


def _layers(host: Any, shard: Shard | None, stages: int) -> str:
    """Return the layers of a pool's pages, counted from the model's first.

    Pools of states do not have these numbers: there the stages' sizes tell, if they were given.
    """
    if not hasattr(host, "start_layer"):
        return os.environ.get("SGLANG_PP_LAYER_PARTITION", "") if stages > 1 else ""
    if shard is None:
        return f"{host.start_layer}-{host.end_layer}"
    return f"{host.start_layer + shard.first}-{host.start_layer + shard.end}"


def _state_dtypes(host: Any) -> dict[str, Any]:
    """Return the dtypes of a pool of recurrent states; its `dtype` is that of convolutions only."""
    if not hasattr(host, "temporal_dtype"):
        return {}
    return {"temporal_dtype": host.temporal_dtype}


def linker_namespace(
    identity: Identity,
    facts: Mapping[str, Any],
    params: Any,
    pool_dtype: Any,
    layout: PageLayout,
    shard: tuple[int, int],
) -> Namespace:
    """Return the namespace of the linker's pages.

    `params`: SGLang's parameters of a cache. `shard`: rank and size of the ranks whose pages
    differ. Draft layers are not in its pool.
    """
    text = facts_text(
        "sglang-linker",
        generation=GENERATION,
        pool_dtype=pool_dtype,
        **{fact: value for fact, value in facts.items() if fact != "draft"},
    )
    return identity.namespace(
        layout,
        text,
        tp_rank=shard[0],
        tp_size=shard[1],
        pp_rank=params.pp_rank,
        pp_size=params.pp_size,
        cp_rank=params.attn_cp_rank,
        cp_size=params.attn_cp_size,
    )
