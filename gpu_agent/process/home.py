"""`AgentProcess`: the engine's side. Gives orders to the agents' process, and reads what became of them.

Nothing here waits and nothing runs beside the engine: no thread, and of CUDA an event per order. The death of
the process (`child.py`) is a miss: orders fail, a save when nobody reads its blocks any more, a load when
nobody writes them.
"""

import concurrent.futures
import time
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from gpu_agent.blocks.homes import BlockAgent, Place, check_blocks, config_at
from gpu_agent.config import AgentConfig
from gpu_agent.jobs import LoadJob, LoadResult, SaveJob, SaveResult
from gpu_agent.process import frames
from gpu_agent.process.child import GRACE_S, IDLE_S, Child
from gpu_agent.process.frames import Kind
from gpu_agent.process.marks import Marks
from gpu_agent.process.memory import described_pools
from gpu_agent.process.orders import Orders, new_load, new_save
from gpu_agent.process.staged import StagedSaves
from kvstore.config import ClientConfig
from kvstore.errors import Exhausted, InvalidRequest, ProtocolError
from kvstore.keys import Namespace
from kvstore.messages import namespace_message
from kvstore.tracing import packed_now

STAGED_SENDS_MAX = 16  # staged saves sent per poll: each costs the engine's step some microseconds
SAVING_S = 0.01  # that the engine may not know of blocks that have been read; of loads it wants to know at once


