"""The agent: `lookup`, `save` and `load` for one GPU's shard of the KV cache.

    save:  what is missing? -> [gather a chunk of missing pages, store it] ... -> touch the chain
    load:  [fetch a chunk, checksums verified, scatter its leading hits] ... -> touch the chain

How a chunk travels is `carriers.py`'s business: through the node's mapped memory or a buffer.

The engine is never slowed or broken: nothing here blocks it, every job ends by its deadline, and
whatever goes wrong with the store is a smaller number in a result, never an exception. A caller's
own mistakes (wrong indices, wrong counts) raise InvalidRequest at once, before anything moves.
"""

import contextlib
import logging
import time
from collections.abc import Generator, Sequence
from functools import partial
from typing import TypeVar

import torch

from gpu_agent.bounded_executor import BoundedExecutor
from gpu_agent.kernels.available import transfer_for
from gpu_agent.load_pipeline import (
    DEPTH,
    AgentCounts,
    AgentStats,
    BufferedPath,
    Fetched,
    Job,
    LoadJob,
    LoadResult,
    MappedPath,
    SaveJob,
    SaveResult,
    TransferPath,
    parts_of,
    run_pipeline,
)
from gpu_agent.options import AgentConfig, agent_config
from gpu_agent.outage_log import OutageLog
from gpu_agent.pool import KVPool, Units
from gpu_agent.transfer import Fence, Placed, TorchTransfer, Transfer
from kvstore import PutOutcome
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

# Of one chunk that travels in place: each costs two round trips and the pipeline's start, about a
# millisecond, and the node keeps its slots until it is done.
IN_PLACE_NBYTES = 256 << 20

Result = TypeVar("Result")


