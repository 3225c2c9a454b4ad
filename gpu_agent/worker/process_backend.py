"""Send a rank's saves and loads to its agents' process, from the engine's side.

    save ---> GATHERED ---> SAVED      each order ends once: by an answer, or after the process has
    load -----------------> LOADED     ended, because then nothing reads or writes its blocks

    save ---> staged ---> the process is ready ---> sent to it, with its whole deadline
                   +----> wait_s passed, the start failed, the namespace was replaced,
                          or the engine lacks blocks: dropped

No call waits, no thread runs beside the engine, and CUDA records one event per order. The death of
the process (`worker_process.py`) is a miss: its orders fail.

Saves are staged while the process starts. Their blocks stay pinned, so a save may not wait for
ever, and no request waits for one. Their number is bounded by the engine's pinned blocks
(`gpu_agent.blocks.save_plan`), their bytes by UNSENT_NBYTES_MAX. Pages of a dropped save count as
dropped in its result.
"""

import concurrent.futures
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from gpu_agent.blocks.backends import BlockAgent, ShardPool, check_blocks, shard_config
from gpu_agent.load_pipeline import LoadJob, LoadResult, SaveJob, SaveResult
from gpu_agent.options import AgentConfig
from gpu_agent.worker import frames
from gpu_agent.worker.frames import Kind, Loaded, Saved
from gpu_agent.worker.ipc_memory import IpcEvents, described_pools
from gpu_agent.worker.worker_process import TIMEOUTS, WorkerProcess, WorkerTimeouts
from kvstore.config import ClientConfig
from kvstore.errors import Exhausted, InvalidRequest, ProtocolError
from kvstore.keys import Namespace
from kvstore.messages import namespace_message
from kvstore.sync import Future
from kvstore.tracing import packed_now

STAGED_SENDS_MAX = 16  # staged saves sent per poll: each costs the engine's step some microseconds
# How late the engine may learn that blocks were read; it learns of ended loads at once.
SAVING_S = 0.01

AnyOrder = TypeVar("AnyOrder")


@dataclass(frozen=True)
class _InflightSave:
    job: SaveJob
    pages: int
    overdue_at: float

    def fail(self, reason: str) -> None:
        self.end(SaveResult(0, 0, self.pages, reason))

    def end(self, result: SaveResult) -> None:
        if not self.job.gathered.done():
            self.job.gathered.set_result(None)
        self.job.done.set_result(result)


@dataclass(frozen=True)
class _InflightLoad:
    job: LoadJob
    pages: int
    overdue_at: float

    def fail(self, reason: str) -> None:
        self.job.done.set_result(LoadResult(0, 0, reason))


class InflightOrders:
    """Orders that were sent and have not ended.

    Not thread-safe. Numbers are never reused, so that a late answer can not end another order.
    """

    def __init__(self) -> None:
        self._saves: dict[
            int, _InflightSave
        ] = {}  # in the order of their deadlines, because all have the same timeout
        self._loads: dict[int, _InflightLoad] = {}
        self._next = 0

    def save(self, pages: int, overdue_at: float, job: SaveJob) -> int:
        """Number a save."""
        number = self._number()
        self._saves[number] = _InflightSave(job, pages, overdue_at)
        return number

    def load(self, pages: int, overdue_at: float) -> tuple[int, LoadJob]:
        """Number a load."""
        number, load = self._number(), _InflightLoad(new_load(), pages, overdue_at)
        self._loads[number] = load
        return number, load.job

    def gathered(self, number: int) -> None:
        """Note that the blocks of a save were read.

        This and the following raise ProtocolError for an answer that does not fit the order.
        """
        future = _known(self._saves, number).job.gathered
        if future.done():
            raise ProtocolError(f"the blocks of save {number} were read twice")
        future.set_result(None)

    def saved(self, said: Saved) -> None:
        """Complete a save. Raises ProtocolError if the counts do not add up."""
        save = _known(self._saves, said.order)
        if said.stored + said.existing + said.dropped != save.pages:
            raise ProtocolError(f"a save of {save.pages} pages ended with {said}")
        del self._saves[said.order]
        save.end(SaveResult(said.stored, said.existing, said.dropped, said.reason))

    def loaded(self, said: Loaded) -> None:
        """Complete a load. Raises ProtocolError for impossible counts."""
        load = _known(self._loads, said.order)
        if not said.loaded <= said.pages <= load.pages:
            raise ProtocolError(f"a load of {load.pages} pages ended with {said}")
        del self._loads[said.order]
        load.job.done.set_result(LoadResult(said.pages, said.loaded, said.error))

    def fail(self, number: int, reason: str) -> None:
        """End an order that could not be sent."""
        order = self._saves.pop(number, None) or self._loads.pop(number)
        order.fail(reason)

    def fail_all(self, reason: str) -> int:
        """End all orders, after nothing touches their blocks any more, and return their number."""
        orders: list[_InflightSave | _InflightLoad] = [*self._saves.values(), *self._loads.values()]
        self._saves, self._loads = {}, {}
        for order in orders:
            order.fail(reason)
        return len(orders)

    def overdue(self, now: float) -> bool:
        """Return whether an order should have ended by now."""
        save, load = next(iter(self._saves.values()), None), next(iter(self._loads.values()), None)
        return bool((save and save.overdue_at < now) or (load and load.overdue_at < now))

    @property
    def loading(self) -> bool:
        """Return whether loads are under way."""
        return bool(self._loads)

    def __len__(self) -> int:
        return len(self._saves) + len(self._loads)

    def _number(self) -> int:
        self._next += 1
        return self._next


