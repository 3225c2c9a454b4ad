"""SGLang's host pools (HiCache): a page of the pool is the unit, whatever lies in it in whatever order.

Nothing here asks for the layout's name. The pool itself says where a page is, in one of two ways:

    page_view   get_data_page(index, flat=False)  a view of the page, with dtype, shape and strides.
                Row-major it is the engine's flat page, so both of its interfaces share their bytes
    segments    get_page_buffer_meta(indices)     addresses and lengths, where there is no such view:
                K and V of different dims, state of Mamba, a buffer for each layer

Dims of equal size look the same in any order, so the layout's name belongs into the salt.
"""

import ctypes
from typing import Any

import torch

from gpu_agent.layouts.group import GroupView, pool_of
from gpu_agent.pool import KVPool, dtype_name
from kvstore.errors import InvalidRequest

SPACE = "page"


def host_pool(pool: Any) -> tuple[KVPool, bool]:
    """(pages of a `HostKVCache` by their number, whether a page's bytes are the engine's flat page).

    Unit: `pool.page_size` slots, number = first slot // page_size. The `KVPool` is over the pool's own
    memory: it must outlive it. Raises InvalidRequest if the pool describes its pages in neither way.
    """
    page_tokens = int(pool.page_size or 1)
    pages = int(pool.size) // page_tokens
    view = _page_view(pool, page_tokens, pages)
    if view is not None:
        return _pool(page_tokens, {"page": view}), True
    segments = _segments(pool, page_tokens, pages)
    return _pool(page_tokens, {f"segment{i}": segment for i, segment in enumerate(segments)}), False


def page_numbers(indices: torch.Tensor, page_tokens: int, count: int) -> torch.Tensor:
    """`indices`: int64 slots `[count * page_tokens]`. Numbers of the pages that they are.

    Raises InvalidRequest unless they are whole pages: neighbours, the first at a page's start.
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
    """All layers of a page are in its planes, so there is one "layer"."""
    views = {name: [tensor] for name, tensor in planes.items()}
    return pool_of(page_tokens, GroupView("host", (0,), views, unit_tokens=page_tokens, space=SPACE))


def _page_view(pool: Any, page_tokens: int, pages: int) -> torch.Tensor | None:
    """`[pages, *shape of a page]` over the pool's memory, any strides."""
    try:
        first, second, last = (
            pool.get_data_page(page * page_tokens, flat=False) for page in (0, min(1, pages - 1), pages - 1)
        )
    except (NotImplementedError, ValueError):
        return None
    stride = second.storage_offset() - first.storage_offset()
    if not first.numel() or any(
        page.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()  # a copy, not a view
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
    view: torch.Tensor = first.as_strided((pages, *first.shape), (stride or first.numel(), *first.stride()))
    return view


def _segments(pool: Any, page_tokens: int, pages: int) -> list[torch.Tensor]:
    """Per segment uint8 `[pages, nbytes]`."""
    try:
        first, second, last = (_meta(pool, page, page_tokens) for page in (0, min(1, pages - 1), pages - 1))
    except (NotImplementedError, ValueError, AttributeError) as error:
        raise InvalidRequest(f"{type(pool).__name__} describes no pages: {error}") from error
    tensors = []
    for (start, nbytes), (next_start, _), (end, _) in zip(first, second, last, strict=True):
        stride = next_start - start if pages > 1 else nbytes
        if stride < nbytes or end != start + (pages - 1) * stride:
            raise InvalidRequest(f"{type(pool).__name__}: pages are not evenly spaced")
        memory = (ctypes.c_uint8 * ((pages - 1) * stride + nbytes)).from_address(start)
        tensors.append(torch.frombuffer(memory, dtype=torch.uint8).as_strided((pages, nbytes), (stride, 1)))
    return tensors


def _meta(pool: Any, page: int, page_tokens: int) -> list[tuple[int, int]]:
    """(address, length) of each segment of a page."""
    slots = torch.arange(page * page_tokens, (page + 1) * page_tokens)
    meta = pool.get_page_buffer_meta(slots)
    if not meta or not meta[0]:
        raise ValueError("it has no buffer")
    return [(int(start), int(nbytes)) for start, nbytes in zip(*meta, strict=True) if nbytes]
