"""Describe SGLang's pools: those of the GPU, and those of HiCache on the host.

On the GPU: a list of tensors per kind of data, one per layer. Slots name tokens, except in the
indexer. Slots below the engine's page size are its padding; like any other slot they are moved if
named.

On the host: the unit is a page of the pool, with any content in any order. The layout's name is not
used. The pool itself says where a page is, in one of two ways:

    page_view   get_data_page(index, flat=False): a view of the page, with dtype, shape and strides.
                Row-major it is the engine's flat page, so both of its interfaces share their bytes
    segments    get_page_buffer_meta(indices): addresses and lengths, where there is no such view:
                K and V of different dims, state of Mamba, a buffer for each layer

Dims of equal size look the same in any order, so the layout's name belongs into the salt.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gpu_agent.layouts.group import GroupView, check_shape, pool_of
from gpu_agent.pool import KVPool, dtype_name
from kvstore.errors import InvalidRequest

INDEXER_TOKENS = 64  # the engine's page size with sparse attention
SPACE = "page"  # index space of a host pool
# Host pools and layouts whose code was read: all layers of a page are apart from each other.
_BY_LAYERS = frozenset({"MHATokenToKVPoolHost", "MLATokenToKVPoolHost", "DSAIndexerPoolHost"})
_LAYERS_OUTERMOST = frozenset({"page_first_direct", "layer_first"})


class Heads(NamedTuple):
    """K and V of some layers: per layer `[slots, heads, dim]`; the two dims may differ."""

    k_buffer: Sequence[torch.Tensor]
    v_buffer: Sequence[torch.Tensor]
    layers: Sequence[int]


def mha_pool(
    k_buffer: Sequence[torch.Tensor],
    v_buffer: Sequence[torch.Tensor],
    page_tokens: int,
    first_layer: int = 0,
) -> KVPool:
    """View `MHATokenToKVPool`: K and V `L x [slots, heads, dim]`, fp8 as uint8."""
    layers = range(first_layer, first_layer + len(k_buffer))
    return pool_of(page_tokens, _attention("attention", Heads(k_buffer, v_buffer, layers), "token"))


def window_pool(full: Heads, window: Heads, page_tokens: int) -> KVPool:
    """View `SWAKVPool`: two pools with their own slot numbers, spaces "token" and "window".

    The caller translates; a page needs slots for all its tokens in both.
    """
    return pool_of(
        page_tokens, _attention("full", full, "token"), _attention("window", window, "window")
    )


def mla_pool(kv_buffer: Sequence[torch.Tensor], page_tokens: int, first_layer: int = 0) -> KVPool:
    """View `MLATokenToKVPool`: `L x [slots, 1, row]`, rows of 576 elements or 656 bytes.

    It is the same on every tensor-parallel rank.
    """
    return pool_of(page_tokens, _latent(kv_buffer, first_layer))


def dsa_pool(
    kv_buffer: Sequence[torch.Tensor],
    index_buffer: Sequence[torch.Tensor],
    page_tokens: int,
    first_layer: int = 0,
    indexer_tokens: int = INDEXER_TOKENS,
) -> KVPool:
    """View `DSATokenToKVPool`: latents, and per layer `index_buffer` `[pages, 8448]` in bytes.

    An index page has first all keys of an engine page, then all scales, so a page is the unit, and
    "page" its space (slot // `indexer_tokens`). A layer that uses another's top-k has a tensor of 0
    pages and no bytes.
    """
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


def host_pool(pool: Any) -> tuple[KVPool, bool]:
    """View a `HostKVCache`; return (pool of pages by number, whether pages are flat).

    A unit is `pool.page_size` slots, its number first slot // page_size. The result views the
    pool's own memory, which must outlive it. Raises InvalidRequest if the pool describes its pages
    in neither way.
    """
    page_tokens = int(pool.page_size or 1)
    pages = int(pool.size) // page_tokens
    view = _page_view(pool, page_tokens, pages)
    if view is not None:
        return _pool(page_tokens, {"page": view}), True
    segments = _segments(pool, page_tokens, pages)
    return _pool(page_tokens, {f"segment{i}": segment for i, segment in enumerate(segments)}), False


class PageAxis(NamedTuple):
    """Heads or layers: dimension `dim` of a view `[pages, *shape of a page]`."""

    page_tokens: int
    view: torch.Tensor
    dim: int

    @property
    def runs(self) -> int:
        """Return in how many parts a range's bytes lie among those of a whole flat page."""
        return math.prod(self.view.shape[1 : self.dim])

    def cut(self, first: int, end: int) -> KVPool:
        """View a range of each page as pages of their own."""
        return _pool(self.page_tokens, {"page": self.view.narrow(self.dim, first, end - first)})


def head_axis(pool: Any) -> PageAxis | None:
    """Return the heads of a pool's pages; None if a range of them is scattered.

    Only in the layout `page_head` has it few runs of memory: one of K, one of V.
    """
    # [pages, K and V, 1, heads, tokens, layers, dim]
    axis = _axis(pool, 3)
    if (
        axis is None
        or pool.layout != "page_head"
        or axis.view.dim() != 7
        or axis.view.shape[3] != pool.head_num
    ):
        return None
    return axis


def layer_axis(pool: Any) -> PageAxis | None:
    """Return the layers of a pool's pages; None if a range of them is scattered.

    In `page_first_direct` a range has one run of K, one of V; in `layer_first` a run for each layer
    of them, as the whole page has. In `page_first` and `page_head` it has one for each token.
    """
    # [pages, ..., layers, tokens, heads, dim], or for an indexer [pages, ..., layers, 1, bytes]
    indexer = type(pool).__name__ == "DSAIndexerPoolHost"
    axis = _axis(pool, -3 if indexer else -4)
    if (
        axis is None
        or type(pool).__name__ not in _BY_LAYERS
        or pool.layout not in _LAYERS_OUTERMOST
        or axis.view.shape[axis.dim] != pool.layer_num
        or axis.view.shape[axis.dim + 1] != (1 if indexer else axis.page_tokens)
    ):
        return None
    return axis


def _axis(pool: Any, dim: int) -> PageAxis | None:
    page_tokens = int(pool.page_size or 1)
    view = _page_view(pool, page_tokens, int(pool.size) // page_tokens)
    if view is None or view.dim() <= max(dim, -dim):
        return None
    return PageAxis(page_tokens, view, dim % view.dim())


def page_numbers(indices: torch.Tensor, page_tokens: int, count: int) -> torch.Tensor:
    """Return page numbers of int64 slots `[count * page_tokens]`.

    Raises InvalidRequest unless they are whole pages: consecutive slots, the first at a page's
    start.
    """
    if indices is None or indices.numel() != count * page_tokens:
        have = "no" if indices is None else indices.numel()
        raise InvalidRequest(f"{have} host slots for {count} pages of {page_tokens} tokens")
    rows = indices.detach().to("cpu", torch.int64).view(count, page_tokens)
    numbers = rows[:, 0] // page_tokens
    if not torch.equal(rows, numbers[:, None] * page_tokens + torch.arange(page_tokens)):
        raise InvalidRequest(f"host slots are no whole pages of {page_tokens} tokens")
    return numbers


def _pool(page_tokens: int, planes: dict[str, torch.Tensor]) -> KVPool:
    """View planes that hold all layers of a page, as one "layer"."""
    views = {name: [tensor] for name, tensor in planes.items()}
    return pool_of(
        page_tokens, GroupView("host", (0,), views, unit_tokens=page_tokens, space=SPACE)
    )


def _page_view(pool: Any, page_tokens: int, pages: int) -> torch.Tensor | None:
    """View the pool's memory as `[pages, *shape of a page]`; None if impossible."""
    try:
        first, second, last = (
            pool.get_data_page(page * page_tokens, flat=False)
            for page in (0, min(1, pages - 1), pages - 1)
        )
    except (NotImplementedError, ValueError):
        return None
    stride = second.storage_offset() - first.storage_offset()
    if not first.numel() or any(
        page.untyped_storage().data_ptr()
        != first.untyped_storage().data_ptr()  # a copy, not a view
        or page.shape != first.shape
        or page.stride() != first.stride()
        for page in (second, last)
    ):
        return None
    if last.storage_offset() != first.storage_offset() + (pages - 1) * stride:
        return None
    try:
        dtype_name(first.dtype)
    except InvalidRequest:
        return None
    view: torch.Tensor = first.as_strided(
        (pages, *first.shape), (stride or first.numel(), *first.stride())
    )
    return view


def _segments(pool: Any, page_tokens: int, pages: int) -> list[torch.Tensor]:
    """View each segment as uint8 `[pages, nbytes]`."""
    try:
        first, second, last = (
            _meta(pool, page, page_tokens) for page in (0, min(1, pages - 1), pages - 1)
        )
    except (NotImplementedError, ValueError, AttributeError) as error:
        raise InvalidRequest(f"{type(pool).__name__} describes no pages: {error}") from error
    tensors = []
    for (start, nbytes), (next_start, _), (end, _) in zip(first, second, last, strict=True):
        stride = next_start - start if pages > 1 else nbytes
        if stride < nbytes or end != start + (pages - 1) * stride:
            raise InvalidRequest(f"{type(pool).__name__}: pages are not evenly spaced")
        memory = (ctypes.c_uint8 * ((pages - 1) * stride + nbytes)).from_address(start)
        tensors.append(
            torch.frombuffer(memory, dtype=torch.uint8).as_strided((pages, nbytes), (stride, 1))
        )
    return tensors


def _meta(pool: Any, page: int, page_tokens: int) -> list[tuple[int, int]]:
    """Return (address, length) of each segment of a page."""
    slots = torch.arange(page * page_tokens, (page + 1) * page_tokens)
    meta = pool.get_page_buffer_meta(slots)
    if not meta or not meta[0]:
        raise ValueError("it has no buffer")
    return [(int(start), int(nbytes)) for start, nbytes in zip(*meta, strict=True) if nbytes]
