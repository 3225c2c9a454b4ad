"""Pools of random bytes whose pages are compared as a whole, and a chain of them."""

import torch

from gpu_agent import KVPool, TorchTransfer
from gpu_agent.layouts.vllm import table_pool
from kvstore import Client, Namespace, prefix_hashes

WAIT_S = 20.0
PAGES = 6
SOURCE, TARGET = torch.arange(48), torch.arange(48, 96)  # slots of `token_pool`, for so many pages
BLOCKS, BLOCK_TOKENS = 24, 16


def packed_pool(layers: int = 3, cell: int = 24) -> KVPool:
    """vLLM's `BLHNC`: all layers of a block together, and something of another's behind them."""
    memory = torch.randint(0, 256, (BLOCKS, layers + 1, 2, BLOCK_TOKENS, cell), dtype=torch.uint8)
    return table_pool({f"layers.{i}": memory[:, i] for i in range(layers)}, BLOCKS, BLOCK_TOKENS)


def pages_at(pool: KVPool, units: torch.Tensor, unit_tokens: int = 1) -> torch.Tensor:
    """`[pages, page_nbytes]`: what these slots hold, or these blocks of `unit_tokens` tokens."""
    count = len(units) * unit_tokens // pool.layout.page_tokens
    pages = torch.empty((count, pool.layout.page_nbytes), dtype=torch.uint8)
    TorchTransfer().gather(pool, pool.unit_table(units, count), list(pages), None)
    return pages


def blocks_at(pool: KVPool, blocks: torch.Tensor) -> torch.Tensor:
    return pages_at(pool, blocks, BLOCK_TOKENS)


def hashes(count: int = PAGES) -> list[bytes]:
    return prefix_hashes(list(range(8 * count)), 8)


def damage(client: Client, namespace: Namespace, page: int) -> None:
    """As a broken DIMM would: the node's own memory changes behind its back."""
    with client.open_get(namespace, hashes()) as slots:
        offset = slots.offsets[page] + 3
        slots.arena.memory[offset] ^= 1
