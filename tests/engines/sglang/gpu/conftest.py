"""SGLang's real engine on this machine's GPU: `make gpu-test-sglang`.

An ordinary installation, unpatched, with tiny models in bfloat16; each engine in a process of its
own, with SGLang's own processes below it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_apart import close_all
from sglang_handle import SGLangHandle

HERE = Path(__file__).parent


TINY = {"dtype": "bfloat16", "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: make gpu-test-sglang"))


@pytest.fixture(scope="session")
def _one_rank() -> None:
    """Of the tests without a GPU, whose SGLang runs in their own process: not here."""


@pytest.fixture(scope="module")
def engines(
    models: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., SGLangHandle]]:
    """`engines(name, model={...}, ...)`: an engine with a tiny Llama of this kind, which is
    starting.

    `model`: changes of the model's configuration. Everything else goes to sglang.Engine.
    """
    running: dict[str, SGLangHandle] = {}
    faults = tmp_path_factory.mktemp("faults")

    def engine(name: str, model: dict[str, Any] | None = None, **arguments: Any) -> SGLangHandle:
        path = models("llama", **{**TINY, **(model or {})})
        running[name] = SGLangHandle(name, {"model_path": path, **arguments}, faults / name)
        return running[name]

    yield engine
    close_all(running)
