"""Register our connectors with vLLM, so that its arguments name them without a module path.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`), also for users
who have this package and do not use it. So it imports nothing: vLLM's factories would take a
second. It waits until vLLM imports them, and registers then.
"""

import importlib.machinery
import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import NamedTuple

log = logging.getLogger(__name__)


class _Factory(NamedTuple):
    """A factory of vLLM, its method, and our classes with their modules."""

    name: str
    method: str
    classes: dict[str, str]


# By module
FACTORIES = {
    "vllm.distributed.kv_transfer.kv_connector.factory": _Factory(
        "KVConnectorFactory",
        "register_connector",
        {
            "KVStoreConnector": "gpu_agent.engines.vllm",
            "KVStoreOffloadingConnector": "gpu_agent.engines.vllm_tier",
        },
    ),
    "vllm.distributed.ec_transfer.ec_connector.factory": _Factory(
        "ECConnectorFactory",
        "register_connector",
        {"KVStoreEncoderConnector": "gpu_agent.engines.vllm_encoder"},
    ),
    "vllm.v1.kv_offload.tiering.factory": _Factory(
        "SecondaryTierFactory", "register_tier", {"KVStoreTier": "gpu_agent.engines.vllm_tier"}
    ),
}


def register() -> None:
    """Register our classes, now or when vLLM imports the factory. Raises nothing."""
    for module in FACTORIES:
        if module in sys.modules:
            _add(sys.modules[module])
    if not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def _add(module: ModuleType) -> None:
    """Add our classes to a factory; a name that it has keeps its class."""
    found = FACTORIES[module.__name__]
    for name, home in found.classes.items():
        try:
            getattr(getattr(module, found.name), found.method)(name, home, name)
        except Exception as error:  # noqa: BLE001 -- vLLM must start, whatever it has become
            log.debug("%s is not registered: %s", name, error)


class _Waiting(MetaPathFinder):
    """Find the factories' modules as Python does, and add our classes after their execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a factory's module; None for any other."""
        if fullname not in FACTORIES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader = spec.loader if spec else None
        if loader is None:
            return None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _add(module)

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign]
        except AttributeError:  # a loader without attributes of its own: vLLM goes on without us
            log.debug("%s is not watched", fullname)
        return spec
