"""gpu_agent: per-GPU agent that moves KV between an engine's pool and the store. Needs torch.

engine's tensors --- pool.py: a view --- transfer.py: pages <-> slots --- agent.py: jobs --- kvstore.Client

What is named here is imported when it is used: torch takes seconds and 200 MB, and the process that asks the store for
an engine's scheduler does without.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_agent.agent import Agent
    from gpu_agent.config import AgentConfig, agent_config
    from gpu_agent.jobs import AgentStats, LoadJob, LoadResult, SaveJob, SaveResult
    from gpu_agent.pool import KVPool
    from gpu_agent.transfer import TorchTransfer, Transfer
    from gpu_agent.units import Units, UnitTable

_FILES = {
    "agent": ("Agent",),
    "config": ("AgentConfig", "agent_config"),
    "jobs": ("AgentStats", "LoadJob", "LoadResult", "SaveJob", "SaveResult"),
    "pool": ("KVPool",),
    "transfer": ("TorchTransfer", "Transfer"),
    "units": ("UnitTable", "Units"),
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names}

__all__ = [
    "Agent",
    "AgentConfig",
    "AgentStats",
    "KVPool",
    "LoadJob",
    "LoadResult",
    "SaveJob",
    "SaveResult",
    "TorchTransfer",
    "Transfer",
    "UnitTable",
    "Units",
    "agent_config",
]


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FILE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
