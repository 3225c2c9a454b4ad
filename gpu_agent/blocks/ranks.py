"""Carry out the orders for one rank of an engine with block tables, with an agent per shard.

    StepOrders --- load: all shards of a group ---> finished, and which blocks are wrong
               +-- save: all shards of a group ---> acknowledged as soon as all have read the blocks

A cache group has one shard or several (`gpu_agent.identity.shards`): different bytes of its blocks.
The orders come from `scheduler.py`, and the rank's `Report` goes back to it. Every load is
reported, however it ended.
"""

import logging
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from gpu_agent.blocks.backends import AgentBackend, BlockAgent
from gpu_agent.blocks.save_plan import GroupBlocks, LoadOrder, Report, SaveOrder, StepOrders
from gpu_agent.load_pipeline import LoadJob, SaveJob
from kvstore.errors import InvalidRequest
from kvstore.tracing import NamesRequest, request

log = logging.getLogger(__name__)
log.addFilter(NamesRequest())


@dataclass
class RankCounts:
    """Counters since the object was made.

    Seconds are sums.

    Loads are timed from order to end. `agent_startups` counts how often an agents' process became
    ready, and `agent_startup_seconds` sums the time from its start until then.
    """

    loads: int = 0
    loads_failed: int = 0
    load_seconds: float = 0.0
    pages_loaded: int = 0
    loaded_nbytes: int = 0
    pages_saved: int = 0
    saved_nbytes: int = 0
    pages_existing: int = 0
    pages_dropped: int = 0
    agent_startups: int = 0
    agent_startup_seconds: float = 0.0


@dataclass
class LoadsEnded:
    """Loads that ended since the last call.

    `failed`: requests that got less than ordered. `wrong_blocks`: ids of blocks that were not
    written.
    """

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    wrong_blocks: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Load:
    order: LoadOrder
    jobs: list[tuple[GroupBlocks, BlockAgent, LoadJob | None]]  # None: it could not begin
    began_at: float
    epoch: int

    @property
    def done(self) -> bool:
        return all(job is None or job.done.done() for _, _, job in self.jobs)


