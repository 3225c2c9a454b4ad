"""View vLLM's pools (0.29 and later): per layer a view `[blocks, heads, tokens, cell]`.

The dimensions and the layers may have any order in memory. A page holds cells in the order of the
view, not of the memory, so pools of all stride orders have the same layout and share their pages.
With `BLHNC` and pages of one block, a page and a block are the same contiguous bytes. The null
block, number 0, is an ordinary block of the pool; callers neither save nor load it.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch

from gpu_agent.layouts.group import GroupView, check_shape, pool_of
from gpu_agent.pool import KVPool
from kvstore.errors import InvalidRequest


class Blocks(NamedTuple):
    """Layers with views of one shape and dtype.

    `views`: by the model's layer number; a cell is K and V, a latent, an indexer row, with its
    scales. `block_tokens`: tokens of a block id; a view with smaller blocks holds several of them
    for each block, one after the other. `space`: groups with one block table share it.
    """

    views: Mapping[int, torch.Tensor]
    block_tokens: int
    space: str = "block"


def block_pool(groups: Mapping[str, Blocks], page_tokens: int) -> KVPool:
    """View all groups as a pool indexed by block id. Raises InvalidRequest.

    In a page they are ordered by name: vLLM's own order has no meaning.
    """
    return pool_of(page_tokens, *(_group(name, groups[name]) for name in sorted(groups)))


def table_pool(views: Mapping[str, torch.Tensor], num_blocks: int, block_tokens: int) -> KVPool:
    """View one cache group, all of whose layers are indexed by one block table.

    `views` are by the engine's layer names. Layers of one shape and dtype make a layout group,
    named for their content; a latent beside its indexer is two. `num_blocks` tells how many rows of
    a view a block has: a row may be a smaller kernel block, or hold fewer states than tokens.
    Layers that share memory are in the pages once. Raises InvalidRequest.
    """
    kinds: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name in sorted(views):
        view = views[name]
        check_shape(name, view, "rows", "heads", "tokens", "cell")
        place = (view.data_ptr(), tuple(view.shape), view.stride())
        if place in seen and not view.is_meta:
            continue
        seen.add(place)
        rows, heads, tokens, cell = view.shape
        if rows < num_blocks or rows % num_blocks:
            raise InvalidRequest(
                f"{name}: {rows} rows are no whole number for each of {num_blocks} blocks"
            )
        kind = (
            f"{str(view.dtype).removeprefix('torch.')}.{rows // num_blocks}x{heads}x{tokens}x{cell}"
        )
        kinds[kind][name] = view.view(num_blocks, rows // num_blocks, heads, tokens, cell)
    groups = []
    for kind in sorted(kinds):
        cells = {number: kinds[kind][name] for number, name in _numbered(kinds[kind]).items()}
        groups.append(
            GroupView(
                kind,
                sorted(cells),
                {"cell": [cells[n] for n in sorted(cells)]},
                block_tokens,
                "block",
            )
        )
    return pool_of(block_tokens, *groups)


def _numbered(names: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """Number layers by the first number in their names, or else by the order of the names.

    An example is "model.layers.3.self_attn.attn".
    """
    found = [re.search(r"\d+", name) for name in names]
    numbers = [int(match.group()) for match in found if match]
    if len(set(numbers)) < len(names):
        numbers = list(range(len(names)))
    return dict(zip(numbers, names, strict=True))


def _group(name: str, blocks: Blocks) -> GroupView:
    layers = sorted(blocks.views)
    cells = [
        _whole_blocks(f"group {name} layer {layer}", blocks.views[layer], blocks.block_tokens)
        for layer in layers
    ]
    return GroupView(name, layers, {"cell": cells}, blocks.block_tokens, blocks.space)


def _whole_blocks(where: str, view: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """View the same memory as `[blocks, kernel blocks, heads, tokens, cell]`."""
    check_shape(where, view, "blocks", "heads", "tokens", "cell")
    rows, heads, tokens, cell = view.shape
    if not tokens or block_tokens % tokens or rows % (block_tokens // tokens):
        raise InvalidRequest(
            f"{where}: {rows} kernel blocks of {tokens} tokens are no whole blocks of "
            f"{block_tokens} tokens"
        )
    ratio = block_tokens // tokens
    return view.view(rows // ratio, ratio, heads, tokens, cell)
