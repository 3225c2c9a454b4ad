"""Run the agents of a rank: in the engine's process, or in one of their own (`gpu_agent.worker`).

BlockRank --- AgentBackend --- BlockAgent of each shard --- saves and loads
              LocalBackend     LocalAgent
              ProcessBackend   RemoteAgent
"""

import concurrent.futures
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from gpu_agent.agent import Agent
from gpu_agent.load_pipeline import LoadJob, SaveJob
from gpu_agent.options import AgentConfig
from gpu_agent.outage_log import OutageLog
from gpu_agent.pool import KVPool
from gpu_agent.transfer import Transfer
from kvstore.client import Client
from kvstore.config import ClientConfig
from kvstore.errors import InvalidRequest
from kvstore.keys import Namespace
from kvstore.sync import start_thread
from kvstore.threads import wait_for

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShardPool:
    """A shard of a cache group on this rank: its blocks' pages, and their namespace."""

    namespace: Namespace
    pool: KVPool

    @property
    def space(self) -> str:
        """Return the only index space of a pool that is a table of blocks."""
        (space,) = self.pool.spaces
        return space

    def at(self, epoch: int | None) -> Namespace:
        """Return the namespace of an epoch; None is the configured epoch."""
        return self.namespace if epoch is None else replace(self.namespace, epoch=epoch)


class BlockAgent(Protocol):
    """A shard's agent as a rank uses it: like `gpu_agent.agent.Agent`, with block numbers."""

    namespace: Namespace

    def save(self, keys: Sequence[bytes], blocks: Sequence[int]) -> SaveJob:
        """Begin to save blocks under their keys."""

    def load(self, keys: Sequence[bytes], blocks: Sequence[int]) -> LoadJob:
        """Begin to load blocks."""


class AgentBackend(Protocol):
    """The agents of a rank, called by the engine's thread.

    Only `wait` and `close` wait.
    """

    def agents(self, epoch: int | None) -> Sequence[BlockAgent]:
        """Make an agent per shard in this epoch."""

    @property
    def loads(self) -> bool:
        """Return whether loads can succeed now."""

    @property
    def startup_seconds(self) -> deque[float]:
        """Return how long each process that became ready took to start.

        The caller removes them.
        """

    def poll(self) -> None:
        """Complete the futures of loads that have ended.

        Those of saves may follow a few steps later.
        """

    def release(self) -> None:
        """Drop saves that wait for a process to start, because the engine lacks blocks."""

    def wait(self, futures: Iterable["concurrent.futures.Future[Any]"]) -> None:
        """Wait until all are done: by the deadlines of their jobs."""

    def retire(self, agents: Sequence[BlockAgent]) -> None:
        """Give these agents no more jobs; running jobs end."""

    def close(self) -> None:
        """End running jobs in bounded time."""

    def check(self) -> list[str]:
        """Return violated invariants; an empty list if there are none."""


def shard_config(config: AgentConfig, shards: Sequence[ShardPool], shard: ShardPool) -> AgentConfig:
    """Return the configuration of one pool's agent.

    Pools share the memory for staging, and each gets at least a page. Pending jobs are limited by
    the blocks, which are pinned or allocated, so that no order of an engine is refused.
    """
    layout = shard.pool.layout
    staging_nbytes = max(config.staging_nbytes // len(shards), layout.page_nbytes)
    all_nbytes = shard.pool.spaces[shard.space].slots * layout.page_nbytes
    pending_nbytes_max = max(config.pending_nbytes_max, staging_nbytes, all_nbytes)
    return replace(config, staging_nbytes=staging_nbytes, pending_nbytes_max=pending_nbytes_max)


def check_blocks(shard: ShardPool, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
    """Raise InvalidRequest unless there is a block of the pool for each key.

    The agent checks the keys.
    """
    slots = shard.pool.spaces[shard.space].slots
    if len(keys) != len(blocks):
        raise InvalidRequest(f"{len(keys)} keys for {len(blocks)} blocks")
    if blocks and not 0 <= min(blocks) <= max(blocks) < slots:
        wrong = min(blocks) if min(blocks) < 0 else max(blocks)
        raise InvalidRequest(f"block {wrong} is named; allowed are 0..{slots - 1}")


class LocalAgent:
    """A shard's agent in this process: `BlockAgent`."""

    def __init__(self, agent: Agent, shard: ShardPool) -> None:
        self.namespace = agent.namespace
        self.agent = agent
        self._shard = shard

    def save(self, keys: Sequence[bytes], blocks: Sequence[int]) -> SaveJob:
        """Begin to save blocks under their keys."""
        check_blocks(self._shard, keys, blocks)
        return self.agent.save(keys, torch.tensor(blocks, dtype=torch.int64))

    def load(self, keys: Sequence[bytes], blocks: Sequence[int]) -> LoadJob:
        """Begin to load blocks."""
        check_blocks(self._shard, keys, blocks)
        return self.agent.load(keys, torch.tensor(blocks, dtype=torch.int64))


class LocalBackend:
    """Run agents as threads of the engine's process, with a client of their own."""

    def __init__(
        self,
        shards: Sequence[ShardPool],
        client: ClientConfig,
        config: AgentConfig,
        transfer: Transfer | None = None,
    ) -> None:
        self._shards = shards
        self._client = Client(client)
        self._config = config
        self._transfer = transfer
        self._outage = OutageLog()
        self._live: list[LocalAgent] = []
        self.startup_seconds: deque[float] = deque()  # stays empty: there is no process

    def agents(self, epoch: int | None) -> list[LocalAgent]:
        """Make an agent per shard in this epoch."""
        made = [self._made(shard, epoch) for shard in self._shards]
        self._live += made
        return made

    def _made(self, shard: ShardPool, epoch: int | None) -> LocalAgent:
        config = shard_config(self._config, self._shards, shard)
        namespace, pool = shard.at(epoch), shard.pool
        agent = Agent(self._client, namespace, pool, config, self._transfer, self._outage)
        return LocalAgent(agent, shard)

    @property
    def loads(self) -> bool:
        """Return that loads are possible."""
        return True

    def poll(self) -> None:
        """Do nothing: the agents' threads complete their futures."""

    def release(self) -> None:
        """Do nothing: no save waits for a process."""

    def wait(self, futures: Iterable["concurrent.futures.Future[Any]"]) -> None:
        """Wait for futures."""
        wait_for(list(futures))

    def retire(self, agents: Sequence[BlockAgent]) -> None:
        """Close agents of an earlier epoch in the background."""
        gone = [agent for agent in self._live if agent in agents]
        self._live = [agent for agent in self._live if agent not in gone]
        try:
            start_thread(partial(_close, gone), "kvstore-close")
        except RuntimeError as error:  # no thread can be started
            log.warning("agents that are not used any more stay until the end: %s", error)
            self._live += gone

    def close(self) -> None:
        """Close agents and client."""
        _close(self._live)
        self._client.close()

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        return [violation for live in self._live for violation in live.agent.check()]


def _close(agents: Iterable[LocalAgent]) -> None:
    for local in agents:
        local.agent.close()
