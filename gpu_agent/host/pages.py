"""Store one pool of host pages with blocking calls, for engines that have threads of their own.

After a call returns, no thread reads or writes the pool. Nothing raises for a store that is slow,
faulty or unreachable: the result is False.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch

from gpu_agent.agent import Agent
from gpu_agent.host.slot_copies import SlotSegments
from gpu_agent.options import AgentConfig
from gpu_agent.pool import KVPool
from kvstore.client import Client
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
    `batch_pages_max`: pages of one call; a batch of that size is never refused.
    """

    def __init__(
        self,
        client: Client,
        namespace: Namespace,
        pool: KVPool,
        config: AgentConfig,
        batch_pages_max: int,
    ) -> None:
        nbytes = pool.layout.page_nbytes
        config = dataclasses.replace(
            config,
            staging_nbytes=max(
                nbytes, min(config.staging_nbytes, STAGING_PAGES_MAX * nbytes), 4096
            ),
            pending_nbytes_max=max(
                config.pending_nbytes_max, config.workers * batch_pages_max * nbytes, nbytes
            ),
        )
        self.namespace = namespace
        self._client = client
        self.agent = Agent(client, namespace, pool, config, SlotSegments(pool))

    @property
    def page_nbytes(self) -> int:
        """Return the bytes of a page."""
        return self.namespace.layout.page_nbytes

    def present(self, hashes: Sequence[bytes], timeout_s: float) -> list[bool]:
        """Return which pages are stored."""
        return list(self.agent.present(hashes, timeout_s))

    def save(self, hashes: Sequence[bytes], numbers: torch.Tensor, timeout_s: float) -> list[bool]:
        """Save pages, return which are stored now; `numbers` is int64 `[pages]`, their indices."""
        result = self.agent.save(hashes, numbers, timeout_s=timeout_s).done.result()
        if not result.dropped:
            return [True] * len(hashes)
        return self.present(hashes, self.agent.config.lookup_timeout_s)

    def load(self, hashes: Sequence[bytes], numbers: torch.Tensor, timeout_s: float) -> list[bool]:
        """Load pages and return which are in the pool now: a leading run.

        The content of the other pages' slots is undefined.
        """
        result = self.agent.load(hashes, numbers, timeout_s=timeout_s).done.result()
        return _leading(result.pages, len(hashes))

    def put(self, hashes: Sequence[bytes], pages: Sequence[Any], timeout_s: float) -> list[bool]:
        """Save pages from buffers outside the pool."""
        try:
            outcomes = (
                self._client.put(self.namespace, hashes, pages, timeout_s=timeout_s)
                if hashes
                else []
            )
        except KVStoreError as error:
            log.info("%d pages were not stored: %s", len(hashes), error)
            return [False] * len(hashes)
        return [outcome.kept for outcome in outcomes]

    def get(self, hashes: Sequence[bytes], pages: Sequence[Any], timeout_s: float) -> list[bool]:
        """Load pages into buffers; those of misses are undefined."""
        try:
            return (
                self._client.get(self.namespace, hashes, pages, prefix=True, timeout_s=timeout_s)
                if hashes
                else []
            )
        except KVStoreError as error:
            log.info("%d pages were not loaded: %s", len(hashes), error)
            return [False] * len(hashes)

    def close(self, timeout_s: float) -> None:
        """End at the deadline of the running call at the latest."""
        self.agent.close(timeout_s)


def _leading(length: int, count: int) -> list[bool]:
    return [True] * length + [False] * (count - length)
