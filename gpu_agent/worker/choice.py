"""Where a rank's agents live: a process of their own beside an engine on a GPU, threads beside one on a CPU."""

import logging
from collections.abc import Sequence

from gpu_agent.blocks.backends import AgentBackend, GroupPool, LocalBackend
from gpu_agent.blocks.lookups import LookupBackend, ThreadLookups
from gpu_agent.options import AgentConfig
from gpu_agent.worker.lookup_client import ProcessLookups
from gpu_agent.worker.process_backend import ProcessBackend
from kvstore.client import Client
from kvstore.config import ClientConfig
from kvstore.errors import ConfigError

log = logging.getLogger(__name__)

READY_S = 15.0  # that an engine's start waits for a process
WHERE = ("auto", "process", "threads")


def asker_of(client: ClientConfig, on_gpu: bool, where: str) -> LookupBackend:
    """Who asks for a scheduler; `on_gpu`: its engine computes on one."""
    if where == "process" or (where == "auto" and on_gpu):
        try:
            asker = ProcessLookups(client)
        except (ConfigError, OSError) as error:
            if where == "process":
                raise
            log.warning("lookups run inside the engine's process and slow it, another can not be started: %s", error)
        else:
            if not asker.await_ready(READY_S):
                log.warning("the process of the lookups is not ready after %.0f s; until then there is no hit", READY_S)
            return asker
    return ThreadLookups(Client(client))


def home_of(places: Sequence[GroupPool | None], client: ClientConfig, config: AgentConfig, where: str) -> AgentBackend:
    """`where`: one of WHERE. Raises ConfigError if a process is asked for and can not have the memory."""
    devices = {place.pool.device.type for place in places if place}
    if where == "process" or (where == "auto" and devices == {"cuda"}):
        try:
            return ProcessBackend(places, client, config)
        except (ConfigError, OSError) as error:
            if where == "process":
                raise
            log.warning(
                "the agents run inside the engine's process and slow it, no other can have its memory: %s", error
            )
    return LocalBackend(places, client, config)
