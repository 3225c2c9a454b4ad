"""Look up, save and load the KV cache of one GPU's shard.

    save    which pages are missing? -> [gather a chunk of them, store it] ... -> touch the chain
    load    [fetch a chunk, verify it, scatter its leading hits] ...           -> touch the chain

    Agent.save, load -> BoundedExecutor -> SaveTask, LoadTask -> MappedPath, BufferedPath -> Client

The engine is never slowed or broken: nothing here blocks it, every job ends by its deadline, and
any failure of the store is a smaller number in a result, never an exception. A caller's own
mistakes (wrong indices, wrong counts) raise InvalidRequest at once, before anything moves.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from gpu_agent.bounded_executor import BoundedExecutor
from gpu_agent.kernels.available import transfer_for
from gpu_agent.load_pipeline import (
    DEPTH,
    LoadJob,
    LoadResult,
    LoadTask,
    SaveJob,
    SaveResult,
    SaveTask,
)
from gpu_agent.options import AgentConfig, agent_config
from gpu_agent.outage_log import OutageLog
from gpu_agent.pool import KVPool, Units
from gpu_agent.transfer import Fence, Placed, TorchTransfer, Transfer
from gpu_agent.transfer_path import BufferedPath, MappedPath, PageBatch, TransferPath
from kvstore.admin import PREFIX_HASHES_MAX
from kvstore.client import Client
from kvstore.deadline import Deadline
from kvstore.errors import ConfigError, InvalidRequest, KVStoreError
from kvstore.keys import PREFIX_HASH_NBYTES_MIN, Namespace, check_prefix_hashes
from kvstore.log_rate import LogRate
from kvstore.sync import Future
from kvstore.threads import ThreadPool, begun
from kvstore.tracing import NamesRequest

log = logging.getLogger(__name__)
log.addFilter(LogRate())
log.addFilter(NamesRequest())

# Bytes of a chunk that moves in mapped memory. Each chunk costs two round trips and the start of
# the pipeline, about a millisecond, and the node keeps its slots until the chunk is done.
IN_PLACE_NBYTES = 256 << 20

Result = TypeVar("Result")


@dataclass
class AgentStats:
    """Counters since the agent was made.

    `pages_forged`: pages of a keyed namespace without a valid HMAC, counted by the agent's client,
    which may be shared.
    """

    lookups: int = 0
    lookups_failed: int = 0
    saves: int = 0
    pages_stored: int = 0
    pages_existing: int = 0
    pages_dropped: int = 0
    loads: int = 0
    loads_failed: int = 0
    pages_loaded: int = 0
    pages_forged: int = 0


class AgentCounts:
    """The counters of `AgentStats`; logs each job that failed.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = AgentStats()

    def add(self, **counts: int) -> None:
        """Add to counts by name."""
        with self._lock:
            for name, count in counts.items():
                setattr(self._stats, name, getattr(self._stats, name) + count)

    def saved(self, result: SaveResult) -> SaveResult:
        """Count a save's result, log dropped pages, and return the result."""
        self.add(
            pages_stored=result.stored, pages_existing=result.existing, pages_dropped=result.dropped
        )
        if result.dropped:
            count = result.stored + result.existing + result.dropped
            log.info("%d of %d pages were not stored: %s", result.dropped, count, result.reason)
        return result

    def loaded(self, result: LoadResult) -> LoadResult:
        """Count a load's result, log a failure, and return the result."""
        self.add(pages_loaded=result.loaded, loads_failed=int(result.error is not None))
        if result.error is not None:
            log.info("a load ended after %d pages: %s", result.pages, result.error)
        return result

    def now(self, **others: int) -> AgentStats:
        """Return a copy with the counters in `others`, which are kept elsewhere."""
        with self._lock:
            return replace(self._stats, **others)