def new_save() -> SaveJob:
    """Make a save that has not ended."""
    return SaveJob(Future(), Future())


def new_load() -> LoadJob:
    """Make a load that has not ended."""
    return LoadJob(Future())


def _known(orders: dict[int, AnyOrder], number: int) -> AnyOrder:
    if number not in orders:
        raise ProtocolError(f"an answer to order {number}, which was not given or has ended")
    return orders[number]


@dataclass(frozen=True)
class StagedSave:
    """A save that is sent later.

    `event`: of `IpcEvents`, recorded when the save was ordered, so that the agents wait for the
    step that computed the blocks. If it was recorded again since, they only wait longer.
    """

    job: SaveJob
    agent: int
    event: int
    keys: Sequence[bytes]
    slot_indices: dict[str, bytes]
    trace: bytes
    until: float

    @property
    def nbytes(self) -> int:
        """Return the bytes of the order."""
        return (
            sum(map(len, self.keys)) + sum(map(len, self.slot_indices.values())) + len(self.trace)
        )

    def drop(self, reason: str) -> None:
        """End the save without saving."""
        self.job.gathered.set_result(None)
        self.job.done.set_result(SaveResult(0, 0, len(self.keys), reason))


class StagedSaves:
    """A queue of saves, sent in the order in which they were staged. Not thread-safe."""

    def __init__(self, wait_s: float) -> None:
        """Hold saves until the process is ready, for at most `wait_s`."""
        self._wait_s = wait_s
        self._saves: deque[StagedSave] = deque()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._saves)

    def add(
        self,
        agent: int,
        event: int,
        keys: Sequence[bytes],
        slot_indices: dict[str, bytes],
        trace: bytes,
    ) -> SaveJob:
        """Hold a save."""
        save = StagedSave(
            new_save(), agent, event, keys, slot_indices, trace, time.monotonic() + self._wait_s
        )
        if self._nbytes + save.nbytes > frames.UNSENT_NBYTES_MAX:
            save.drop(f"{self._nbytes} bytes of orders wait for the agents' process")
        else:
            self._saves.append(save)
            self._nbytes += save.nbytes
        return save.job

    def take(self) -> StagedSave:
        """Take the oldest save."""
        save = self._saves.popleft()
        self._nbytes -= save.nbytes
        return save

    def expire(self, now: float) -> None:
        """Drop those that have waited too long."""
        while self._saves and self._saves[0].until < now:
            self.take().drop(f"the agents' process was not ready within {self._wait_s:.0f} s")

    def drop(self, reason: str, which: Callable[[StagedSave], bool] = lambda _: True) -> None:
        """Drop all, or those that `which` names."""
        gone = [save for save in self._saves if which(save)]
        self._saves = deque(save for save in self._saves if not which(save))
        for save in gone:
            self._nbytes -= save.nbytes
            save.drop(reason)


