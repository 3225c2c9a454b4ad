"""Provide the module that LightLLM's disk cache imports (docs/engines/lightllm.md).

Nothing installs it: this folder's parent goes on PYTHONPATH of LightLLM's server only. There it
precedes an installed LightMem, which has the same name.
"""

from gpu_agent.engines.lightllm import PyLocalCacheService, PyState

__all__ = ["PyLocalCacheService", "PyState"]
