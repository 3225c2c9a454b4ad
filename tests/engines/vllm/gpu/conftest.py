"""vLLM's real engine on this machine's GPU: `make gpu-test-vllm`.

It is the official, unpatched wheel with tiny models in bfloat16. Each engine runs in a process of
its own, with its agents' processes beside it, as in production.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
from engine_handle import EngineHandle
from gpu_answers import FULL_GRAPHS

# Without autotuning, all engines run the same kernels of recurrent layers, to the last bit.
os.environ.setdefault("VLLM_TRITON_FORCE_FIRST_CONFIG", "1")

MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "full graphs": FULL_GRAPHS,
}
# All engines of a file share the GPU, so none may size its cache by the GPU's free memory.
GPU: dict[str, Any] = {
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 256 << 20,
    "gpu_memory_utilization": 0.03,
}


@pytest.fixture(params=MODES, scope="module")
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the arguments that select how the engine runs decodes."""
    return MODES[request.param]


@pytest.fixture(scope="module")
def on_gpu(
    engines: Callable[..., EngineHandle], models: Callable[..., str]
) -> Callable[..., EngineHandle]:
    """Return `on_gpu(name, "llama", store={...}, ...)`, which makes an engine with a tiny model."""

    def engine(
        name: str, kind: str = "llama", store: dict[str, Any] | None = None, **arguments: Any
    ) -> EngineHandle:
        return engines(
            name, store=store, **{**GPU, "model": models(kind, dtype="bfloat16"), **arguments}
        )

    return engine