class ProcessBackend:
    """`gpu_agent.blocks.backends.AgentBackend` in a child process.

    Not thread-safe. Raises ConfigError if the engine's memory can not be mapped by another process,
    OSError if the process can not be started.
    """

    name = "agents"

    def __init__(
        self,
        shards: Sequence[ShardPool],
        client: ClientConfig,
        config: AgentConfig,
        command: Sequence[str] = (),
        timeouts: WorkerTimeouts = TIMEOUTS,
    ) -> None:
        self._shards = shards
        self._client = client
        self._config = config
        self._device = shards[0].pool.device
        self._events = IpcEvents(self._device)
        self._orders = InflightOrders()
        self._staged = StagedSaves(timeouts.start_s)
        self._agents: dict[int, RemoteAgent] = {}
        self._made = 0
        self._child = WorkerProcess(self, command, timeouts)
        self._child.start()

    # ---- AgentBackend ----------------------------------------------------------------------

    def agents(self, epoch: int | None) -> list["RemoteAgent"]:
        """Make an agent per shard in this epoch."""
        made: list[RemoteAgent] = []
        for index, shard in enumerate(self._shards):
            self._made += 1
            agent = self._agents[self._made] = RemoteAgent(
                self, self._made, index, shard.at(epoch), shard
            )
            self._child.tell(frames.facts_frame(Kind.ADD, self._facts_of(agent)))
            made.append(agent)
        return made

    @property
    def loads(self) -> bool:
        """Return whether the process is ready for loads."""
        return self._child.listens and self._child.ready

    @property
    def startup_seconds(self) -> deque[float]:
        """Return how long the last starts took."""
        return self._child.startup_seconds

    def poll(self) -> None:
        """Take the process's messages and send held saves."""
        timeouts = self._child.timeouts
        saving_s = timeouts.saving_s if len(self._orders) else timeouts.idle_s
        self._child.poll(0.0 if self._orders.loading else saving_s)
        if len(self._staged):
            self._send_or_drop_staged()

    def _send_or_drop_staged(self) -> None:
        """Send staged saves once the process is ready, a few at a time.

        Drop those that can not be sent.
        """
        if self.loads:
            self._send_staged(STAGED_SENDS_MAX)
        elif not self._child.awaited:
            self._staged.drop("the agents' process could not be started")
        else:
            self._staged.expire(time.monotonic())

    def _send_staged(self, at_most: int) -> None:
        for _ in range(min(at_most, len(self._staged))):
            save = self._staged.take()
            number, until = self._order(len(save.keys), save.job)
            self._give(
                Kind.SAVE,
                number,
                save.agent,
                until,
                save.keys,
                save.slot_indices,
                save.event,
                save.trace,
            )

    def release(self) -> None:
        """Drop held saves when the engine lacks blocks and the process is not ready."""
        if len(self._staged) and not self.loads:
            self._staged.drop("the engine lacks blocks, and the agents' process is not ready")

    def wait(self, futures: Iterable["concurrent.futures.Future[Any]"]) -> None:
        """Wait for futures."""
        waited = list(futures)
        if self.loads:
            self._send_staged(len(self._staged))
        self._staged.drop("the engine waits for its blocks, and the agents' process is not ready")
        self._child.poll()
        while not all(future.done() for future in waited):
            self._child.pause()
            self._child.poll()

    def retire(self, agents: Sequence[BlockAgent]) -> None:
        """Close agents of an earlier epoch."""
        for agent in agents:
            if isinstance(agent, RemoteAgent) and agent.number in self._agents:
                del self._agents[agent.number]
                self._child.tell(frames.number_frame(Kind.RETIRE, agent.number))
        self._staged.drop(
            "its namespace is no longer used", lambda save: save.agent not in self._agents
        )

    def close(self) -> None:
        """Send held saves if possible, and end the process."""
        if self.loads:
            self._send_staged(len(self._staged))
        self._staged.drop("the engine ends")
        self._child.close(lambda: len(self._orders) > 0)

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        if self._child.pid is None and len(self._orders):
            return [f"{len(self._orders)} orders are under way in a process that does not exist"]
        return []

    # ---- the agents' calls -----------------------------------------------------------------

    def save(
        self, agent: "RemoteAgent", keys: Sequence[bytes], slot_indices: dict[str, bytes]
    ) -> SaveJob:
        """Start a save, or stage it while the process starts.

        Its deadline begins when it is sent.
        """
        if self.loads:
            job = new_save()
            number, until = self._order(len(keys), job)
            self._give(
                Kind.SAVE,
                number,
                agent.number,
                until,
                keys,
                slot_indices,
                self._events.record(),
                packed_now(),
            )
            return job
        if self._child.awaited:
            return self._staged.add(
                agent.number, self._events.record(), keys, slot_indices, packed_now()
            )
        job = new_save()
        job.gathered.set_result(None)
        job.done.set_result(SaveResult(0, 0, len(keys), "the agents' process does not exist"))
        return job

    def _order(self, pages: int, job: SaveJob) -> tuple[int, float]:
        """Return the number of a save that is sent now, and its deadline."""
        until = time.monotonic() + self._config.save_timeout_s
        return self._orders.save(pages, until + self._child.timeouts.grace_s, job), until

    def load(
        self, agent: "RemoteAgent", keys: Sequence[bytes], slot_indices: dict[str, bytes]
    ) -> LoadJob:
        """Start a load if the process is ready.

        Otherwise computing is faster than starting it.
        """
        if not self.loads:
            job = new_load()
            job.done.set_result(LoadResult(0, 0, "the agents' process is not ready"))
            return job
        until = time.monotonic() + self._config.load_timeout_s
        number, job = self._orders.load(len(keys), until + self._child.timeouts.grace_s)
        self._give(
            Kind.LOAD,
            number,
            agent.number,
            until,
            keys,
            slot_indices,
            self._events.record(),
            packed_now(),
        )
        return job

    def _give(
        self,
        kind: Kind,
        number: int,
        agent: int,
        until: float,
        keys: Sequence[bytes],
        slot_indices: dict[str, bytes],
        event: int,
        trace: bytes,
    ) -> None:
        order = frames.Order(number, agent, event, until, keys, slot_indices, trace)
        try:
            self._child.give(frames.order_frame(kind, order))
        except (Exhausted, InvalidRequest) as error:  # it was not sent
            self._orders.fail(number, str(error))

    # ---- Delegate --------------------------------------------------------------------------

    def setup(self) -> tuple[dict[str, Any], Sequence[int]]:
        """Return the process's setup and inherited descriptors."""
        storages, pools, inherited = described_pools(shard.pool for shard in self._shards)
        return {
            "task": self.name,
            "device": str(self._device),
            "client": asdict(self._client),
            "events": self._events.handles(),
            "storages": storages,
            "pools": pools,
            "agents": [self._facts_of(agent) for agent in self._agents.values()],
        }, inherited

    def on_message(self, kind: Kind, body: bytes) -> None:
        """Take a message. Raises ProtocolError."""
        if kind is Kind.GATHERED:
            self._orders.gathered(frames.parse_number(body))
        elif kind is Kind.SAVED:
            self._orders.saved(frames.parse_saved(body))
        elif kind is Kind.LOADED:
            self._orders.loaded(frames.parse_loaded(body))
        else:
            raise ProtocolError(f"the agents' process sent {kind.name}")

    def overdue(self, now: float) -> bool:
        """Return whether an order should have ended."""
        return self._orders.overdue(now)

    def on_exit(self) -> int:
        """Fail all orders; return how many there were."""
        return self._orders.fail_all("the agents' process died")

    def _facts_of(self, agent: "RemoteAgent") -> dict[str, Any]:
        return {
            "number": agent.number,
            "pool": agent.index,
            "namespace": namespace_message(agent.namespace).SerializeToString().hex(),
            "config": asdict(shard_config(self._config, self._shards, agent.shard)),
        }


class RemoteAgent:
    """A shard's agent in the other process: `gpu_agent.blocks.backends.BlockAgent`."""

    def __init__(
        self,
        backend: ProcessBackend,
        number: int,
        index: int,
        namespace: Namespace,
        shard: ShardPool,
    ) -> None:
        self.namespace = namespace
        self.number = number
        self.index = index
        self.shard = shard
        self._backend = backend

    def save(self, keys: Sequence[bytes], blocks: Sequence[int]) -> SaveJob:
        """Begin to save blocks under their keys."""
        check_blocks(self.shard, keys, blocks)
        return self._backend.save(self, keys, {self.shard.space: array("q", blocks).tobytes()})

    def load(self, keys: Sequence[bytes], blocks: Sequence[int]) -> LoadJob:
        """Begin to load blocks."""
        check_blocks(self.shard, keys, blocks)
        return self._backend.load(self, keys, {self.shard.space: array("q", blocks).tobytes()})