class BlockRank:
    """The agents of one rank, and its running saves and loads.

    Not thread-safe.

    `backend`: makes the agents and is closed here.
    `writes`: whether this rank stores; of ranks with the same KV only one does.
    `shards`: the number of agents of each cache group, in the backend's order; by default one.
    """

    def __init__(
        self, backend: AgentBackend, writes: bool, shards: Sequence[int] | None = None
    ) -> None:
        self.counts = RankCounts()
        self._backend = backend
        self._agents = backend.agents(None)
        self._shards = list(shards) if shards is not None else [1] * len(self._agents)
        self._writes = writes
        self._epoch: int | None = None
        self._generation = 0  # incremented with every change of the epoch
        self._step = 0
        self._loads: list[_Load] = []
        self._saves: dict[int, list[SaveJob]] = {}  # saves whose blocks are still being read
        # Save jobs of which a part was read
        self._read: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._outcomes: list[tuple[BlockAgent, SaveJob]] = []
        self._reported = Report(0)

    def begin(self, orders: StepOrders) -> None:
        """Begin a step with these orders."""
        self._step = orders.step
        if orders.epoch != self._epoch:
            self._renew(orders.epoch)
        if orders.scarce:
            self._backend.release()

    def load(self, orders: Sequence[LoadOrder]) -> None:
        """Start loads, behind all work that the engine has enqueued so far.

        Each ends by the agent's deadline. After its end nothing writes to its blocks.
        """
        for order in orders:
            began_at = time.monotonic()
            with request(order.request_id):
                jobs = [
                    (part, agent, self._start_load(agent, part))
                    for part in order.parts
                    if part.keys
                    for agent in self._agents_of(part.group)
                ]
            self._loads.append(_Load(order, jobs, began_at, self._generation))

    def save(self, orders: Sequence[SaveOrder]) -> None:
        """Start saves, behind all work that the engine has enqueued so far."""
        for order in orders:
            self._saves[order.job] = jobs = self._start_saves(order) if self._writes else []
            read = partial(self._save_read, order.job)
            for job in jobs:
                job.gathered.add_done_callback(read)
            read(None)

    def loads_ended(self) -> LoadsEnded:
        """Return the loads that have ended, each once."""
        self._backend.poll()
        while self._backend.startup_seconds:
            self.counts.agent_startups += 1
            self.counts.agent_startup_seconds += self._backend.startup_seconds.popleft()
        ended = LoadsEnded()
        going = []
        for load in self._loads:
            if not load.done:
                going.append(load)
                continue
            wrong = self._wrong_blocks(load)
            request_id = load.order.request_id
            self._reported.finished[request_id] = 1
            ended.finished.add(request_id)
            if wrong is not None:
                ended.failed.add(request_id)
                ended.wrong_blocks |= wrong
        self._loads = going
        self._reported.failed |= ended.failed
        return ended

    def report(self) -> Report:
        """Return the report for the scheduler since the last one."""
        # Only these few, of thousands of running saves
        for number in {self._read.get_nowait() for _ in range(self._read.qsize())}:
            if number in self._saves and all(job.gathered.done() for job in self._saves[number]):
                del self._saves[number]
                self._reported.acknowledged[number] = 1
        report, self._reported = self._reported, Report(0)
        report.step = self._step
        report.away = int(not self._backend.loads)
        report.uncounted = int(bool(self._outcomes))
        return report

    @property
    def busy(self) -> bool:
        """Return whether loads or saves are under way, or ended since the last `take_counts`."""
        return bool(self._loads or self._outcomes)

    @property
    def counted(self) -> bool:
        """Return whether `take_counts` may return any counts."""
        return bool(self._outcomes) or any(vars(self.counts).values())

    def take_counts(self) -> RankCounts:
        """Return the counts since the last call, and reset them."""
        going = []
        for agent, job in self._outcomes:
            if not job.done.done():
                going.append((agent, job))
                continue
            result = job.done.result()
            self.counts.pages_saved += result.stored
            self.counts.saved_nbytes += result.stored * agent.namespace.layout.page_nbytes
            self.counts.pages_existing += result.existing
            self.counts.pages_dropped += result.dropped
        self._outcomes = going
        counts, self.counts = self.counts, RankCounts()
        return counts

    def drain(self) -> None:
        """Wait until no job reads or writes the engine's blocks: by the deadlines of the jobs."""
        self._backend.wait([job.gathered for jobs in self._saves.values() for job in jobs])
        self._backend.wait([job.done for load in self._loads for _, _, job in load.jobs if job])

    def close(self) -> None:
        """End pending saves in bounded time."""
        self._backend.close()

    def check(self) -> list[str]:
        """Return violated invariants; an empty list if there are none."""
        return self._backend.check()

    # ---- in detail --------------------------------------------------------------------------

    def _save_read(self, number: int, _: object) -> None:
        """Note that a part of a save job was read.

        Called by any thread.
        """
        self._read.put(number)

    def _agents_of(self, group: int) -> list[BlockAgent]:
        """Return the agents of a group's shards; none for a group without layers on this rank."""
        first = sum(self._shards[:group])
        return list(self._agents[first : first + self._shards[group]])

    def _start_saves(self, order: SaveOrder) -> list[SaveJob]:
        jobs = []
        with request(*order.requests):
            for part in order.parts:
                for agent in self._agents_of(part.group):
                    try:
                        job = agent.save(part.keys, part.blocks)
                    except InvalidRequest as error:
                        log.error("blocks could not be stored: %s", error)
                        continue
                    jobs.append(job)
                    self._outcomes.append((agent, job))
        return jobs

    def _start_load(self, agent: BlockAgent, part: GroupBlocks) -> LoadJob | None:
        try:
            return agent.load(part.keys, part.blocks)
        except InvalidRequest as error:
            log.error("blocks could not be loaded: %s", error)
            return None

    def _wrong_blocks(self, load: _Load) -> set[int] | None:
        """Return the blocks whose content is undefined after a load; None if there are none.

        A block is right only if all its shards came.
        """
        wrong: set[int] = set()
        self.counts.loads += 1
        self.counts.load_seconds += time.monotonic() - load.began_at
        for part, agent, job in load.jobs:
            pages = 0
            if job and load.epoch == self._generation:
                result = job.done.result()
                pages = result.pages
                self.counts.pages_loaded += result.loaded
                self.counts.loaded_nbytes += result.loaded * agent.namespace.layout.page_nbytes
            wrong.update(part.blocks[pages:])
        if not wrong:
            return None
        self.counts.loads_failed += 1
        return wrong

    def _renew(self, epoch: int | None) -> None:
        """Use the namespaces of another epoch from now on.

        Running loads bring pages of the old epoch, so they count as failed. Running saves store
        under the old epoch, where no lookup finds them.
        """
        old, self._agents = self._agents, self._backend.agents(epoch)
        self._epoch = epoch
        self._generation += 1
        self._backend.retire(old)
