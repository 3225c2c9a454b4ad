"""Carry out an engine's saves and loads in a worker process.

    SETUP ---> the engine's memory mapped, a client, an agent per pool ---> READY
    SAVE, LOAD ---> Agent.save, Agent.load ---> GATHERED, SAVED, LOADED     by the agents' threads

The other side of `process_backend.py`. `__main__.py` starts and ends it.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from gpu_agent.agent import Agent
from gpu_agent.load_pipeline import LoadJob, SaveJob
from gpu_agent.options import AgentConfig
from gpu_agent.outage_log import OutageLog
from gpu_agent.pool import KVPool
from gpu_agent.worker import frames
from gpu_agent.worker.frames import AgentsEnd, Kind, Loaded, Saved
from gpu_agent.worker.ipc_memory import opened_memory, opened_pool
from kvstore.client import Client
from kvstore.config import ClientConfig
from kvstore.errors import InvalidRequest, ProtocolError
from kvstore.messages import parse_namespace
from kvstore.sync import start_thread
from kvstore.tracing import unpacked_all, within

_OVER_S = 0.001  # for an order that comes too late: its agent reports that


class AgentWorker:
    """Run agents by an engine's orders until it ends."""

    def __init__(self, channel: AgentsEnd, setup: Mapping[str, Any]) -> None:
        try:
            self._client = Client(ClientConfig(**setup["client"]))
            self._events, self._storages = opened_memory(setup)
            self._views = setup["pools"]
            wanted = setup["agents"]
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"not a setup: {error!r}") from error
        self._channel = channel
        self._pools: dict[int, KVPool] = {}
        self._agents: dict[int, Agent] = {}
        self._outage = OutageLog()
        for facts in wanted:
            self._add(facts)
        channel.send(frames.ready_frame(time.monotonic()))

    def run(self) -> None:
        """Serve until CLOSE.

        Raises ConnectionError when the engine is gone, ProtocolError for a wrong frame.
        """
        while True:
            kind, body = self._channel.receive()
            if kind is Kind.SAVE:
                self._save(frames.parse_order(body))
            elif kind is Kind.LOAD:
                self._load(frames.parse_order(body))
            elif kind is Kind.ADD:
                self._add(frames.parse_facts(body))
            elif kind is Kind.RETIRE:
                agent = self._agents.pop(frames.parse_number(body), None)
                if agent:
                    start_thread(agent.close, "kvstore-close")
            elif kind is Kind.CLOSE:
                self._close(frames.parse_close(body))
                return
            else:
                raise ProtocolError(f"the engine sent {kind.name}")

    def _add(self, facts: Mapping[str, Any]) -> None:
        try:
            namespace = parse_namespace(bytes.fromhex(facts["namespace"]))
            number, pool = facts["number"], facts["pool"]
            if pool not in self._pools:
                self._pools[pool] = opened_pool(self._views[pool], namespace.layout, self._storages)
            config = AgentConfig(**facts["config"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"no description of an agent: {error!r}") from error
        agent = Agent(self._client, namespace, self._pools[pool], config, outage=self._outage)
        self._agents[number] = agent
        agent.prepare()

    def _save(self, order: frames.Order) -> None:
        try:
            agent, indices, fence = (
                self._agent(order),
                _slot_indices(order),
                self._events.fence(order.event),
            )
            with within(unpacked_all(order.trace)):
                job = agent.save(order.keys, indices, timeout_s=_left_s(order), fence=fence)
        except InvalidRequest as error:
            self._channel.send(
                frames.saved_frame(Saved(order.number, 0, 0, len(order.keys), str(error)))
            )
            return

        def gathered(_: object) -> None:
            self._channel.send(frames.number_frame(Kind.GATHERED, order.number))
            # Only now: a save that failed at once is done before it is gathered, and the engine's
            # process takes SAVED as the end of the order.
            job.done.add_done_callback(partial(self._saved, order.number, job))

        job.gathered.add_done_callback(gathered)

    def _saved(self, number: int, job: SaveJob, _: object) -> None:
        result = job.done.result()
        said = Saved(number, result.stored, result.existing, result.dropped, result.reason)
        self._channel.send(frames.saved_frame(said))

    def _load(self, order: frames.Order) -> None:
        try:
            agent, indices, fence = (
                self._agent(order),
                _slot_indices(order),
                self._events.fence(order.event),
            )
            with within(unpacked_all(order.trace)):
                job = agent.load(order.keys, indices, timeout_s=_left_s(order), fence=fence)
        except InvalidRequest as error:
            self._channel.send(frames.loaded_frame(Loaded(order.number, 0, 0, str(error))))
            return
        job.done.add_done_callback(partial(self._loaded, order.number, job))

    def _loaded(self, number: int, job: LoadJob, _: object) -> None:
        result = job.done.result()
        self._channel.send(
            frames.loaded_frame(Loaded(number, result.pages, result.loaded, result.error))
        )

    def _agent(self, order: frames.Order) -> Agent:
        if order.agent not in self._agents:
            raise InvalidRequest(
                f"order {order.number} is for agent {order.agent}, which is not here"
            )
        return self._agents[order.agent]

    def _close(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for agent in self._agents.values():
            agent.close(max(0.0, end - time.monotonic()))
        self._client.close()


def _left_s(order: frames.Order) -> float:
    return max(_OVER_S, order.until - time.monotonic())


def _slot_indices(order: frames.Order) -> dict[str, torch.Tensor]:
    return {
        space: torch.frombuffer(bytearray(indices), dtype=torch.int64)
        if indices
        else torch.empty(0, dtype=torch.int64)
        for space, indices in order.slot_indices.items()
    }
