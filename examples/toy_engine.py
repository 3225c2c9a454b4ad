"""Run a toy engine with a paged KV pool, and let a second one skip its prefill.

    kvstore-node --ram-bytes 1GiB &
    python examples/toy_engine.py localhost:7440

The engine "computes" the KV of a token from all tokens before it, as attention does. Its pool has
one tensor per layer and plane, `[blocks * block tokens, heads, head size]`, and a request has a
block table.
"""

import sys

import torch

from gpu_agent import Agent, KVPool
from kvstore import Client, LayerGroup, Namespace, PageLayout, Plane, prefix_hashes

BLOCK_TOKENS, BLOCKS, LAYERS, HEADS, HEAD_SIZE = 16, 64, 4, 2, 8
UNIT = (HEADS, HEAD_SIZE)
PLANES = (Plane("k", "float32", UNIT), Plane("v", "float32", UNIT))
LAYOUT = PageLayout(BLOCK_TOKENS, (LayerGroup("attention", tuple(range(LAYERS)), PLANES),))


class Engine:
    """An engine with its own pool, connected to the store by an agent."""

    def __init__(self, client: Client) -> None:
        shape = (BLOCKS * BLOCK_TOKENS, *UNIT)
        self.cache = {
            ("attention", layer, plane): torch.zeros(shape)
            for layer in range(LAYERS)
            for plane in ("k", "v")
        }
        namespace = Namespace("toy-model", LAYOUT, tenant=client.tenant)
        self.agent = Agent(client, namespace, KVPool(LAYOUT, self.cache))

    def prefill(self, tokens: list[int], blocks: list[int]) -> int:
        """Fill the KV of a prompt into `blocks`, and return how many tokens were computed."""
        hashes = prefix_hashes(tokens, BLOCK_TOKENS)
        slots = slots_of(blocks)
        found = self.agent.lookup(hashes)
        loaded = 0
        if found:
            pages = slots[: found * BLOCK_TOKENS]
            loaded = self.agent.load(hashes[:found], {"token": pages}).done.result().pages
        start = loaded * BLOCK_TOKENS
        for position in range(start, len(tokens)):
            seed = torch.Generator().manual_seed(sum(tokens[: position + 1]))
            for tensor in self.cache.values():
                tensor[slots[position]] = torch.rand(UNIT, generator=seed)
        full = slots[: len(hashes) * BLOCK_TOKENS]
        self.agent.save(hashes, {"token": full}).done.result()
        return len(tokens) - start

    def kv(self, tokens: list[int], blocks: list[int]) -> torch.Tensor:
        """Return the KV of a prompt: `[tensors, tokens, heads, head size]`."""
        slots = slots_of(blocks)[: len(tokens)]
        return torch.stack([tensor[slots] for tensor in self.cache.values()])


def slots_of(blocks: list[int]) -> torch.Tensor:
    """Return the slots of all tokens of a block table, int64."""
    first = torch.tensor(blocks, dtype=torch.int64) * BLOCK_TOKENS
    return (first[:, None] + torch.arange(BLOCK_TOKENS)).flatten()


def main(address: str) -> tuple[int, int, bool]:
    """Return how many tokens each engine computed, and whether their KV is equal."""
    prompt, first, second = list(range(7, 107)), [3, 9, 4, 1, 12, 5, 8], [20, 2, 31, 7, 40, 6, 11]
    with Client(address) as client:
        one, two = Engine(client), Engine(client)
        computed = one.prefill(prompt, first), two.prefill(prompt, second)
        equal = torch.equal(one.kv(prompt, first), two.kv(prompt, second))
        one.agent.close()
        two.agent.close()
    print(f"the first engine computed {computed[0]} tokens, the second {computed[1]}")
    print(f"their KV is {'equal' if equal else 'DIFFERENT'}")
    return *computed, equal


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "localhost:7440")
