"""Name the KV of LightLLM from its start arguments.

Its page hashes cover token ids only. So everything else that decides the bytes is in the namespace,
and inputs that token ids do not describe are refused.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gpu_agent.host.page_table_tier import row_pool
from gpu_agent.identity.checkpoint import config_digest, named, secondary_weights
from gpu_agent.options import Identity, facts_text
from kvstore.errors import ConfigError
from kvstore.keys import Namespace

# Incremented when LightLLM's CPU pages hold other bytes for the same arguments.
LAYOUT_GENERATION = 1
# Variables that decide a page's bytes: the base of plain rotary embeddings.
VARIABLES = ("LIGHTLLM_NTK_ALPHA",)
# Start arguments that decide them, for every model and for hybrid ones.
_ARGUMENTS = (
    "data_type",
    "quant_type",
    "expert_dtype",
    "llm_kv_type",
    "llm_kv_quant_group_size",
    "mtp_mode",
    "mtp_step",
    "weight_version",
    "cpu_cache_token_page_size",
)
_HYBRID_ARGUMENTS = (
    "linear_att_hash_page_size",
    "linear_att_page_block_num",
    "linear_att_ssm_data_type",
    "disable_linear_att_small_page_cpu_cache",
)
# Models whose recurrent states LightLLM puts into its CPU pages, and fields that models with such
# states have.
_HYBRID_MODELS = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
_STATE_FIELDS = ("linear_", "mamba_", "ssm_", "hybrid_override_pattern")
# Arguments that name a file whose content decides them.
_FILES = ("kv_quant_calibration_config_path", "quant_cfg")
_DIMENSIONS = ("num_hidden_layers", "num_key_value_heads", "head_dim")


def namespace_of(
    arguments: Mapping[str, Any],
    variables: Mapping[str, str],
    identity: Identity,
    memory: torch.Tensor,
) -> Namespace:
    """Return the namespace of LightLLM's CPU pages. Raises ConfigError.

    `variables`: those of VARIABLES that are set. The tensor-parallel size is not included: a page
    holds the heads of all ranks in the model's order. A hybrid model's page holds their states rank
    by rank, and on one of several nodes only its own ranks'.
    """
    model_dir = arguments.get("model_dir")
    if not model_dir:
        raise ConfigError("LightLLM's start arguments name no model_dir")
    _refuse(arguments)
    layout = row_pool(memory, int(arguments.get("cpu_cache_token_page_size") or 256)).layout
    facts = _facts(arguments, Path(str(model_dir)), bool(identity.revision)) | dict(variables)
    return named(identity, str(model_dir)).namespace(layout, facts_text("lightllm", **facts))


def _refuse(arguments: Mapping[str, Any]) -> None:
    if arguments.get("enable_rl"):
        raise ConfigError(
            "LightLLM runs with --enable_rl, which changes weights under the same name and does "
            "not notify its disk cache: pages of the old weights would be reused. Leave out "
            "--enable_disk_cache"
        )
    # LightLLM numbers images in the order of their arrival, in each process anew, and a hash does
    # not show what was hashed: a prompt of text alone could not be told from one with an image.
    text_only = bool(arguments.get("disable_vision")) and bool(arguments.get("disable_audio"))
    if arguments.get("enable_multimodal", not text_only) or arguments.get("run_mode") == "decode":
        raise ConfigError(
            "LightLLM serves images or audio, which it numbers in the order of their arrival: "
            "another server, or this one after a restart, gives other images the same page hashes. "
            "Start it with --disable_vision and --disable_audio, or leave out --enable_disk_cache"
        )


def _refuse_lost_states(model_type: object) -> None:
    """Raise ConfigError for a hybrid model whose states LightLLM does not put into its pages."""
    if model_type not in _HYBRID_MODELS:
        raise ConfigError(
            f"{model_type} has recurrent layers, whose states LightLLM does not put into its CPU "
            "pages: a hit would skip tokens that the states must see. Its CPU cache keeps states "
            f"of {', '.join(_HYBRID_MODELS)} only. Leave out --enable_disk_cache"
        )


def _facts(arguments: Mapping[str, Any], model_dir: Path, revision_given: bool) -> dict[str, Any]:
    config = _model_config(model_dir)
    text = config.get("text_config") or config
    facts = {name: arguments.get(name) for name in _ARGUMENTS}
    facts["data_type"] = facts["data_type"] or text.get("dtype") or text.get("torch_dtype")
    facts |= {name: text.get(name) for name in _DIMENSIONS}
    facts |= {name: _file_digest(arguments.get(name)) for name in _FILES}
    drafts = arguments.get("mtp_draft_model_dir") or []
    for number, draft in enumerate([drafts] if isinstance(drafts, str) else drafts):
        facts[f"draft{number}"] = secondary_weights(revision_given, str(draft))
    tp, dp, nodes = (int(arguments.get(name) or 1) for name in ("tp", "dp", "nnodes"))
    if any(name.startswith(_STATE_FIELDS) for name in text):
        _refuse_lost_states(config.get("model_type"))
        facts |= {name: arguments.get(name) for name in _HYBRID_ARGUMENTS}
        facts["tp"] = tp // dp
    if nodes > dp:
        facts["node"] = f"{arguments.get('node_rank')}/{nodes}"
    facts["config"] = config_digest(config)
    facts["hash"] = "xxh3_128"
    facts["layout"] = LAYOUT_GENERATION
    return facts


def _model_config(model_dir: Path) -> dict[str, Any]:
    """Return the model's config.json; empty if there is none. Raises ConfigError."""
    path = model_dir / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can not be read: {error}") from error
    return config


def _file_digest(path: str | None) -> str | None:
    """Return the digest of a file that changes what bytes mean; None without one."""
    if not path:
        return None
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
    except OSError as error:
        raise ConfigError(
            f"{path} is needed to identify the format of the KV cache, and can not be read: {error}"
        ) from error
