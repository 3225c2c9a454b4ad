"""SGLang's real engine on this machine's GPU: `make gpu-test-sglang`.

It is an ordinary, unpatched installation with tiny models in bfloat16. Each engine runs in a
process of its own, with SGLang's own processes as its children.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_apart import close_all
from sglang_handle import SGLangHandle

HERE = Path(__file__).parent


TINY = {"dtype": "bfloat16", "hidden_size": 256, "intermediate_size": 512}
LLAMA = {"head_dim": 64}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: make gpu-test-sglang"))


@pytest.fixture(scope="session")
def _one_rank() -> None:
    """Replace the fixture of the CPU tests, which run SGLang in their own process."""


@pytest.fixture(scope="module")
def engines(
    models: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., SGLangHandle]]:
    """Return `engines(name, model={...}, ...)`, which begins to start an engine with a tiny model.

    `kind`: a model of `tiny_models`, a Llama if not given; `model` changes its configuration. All
    other arguments go to sglang.Engine.
    """
    running: dict[str, SGLangHandle] = {}
    faults = tmp_path_factory.mktemp("faults")

    def engine(
        name: str, model: dict[str, Any] | None = None, kind: str = "llama", **arguments: Any
    ) -> SGLangHandle:
        path = models(kind, **{**TINY, **(LLAMA if kind == "llama" else {}), **(model or {})})
        running[name] = SGLangHandle(name, {"model_path": path, **arguments}, faults / name)
        return running[name]

    yield engine
    close_all(running)
