"""Pools of random bytes, and functions to compare their pages."""

import torch

from gpu_agent import KVPool, TorchTransfer
from gpu_agent.layouts.vllm import table_pool
from kvstore import Client, Namespace, prefix_hashes

WAIT_S = 60.0
PAGES = 6
SOURCE, TARGET = torch.arange(48), torch.arange(48, 96)  # slots of `token_pool` for PAGES pages
BLOCKS, BLOCK_TOKENS = 24, 16


def packed_pool(layers: int = 3, cell: int = 24) -> KVPool:
    """Return a pool in vLLM's layout `BLHNC`: the layers of a block, then foreign data."""
    memory = torch.randint(0, 256, (BLOCKS, layers + 1, 2, BLOCK_TOKENS, cell), dtype=torch.uint8)
    return table_pool({f"layers.{i}": memory[:, i] for i in range(layers)}, BLOCKS, BLOCK_TOKENS)


def pages_at(pool: KVPool, units: torch.Tensor, unit_tokens: int = 1) -> torch.Tensor:
    """Return the pages at these slots, or at these blocks of `unit_tokens` tokens.

    Shape: `[pages, page_nbytes]`.
    """
    count = len(units) * unit_tokens // pool.layout.page_tokens
    pages = torch.empty((count, pool.layout.page_nbytes), dtype=torch.uint8)
    TorchTransfer().gather(pool, pool.unit_table(units, count), list(pages), None)
    return pages


def blocks_at(pool: KVPool, blocks: torch.Tensor) -> torch.Tensor:
    return pages_at(pool, blocks, BLOCK_TOKENS)


def hashes(count: int = PAGES) -> list[bytes]:
    return prefix_hashes(list(range(8 * count)), 8)


def damage(client: Client, namespace: Namespace, page: int) -> None:
    """Flip a bit of a page in the node's memory, as a faulty DIMM would."""
    with client.open_get(namespace, hashes()) as slots:
        offset = slots.offsets[page] + 3
        slots.arena.memory[offset] ^= 1
