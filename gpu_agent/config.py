"""Limits of one agent. Environment: KVSTORE_AGENT_WORKERS, KVSTORE_AGENT_LOAD_TIMEOUT_S, ..."""

import os
from dataclasses import dataclass
from typing import Any

from kvstore.config import check_settings, load, setting
from kvstore.errors import ConfigError


@dataclass(frozen=True)
class AgentConfig:
    """Saves and loads run apart from each other, each with these limits.

    Memory held from the start: 2 x workers x staging_nbytes (saves and loads), 128 MiB by default.
    """

    workers: int = setting(2, "threads for saves, and as many for loads", 1, 64)
    staging_nbytes: int = setting(32 << 20, "page buffer of one thread; at least one page", 4096, 4 << 30)
    hashers: int = setting(
        0, "threads for checksums of pages in a node's mapped memory; 0: half of the CPUs, 2 to 16", 0, 256
    )
    pending_nbytes_max: int = setting(
        2 << 30, "page bytes of saves (and of loads) accepted and not done; more are refused", 4096, 1 << 40
    )
    lookup_timeout_s: float = setting(1.0, "deadline of a lookup", 0.001, 60.0)
    save_timeout_s: float = setting(20.0, "deadline of a save, its wait for a thread included", 0.001, 600.0)
    load_timeout_s: float = setting(10.0, "deadline of a load, its wait for a thread included", 0.001, 600.0)

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.hashers:
            object.__setattr__(self, "hashers", min(max(2, (os.cpu_count() or 2) // 2), 16))
        if self.pending_nbytes_max < self.staging_nbytes:
            raise ConfigError(
                f"pending_nbytes_max={self.pending_nbytes_max} is smaller than staging_nbytes={self.staging_nbytes}: "
                "a job of one buffer would never be accepted"
            )


def agent_config(**values: Any) -> AgentConfig:
    """AgentConfig from explicit values, the environment (KVSTORE_AGENT_*) and the defaults."""
    return load(AgentConfig, "KVSTORE_AGENT", values)
