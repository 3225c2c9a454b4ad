"""Store one pool of host pages with blocking calls, for engines that have threads of their own.

A page is stored whole, or as several shards: ranges of its heads or layers, each a page of its own
namespace.

After a call returns, no thread reads or writes the pool. Nothing raises for a store that is slow,
faulty or unreachable: the result is False.
"""

import dataclasses
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gpu_agent.agent import Agent
from gpu_agent.host.slot_copies import SlotSegments
from gpu_agent.options import AgentConfig
from gpu_agent.outage_log import OutageLog
from gpu_agent.pool import KVPool
from kvstore.buffers import byte_view
from kvstore.client import Client
from kvstore.deadline import Deadline
from kvstore.errors import KVStoreError
from kvstore.keys import Namespace
from kvstore.tracing import NamesRequest

log = logging.getLogger(__name__)
log.addFilter(NamesRequest())

# Most pages of a staging buffer (transports without shared memory): pools with small pages may have
# many.
STAGING_PAGES_MAX = 128


class HostPages:
    """Store a pool of host pages. Thread-safe.

    `pool`: with one index space, whose unit is a page. Counters are in `agent.stats`.
    `batch_pages_max`: pages of one call; a batch of that size is never refused. `more`: the other
    shards of the same pages. `runs`: how many runs of a whole page's bytes each shard has a part
    of, such as K and V. `writes`: False where another rank has the same pages and stores them.
    """

    def __init__(
        self,
        client: Client,
        namespace: Namespace,
        pool: KVPool,
        config: AgentConfig,
        batch_pages_max: int,
        more: Sequence[tuple[Namespace, KVPool]] = (),
        runs: int = 1,
        writes: bool = True,
    ) -> None:
        self.namespace = namespace
        self.writes = writes
        self._client = client
        self._runs = runs
        shards, outage = 1 + len(more), OutageLog()
        self.agents = [
            _agent(client, space, shard, config, batch_pages_max, shards, outage)
            for space, shard in [(namespace, pool), *more]
        ]
        self.agent = self.agents[0]

    @property
    def namespaces(self) -> list[Namespace]:
        """Return the namespaces of all shards."""
        return [agent.namespace for agent in self.agents]

    @property
    def page_nbytes(self) -> int:
        """Return the bytes of a page, all shards together."""
        return sum(namespace.layout.page_nbytes for namespace in self.namespaces)

    def present(self, hashes: Sequence[bytes], timeout_s: float) -> list[bool]:
        """Return which pages are stored, with all shards."""
        deadline, there = Deadline(timeout_s), [True] * len(hashes)
        for agent in self.agents:
            left = list(itertools.compress(hashes, there))
            if left:
                left_s = timeout_s if agent is self.agent else max(deadline.left(), 0.001)
                found = iter(agent.present(left, left_s))
                there = [has and next(found) for has in there]
        return there

    def save(self, hashes: Sequence[bytes], numbers: torch.Tensor, timeout_s: float) -> list[bool]:
        """Save pages, return which are stored now; `numbers` is int64 `[pages]`, their indices.

        Where another rank stores them, all count as stored.
        """
        if not self.writes:
            return [True] * len(hashes)
        jobs = [agent.save(hashes, numbers, timeout_s=timeout_s) for agent in self.agents]
        results = [job.done.result() for job in jobs]
        if not any(result.dropped for result in results):
            return [True] * len(hashes)
        return self.present(hashes, self.agent.config.lookup_timeout_s)

    def load(self, hashes: Sequence[bytes], numbers: torch.Tensor, timeout_s: float) -> list[bool]:
        """Load pages and return which are in the pool now: a leading run.

        The content of the other pages' slots is undefined.
        """
        jobs = [agent.load(hashes, numbers, timeout_s=timeout_s) for agent in self.agents]
        results = [job.done.result() for job in jobs]
        return _leading(min(result.pages for result in results), len(hashes))

    def put(self, hashes: Sequence[bytes], pages: Sequence[Any], timeout_s: float) -> list[bool]:
        """Save pages from buffers outside the pool."""
        if not self.writes:
            return [True] * len(hashes)
        kept, deadline = [True] * len(hashes), Deadline(timeout_s)
        try:
            for space, parts in self._cut(pages) if hashes else ():
                outcomes = self._client.put(space, hashes, parts, timeout_s=deadline.remaining())
                kept = [has and one.kept for has, one in zip(kept, outcomes, strict=True)]
        except KVStoreError as error:
            log.info("%d pages were not stored: %s", len(hashes), error)
            return [False] * len(hashes)
        return kept

    def get(self, hashes: Sequence[bytes], pages: Sequence[Any], timeout_s: float) -> list[bool]:
        """Load pages into buffers; those of misses are undefined."""
        there, deadline = [True] * len(hashes), Deadline(timeout_s)
        try:
            for space, parts in self._cut(pages) if hashes else ():
                found = self._client.get(
                    space, hashes, parts, prefix=True, timeout_s=deadline.remaining()
                )
                there = [has and one for has, one in zip(there, found, strict=True)]
        except KVStoreError as error:
            log.info("%d pages were not loaded: %s", len(hashes), error)
            return [False] * len(hashes)
        return there

    def _cut(self, pages: Sequence[Any]) -> Iterator[tuple[Namespace, Sequence[Any]]]:
        """Yield each shard's namespace, and its parts of whole pages."""
        if len(self.agents) == 1:
            yield self.namespace, pages
            return
        run_nbytes, first = self.page_nbytes // self._runs, 0
        for namespace in self.namespaces:
            nbytes = namespace.layout.page_nbytes // self._runs
            starts = [run * run_nbytes + first for run in range(self._runs)]
            yield (
                namespace,
                [
                    tuple(whole[start : start + nbytes] for start in starts)
                    for whole in map(byte_view, pages)
                ],
            )
            first += nbytes

    def close(self, timeout_s: float) -> None:
        """End at the deadline of the running call at the latest."""
        end = time.monotonic() + timeout_s
        for agent in self.agents:
            agent.close(max(0.0, end - time.monotonic()))


def _agent(
    client: Client,
    namespace: Namespace,
    pool: KVPool,
    config: AgentConfig,
    batch_pages_max: int,
    shards: int,
    outage: OutageLog,
) -> Agent:
    """Return the agent of a shard; all `shards` share the memory for staging."""
    nbytes = pool.layout.page_nbytes
    staging_nbytes = min(config.staging_nbytes // shards, STAGING_PAGES_MAX * nbytes)
    config = dataclasses.replace(
        config,
        staging_nbytes=max(nbytes, staging_nbytes, 4096),
        pending_nbytes_max=max(
            config.pending_nbytes_max, config.workers * batch_pages_max * nbytes, nbytes
        ),
    )
    return Agent(client, namespace, pool, config, SlotSegments(pool), outage)


def _leading(length: int, count: int) -> list[bool]:
    return [True] * length + [False] * (count - length)
