"""View LightLLM's pools: one tensor for all layers, `[layers, slots + 1, heads, dim]`.

The engine allocates single token slots. The last slot takes the writes of padded requests. It
belongs to no request, so the pools end before it and refuse its number. `manager_pool` makes the
pool of any of LightLLM's memory managers.
"""

from collections.abc import Mapping
from typing import Any

import torch

from gpu_agent.layouts.group import GroupView, check_shape, pool_of
from gpu_agent.pool import KVPool
from kvstore.buffers import byte_view
from kvstore.checksum import checksum
from kvstore.errors import InvalidRequest

# Tensors of a memory manager that are known to be no part of a page, beside those that are.
_KNOWN = {"kv_buffer", "scale_buffer", "scales", "kv_move_buffer", "req_to_token_indexs"}


def heads_pool(kv_buffer: torch.Tensor, page_tokens: int, first_layer: int = 0) -> KVPool:
    """View `MemoryManager`, also with static fp8 scales: `kv_buffer` `[L, S+1, 2H, D]`.

    A token has first the K heads, then the V heads. Static scales lie outside the cache: they go
    into the namespace's salt.
    """
    _check_pairs(kv_buffer)
    return _pool({"kv": kv_buffer}, page_tokens, first_layer)


def scaled_pool(
    kv_buffer: torch.Tensor, scale_buffer: torch.Tensor, page_tokens: int, first_layer: int = 0
) -> KVPool:
    """View `PPLINT8KVMemoryManager` or `PPLINT4KVMemoryManager`, with scales.

    `kv_buffer` is int8 `[L, S+1, 2H, D]`, or `[.., D/2]` with two values per byte. `scale_buffer`
    is `[L, S+1, 2H, D/group]` of the model's dtype. The historic `INT8KVMemoryManager` has one
    scale for a head, `[.., 1]`.
    """
    _check_pairs(kv_buffer)
    return _pool({"kv": kv_buffer, "scale": scale_buffer}, page_tokens, first_layer)


def latent_pool(kv_buffer: torch.Tensor, page_tokens: int, first_layer: int = 0) -> KVPool:
    """View `Deepseek2MemoryManager` and its descendants: `kv_buffer` `[L, S+1, 1, row]`.

    Rows of 576 x 16-bit; 578 bytes (fp8, scale in the last two); with the indexer inline 648 x
    16-bit or 800 bytes.
    """
    check_shape("kv_buffer", kv_buffer, "layers", "slots + 1", 1, "row")
    return _pool({"latent": kv_buffer}, page_tokens, first_layer)


def hybrid_pool(
    kv_buffer: torch.Tensor,
    conv_state: torch.Tensor,
    ssm_state: torch.Tensor,
    page_tokens: int,
    full_attention_interval: int,
) -> KVPool:
    """View `Qwen3NextMemManager`: full attention in every `full_attention_interval`th layer.

    Those have `kv_buffer` `[L, S+1, 2H, D]`. The other layers have a state at the end of each page
    of `page_tokens` tokens: `conv_state` `[layers, checkpoints, dim, window]` and `ssm_state`
    `[layers, checkpoints, heads, k dim, v dim]`. Index spaces are "token" and "state", one
    checkpoint per page. Layers of a draft model follow the model's.
    """
    _check_pairs(kv_buffer)
    check_shape("conv_state", conv_state, "layers", "checkpoints", "dim", "window")
    check_shape("ssm_state", ssm_state, *conv_state.shape[:2], "heads", "k dim", "v dim")
    attending, stateful = len(kv_buffer), len(conv_state)
    if full_attention_interval < 2 or stateful % (full_attention_interval - 1):
        raise InvalidRequest(
            f"{stateful} layers with a state do not fit "
            f"full_attention_interval={full_attention_interval}"
        )
    model = stateful + stateful // (full_attention_interval - 1)
    if attending < model - stateful:
        raise InvalidRequest(f"kv_buffer: {attending} layers, expected at least {model - stateful}")
    full = [
        layer
        for layer in range(model)
        if layer % full_attention_interval == full_attention_interval - 1
    ]
    others = [layer for layer in range(model) if layer not in full]
    full += range(model, stateful + attending)
    states = {"conv": conv_state.unbind(0), "ssm": ssm_state.unbind(0)}
    return pool_of(
        page_tokens,
        GroupView("attention", full, {"kv": kv_buffer[:, :-1].unbind(0)}),
        GroupView("state", others, states, unit_tokens=page_tokens, space="state"),
    )


