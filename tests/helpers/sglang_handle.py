"""The tests' side of sglang_process.py, and the engine's arguments for the store."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_answers import agree, answers, cached, found_locally, prompt
from engine_apart import EngineApart
from restartable_node import RestartableNode

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STORED_S = 60.0
# Timeouts for a busy machine, in tests that do not test time.
PATIENT = {
    "lookup_timeout_s": 5.0,
    "load_timeout_s": 10.0,
    "connect_timeout_s": 5.0,
    "backoff_s_max": 0.1,
}


def hicache(
    address: str,
    layout: str = "page_first",
    io: str = "kernel",
    policy: str = "wait_complete",
    module: str = "gpu_agent.engines.sglang",
    **options: Any,
) -> dict[str, Any]:
    """Return SGLang's arguments for HiCache with the store.

    `policy`: how SGLang waits for a prefetch; its default policy gives up after a while.
    """
    extra = {
        "backend_name": "kvstore",
        "module_path": module,
        "class_name": "KVStoreHiCache",
        "interface_v1": 1,
    }
    return {
        "enable_hierarchical_cache": True,
        "hicache_mem_layout": layout,
        "hicache_io_backend": io,
        "hicache_storage_prefetch_policy": policy,
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(
            {**extra, "address": address, **PATIENT, **options}
        ),
    }


def linker(
    address: str, module: str = "gpu_agent.engines.sglang_linker", **options: Any
) -> dict[str, Any]:
    """Return SGLang's arguments for the linker."""
    config = {
        "linker": "KVStoreLinker",
        "linker_module_path": module,
        "linker_extra_config": {"address": address, **PATIENT, **options},
    }
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": config,
    }


class SGLangHandle(EngineApart):
    """One SGLang engine; `faults` is the file from which it takes faults, see faulty.py."""

    def __init__(self, name: str, arguments: dict[str, Any], faults: Path) -> None:
        self._faults = faults
        paths = [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
        more = {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "KVSTORE_TEST_FAULTS": str(faults),
        }
        super().__init__(
            name,
            HERE / "sglang_process.py",
            arguments,
            {**os.environ, "HF_HUB_OFFLINE": "1", **more},
        )

    def reset(self) -> None:
        assert self.ask("reset")["done"], (
            f"{self._name} does not become idle:\n{self.said()[-3000:]}"
        )

    def chain(self, whole: Sequence[int]) -> list[bytes]:
        """Return the hashes of a prompt's full pages."""
        return [bytes.fromhex(name) for name in self.ask("chain", prompt=list(whole))["hashes"]]

    def arm(self, **fault: Any) -> None:
        """Arm a fault; the engine must use the adapters of faulty.py."""
        written = self._faults.with_suffix(".new")
        written.write_text(json.dumps(fault))
        written.rename(self._faults)
        end = time.monotonic() + STORED_S
        while self._faults.exists():
            assert time.monotonic() < end, "the engine does not take the fault"
            time.sleep(0.01)


def from_store(found: Sequence[dict[str, Any]]) -> list[int]:
    """Return how many prompt tokens each request found in the store.

    SGLang counts tokens of the linker as found in host memory.
    """
    return [one["details"].get("storage", one["details"].get("host", 0)) for one in found]


def wait_stored(engine: SGLangHandle, store: RestartableNode, *prompts: Sequence[int]) -> None:
    """Wait until all full pages of these prompts are in the store."""
    end = time.monotonic() + STORED_S
    with store.client() as client:
        for one in prompts:
            names = engine.chain(one)
            while not any(
                client.lookup(space, names).prefix_pages == len(names)
                for space, _ in client.namespaces()
            ):
                assert time.monotonic() < end, (
                    f"not stored after {STORED_S} s:\n{engine.said()[-3000:]}"
                )
                time.sleep(0.02)


def wait_hit(engine: SGLangHandle, whole: Sequence[int], **order: Any) -> None:
    """Wait until the engine finds all full pages of this prompt in the store.

    The engine may have to store them again first.
    """
    end = time.monotonic() + STORED_S
    while from_store(engine.alone(whole, **order)) != [len(whole) // 64 * 64]:
        engine.generate(whole, **order)
        assert time.monotonic() < end, f"no hit after {STORED_S} s:\n{engine.said()[-3000:]}"
        time.sleep(0.1)


def found_locally_and_stored(
    engine: SGLangHandle, store: RestartableNode, *prompts: Sequence[int], **order: Any
) -> list[dict[str, Any]]:
    """Return the answers of an engine that finds each prompt in its own cache, just computed.

    All full pages are in the store afterwards.
    """
    found = []
    for one in prompts:
        engine.reset()
        assert from_store(engine.generate(one, **order)) == [0], (
            "the prompt is already in the store"
        )
        found += engine.generate(one, **order)
        wait_stored(engine, store, one)
    assert from_store(found) == [0] * len(prompts)
    return found


def continued_locally(
    engine: SGLangHandle, first: Sequence[int], whole: Sequence[int], salt: str
) -> list[dict[str, Any]]:
    """Return the answer to `whole` of an engine that just computed `first`, under a new salt."""
    engine.reset()
    assert from_store(engine.generate(first, salts=[salt])) == [0], (
        "the salt is already in the store"
    )
    found = engine.generate(whole, salts=[salt])
    assert from_store(found) == [0]
    return found


def check_store_hits(writer: SGLangHandle, reader: SGLangHandle, store: RestartableNode) -> None:
    """Compare hits in the store with local hits of the same and of another process."""
    prompts = [prompt(1, 700), prompt(2, 1300), prompt(3, 1921)]
    expected = found_locally_and_stored(writer, store, *prompts)
    own, found = writer.alone(*prompts), reader.alone(*prompts)
    assert from_store(own) == from_store(found) == [640, 1280, 1920]
    assert answers(own) == answers(expected)
    assert answers(found) == answers(found_locally(reader, *prompts))
    assert agree(found, expected)


def check_partial_hit(writer: SGLangHandle, reader: SGLangHandle, store: RestartableNode) -> None:
    """Compare the same where the stored prefix ends with a shorter prompt."""
    head = prompt(10, 640)
    first, own_whole, whole = (
        head + prompt(seed, tokens) for seed, tokens in ((11, 10), (12, 500), (13, 500))
    )
    found_locally_and_stored(writer, store, first)
    own, found = writer.alone(own_whole), reader.alone(whole)
    assert from_store(own) == from_store(found) == [640]
    own_expected = continued_locally(writer, first, own_whole, "only the writer's")
    expected = continued_locally(reader, first, whole, "only the reader's")
    assert cached(own_expected) == cached(expected) == [640]
    assert answers(own) == answers(own_expected)  # same tokens computed in the same steps
    assert agree(found, expected)  # another engine computed the head, perhaps without CUDA graphs
