"""SGLang: a list of tensors per kind of data, one per layer. Slots name tokens, except in the indexer.

Slots below the engine's page size are its padding; like any other slot they are moved if named.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gpu_agent.layouts.group import GroupView, check_shape, pool_of
from gpu_agent.pool import KVPool

INDEXER_TOKENS = 64  # the engine's page size with sparse attention


class Heads(NamedTuple):
    """K and V of some layers: per layer `[slots, heads, dim]`; the two dims may differ."""

    k_buffer: Sequence[torch.Tensor]
    v_buffer: Sequence[torch.Tensor]
    layers: Sequence[int]


def mha_pool(
    k_buffer: Sequence[torch.Tensor], v_buffer: Sequence[torch.Tensor], page_tokens: int, first_layer: int = 0
) -> KVPool:
    """`MHATokenToKVPool`: `k_buffer` and `v_buffer` `L x [slots, heads, dim]`; fp8 is shown as uint8."""
    layers = range(first_layer, first_layer + len(k_buffer))
    return pool_of(page_tokens, _attention("attention", Heads(k_buffer, v_buffer, layers), "token"))


def window_pool(full: Heads, window: Heads, page_tokens: int) -> KVPool:
    """`SWAKVPool`: two pools whose slots are numbered apart, spaces "token" and "window". The caller
    translates; a page needs slots for all its tokens in both."""
    return pool_of(page_tokens, _attention("full", full, "token"), _attention("window", window, "window"))


def mla_pool(kv_buffer: Sequence[torch.Tensor], page_tokens: int, first_layer: int = 0) -> KVPool:
    """`MLATokenToKVPool`: `L x [slots, 1, row]`, rows of 576 elements or 656 packed bytes; the same on
    every tensor-parallel rank."""
    return pool_of(page_tokens, _latent(kv_buffer, first_layer))


def dsa_pool(
    kv_buffer: Sequence[torch.Tensor],
    index_buffer: Sequence[torch.Tensor],
    page_tokens: int,
    first_layer: int = 0,
    indexer_tokens: int = INDEXER_TOKENS,
) -> KVPool:
    """`DSATokenToKVPool`: latents as above, and per layer `index_buffer` `[pages, 8448]`, bytes: first
    all keys of an engine page, then all scales, so a page is the unit and "page" its space (slot //
    `indexer_tokens`). A layer that uses another's top-k has a tensor of 0 pages and owns nothing."""
    owners = [layer for layer, pages in enumerate(index_buffer) if pages.shape[0]]
    for layer in owners:
        check_shape(f"index_buffer[{layer}]", index_buffer[layer], "pages", "page bytes")
    indexer = GroupView(
        "indexer",
        [first_layer + layer for layer in owners],
        {"page": [index_buffer[layer] for layer in owners]},
        indexer_tokens,
        "page",
    )
    return pool_of(page_tokens, _latent(kv_buffer, first_layer), indexer)


def _attention(name: str, heads: Heads, space: str) -> GroupView:
    for buffer_name, buffer in (("k_buffer", heads.k_buffer), ("v_buffer", heads.v_buffer)):
        for i, tensor in enumerate(buffer):
            check_shape(f"group {name}: {buffer_name}[{i}]", tensor, "slots", "heads", "dim")
    return GroupView(name, heads.layers, {"k": heads.k_buffer, "v": heads.v_buffer}, space=space)


def _latent(kv_buffer: Sequence[torch.Tensor], first_layer: int) -> GroupView:
    for i, tensor in enumerate(kv_buffer):
        check_shape(f"kv_buffer[{i}]", tensor, "slots", 1, "row")
    return GroupView("kv", range(first_layer, first_layer + len(kv_buffer)), {"latent": kv_buffer})
