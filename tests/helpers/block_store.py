"""The store's scheduler side and one rank with one block group, without an engine.

Requests are dataclasses; KV is random bytes in a pool on the CPU.
"""

import concurrent.futures
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu_agent import AgentConfig
from gpu_agent.blocks.backends import LocalBackend, ShardPool
from gpu_agent.blocks.groups import BlockGroup
from gpu_agent.blocks.lookups import Lookups, ThreadLookups
from gpu_agent.blocks.ranks import BlockRank
from gpu_agent.blocks.save_plan import SavePlan, StepOrders
from gpu_agent.blocks.scheduler import BlockScheduler
from gpu_agent.layouts.vllm import table_pool
from kvstore import Client, Namespace
from kvstore.keys import prefix_hashes

BLOCK = 16
BLOCKS = 32


@dataclass
class FakeRequest:
    request_id: str
    tokens: list[int]
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.block_hashes = prefix_hashes(self.tokens, BLOCK)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)


class Store:
    """One rank, one block group and the scheduler side; `step` does what an engine step does."""

    def __init__(self, client: Client, name: str, **options: Any) -> None:
        """`client` belongs to the scheduler side; the rank creates its own."""
        self.pins: list[int] = []
        self.views = {
            f"layers.{i}": torch.randint(0, 256, (BLOCKS, 2, BLOCK, 8), dtype=torch.uint8)
            for i in (0, 1)
        }
        self.pool = table_pool(self.views, BLOCKS, BLOCK)
        self.namespace = Namespace(name, self.pool.layout)
        limits = {"staging_nbytes": 1 << 16, "pending_nbytes_max": 1 << 22}
        config = AgentConfig(**{name: options.pop(name, limit) for name, limit in limits.items()})

        home = LocalBackend([ShardPool(self.namespace, self.pool)], client.config, config)
        self.rank = BlockRank(home, writes=options.pop("writes", True))
        self.lookups = Lookups(ThreadLookups(client), 5.0)
        self.scarce = False
        ranks, blocks_max = options.pop("ranks", 1), options.pop("blocks_max", 16)
        plan = SavePlan(
            ranks, blocks_max, 4, self.pins.extend, self._unpin, scarce=lambda: self.scarce
        )
        self.scheduler = BlockScheduler(
            [BlockGroup(BLOCK)], [[self.namespace]], BLOCK, BLOCK, self.lookups, plan, **options
        )

    def _unpin(self, blocks: Any) -> None:
        for block in blocks:
            self.pins.remove(block)

    def matched(self, request: FakeRequest, local: int = 0) -> int:
        end = time.monotonic() + 60
        while (tokens := self.scheduler.matched(request, local)) is None:
            assert time.monotonic() < end
            time.sleep(0.001)
        return tokens

    def step(self, *scheduled: tuple[FakeRequest, int, list[int]]) -> tuple[StepOrders, Any]:
        """Schedule and run one step, and report its outcome to the scheduler."""
        tables = {request.request_id: [table] for request, _, table in scheduled}
        counts = {request.request_id: count for request, count, _ in scheduled}
        orders = self.scheduler.step(counts, tables.__getitem__)
        ended = self.run(orders)
        for request, count, _ in scheduled:
            request.num_computed_tokens += count
        self.scheduler.ran(self.rank.report())
        assert self.scheduler.check() == []
        return orders, ended

    def run(self, orders: StepOrders) -> Any:
        self.rank.begin(orders)
        self.rank.load(orders.loads)
        self.rank.save(orders.saves)
        return self.rank.loads_ended()

    def settle(self) -> None:
        end = time.monotonic() + 60
        while self.scheduler.busy:
            assert time.monotonic() < end
            self.step()
            time.sleep(0.001)
        # The blocks have been read by now; wait until they are stored
        concurrent.futures.wait([job.done for _, job in self.rank._outcomes], 10)

    def save(self, request: FakeRequest, blocks: list[int]) -> None:
        """Compute a request that misses the store, and wait until its blocks are stored."""
        self.scheduler.ask(request)
        assert self.matched(request) == 0
        self.scheduler.allocated(request, [blocks], 0)
        self.step((request, request.num_tokens, blocks))
        self.settle()

    def loaded(self) -> Any:
        """Run steps until a load ends, and return its result."""
        end = time.monotonic() + 60
        while not (ended := self.step()[1]).finished:
            assert time.monotonic() < end
            time.sleep(0.001)
        return ended

    def content(self, block: int) -> list[torch.Tensor]:
        return [view[block].clone() for view in self.views.values()]

    def close(self) -> None:
        self.rank.close()
        self.lookups.close()


TOKENS = list(range(70))  # 4 blocks and 6 tokens


MakeStore = Callable[..., Store]
