"""LightLLM: one tensor for all layers, `[layers, slots + 1, heads, dim]`, token slots handed out singly.

The last slot takes what padded requests write. It belongs to nobody, so the pools end before it and
refuse its number.
"""

from collections.abc import Mapping

import torch

from gpu_agent.layouts.group import GroupView, check_shape, pool_of
from gpu_agent.pool import KVPool
from kvstore.errors import InvalidRequest


def heads_pool(kv_buffer: torch.Tensor, page_tokens: int, first_layer: int = 0) -> KVPool:
    """`MemoryManager` and the two with static fp8 scales: `kv_buffer` `[L, S+1, 2H, D]`, of a token
    first the K heads, then the V heads. Static scales lie outside the cache: they go into the
    namespace's salt."""
    _check_pairs(kv_buffer)
    return _pool({"kv": kv_buffer}, page_tokens, first_layer)


def scaled_pool(kv_buffer: torch.Tensor, scale_buffer: torch.Tensor, page_tokens: int, first_layer: int = 0) -> KVPool:
    """`PPLINT8KVMemoryManager` (`kv_buffer` `[L, S+1, 2H, D]`) and `PPLINT4KVMemoryManager` (`[.., D/2]`,
    two values a byte), both int8, with `scale_buffer` `[L, S+1, 2H, D/group]` of the model's dtype."""
    _check_pairs(kv_buffer)
    return _pool({"kv": kv_buffer, "scale": scale_buffer}, page_tokens, first_layer)


def latent_pool(kv_buffer: torch.Tensor, page_tokens: int, first_layer: int = 0) -> KVPool:
    """`Deepseek2MemoryManager` and its descendants: `kv_buffer` `[L, S+1, 1, row]`. Rows of 576 x 16-bit;
    578 bytes (fp8, scale in the last two); with the indexer inline 648 x 16-bit or 800 bytes."""
    check_shape("kv_buffer", kv_buffer, "layers", "slots + 1", 1, "row")
    return _pool({"latent": kv_buffer}, page_tokens, first_layer)


def _check_pairs(kv_buffer: torch.Tensor) -> None:
    check_shape("kv_buffer", kv_buffer, "layers", "slots + 1", "2 x heads", "dim")
    if kv_buffer.shape[2] % 2:
        raise InvalidRequest(f"kv_buffer: {kv_buffer.shape[2]} heads; K and V need as many each")


def _pool(buffers: Mapping[str, torch.Tensor], page_tokens: int, first_layer: int) -> KVPool:
    """`buffers`: by plane name. Raises InvalidRequest if they differ in layers, slots or heads."""
    layers, slots, heads = next(iter(buffers.values())).shape[:3]
    for name, buffer in buffers.items():
        check_shape(f"{name} buffer", buffer, layers, slots, heads, "dim")
    rows = {name: buffer[:, :-1].unbind(0) for name, buffer in buffers.items()}
    return pool_of(page_tokens, GroupView("attention", range(first_layer, first_layer + layers), rows))
