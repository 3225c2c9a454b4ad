"""Import a module when a test first uses it.

transformers takes three seconds. Each worker collects all files, and only one runs those that need
it (`WITH_TRANSFORMERS` in tests/conftest.py).
"""

import gc
import importlib
import sys
from importlib.metadata import version
from typing import Any


class Lazily:
    """Stand for a module, which is imported at the first use of a name in it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for marks of its own
            raise AttributeError(name)
        if self._name not in sys.modules:
            gc.disable()
            try:
                importlib.import_module(self._name)
            finally:
                gc.freeze()  # as `pytest_collection` in tests/conftest.py does
                gc.enable()
        return getattr(sys.modules[self._name], name)


transformers = Lazily("transformers")
adapters = Lazily("gpu_agent.engines.transformers")
paged_adapters = Lazily("gpu_agent.engines.transformers_paged")
IS_PAGED = tuple(map(int, version("transformers").split(".")[:2])) >= (5, 19)
UNPAGED = "needs transformers 5.19 or newer"


def batching_config(**fields: Any) -> Any:
    utilities = importlib.import_module("transformers.generation.configuration_utils")
    return utilities.ContinuousBatchingConfig(**fields)
