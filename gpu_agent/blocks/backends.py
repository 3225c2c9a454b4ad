"""Where the agents of a rank live: in the engine's process, or in one of their own (`gpu_agent.worker`).

BlockRank --- Home --- agents of the groups --- saves and loads
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
class GroupPool:
    """A cache group on this rank: its blocks, a page each, and the namespace of its pages."""

    namespace: Namespace
    pool: KVPool

    @property
    def space(self) -> str:
        """The one index space of a pool that is a table of blocks."""
        (space,) = self.pool.spaces
        return space

    def at(self, epoch: int | None) -> Namespace:
        """None: the epoch that was configured."""
        return self.namespace if epoch is None else replace(self.namespace, epoch=epoch)


class BlockAgent(Protocol):
    """What a rank needs of a group's agent: as `gpu_agent.agent.Agent` says it, with numbers of blocks."""

    namespace: Namespace

    def save(self, keys: Sequence[bytes], blocks: Sequence[int]) -> SaveJob: ...

    def load(self, keys: Sequence[bytes], blocks: Sequence[int]) -> LoadJob: ...


class AgentBackend(Protocol):
    """The calls of one thread, the engine's. None waits, but for `wait` and `close`."""

    def agents(self, epoch: int | None) -> Sequence[BlockAgent | None]:
        """One per group; None for a group without layers on this rank."""

    @property
    def loads(self) -> bool:
        """Whether there is somebody to load anything now."""

    @property
    def startup_seconds(self) -> deque[float]:
        """Return how long each process that became ready took to start. The caller removes them."""

    def poll(self) -> None:
        """Futures of loads that have ended are done afterwards, those of saves then or a few steps later."""

    def release(self) -> None:
        """The engine lacks blocks: saves that wait for a process to start end now."""

    def wait(self, futures: Iterable["concurrent.futures.Future[Any]"]) -> None:
        """Until all are done: by the deadlines of their jobs."""

    def retire(self, agents: Sequence[BlockAgent | None]) -> None:
        """They get no more jobs; those under way end."""

    def close(self) -> None:
        """Jobs under way end in bounded time."""

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""


def config_at(config: AgentConfig, places: Sequence[GroupPool | None], place: GroupPool) -> AgentConfig:
    """Of one group's agent. Groups share the memory for staging, each gets a page at least. What is under way
    is limited by the blocks, which are pinned or allocated: an order that an engine has given is not refused."""
    layout = place.pool.layout
    staging_nbytes = max(config.staging_nbytes // len(places), layout.page_nbytes)
    all_nbytes = place.pool.spaces[place.space].slots * layout.page_nbytes
    pending_nbytes_max = max(config.pending_nbytes_max, staging_nbytes, all_nbytes)
    return replace(config, staging_nbytes=staging_nbytes, pending_nbytes_max=pending_nbytes_max)


def check_blocks(place: GroupPool, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
    """Raises InvalidRequest unless there is a block of the pool for each key. Keys are the agent's to check."""
    slots = place.pool.spaces[place.space].slots
    if len(keys) != len(blocks):
        raise InvalidRequest(f"{len(keys)} keys for {len(blocks)} blocks")
    if blocks and not 0 <= min(blocks) <= max(blocks) < slots:
        wrong = min(blocks) if min(blocks) < 0 else max(blocks)
        raise InvalidRequest(f"block {wrong} is named; allowed are 0..{slots - 1}")


class LocalAgent:
    """`BlockAgent` with an agent in this process."""

    def __init__(self, agent: Agent, place: GroupPool) -> None:
        self.namespace = agent.namespace
        self.agent = agent
        self._place = place

    def save(self, keys: Sequence[bytes], blocks: Sequence[int]) -> SaveJob:
        check_blocks(self._place, keys, blocks)
        return self.agent.save(keys, torch.tensor(blocks, dtype=torch.int64))

    def load(self, keys: Sequence[bytes], blocks: Sequence[int]) -> LoadJob:
        check_blocks(self._place, keys, blocks)
        return self.agent.load(keys, torch.tensor(blocks, dtype=torch.int64))


class LocalBackend:
    """Agents as threads of the engine's process, with a client of their own."""

    def __init__(
        self,
        places: Sequence[GroupPool | None],
        client: ClientConfig,
        config: AgentConfig,
        transfer: Transfer | None = None,
    ) -> None:
        self._places = places
        self._client = Client(client)
        self._config = config
        self._transfer = transfer
        self._live: list[LocalAgent] = []
        self.startup_seconds: deque[float] = deque()  # stays empty: there is no process

    def agents(self, epoch: int | None) -> list[LocalAgent | None]:
        made = [self._made(place, epoch) if place else None for place in self._places]
        self._live += [agent for agent in made if agent]
        return made

    def _made(self, place: GroupPool, epoch: int | None) -> LocalAgent:
        config = config_at(self._config, self._places, place)
        return LocalAgent(Agent(self._client, place.at(epoch), place.pool, config, self._transfer), place)

    @property
    def loads(self) -> bool:
        return True

    def poll(self) -> None:
        """The agents' threads do it."""

    def release(self) -> None:
        """None waits for a process."""

    def wait(self, futures: Iterable["concurrent.futures.Future[Any]"]) -> None:
        wait_for(list(futures))

    def retire(self, agents: Sequence[BlockAgent | None]) -> None:
        gone = [agent for agent in self._live if agent in agents]
        self._live = [agent for agent in self._live if agent not in gone]
        try:
            start_thread(partial(_close, gone), "kvstore-close")
        except RuntimeError as error:  # no thread can be had
            log.warning("agents that are not used any more stay until the end: %s", error)
            self._live += gone

    def close(self) -> None:
        _close(self._live)
        self._client.close()

    def check(self) -> list[str]:
        return [violation for live in self._live for violation in live.agent.check()]


def _close(agents: Iterable[LocalAgent]) -> None:
    for local in agents:
        local.agent.close()
