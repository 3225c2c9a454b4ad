"""Run agents and lookups in processes beside an engine on a GPU, in threads beside one on a CPU."""

import logging
from collections.abc import Sequence

from gpu_agent.blocks.backends import AgentBackend, LocalBackend, ShardPool
from gpu_agent.blocks.lookups import LookupBackend, ThreadLookups
from gpu_agent.options import AgentConfig
from gpu_agent.worker.lookup_client import ProcessLookups
from gpu_agent.worker.process_backend import ProcessBackend
from kvstore.client import Client
from kvstore.config import ClientConfig
from kvstore.errors import ConfigError

log = logging.getLogger(__name__)

READY_S = 15.0  # time that an engine's start waits for a process
WHERE = ("auto", "process", "threads")


def lookup_backend_for(client: ClientConfig, on_gpu: bool, where: str) -> LookupBackend:
    """Return the lookups of a scheduler.

    `on_gpu`: its engine computes on a GPU. `where`: one of WHERE.
    """
    if where == "process" or (where == "auto" and on_gpu):
        Client(client).close()  # raises ConfigError here; the process would restart for ever
        try:
            lookups = ProcessLookups(client)
        except (ConfigError, OSError) as error:
            if where == "process":
                raise
            log.warning(
                "lookups run inside the engine's process and slow it; another process can "
                "not be started: %s",
                error,
            )
        else:
            if not lookups.await_ready(READY_S):
                log.warning(
                    "the lookup process is not ready after %.0f s; until then there are no hits",
                    READY_S,
                )
            return lookups
    return ThreadLookups(Client(client))


def agent_backend_for(
    shards: Sequence[ShardPool], client: ClientConfig, config: AgentConfig, where: str
) -> AgentBackend:
    """Return the agents of a rank.

    `where`: one of WHERE. Raises ConfigError if it is "process" and the engine's memory can not be
    shared with a process.
    """
    devices = {shard.pool.device.type for shard in shards}
    # A rank without layers has no shards, and needs no process
    if shards and (where == "process" or (where == "auto" and devices == {"cuda"})):
        Client(client).close()  # raises ConfigError here, as for lookups
        try:
            return ProcessBackend(shards, client, config)
        except (ConfigError, OSError) as error:
            if where == "process":
                raise
            log.warning(
                "the agents run inside the engine's process and slow it; its memory can "
                "not be shared: %s",
                error,
            )
    return LocalBackend(shards, client, config)
