"""vLLM (0.29 and later): per layer a view `[blocks, heads, tokens, cell]` of one buffer, whatever the
order of these dimensions and of the layers in memory.

A page holds cells in the order of the view, not of the memory, so pools of all stride orders have
the same layout and share their pages. With `BLHNC` and pages of one block, page and block are the
same run of bytes. The null block, number 0, is a block like any other to the pool; callers neither
save nor load it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from gpu_agent.layouts.group import GroupView, check_shape, pool_of
from gpu_agent.pool import KVPool
from kvstore.errors import InvalidRequest


class Blocks(NamedTuple):
    """Layers with views of one shape and dtype.

    `views`: by the model's layer number; a cell is K and V, a latent, an indexer row, with its scales.
    `block_tokens`: what a block id names; a view whose blocks are smaller holds several of them for
    each block, one after the other. `space`: groups with one block table share it.
    """

    views: Mapping[int, torch.Tensor]
    block_tokens: int
    space: str = "block"


def block_pool(groups: Mapping[str, Blocks], page_tokens: int) -> KVPool:
    """A pool of all `groups`, indexed by block id. In a page they stand in the order of their names:
    vLLM's own order of groups has no meaning. Raises InvalidRequest."""
    return pool_of(page_tokens, *(_group(name, groups[name]) for name in sorted(groups)))


def _group(name: str, blocks: Blocks) -> GroupView:
    layers = sorted(blocks.views)
    cells = [_whole_blocks(f"group {name} layer {layer}", blocks.views[layer], blocks.block_tokens) for layer in layers]
    return GroupView(name, layers, {"cell": cells}, blocks.block_tokens, blocks.space)


def _whole_blocks(where: str, view: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """`[blocks, kernel blocks, heads, tokens, cell]`, of the same memory."""
    check_shape(where, view, "blocks", "heads", "tokens", "cell")
    rows, heads, tokens, cell = view.shape
    if not tokens or block_tokens % tokens or rows % (block_tokens // tokens):
        raise InvalidRequest(
            f"{where}: {rows} kernel blocks of {tokens} tokens are no whole blocks of {block_tokens} tokens"
        )
    ratio = block_tokens // tokens
    return view.view(rows // ratio, ratio, heads, tokens, cell)
