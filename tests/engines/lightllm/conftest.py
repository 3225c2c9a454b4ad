"""Run LightLLM's own CPU cache client, disk worker and request path, unpatched, on CPU pages.

A `Server` holds the parts of one LightLLM server process. Every module comes from the LightLLM
repository, with the packages it imports (install.sh). Only objects that other processes would
create, such as a request or the pipes, are stand-ins.
"""

import inspect
import itertools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from gpu_agent.engines.lightllm import light_mem_path
from kvstore.tools.node_process import NodeProcess

PAGE_TOKENS = 64
PAGES = 24
# The same fields as in `calcu_cpu_cache_meta`: (tokens, layers, heads, dim, dtype, scale dim).
KINDS: dict[str, tuple[int, int, int, int, torch.dtype, int]] = {
    "bf16": (PAGE_TOKENS, 3, 2 * 4, 16, torch.bfloat16, 0),
    "int8": (PAGE_TOKENS, 3, 2 * 4, 16, torch.int8, 16 // 8),
    "mla": (PAGE_TOKENS, 3, 1, 512 + 64, torch.bfloat16, 0),
    "hybrid": (1, 1, 1, 50_000, torch.uint8, 0),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "hybrid": {
        "model_type": "qwen3_5",
        "text_config": {"linear_num_key_heads": 4, "full_attention_interval": 4},
    }
}
# Long timeouts, for tests that do not test timing. Variables that a test sets take precedence.
PATIENT = {
    "KVSTORE_AGENT_LOOKUP_TIMEOUT_S": "10",
    "KVSTORE_AGENT_LOAD_TIMEOUT_S": "30",
    "KVSTORE_BACKOFF_S_MAX": "0.5",
}
_numbers = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Show warnings without failing on them.

    LightLLM's code warns, and so do its shared memory objects when they are garbage collected.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", autouse=True)
def modules() -> Iterator[None]:
    """Prepare what `import lightllm...` needs: `light_mem` on the path and a server's arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(light_mem_path())
        patch.setenv("LIGHTLLM_DISK_CACHE_PROMPT_LIMIT_LENGTH", "0")
        patch.setenv("LIGHTLLM_UNIQUE_SERVICE_NAME_ID", "kvstore-test")
        patch.setenv("LIGHTLLM_START_ARGS", json.dumps({"model_dir": "/nowhere"}))
        yield
    logging.disable(logging.INFO)  # LightLLM logs at exit, after pytest closed the stream


class Server:
    """One LightLLM server: its CPU cache `client`, its disk `worker` and its request `match`.

    `match` runs LightLLM's handling of a request before the router.
    """

    def __init__(self, kind: str, arguments: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
        from lightllm.server.multi_level_kv_cache import cpu_cache_client
        from lightllm.utils import envs_utils
        from lightllm.utils.kv_cache_utils import CpuKVCacheMeta, compute_token_list_hash

        name = f"kvstore-test-{os.getpid()}-{next(_numbers)}"
        patch.setenv("LIGHTLLM_UNIQUE_SERVICE_NAME_ID", name)
        patch.setenv("LIGHTLLM_START_ARGS", json.dumps(arguments))
        for cached in (envs_utils.get_env_start_args, envs_utils.get_unique_server_name):
            cached.cache_clear()
        tokens, layers, heads, dim, dtype, scale_dim = KINDS[kind]
        meta = CpuKVCacheMeta(PAGES, tokens, layers, heads, dim, dtype, scale_dim, torch.bfloat16)
        patch.setattr(cpu_cache_client, "calcu_cpu_cache_meta", lambda: meta)
        self.client = cpu_cache_client.CpuKvCacheClient(
            only_create_meta_data=False, init_shm_data=True
        )
        from lightllm.server.multi_level_kv_cache.disk_cache_worker import DiskCacheWorker

        self.worker = DiskCacheWorker(1, self.client, str(arguments["disk_cache_dir"]))
        self.service = self.worker.service
        self.memory: torch.Tensor = self.client.cpu_kv_cache_tensor.flatten(1).view(torch.uint8)
        self.arguments = SimpleNamespace(**arguments)
        self._hash = compute_token_list_hash

    def hashes(self, seed: int, pages: int) -> list[int]:
        """Return the hashes of a prompt of `pages` pages; prompts of one seed share prefixes."""
        tokens = [seed * 100_003 + number for number in range(pages * PAGE_TOKENS + 1)]
        return list(self._hash(tokens, PAGE_TOKENS))

    def compute(self, hashes: list[int]) -> list[int]:
        """Do what the ranks do after computing a prompt.

        Fill the pages, mark them ready and queue them for the disk. Return their indexes.
        """
        pages, ready = self.locked(
            self.client.allocate_pages, hash_keys=hashes, disk_offload_enable=True
        )
        for page, is_ready in zip(pages, ready, strict=True):
            if page != -1 and not is_ready:
                self.memory[page] = torch.randint(
                    0, 256, self.memory[page].shape, dtype=torch.uint8
                )
        update = self.client.update_pages_status_to_ready
        arguments = {"page_list": pages, "deref": True, "disk_offload_enable": True}
        if "token_num_in_page_list" in inspect.signature(update).parameters:  # since August 2026
            arguments["token_num_in_page_list"] = len(pages) * PAGE_TOKENS
        self.locked(update, **arguments)
        return [page for page in pages if page != -1]

    def persist(self) -> None:
        """Run one round of the writer thread and wait for the saves that it started."""
        for payloads in self.worker._gather_offload_payloads():
            self.worker._persist_pages_to_disk(payloads)
        self.settle()

    def settle(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.service.active_threads("w") or self.service.active_threads("r"):
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def locked(self, call: Callable[..., Any], **arguments: Any) -> Any:
        self.client.lock.acquire_sleep1ms()
        result = call(**arguments)
        self.client.lock.release()
        return result

    def match(self, hashes: list[int]) -> list[int]:
        """Return the pages given to a request, which references them until `release`.

        Asserts that the request was forwarded to the router.
        """
        from lightllm.server.core.objs.token_chunck_hash_list import CpuCachePageList
        from lightllm.server.multi_level_kv_cache.manager import MultiLevelKVCacheManager

        request = SimpleNamespace(
            request_id=1,
            group_req_id=1,
            is_aborted=False,
            disk_prompt_cache_len=-1,
            sample_params=SimpleNamespace(prompt_logprobs=-1),
            token_hash_list=SimpleNamespace(get_all=lambda: list(hashes)),
            token_hash_page_len_list=SimpleNamespace(
                get_all=lambda: [PAGE_TOKENS * n for n in range(1, 1 + len(hashes))]
            ),
            cpu_cache_match_page_indexes=CpuCachePageList(),
        )
        manager = MultiLevelKVCacheManager.__new__(MultiLevelKVCacheManager)
        manager.args = self.arguments
        manager.cpu_cache_client, manager.disk_cache_worker = self.client, self.worker
        manager.cpu_cache_time_out, manager.only_cpu_cache_enable = 0.5, False
        manager.executor, manager.shm_req_manager, manager.send_to_router = (
            MagicMock(),
            MagicMock(),
            MagicMock(),
        )
        manager.shm_req_manager.get_req_obj_by_index.return_value = request
        group = SimpleNamespace(shm_req_indexes=[0], group_req_id=1)
        manager._handle_group_req_multi_cache_match(group, time.time())
        manager.send_to_router.send_pyobj.assert_called_once()
        manager.shm_req_manager.put_back_req_obj.assert_called_once_with(request)
        self.loaded_tokens = request.disk_prompt_cache_len
        return list(request.cpu_cache_match_page_indexes.get_all())

    def release(self, pages: list[int]) -> None:
        self.locked(self.client.deref_pages, page_list=pages)

    def references(self) -> int:
        """Return the sum of the reference counts of all pages.

        Asserts that the free list holds exactly the unreferenced pages.
        """
        items = self.client.page_items
        free, item = set(), items.head.get_next_item()
        while item.self_index != items.tail.self_index:
            free.add(item.self_index)
            item = item.get_next_item()
        counts = {page: items.linked_items[page].ref_count for page in range(PAGES)}
        assert min(counts.values()) >= 0
        assert free == {page for page, count in counts.items() if count == 0}
        return sum(counts.values())

    def close(self) -> None:
        self.service.close()
        shared = (
            self.client.page_items,
            self.client.page_hash_dict.link_items,
            self.client.offload_page_indexes,
        )
        for segment in (*shared, self.client.lock):
            segment.shm.unlink()
            # close() would raise BufferError: exported arrays still exist
            segment.shm.close = lambda: None
        assert self.service.pages.check() == []


@pytest.fixture
def start_node() -> Iterator[Callable[..., NodeProcess]]:
    nodes: list[NodeProcess] = []

    def start(*flags: str) -> NodeProcess:
        defaults = ("--ram-bytes", "64MiB", "--extent-bytes", "4MiB")
        nodes.append(
            NodeProcess(
                *defaults, *flags, python=os.environ.get("KVSTORE_NODE_PYTHON", sys.executable)
            )
        )
        return nodes[-1]

    yield start
    for node in nodes:
        if node.running:
            node.kill()


@pytest.fixture
def make_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Return `make_server(address, kind, **arguments)`; `arguments` replace default values."""
    servers: list[Server] = []

    def make(address: str, kind: str = "bf16", **arguments: Any) -> Server:
        monkeypatch.setenv("KVSTORE_ADDRESS", address)
        for name in PATIENT.keys() - os.environ.keys():
            monkeypatch.setenv(name, PATIENT[name])
        model = tmp_path / f"model-{kind}"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(CONFIGS.get(kind, {"model_type": "llama"})))
        (model / "model.safetensors").write_bytes(b"weights")
        defaults = {
            "model_dir": str(model),
            "data_type": "bfloat16",
            "llm_kv_type": "int8kv" if kind == "int8" else "None",
            "llm_kv_quant_group_size": 8,
            "cpu_cache_token_page_size": PAGE_TOKENS,
            "enable_cpu_cache": True,
            "enable_disk_cache": True,
            "cpu_cache_storage_size": 1,
            "disk_cache_storage_size": 1,
            "disk_cache_dir": str(tmp_path / "unused"),
            "cpu_kv_cache_shm_id": int.from_bytes(os.urandom(3), "big") + 1,
            "diverse_mode": False,
            "enable_multimodal": False,
            "mtp_mode": None,
            "tp": 1,
            "dp": 1,
            "linear_att_hash_page_size": PAGE_TOKENS,
            "linear_att_page_block_num": 1,
            "linear_att_ssm_data_type": "float32",
        }
        servers.append(Server(kind, {**defaults, **arguments}, monkeypatch))
        return servers[-1]

    yield make
    for server in servers:
        server.close()
    workers = ("kvstore-save", "kvstore-load", "kvstore-hash")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(workers)]
