"""Compute how many bytes a model caches, from its config.json.

Attention caches keys and values of every token. A recurrent layer (Mamba, linear attention) keeps
one state, whatever the number of tokens:

    attention    2 x KV heads x head size, or an MLA latent             for each token
    GDN, KDA     (2 x K heads x K size + V heads x V size) x (kernel - 1)
                 + V heads x K size x V size
    Mamba-2      (heads x size + 2 x groups x N) x (kernel - 1) + heads x size x N
    Mamba-1      D x (kernel - 1) + D x N

The first part of a state is the convolution's window, in the model's dtype. The second one has the
dtype that the configuration names for it, or else the model's.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.errors import InvalidRequest

CACHE_NBYTES_MAX = 1 << 40
ATTENTION, RECURRENT, OTHER = "attention", "recurrent", "other"
_DTYPE_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
# Names and letters of layers in `layer_types`, `layers_block_type`, `hybrid_override_pattern`
_KINDS = {
    **dict.fromkeys(("full_attention", "attention", "*"), (ATTENTION,)),
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "M"), (RECURRENT,)),
    **dict.fromkeys(("mlp", "moe", "-", "E"), (OTHER,)),
}
# Fields of configurations whose layers are not all attention
_RECURRENT_FIELDS = ("mamba_", "ssm_", "linear_", "lru_", "state_size", "attn_type_list", "conv_L_")


class CacheSize(NamedTuple):
    """Bytes that a model caches, over all ranks: of each token, and of one recurrent state."""

    token_nbytes: int
    state_nbytes: int = 0


def cache_size(config: Path) -> CacheSize:
    """Return the bytes that a model caches, from its config.json.

    Raises InvalidRequest for layers whose size is not known here.
    """
    try:
        found = json.loads(config.read_bytes())
        size = _cache_size(found.get("text_config", found))
        if min(size) < 0 or not 1 <= sum(size) <= CACHE_NBYTES_MAX:
            raise ValueError(f"a token would take {size.token_nbytes} bytes")
        return size
    except OSError as error:
        raise InvalidRequest(f"can not read {config}: {error.strerror}") from error
    except (
        ValueError,
        AttributeError,
        LookupError,
        TypeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise InvalidRequest(
            f"{config} describes no model that is known here ({type(error).__name__}: "
            f"{error}); set --page-bytes"
        ) from error


def _cache_size(model: Mapping[str, Any]) -> CacheSize:
    layers = layer_kinds(model)
    dtype_nbytes = _dtype_nbytes(model.get("dtype") or model.get("torch_dtype") or "bfloat16")
    token = layers[ATTENTION] and layers[ATTENTION] * _token_units(model) * dtype_nbytes
    if not layers[RECURRENT]:
        return CacheSize(token)
    window, state = _state_units(model)
    named = model.get("mamba_ssm_dtype") or model.get("mamba_ssm_cache_dtype")
    if not named and model.get("linear_attn_config"):
        named = "float32"  # as vLLM keeps it
    state_nbytes = window * dtype_nbytes + state * (_dtype_nbytes(named) if named else dtype_nbytes)
    return CacheSize(token, layers[RECURRENT] * state_nbytes)


def layer_kinds(model: Mapping[str, Any]) -> "Counter[str]":
    """Return how many layers of each kind a model has; one layer may have two kinds (Falcon-H1).

    Raises ValueError for layers of another kind, such as sliding windows, and LookupError.
    """
    names = (
        model.get("layer_types")
        or model.get("layers_block_type")
        or model.get("hybrid_override_pattern")
    )
    count = int(model.get("num_hidden_layers") or len(names or ()) or model["num_hidden_layers"])
    if model.get("model_type") == "falcon_h1":
        return Counter({ATTENTION: count, RECURRENT: count})
    if names:
        if unknown := sorted(set(names) - _KINDS.keys()):
            raise ValueError(
                f"it has layers of {', '.join(unknown)}, whose pages are not all alike"
            )
        return Counter(kind for name in names[:count] for kind in _KINDS[name])
    attention = _attention_layers(model, count)
    return Counter({ATTENTION: attention, RECURRENT: count - attention})


def _attention_layers(model: Mapping[str, Any], count: int) -> int:
    """Return the number of attention layers of a model that does not list its layers."""
    if interval := model.get("full_attention_interval"):  # Qwen3-Next
        return count // int(interval)
    if period := model.get("attn_layer_period"):  # Jamba
        return len(range(int(model["attn_layer_offset"]), count, int(period)))
    if model.get("attn_layer_indices"):  # Bamba
        return len(model["attn_layer_indices"])
    if linear := model.get("linear_attn_config"):  # Kimi Linear
        return len(linear["full_attn_layers"])
    fields = sorted(name for name in model if name.startswith(_RECURRENT_FIELDS))
    if fields:
        raise ValueError(f"it is a recurrent model of an unknown kind, with {', '.join(fields)}")
    return count


def _token_units(model: Mapping[str, Any]) -> int:
    """Return the numbers that an attention layer caches of a token."""
    if model.get("kv_lora_rank"):  # MLA: one latent for all heads
        return int(model["kv_lora_rank"]) + int(model["qk_rope_head_dim"])
    heads = int(model["num_attention_heads"])
    size = model.get("head_dim") or model.get("attention_head_dim")
    head_dim = int(size or int(model["hidden_size"]) // heads)
    return 2 * int(model.get("num_key_value_heads") or heads) * head_dim


def _state_units(model: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers in a recurrent layer's convolution window, and in its state."""

    def first(*names: str) -> int:
        value = next((model[name] for name in names if model.get(name) is not None), None)
        if value is None:
            raise ValueError(f"its recurrent layers have no {' or '.join(names)}")
        return int(value)

    if linear := model.get("linear_attn_config"):
        heads, dim, kernel = (
            int(linear[name]) for name in ("num_heads", "head_dim", "short_conv_kernel_size")
        )
        return 3 * heads * dim * (kernel - 1), heads * dim * dim
    if "linear_num_value_heads" in model:
        keys, values, key_dim, value_dim = (
            first(f"linear_{name}")
            for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        )
        window = 2 * keys * key_dim + values * value_dim
        return window * (first("linear_conv_kernel_dim") - 1), values * key_dim * value_dim
    kernel, states = (
        first("mamba_d_conv", "conv_kernel"),
        first("mamba_d_state", "ssm_state_size"),
    )
    if "mamba_n_heads" not in model and "mamba_num_heads" not in model:  # Mamba-1
        width = first("mamba_expand") * first("hidden_size")
        return width * (kernel - 1), width * states
    heads = first("mamba_n_heads", "mamba_num_heads")
    size = model.get("mamba_d_head")
    if size == "auto" or (size is None and "mamba_head_dim" not in model):
        width = first("mamba_expand") * first("hidden_size")
    else:
        width = heads * first("mamba_d_head", "mamba_head_dim")
    groups = first("mamba_n_groups", "n_groups")
    return (width + 2 * groups * states) * (kernel - 1), width * states


def _dtype_nbytes(dtype: str) -> int:
    if dtype not in _DTYPE_NBYTES:
        raise ValueError(f"unknown dtype {dtype!r}")
    return _DTYPE_NBYTES[dtype]