def manager_pool(manager: Any, page_tokens: int, first_layer: int = 0) -> KVPool:
    """View a LightLLM memory manager, chosen by its attributes.

    Raises InvalidRequest for one with KV in a buffer that no layout here covers: a page without it
    would be incomplete.
    """
    name, kv_buffer = type(manager).__name__, getattr(manager, "kv_buffer", None)
    if not isinstance(kv_buffer, torch.Tensor):
        raise InvalidRequest(f"{name} has no kv_buffer tensor; its KV can not be described")
    slots = getattr(manager, "size", kv_buffer.shape[1] - 1)
    for buffer, tensor in vars(manager).items():
        if (
            isinstance(tensor, torch.Tensor)
            and buffer not in _KNOWN
            and tensor.dim() > 1
            and tensor.shape[1] >= slots
        ):
            raise InvalidRequest(
                f"{name} has a buffer {buffer} {list(tensor.shape)} that no layout covers"
            )
    kv_buffer = kv_buffer[:, : slots + 1]  # some have a whole page of slots for padding
    states = getattr(manager, "linear_att_big_page_buffers", None)
    if states is not None:
        hybrid = manager.linear_config
        conv = _by_layer(states.conv_state_cache.buffer, hybrid.linear_layer_num)
        ssm = _by_layer(states.ssm_state_cache.buffer, hybrid.linear_layer_num)
        return hybrid_pool(kv_buffer, conv, ssm, page_tokens, hybrid.full_attention_interval)
    scale_buffer = getattr(manager, "scale_buffer", None)
    if scale_buffer is not None:
        return scaled_pool(kv_buffer, scale_buffer[:, : slots + 1], page_tokens, first_layer)
    if kv_buffer.shape[2] == 1:
        return latent_pool(kv_buffer, page_tokens, first_layer)
    return heads_pool(kv_buffer, page_tokens, first_layer)


def static_scales(manager: Any) -> str:
    """Return the digest of scales outside the cache, for the salt; empty without any.

    Under other scales, equal bytes mean other values (`fp8kv_sph`, `fp8kv_spt`).
    """
    scales = getattr(manager, "scales", None)
    if scales is None:
        return ""
    digest = checksum(byte_view(scales.detach().cpu().contiguous()), 0).hex()
    return f"{list(scales.shape)}{digest}".replace(" ", "")


def _by_layer(buffer: torch.Tensor, layers: int) -> torch.Tensor:
    """Return `[layers, checkpoints, ...]` of a buffer that may have its checkpoints first."""
    if (buffer.shape[0] == layers) == (buffer.shape[1] == layers):
        raise InvalidRequest(
            f"a state of {layers} layers has shape {list(buffer.shape)}; which axis are the layers?"
        )
    return buffer if buffer.shape[0] == layers else buffer.transpose(0, 1)


def _check_pairs(kv_buffer: torch.Tensor) -> None:
    check_shape("kv_buffer", kv_buffer, "layers", "slots + 1", "2 x heads", "dim")
    if kv_buffer.shape[2] % 2:
        raise InvalidRequest(f"kv_buffer: {kv_buffer.shape[2]} heads; K and V need as many each")


def _pool(buffers: Mapping[str, torch.Tensor], page_tokens: int, first_layer: int) -> KVPool:
    """View buffers by plane name.

    Raises InvalidRequest if they differ in layers, slots or heads.
    """
    layers, slots, heads = next(iter(buffers.values())).shape[:3]
    for name, buffer in buffers.items():
        check_shape(f"{name} buffer", buffer, layers, slots, heads, "dim")
    rows = {name: buffer[:, :-1].unbind(0) for name, buffer in buffers.items()}
    return pool_of(
        page_tokens, GroupView("attention", range(first_layer, first_layer + layers), rows)
    )