class Agent:
    """Look up, save and load pages for one GPU.

    Thread-safe.

    `client` may be shared and is not closed here. `pool`: the engine's pool, for calls that name
    none. Engines whose cache tensors come and go (Hugging Face transformers) pass None and name a
    pool in each call. `transfer`: by default the fastest one for the pool's device; without a pool
    plain torch. `outage`: shared by the agents of an engine, so that an outage is logged once.
    """

    def __init__(
        self,
        client: Client,
        namespace: Namespace,
        pool: KVPool | None,
        config: AgentConfig | None = None,
        transfer: Transfer | None = None,
        outage: OutageLog | None = None,
    ) -> None:
        self.namespace = namespace
        self.config = config or agent_config()
        self._counts = AgentCounts()
        self._client = client
        self._pool = pool
        self._transfer = transfer or (transfer_for(pool.device) if pool else TorchTransfer())
        self._outage = outage or OutageLog()
        if pool is not None:
            self._check_pool(pool)
        page_nbytes = namespace.layout.page_nbytes
        buffer_pages = self.config.staging_nbytes // page_nbytes
        if not buffer_pages:
            raise ConfigError(
                f"staging_nbytes={self.config.staging_nbytes} must hold a page of {page_nbytes} "
                "bytes"
            )
        self._hashers = ThreadPool(self.config.hashers, "kvstore-hash")
        self._ahead = ThreadPool(DEPTH * self.config.workers, "kvstore-ahead")
        limits = (self.config.workers, (buffer_pages, page_nbytes), self.config.pending_nbytes_max)
        self._saves: BoundedExecutor[SaveResult] = BoundedExecutor("save", *limits)
        self._loads: BoundedExecutor[LoadResult] = BoundedExecutor("load", *limits)

    @property
    def stats(self) -> AgentStats:
        """Return the counters."""
        return self._counts.now(pages_forged=self._client.stats.forged_pages)

    # ---- the engine's side -----------------------------------------------------------------

    def prepare(self) -> None:
        """Connect, register the namespace and begin to page-lock the node's memory.

        Runs in the background. Otherwise the first job would wait for this.
        """
        self._loads.submit(0, lambda _: self._prepare(), lambda reason: LoadResult(0, 0, reason))

    def lookup(self, prefix_hashes: Sequence[bytes]) -> int:
        """Return the number of leading stored pages; 0 if the store does not answer in time."""
        return [*self.present(prefix_hashes), False].index(False)

    def present(
        self, prefix_hashes: Sequence[bytes], timeout_s: float | None = None
    ) -> tuple[bool, ...]:
        """Return which pages are stored; none if the store does not answer in time.

        `timeout_s`: here and in `ask`, `save` and `load`, by default the configured deadline.
        """
        return self.ask(prefix_hashes, timeout_s=timeout_s) or (False,) * len(prefix_hashes)

    def ask(
        self, prefix_hashes: Sequence[bytes], hold_s: float = 0.0, timeout_s: float | None = None
    ) -> tuple[bool, ...] | None:
        """Return which pages are stored; None if the store does not answer in time.

        `hold_s`: protect stored pages from eviction for this long, which counts as a use. This is
        for an engine that relies on the answer.
        """
        if not prefix_hashes:
            return ()
        self._counts.add(lookups=1)
        namespace = self.namespace
        timeout_s = self.config.lookup_timeout_s if timeout_s is None else timeout_s
        try:
            if hold_s:
                # Pins end in the order in which they begin, and a page becomes the newest at the
                # end of its pin. So the head of the chain must be last.
                tail_first = list(reversed(prefix_hashes))
                found = tuple(
                    reversed(self._client.pin(namespace, tail_first, hold_s, timeout_s=timeout_s))
                )
            else:
                found = self._client.lookup(namespace, prefix_hashes, timeout_s=timeout_s).present
        except InvalidRequest:
            raise
        except KVStoreError as error:
            self._counts.add(lookups_failed=1)
            self._outage.report(error)
            return None
        self._outage.report(None)
        return found

    def save(
        self,
        prefix_hashes: Sequence[bytes],
        units: Units,
        pool: KVPool | None = None,
        timeout_s: float | None = None,
        fence: Fence = None,
    ) -> SaveJob:
        """Store the pages of a chain, head first, that are not stored yet.

        `units`: the slots of their tokens (`gpu_agent.pool`). `fence`: the slots are not read
        before it; by default it follows all work enqueued on the calling thread's stream. Never
        waits: a save that exceeds a limit is dropped and counted. Raises InvalidRequest for a
        mistake in the call itself.
        """
        timeout_s = self.config.save_timeout_s if timeout_s is None else timeout_s
        pages = self._pages(prefix_hashes, units, pool, timeout_s, fence)
        gathered: Future[None] = Future()
        gathered.set_running_or_notify_cancel()
        task = SaveTask(pages, gathered, self._saves.stopping)
        count = len(pages)
        self._counts.add(saves=1)
        if count:
            done = self._saves.submit(
                count * self.namespace.layout.page_nbytes,
                partial(self._save, task),
                lambda reason: self._counts.saved(SaveResult(0, 0, count, reason)),
            )
        else:
            done = _resolved(SaveResult(0, 0, 0))
        done.add_done_callback(lambda _: task.release_slots())
        return SaveJob(gathered, done)

    def load(
        self,
        prefix_hashes: Sequence[bytes],
        units: Units,
        skip_tokens: int = 0,
        pool: KVPool | None = None,
        placed: Placed | None = None,
        timeout_s: float | None = None,
        fence: Fence = None,
    ) -> LoadJob:
        """Load the leading stored pages of a chain into the slots named by `units`.

        The first `skip_tokens` tokens are in the engine already: pages that they cover completely
        are not fetched, and their slots are not written. Only the result says which of the other
        pages are in place: slots of later pages may have been written with bytes that did not match
        their checksum. `fence`: as in `save`. Never waits. Raises InvalidRequest for a mistake in
        the call itself.

        With `placed` the layers move one after the other: `placed(layer, event)` is called on a
        worker's thread for each, ascending, and a stream that waits for the event may compute that
        layer. It is not called, or not for all layers, if the load ends early: see `done`.
        """
        timeout_s = self.config.load_timeout_s if timeout_s is None else timeout_s
        pages = self._pages(prefix_hashes, units, pool, timeout_s, fence)
        count = len(pages)
        pages.pool.check_skip(skip_tokens, count)
        skipped = skip_tokens // self.namespace.layout.page_tokens
        self._counts.add(loads=1)
        if skipped == count:
            return LoadJob(_resolved(LoadResult(count, 0)))
        task = LoadTask(pages, skip_tokens, placed, self._ahead, self._loads.stopping)
        return LoadJob(
            self._loads.submit(
                (count - skipped) * self.namespace.layout.page_nbytes,
                partial(self._load, task),
                lambda reason: self._counts.loaded(LoadResult(skipped, 0, reason)),
            )
        )

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait for pending jobs for `timeout_s`, then cancel queued jobs and stop the others.

        A running job stops at its next chunk. Every future has its result afterwards.
        """
        end = time.monotonic() + timeout_s
        self._saves.close(timeout_s)
        self._loads.close(max(0.0, end - time.monotonic()))
        self._ahead.shutdown()
        self._hashers.shutdown()

    def check(self) -> list[str]:
        """Return violated invariants; an empty list if there are none."""
        return self._saves.check() + self._loads.check()

    def __enter__(self) -> "Agent":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the workers' side -----------------------------------------------------------------

    def _prepare(self) -> LoadResult:
        nobody = [bytes(PREFIX_HASH_NBYTES_MIN)]
        error = None
        try:
            self._client.open(self.namespace, self.config.lookup_timeout_s)
            if self._client.maps_arena and not self.namespace.key_id:
                with self._client.open_get(
                    self.namespace, nobody, timeout_s=self.config.lookup_timeout_s
                ) as slots:
                    self._transfer.host_memory(slots.arena.memory)
        except KVStoreError as failure:
            error = failure
        self._outage.report(error)
        return LoadResult(0, 0, str(error) if error else None)

    def _save(self, task: SaveTask, buffer: torch.Tensor) -> SaveResult:
        pages = task.pages
        try:
            self._open(pages)
            path = self._path(buffer, pages.deadline)
            if len(pages) > path.chunk_pages or not path.asks_first:
                task.skip(self._present(pages))
            while not task.run(path):
                path = self._path(buffer, pages.deadline)
            if task.chunked:
                self._touch(pages, pages.prefix_hashes)
            self._outage.report(None)
        except KVStoreError as error:
            task.reason = str(error)
            self._outage.report(error)
        return self._counts.saved(task.result)

    def _load(self, task: LoadTask, buffer: torch.Tensor) -> LoadResult:
        pages = task.pages
        try:
            self._open(pages)
            while not task.run(self._path(buffer, pages.deadline)):
                pass  # this path was lost, the next one is tried
            if task.chunked:  # the pages are in place, whatever the touch returns
                begun(self._ahead, self._touch, pages, pages.prefix_hashes[: task.result.pages])
            self._outage.report(None)
        except KVStoreError as error:
            task.error = str(error)
            self._outage.report(error)
        return self._counts.loaded(task.result)

    def _open(self, pages: PageBatch) -> None:
        """Open the namespace, unless the calls for mapped pages do so."""
        if not self._client.maps_arena:
            self._client.open(self.namespace, pages.deadline.remaining())

    def _path(self, buffer: torch.Tensor, deadline: Deadline) -> TransferPath:
        """Return the path that can be used now."""
        if self.namespace.key_id or not self._client.maps_arena:
            return BufferedPath(self._client, self._transfer, buffer)
        pages_max = self._client.batch_pages_max(self.namespace, deadline.remaining())
        wanted = max(1, IN_PLACE_NBYTES // self.namespace.layout.page_nbytes)
        return MappedPath(self._client, self._transfer, self._hashers, min(pages_max, wanted))

    def _present(self, pages: PageBatch) -> tuple[bool, ...]:
        """Return which pages are stored, and count those as used.

        A hanging member of a cluster must not cost the other pages the time of the save.
        """
        timeout_s = pages.deadline.remaining() / 2
        return self._client.lookup(
            self.namespace, pages.prefix_hashes, touch=True, timeout_s=timeout_s
        ).present

    def _touch(self, pages: PageBatch, prefix_hashes: list[bytes]) -> None:
        """Restore the chain's age order, tail oldest, after it was aged chunk by chunk.

        The pages have moved already, so a failure costs only the order.
        """
        try:
            self._client.lookup(
                self.namespace, prefix_hashes, touch=True, timeout_s=pages.deadline.remaining()
            )
        except KVStoreError as error:
            log.info("could not touch a chain of %d pages: %s", len(prefix_hashes), error)

    # ---- the caller's mistakes -------------------------------------------------------------

    def _pages(
        self,
        prefix_hashes: Sequence[bytes],
        units: Units,
        pool: KVPool | None,
        timeout_s: float,
        fence: Fence,
    ) -> PageBatch:
        pool = pool or self._pool
        if pool is None:
            raise InvalidRequest("this agent was made without a pool; name one in the call")
        if pool is not self._pool:
            self._check_pool(pool)
        hashes = list(prefix_hashes)
        if hashes:
            check_prefix_hashes(hashes, PREFIX_HASHES_MAX, distinct=True)
        table = pool.unit_table(units, len(hashes))
        return PageBatch(
            self.namespace,
            hashes,
            pool,
            table,
            fence or self._transfer.fence(pool),
            Deadline(timeout_s),
        )

    def _check_pool(self, pool: KVPool) -> None:
        if pool.layout != self.namespace.layout:
            raise InvalidRequest("the pool's layout is not the namespace's layout")


def _resolved(result: Result) -> Future[Result]:
    done: Future[Result] = Future()
    done.set_result(result)
    return done
