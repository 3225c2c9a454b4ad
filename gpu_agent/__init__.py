"""gpu_agent: per-GPU agent that moves KV between an engine's pool and the store. Needs torch.

engine's tensors --- pool.py: a view --- transfer.py: pages <-> slots --- agent.py: jobs --- kvstore.Client
"""

from gpu_agent.agent import Agent
from gpu_agent.config import AgentConfig, agent_config
from gpu_agent.jobs import AgentStats, LoadJob, LoadResult, SaveJob, SaveResult
from gpu_agent.pool import KVPool
from gpu_agent.transfer import TorchTransfer, Transfer
from gpu_agent.units import Units, UnitTable

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
