"""Where a rank's agents live: a process of their own beside an engine on a GPU, threads beside one on a CPU."""

import logging
from collections.abc import Sequence

from gpu_agent.blocks.askers import Asker, ThreadAsker
from gpu_agent.blocks.homes import Home, InProcess, Place
from gpu_agent.config import AgentConfig
from gpu_agent.process.asking import AskProcess
from gpu_agent.process.home import AgentProcess
from kvstore.client import Client
from kvstore.config import ClientConfig
from kvstore.errors import ConfigError

log = logging.getLogger(__name__)

READY_S = 15.0  # that an engine's start waits for a process
WHERE = ("auto", "process", "threads")


def asker_of(client: ClientConfig, on_gpu: bool, where: str) -> Asker:
    """Who asks for a scheduler; `on_gpu`: its engine computes on one."""
    if where == "process" or (where == "auto" and on_gpu):
        try:
            asker = AskProcess(client)
        except (ConfigError, OSError) as error:
            if where == "process":
                raise
            log.warning("lookups run inside the engine's process and slow it, another can not be started: %s", error)
        else:
            if not asker.await_ready(READY_S):
                log.warning("the process of the lookups is not ready after %.0f s; until then there is no hit", READY_S)
            return asker
    return ThreadAsker(Client(client))


def home_of(places: Sequence[Place | None], client: ClientConfig, config: AgentConfig, where: str) -> Home:
    """`where`: one of WHERE. Raises ConfigError if a process is asked for and can not have the memory."""
    devices = {place.pool.device.type for place in places if place}
    if where == "process" or (where == "auto" and devices == {"cuda"}):
        try:
            return AgentProcess(places, client, config)
        except (ConfigError, OSError) as error:
            if where == "process":
                raise
            log.warning(
                "the agents run inside the engine's process and slow it, no other can have its memory: %s", error
            )
    return InProcess(places, client, config)