class AgentProcess:
    """`gpu_agent.blocks.homes.Home` in a child process. Not thread-safe.

    Raises ConfigError if the engine's memory can not be mapped by another process, OSError if the process
    can not be started.
    """

    name = "agents"

    def __init__(
        self,
        places: Sequence[Place | None],
        client: ClientConfig,
        config: AgentConfig,
        command: Sequence[str] = (),
    ) -> None:
        self._places = places
        self._client = client
        self._config = config
        self._device = next(place.pool.device for place in places if place)
        self._marks = Marks(self._device)
        self._orders = Orders()
        self._staged = StagedSaves()
        self._agents: dict[int, RemoteAgent] = {}
        self._made = 0
        self._child = Child(self, command)
        self._child.start()

    # ---- Home ------------------------------------------------------------------------------

    def agents(self, epoch: int | None) -> list["RemoteAgent | None"]:
        made: list[RemoteAgent | None] = []
        for group, place in enumerate(self._places):
            if place is None:
                made.append(None)
                continue
            self._made += 1
            agent = self._agents[self._made] = RemoteAgent(self, self._made, group, place.at(epoch), place)
            self._child.tell(frames.facts_frame(Kind.ADD, self._facts_of(agent)))
            made.append(agent)
        return made

    @property
    def loads(self) -> bool:
        return self._child.listens and self._child.ready

    @property
    def startup_seconds(self) -> deque[float]:
        return self._child.startup_seconds

    def poll(self) -> None:
        saving_s = SAVING_S if len(self._orders) else IDLE_S
        self._child.poll(0.0 if self._orders.loading else saving_s)
        if len(self._staged):
            self._send_or_drop_staged()

    def _send_or_drop_staged(self) -> None:
        """Send staged saves once the process is ready, a few at a time. Drop those that it will not get."""
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
            self._give(Kind.SAVE, number, save.agent, until, save.keys, save.units, save.mark, save.trace)

    def release(self) -> None:
        if len(self._staged) and not self.loads:
            self._staged.drop("the engine lacks blocks, and the agents' process is not ready")

    def wait(self, futures: Iterable["concurrent.futures.Future[Any]"]) -> None:
        waited = list(futures)
        if self.loads:
            self._send_staged(len(self._staged))
        self._staged.drop("the engine waits for its blocks, and the agents' process is not ready")
        self._child.poll()
        while not all(future.done() for future in waited):
            self._child.pause()
            self._child.poll()

    def retire(self, agents: Sequence[BlockAgent | None]) -> None:
        for agent in agents:
            if isinstance(agent, RemoteAgent) and agent.number in self._agents:
                del self._agents[agent.number]
                self._child.tell(frames.number_frame(Kind.RETIRE, agent.number))
        self._staged.drop("its namespace is not used any more", lambda save: save.agent not in self._agents)

    def close(self) -> None:
        if self.loads:
            self._send_staged(len(self._staged))
        self._staged.drop("the engine ends")
        self._child.close(lambda: len(self._orders) > 0)

    def check(self) -> list[str]:
        if self._child.pid is None and len(self._orders):
            return [f"{len(self._orders)} orders are under way in a process that is not there"]
        return []

    # ---- the agents' calls -----------------------------------------------------------------

    def save(self, agent: "RemoteAgent", keys: Sequence[bytes], units: dict[str, bytes]) -> SaveJob:
        """Start a save, or stage it while the process starts. Its deadline begins when it is sent."""
        if self.loads:
            job = new_save()
            number, until = self._order(len(keys), job)
            self._give(Kind.SAVE, number, agent.number, until, keys, units, self._marks.record(), packed_now())
            return job
        if self._child.awaited:
            return self._staged.add(agent.number, self._marks.record(), keys, units, packed_now())
        job = new_save()
        job.gathered.set_result(None)
        job.done.set_result(SaveResult(0, 0, len(keys), "the agents' process is not there"))
        return job

    def _order(self, pages: int, job: SaveJob) -> tuple[int, float]:
        """Return the number of a save that is sent now, and its deadline."""
        until = time.monotonic() + self._config.save_timeout_s
        return self._orders.save(pages, until + GRACE_S, job), until

    def load(self, agent: "RemoteAgent", keys: Sequence[bytes], units: dict[str, bytes]) -> LoadJob:
        """Only when the process is ready: computing is sooner done than a process started."""
        if not self.loads:
            job = new_load()
            job.done.set_result(LoadResult(0, 0, "the agents' process is not ready"))
            return job
        until = time.monotonic() + self._config.load_timeout_s
        number, job = self._orders.load(len(keys), until + GRACE_S)
        self._give(Kind.LOAD, number, agent.number, until, keys, units, self._marks.record(), packed_now())
        return job

    def _give(
        self,
        kind: Kind,
        number: int,
        agent: int,
        until: float,
        keys: Sequence[bytes],
        units: dict[str, bytes],
        mark: int,
        trace: bytes,
    ) -> None:
        order = frames.Order(number, agent, mark, until, keys, units, trace)
        try:
            self._child.give(frames.order_frame(kind, order))
        except (Exhausted, InvalidRequest) as error:  # it was not given
            self._orders.fail(number, str(error))

    # ---- Owner -----------------------------------------------------------------------------

    def setup(self) -> tuple[dict[str, Any], Sequence[int]]:
        storages, pools, inherited = described_pools(place.pool for place in self._places if place)
        return {
            "task": self.name,
            "device": str(self._device),
            "client": asdict(self._client),
            "marks": self._marks.handles(),
            "storages": storages,
            "pools": pools,
            "agents": [self._facts_of(agent) for agent in self._agents.values()],
        }, inherited

    def hear(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.GATHERED:
            self._orders.gathered(frames.parse_number(body))
        elif kind is Kind.SAVED:
            self._orders.saved(frames.parse_saved(body))
        elif kind is Kind.LOADED:
            self._orders.loaded(frames.parse_loaded(body))
        else:
            raise ProtocolError(f"the agents' process sent {kind.name}")

    def overdue(self, now: float) -> bool:
        return self._orders.overdue(now)

    def lost(self) -> int:
        return self._orders.fail_all("the agents' process died")

    def _facts_of(self, agent: "RemoteAgent") -> dict[str, Any]:
        pools = [group for group, place in enumerate(self._places) if place]
        return {
            "number": agent.number,
            "pool": pools.index(agent.group),
            "namespace": namespace_message(agent.namespace).SerializeToString().hex(),
            "config": asdict(config_at(self._config, self._places, agent.place)),
        }


class RemoteAgent:
    """`gpu_agent.blocks.homes.BlockAgent`: a group's agent in the other process."""

    def __init__(self, home: AgentProcess, number: int, group: int, namespace: Namespace, place: Place) -> None:
        self.namespace = namespace
        self.number = number
        self.group = group
        self.place = place
        self._home = home

    def save(self, keys: Sequence[bytes], blocks: Sequence[int]) -> SaveJob:
        check_blocks(self.place, keys, blocks)
        return self._home.save(self, keys, {self.place.space: array("q", blocks).tobytes()})

    def load(self, keys: Sequence[bytes], blocks: Sequence[int]) -> LoadJob:
        check_blocks(self.place, keys, blocks)
        return self._home.load(self, keys, {self.place.space: array("q", blocks).tobytes()})
