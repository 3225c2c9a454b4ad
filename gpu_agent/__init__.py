"""Move KV between an engine's pool and the store, with an agent per GPU.

Needs torch.

    engine's tensors -- pool.py: views -- transfer.py: pages <-> slots -- agent.py: jobs -- Client

Names are imported on first use: torch takes seconds and 200 MB, and the process that makes lookups
for an engine's scheduler does not need it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_agent.agent import Agent, AgentStats
    from gpu_agent.load_pipeline import LoadJob, LoadResult, SaveJob, SaveResult
    from gpu_agent.options import AgentConfig, agent_config
    from gpu_agent.pool import KVPool, Units, UnitTable
    from gpu_agent.transfer import TorchTransfer, Transfer

_FILES = {
    "agent": ("Agent", "AgentStats"),
    "load_pipeline": ("LoadJob", "LoadResult", "SaveJob", "SaveResult"),
    "options": ("AgentConfig", "agent_config"),
    "pool": ("KVPool", "UnitTable", "Units"),
    "transfer": ("TorchTransfer", "Transfer"),
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
