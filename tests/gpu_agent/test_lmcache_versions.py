"""Our `plugin` adapter with two releases of LMCache, without LMCache.

The base class of 0.5.7 has one more abstract method. `make test-lmcache` tests the real releases.
"""

import abc
import enum
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest

# The abstract methods of L2AdapterInterface in each release.
METHODS_056 = (
    "close",
    "get_load_event_fd",
    "get_lookup_and_lock_event_fd",
    "get_store_event_fd",
    "pop_completed_store_tasks",
    "query_load_result",
    "query_lookup_and_lock_result",
    "submit_load_task",
    "submit_lookup_and_lock_task",
    "submit_store_task",
    "submit_unlock",
)
METHODS_057 = (*METHODS_056, "get_memory_tags")
MODULE = "gpu_agent.engines.lmcache"


class Segment(enum.Enum):
    STORAGE = "storage"
    DRAM = "dram"


class Residency(enum.Enum):
    REMOTE = "remote"
    LOCAL = "local"


class Tags(NamedTuple):
    segment: Segment
    residency: Residency


class Notifier:
    def __init__(self) -> None:
        self._fd = os.eventfd(0)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


def base_class(methods: tuple[str, ...]) -> type:
    def init(self: Any, max_capacity_bytes: int = 0) -> None:
        self.capacity = max_capacity_bytes

    abstract = {name: abc.abstractmethod(lambda self: None) for name in methods}
    return abc.ABCMeta("L2AdapterInterface", (), {"__init__": init, **abstract})


def release(monkeypatch: pytest.MonkeyPatch, methods: tuple[str, ...], **api: Any) -> Any:
    """Import our adapter's module with a release of these abstract methods and `api` names."""
    names: dict[str, dict[str, Any]] = {
        "lmcache": {},
        "lmcache.lmcache_native": {"Bitmap": object},
        "lmcache.v1": {},
        "lmcache.v1.platform": {"create_event_notifier": Notifier},
        "lmcache.v1.distributed": {},
        "lmcache.v1.distributed.api": {
            "EncodedObjectKey": object,
            "KeyEntry": object,
            "KeyListPage": tuple,
            **api,
        },
        "lmcache.v1.distributed.internal_api": {"L2StoreResult": object},
        "lmcache.v1.distributed.l2_adapters": {},
        "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": base_class(methods)},
    }
    for name, content in names.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return importlib.import_module(MODULE)


@pytest.fixture(autouse=True)
def _unload_adapter() -> Iterator[None]:
    yield
    sys.modules.pop(MODULE, None)


def adapter(module: Any) -> Any:
    return module.NodeAdapter({"address": "127.0.0.1:9", "revision": "r", "kv_format": "f"})


def test_adapter_for_057_reports_remote_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = {"MemorySegment": Segment, "MemoryResidency": Residency, "MemoryTags": Tags}
    made = adapter(release(monkeypatch, METHODS_057, **api))
    try:
        assert made.get_memory_tags() == Tags(Segment.STORAGE, Residency.REMOTE)
    finally:
        made.close()


def test_adapter_for_056_needs_no_names_of_057(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = adapter(release(monkeypatch, METHODS_056))
    made.close()