class Agent:
    """Thread-safe. One per GPU; `client` may be shared and is not closed here.

    `pool`: the engine's own, for calls that name none. Engines whose cache tensors come and go
    (Hugging Face transformers) pass None and name a pool in each call. `transfer`: by default the
    fastest for the pool's device; without a pool plain torch.
    """

    def __init__(
        self,
        client: Client,
        namespace: Namespace,
        pool: KVPool | None,
        config: AgentConfig | None = None,
        transfer: Transfer | None = None,
    ) -> None:
        self.namespace = namespace
        self.config = config or agent_config()
        self._counts = AgentCounts()
        self._add = self._counts.add
        self._saved, self._loaded = self._counts.saved, self._counts.loaded
        self._client = client
        self._pool = pool
        self._transfer = transfer or (transfer_for(pool.device) if pool else TorchTransfer())
        self._outage = OutageLog()
        if pool is not None:
            self._check_pool(pool)
        page_nbytes = namespace.layout.page_nbytes
        self._buffer_pages = self.config.staging_nbytes // page_nbytes
        if not self._buffer_pages:
            raise ConfigError(f"staging_nbytes={self.config.staging_nbytes} must hold a page of {page_nbytes} bytes")
        self._hashers = ThreadPool(self.config.hashers, "kvstore-hash")
        self._ahead = ThreadPool(DEPTH * self.config.workers, "kvstore-ahead")
        lanes = (self.config.workers, (self._buffer_pages, page_nbytes), self.config.pending_nbytes_max)
        self._saves: BoundedExecutor[SaveResult] = BoundedExecutor("save", *lanes)
        self._loads: BoundedExecutor[LoadResult] = BoundedExecutor("load", *lanes)

    @property
    def stats(self) -> AgentStats:
        return self._counts.now(pages_forged=self._client.stats.forged_pages)

    # ---- the engine's side -----------------------------------------------------------------

    def prepare(self) -> None:
        """Connects, registers the namespace and begins to page-lock the node's memory, in the background:
        what the first job would have to wait for."""
        self._loads.submit(0, lambda _: self._prepare(), lambda reason: LoadResult(0, 0, reason))

    def lookup(self, prefix_hashes: Sequence[bytes]) -> int:
        """Leading pages that are stored; 0 if the store can not be asked in time."""
        return [*self.present(prefix_hashes), False].index(False)

    def present(self, prefix_hashes: Sequence[bytes], timeout_s: float | None = None) -> tuple[bool, ...]:
        """Which pages are stored; none if the store can not be asked in time. `timeout_s`: here and in
        `ask`, `save` and `load`, by default the configured deadline."""
        return self.ask(prefix_hashes, timeout_s=timeout_s) or (False,) * len(prefix_hashes)

    def ask(
        self, prefix_hashes: Sequence[bytes], hold_s: float = 0.0, timeout_s: float | None = None
    ) -> tuple[bool, ...] | None:
        """Which pages are stored; None if the store can not be asked in time.

        `hold_s`: keeps those that are from eviction for so long, and counts as a use: for an engine that
        builds on what it is told.
        """
        if not prefix_hashes:
            return ()
        self._add(lookups=1)
        namespace = self.namespace
        timeout_s = self.config.lookup_timeout_s if timeout_s is None else timeout_s
        try:
            if hold_s:  # pins end in the order in which they begin, each page the newest then: the head must be last
                tail_first = list(reversed(prefix_hashes))
                found = tuple(reversed(self._client.pin(namespace, tail_first, hold_s, timeout_s=timeout_s)))
            else:
                found = self._client.lookup(namespace, prefix_hashes, timeout_s=timeout_s).present
        except InvalidRequest:
            raise
        except KVStoreError as error:
            self._add(lookups_failed=1)
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
        """Stores the pages of a chain, head first, that are not stored yet.

        `units`: where their tokens are (`gpu_agent.pool`). `fence`: what must have happened before the
        slots are touched; by default all that the calling thread's stream was given so far. Never waits:
        a save that exceeds a limit is dropped and counted. Raises InvalidRequest for what is wrong with
        the call itself.
        """
        timeout_s = self.config.save_timeout_s if timeout_s is None else timeout_s
        job = self._job(prefix_hashes, units, pool, timeout_s, fence)
        gathered: Future[None] = Future()
        gathered.set_running_or_notify_cancel()
        count = len(job.prefix_hashes)
        self._add(saves=1)
        if count:
            done = self._saves.submit(
                count * self.namespace.layout.page_nbytes,
                lambda buffer: self._save(job, buffer, gathered),
                lambda reason: self._saved(SaveResult(0, 0, count, reason)),
            )
        else:
            done = _resolved(SaveResult(0, 0, 0))
        done.add_done_callback(lambda _: _release(gathered))
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
        """Puts the leading stored pages of a chain into the slots named by `units`.

        The first `skip_tokens` tokens are in the engine already: pages they cover wholly are not
        fetched, and their slots are not written. Only the result says what of the rest is in place: slots of pages
        that are not counted may have been written, with bytes that did not match their checksum.
        `fence`: as in `save`. Never waits. Raises InvalidRequest for what is wrong with the call itself.

        With `placed` the layers travel one after the other: `placed(layer, event)` is called on a
        worker's thread for each, ascending, and a stream that waits for the event may compute that layer.
        It is not called, or not for all layers, if the load ends early: `done` tells.
        """
        timeout_s = self.config.load_timeout_s if timeout_s is None else timeout_s
        job = self._job(prefix_hashes, units, pool, timeout_s, fence)
        count = len(job.prefix_hashes)
        job.pool.check_skip(skip_tokens, count)
        skipped = skip_tokens // self.namespace.layout.page_tokens
        self._add(loads=1)
        if skipped == count:
            return LoadJob(_resolved(LoadResult(count, 0)))
        return LoadJob(
            self._loads.submit(
                (count - skipped) * self.namespace.layout.page_nbytes,
                lambda buffer: self._load(job, buffer, skip_tokens, placed),
                lambda reason: self._loaded(LoadResult(skipped, 0, reason)),
            )
        )

    def close(self, timeout_s: float = 5.0) -> None:
        """Lets pending jobs end for `timeout_s`, then cancels what is queued and stops the rest at
        their next chunk. Every future has its result afterwards."""
        end = time.monotonic() + timeout_s
        self._saves.close(timeout_s)
        self._loads.close(max(0.0, end - time.monotonic()))
        self._ahead.shutdown()
        self._hashers.shutdown()

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
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
                with self._client.open_get(self.namespace, nobody, timeout_s=self.config.lookup_timeout_s) as slots:
                    self._transfer.host_memory(slots.arena.memory)
        except KVStoreError as failure:
            error = failure
        self._outage.report(error)
        return LoadResult(0, 0, str(error) if error else None)

    def _save(self, job: Job, buffer: torch.Tensor, gathered: Future[None]) -> SaveResult:
        stored = existing = 0
        reason = None
        try:
            if not self._client.maps_arena:  # what is asked in place opens the namespace by itself
                self._client.open(self.namespace, job.deadline.remaining())
            carrier, step = self._carrier(buffer, job.deadline)
            missing = list(range(len(job.prefix_hashes)))
            if len(missing) > step or not carrier.asks_first:
                missing = self._missing(job)
            existing = len(job.prefix_hashes) - len(missing)
            left, parted = missing, False
            while left:
                if self._saves.stopping.is_set():
                    reason = "the agent is closed"
                    break
                chunk, rest = left[:step], left[step:]
                parted = parted or bool(rest)
                read = None if rest else partial(_release, gathered)
                try:
                    outcomes = carrier.save(job.chunk(self.namespace, chunk), read)
                except KVStoreError:
                    if gathered.done() or not self._goes_over(carrier, job):
                        raise
                    carrier, step = self._carrier(buffer, job.deadline)
                    continue
                left = rest
                new = outcomes.count(PutOutcome.STORED)
                stored += new
                if new == len(outcomes):
                    continue
                existing += outcomes.count(PutOutcome.EXISTS) + outcomes.count(PutOutcome.BUSY)
                if PutOutcome.AWAY in outcomes:
                    reason = "members of the cluster do not answer"
                if PutOutcome.FULL in outcomes:  # without its head the rest of a chain is of no use
                    reason = "the node is full of pages that it may not evict"
                    break
            if parted:
                self._touch(job, job.prefix_hashes)
            self._outage.report(None)
        except KVStoreError as error:
            reason = str(error)
            self._outage.report(error)
        dropped = len(job.prefix_hashes) - stored - existing
        return self._saved(SaveResult(stored, existing, dropped, reason if dropped else None))

    def _missing(self, job: Job) -> list[int]:
        """Pages that are not stored. Those that are count as used. A member of a cluster that hangs may not cost the
        others the time of the save."""
        timeout_s = job.deadline.remaining() / 2
        found = self._client.lookup(self.namespace, job.prefix_hashes, touch=True, timeout_s=timeout_s)
        return [page for page, present in enumerate(found.present) if not present]

    def _carrier(self, buffer: torch.Tensor, deadline: Deadline) -> tuple[TransferPath, int]:
        """How pages travel now, and how many at a time."""
        if self.namespace.key_id or not self._client.maps_arena:
            return BufferedPath(self._client, self._transfer, buffer), self._buffer_pages
        pages_max = self._client.batch_pages_max(self.namespace, deadline.remaining())
        wanted = max(1, IN_PLACE_NBYTES // self.namespace.layout.page_nbytes)
        return MappedPath(self._client, self._transfer, self._hashers), min(pages_max, wanted)

    def _goes_over(self, carrier: TransferPath, job: Job) -> bool:
        """Whether a job goes on by buffers: the near node, in whose memory it began, does not answer, or is near no
        more."""
        return isinstance(carrier, MappedPath) and not self._client.maps_arena and not job.deadline.passed

    def _load(self, job: Job, buffer: torch.Tensor, skip_tokens: int, placed: Placed | None) -> LoadResult:
        count = len(job.prefix_hashes)
        first = in_place = skip_tokens // self.namespace.layout.page_tokens
        error, parted = None, False
        try:
            if not self._client.maps_arena:  # what is asked in place opens the namespace by itself
                self._client.open(self.namespace, job.deadline.remaining())
            while True:
                carrier, step = self._carrier(buffer, job.deadline)
                parts = parts_of(in_place, count, step, carrier.overlaps)
                moving = contextlib.closing(self._travelled(job, carrier, parts, skip_tokens, placed))
                with contextlib.suppress(_GoesOver), moving as moved:
                    for part, pages in zip(parts, moved, strict=False):
                        parted = parted or (pages > 0 and in_place > first)
                        in_place += pages
                        if in_place < part.stop:
                            break
                        if self._loads.stopping.is_set() and part.stop < count:
                            error = "the agent is closed"
                            break
                    break
            if parted:  # the pages are there, whatever comes of this
                begun(self._ahead, self._touch, job, job.prefix_hashes[:in_place])
            self._outage.report(None)
        except KVStoreError as failure:
            error = str(failure)
            self._outage.report(failure)
        return self._loaded(LoadResult(in_place, in_place - first, error))

    def _travelled(
        self, job: Job, carrier: TransferPath, parts: list[range], skip_tokens: int, placed: Placed | None
    ) -> Generator[int, None, None]:
        """As `gpu_agent.load_pipeline` has it. Raises _GoesOver when nothing of a part has moved yet."""
        page_tokens, count = self.namespace.layout.page_tokens, len(job.prefix_hashes)

        def fetch(part: range) -> Fetched:
            try:
                return carrier.fetch(job.chunk(self.namespace, list(part)))
            except KVStoreError as error:
                if self._goes_over(carrier, job):
                    raise _GoesOver from error
                raise

        def place(part: range, fetched: Fetched) -> int:
            skip = max(0, skip_tokens - part.start * page_tokens)  # less than a page, in the first one
            return carrier.place(fetched, skip, placed if part.stop == count else None)

        ahead = self._ahead if carrier.overlaps else None
        abreast = carrier.overlaps and not placed and self._transfer.makes_leaves(job.pool)
        return run_pipeline(parts, fetch, place, ahead, abreast)

    def _touch(self, job: Job, prefix_hashes: list[bytes]) -> None:
        """Several calls aged the chain chunk by chunk; put its order right, tail oldest. The pages
        have moved already, so a failure costs nothing but the order."""
        try:
            self._client.lookup(self.namespace, prefix_hashes, touch=True, timeout_s=job.deadline.remaining())
        except KVStoreError as error:
            log.info("could not touch a chain of %d pages: %s", len(prefix_hashes), error)

    # ---- the caller's mistakes -------------------------------------------------------------

    def _job(
        self, prefix_hashes: Sequence[bytes], units: Units, pool: KVPool | None, timeout_s: float, fence: Fence
    ) -> Job:
        pool = pool or self._pool
        if pool is None:
            raise InvalidRequest("this agent was made without a pool; name one in the call")
        if pool is not self._pool:
            self._check_pool(pool)
        hashes = list(prefix_hashes)
        if hashes:
            check_prefix_hashes(hashes, PREFIX_HASHES_MAX, distinct=True)
        table = pool.unit_table(units, len(hashes))
        return Job(hashes, pool, table, fence or self._transfer.fence(pool), Deadline(timeout_s))

    def _check_pool(self, pool: KVPool) -> None:
        if pool.layout != self.namespace.layout:
            raise InvalidRequest("the pool's layout is not the namespace's layout")


class _GoesOver(Exception):
    """The near node does not answer, and there is time left to ask the owners."""


def _release(gathered: Future[None]) -> None:
    if not gathered.done():
        gathered.set_result(None)


def _resolved(result: Result) -> Future[Result]:
    done: Future[Result] = Future()
    done.set_result(result)
    return done
