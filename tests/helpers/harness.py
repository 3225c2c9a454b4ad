"""SGLang's HiCache controller with its threads and host pools, without a GPU or a model.

The controller's constructor needs streams and kernels, so its fields are set here. Everything
between its queues and the storage backend is SGLang's code.
"""

import contextlib
import os
import queue
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    HybridCacheController,
    PrefetchOperation,
)
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel
from stopping import stop

from kvstore.tools.node_process import NodeProcess

# SGLang requires 10 GiB of free memory even for tiny pools. The reference keeps the budget alive.
_budget = host_memory_budget_scope(1 << 40)
_budget.__enter__()
PAGE = 16
WAIT_S = 60.0


def start_node(*flags: str) -> NodeProcess:
    """Start a node with the Python of the development environment."""
    return NodeProcess(*flags, python=os.environ.get("KVSTORE_NODE_PYTHON", sys.executable))


@contextlib.contextmanager
def stopped(node: NodeProcess) -> Iterator[None]:
    """Stop a node with SIGSTOP for the duration: its sockets are open, but it does not answer."""
    stop(node.pid)
    try:
        yield
    finally:
        os.kill(node.pid, signal.SIGCONT)


def options(address: str, **more: Any) -> dict[str, Any]:
    """Return --hicache-storage-backend-extra-config, with deadlines for a busy machine."""
    return {
        "backend_name": "kvstore",
        "module_path": "gpu_agent.engines.sglang",
        "class_name": "KVStoreHiCache",
        "interface_v1": 1,
        "address": address,
        "model": "test-model",
        "lookup_timeout_s": 20.0,
        "load_timeout_s": 30.0,
        **more,
    }


def server_arguments(revision: str) -> types.SimpleNamespace:
    """Return the arguments of SGLang's server that the adapter reads."""
    return types.SimpleNamespace(
        model_path="a-model",
        revision=revision,
        dtype="auto",
        quantization=None,
        quantization_param_path=None,
        kv_cache_dtype="auto",
        json_model_override_args="{}",
        load_format="auto",
        weight_version="default",
        speculative_draft_model_path=None,
        speculative_draft_model_revision=None,
    )


def hashes(tokens: Sequence[int], page: int) -> list[str]:
    """Return SGLang's keys of the pages of a prompt."""
    return list(get_storage_hash_str(RadixKey(list(tokens)), None, page_size=page))


def parallel(rank: int = 0, size: int = 1, stage: int = 0, stages: int = 1) -> Any:
    """Return a context of parallel ranks; keep a reference, because dropping it undoes it.

    `rank` of `size` tensor-parallel, `stage` of `stages` pipeline-parallel ranks.
    """
    return get_parallel().override(
        attn_dcp_size=1,
        attn_dcp_rank=0,
        tp_rank=rank,
        tp_size=size,
        pp_rank=stage,
        pp_size=stages,
        attn_tp_rank=rank,
        attn_tp_size=size,
        attn_dp_rank=0,
    )


def mha(
    layout: str = "page_first",
    slots: int = 1024,
    page: int = PAGE,
    name: Any = PoolName.KV,
    **shape: Any,
) -> Any:
    """Return a K and V pool; `shape`: dtype, heads, dim, v_dim, layers, first_layer, allocator."""
    layers, first = shape.get("layers", 4), shape.get("first_layer", 0)
    device = MHATokenToKVPool(
        slots // 2,
        page,
        shape.get("dtype", torch.bfloat16),
        shape.get("heads", 4),
        shape.get("dim", 32),
        layers,
        "cpu",
        False,
        start_layer=first,
        end_layer=first + layers,
        v_head_dim=shape.get("v_dim"),
    )
    info = device.get_device_pool_infos()[0].buffer_info
    host = get_mha_host_pool_cls(info)(
        info,
        2,
        0,
        page,
        layout,
        pin_memory=False,
        allocator_type=shape.get("allocator", "default"),
        device_capacity_tokens=device.size,
        start_layer=first,
        end_layer=first + layers,
        write_back_staging=None,
    )
    return PoolEntry(
        name, host, device, lambda layer: layer, is_primary_index_anchor=name == PoolName.KV
    )


def mla(
    layout: str = "page_first",
    slots: int = 1024,
    page: int = PAGE,
    allocator: str = "default",
    layers: range = range(3),
) -> Any:
    device = MLATokenToKVPool(
        slots // 2,
        page,
        torch.bfloat16,
        *(48, 16, len(layers), "cpu", False),
        start_layer=layers.start,
        end_layer=layers.stop,
    )
    return PoolEntry(
        PoolName.KV,
        _mla_host(device, layout, page, allocator),
        device,
        lambda i: i,
        is_primary_index_anchor=True,
    )


def dsa(
    layout: str = "page_first", slots: int = 1024, page: int = 64, layers: range = range(3)
) -> list[Any]:
    """Return the KV and indexer pools of DeepSeek-V3.2 with some layers."""
    device = DSATokenToKVPool(
        slots // 2,
        page,
        512,
        torch.float8_e4m3fn,
        64,
        len(layers),
        "cpu",
        128,
        False,
        656,
        start_layer=layers.start,
        end_layer=layers.stop,
    )
    host = _mla_host(device, layout, page, "default", override_kv_cache_dim=656)
    indexer = DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), host, pin_memory=False)
    return [
        PoolEntry(PoolName.KV, host, device, lambda i: i, is_primary_index_anchor=True),
        PoolEntry(PoolName.INDEXER, indexer, device, lambda i: i),
    ]


def mamba(layout: str = "page_first", slots: int = 64, dtype: torch.dtype = torch.float32) -> Any:
    """Return a pool of states with two layers: one temporal and two convolution tensors."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(2, slots, 4, 8, 16, dtype=dtype),
        conv=(
            torch.zeros(2, slots, 24, 3, dtype=torch.bfloat16),
            torch.zeros(2, slots, 10, 3, dtype=torch.bfloat16),
        ),
    )
    host = MambaPoolHost(info, 2, 0, device_capacity=slots, pin_memory=False, layout=layout)
    return PoolEntry(PoolName.MAMBA, host, None, lambda i: i)


def _mla_host(device: Any, layout: str, page: int, allocator: str, **more: Any) -> Any:
    return MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        2,
        0,
        page,
        layout,
        pin_memory=False,
        allocator_type=allocator,
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        target_layer_num=device.layer_num,
        **more,
    )


def buffers(host: Any) -> list[torch.Tensor]:
    """Return all buffers of a host pool."""
    for names in (
        ("temporal_buffer", "conv_buffer"),
        ("index_k_with_scale_buffer",),
        ("k_buffer", "v_buffer"),
    ):
        found = [getattr(host, name, None) for name in names]
        if found[0] is not None:
            return [part for one in found for part in (one if isinstance(one, list) else [one])]
    return [host.kv_buffer]


def fill(host: Any) -> None:
    """Fill a host pool with random bytes, NaNs included."""
    for buffer in buffers(host):
        raw = _bytes(buffer)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(torch.uint8)


def page_bytes(host: Any, slots: torch.Tensor) -> list[bytes]:
    """Return the bytes of each page at these slots, as SGLang addresses them."""
    size = host.page_size
    # K and V of different sizes have no flat pages, so read both buffers
    if getattr(host, "v_head_dim", None) != getattr(host, "head_dim", None):
        rows = slots // size if host.layout == "page_first_direct" else slots
        step = 1 if host.layout == "page_first_direct" else size
        return [
            b"".join(
                _bytes(part[int(row) : int(row) + step].contiguous()).numpy().tobytes()
                for part in buffers(host)
            )
            for row in rows[::size]
        ]
    return [
        _bytes(host.get_data_page(int(slot)).contiguous()).numpy().tobytes()
        for slot in slots[::size]
    ]


class Engine:
    """One rank: its controller, attached to a storage backend."""

    def __init__(
        self,
        entries: Sequence[Any],
        config: dict[str, Any],
        *,
        storage: str = "dynamic",
        model_name: str = "served-name",
        tp_group: Any = None,
        metrics: bool = False,
    ) -> None:
        self.group = HostPoolGroup(list(entries))
        self.page = self.group.page_size
        self.hosts = {entry.name: entry.host_pool for entry in entries}
        self.host = self.group.anchor_entry.host_pool
        self.controller = c = HybridCacheController.__new__(HybridCacheController)
        for name in (
            "attn_cp_group",
            "attn_tp_group",
            "pp_group",
            "storage_backend",
            "storage_backend_type",
        ):
            setattr(c, name, None)
        for name in ("pp_prefetch_command_group", "pp_prefetch_command_thread"):
            setattr(c, name, None)
        for name in (
            "pp_prefetch_states",
            "pp_prefetch_decisions",
            "extra_host_mem_release_queues",
        ):
            setattr(c, name, {})
        c.prefetch_hits_sync_groups, c.prefetch_completion_sync_groups = [], []
        c.tp_group, c.host_memory_mode = tp_group, "cache"
        c.mem_pool_device, c.mem_pool_host = self.group.anchor_entry.device_pool, self.group
        c.storage_host_pool, c.page_size, c.io_backend = self.host, self.page, "kernel"
        c.enable_storage, c.enable_storage_metrics = False, metrics
        c.storage_stop_event = threading.Event()
        c.ack_prefetch_queue, c.pp_prefetch_command_queue = queue.Queue(), queue.Queue()
        c.pp_prefetch_state_lock = threading.Lock()
        c.attach_storage_backend(
            storage,
            prefetch_threshold=self.page,
            model_name=model_name,
            storage_backend_extra_config=dict(config),
            host_pools=self.group.entries,
        )

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    def hashes(self, tokens: Sequence[int]) -> list[str]:
        return hashes(tokens, self.page)

    def backup(
        self, tokens: Sequence[int], slots: torch.Tensor, transfers: Sequence[Any] | None = None
    ) -> Any:
        """Store pages and return the operation; `completed_tokens` is how much was stored."""
        pools = list(transfers) if transfers else None
        self.controller.write_storage(
            slots, list(tokens), hash_value=self.hashes(tokens), extra_pools=pools
        )
        return self.controller.ack_backup_queue.get(timeout=WAIT_S)

    def query(self, tokens: Sequence[int], transfers: Sequence[Any] | None = None) -> Any:
        """Run a hit query and return the operation; `storage_hit_count` is the tokens found."""
        handle = types.SimpleNamespace(rid=f"request-{time.monotonic_ns()}")
        pools = list(transfers) if transfers else None
        self.controller.prefetch_queue.put(
            PrefetchOperation(handle, RadixKey(list(tokens)), None, pool_transfers=pools)
        )
        return self.controller.prefetch_hit_queue.get(timeout=WAIT_S)

    def fetch(self, operation: Any, slots: torch.Tensor | None = None) -> tuple[int, torch.Tensor]:
        """Load the pages of a hit into host slots; return (tokens loaded, slots)."""
        if slots is None:
            slots = self.host.alloc(operation.storage_hit_count)
        operation.host_indices = slots[: operation.storage_hit_count]
        self.controller.prefetch_buffer.put(operation)
        tokens = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=WAIT_S)
            if ack.completed_tokens is not None:
                tokens = ack.completed_tokens
            if ack.pool_hits is not None:
                operation.pool_storage_result.update_extra_pool_hit_pages(ack.pool_hits)
            if ack.completed_req:
                return tokens, slots

    def prefetch(
        self, tokens: Sequence[int], transfers: Sequence[Any] | None = None
    ) -> tuple[int, torch.Tensor]:
        return self.fetch(self.query(tokens, transfers))

    def detach(self) -> None:
        if self.controller.storage_backend is not None:
            self.controller.detach_storage_backend()


def indexer_transfer() -> PoolTransfer:
    return PoolTransfer(name=PoolName.INDEXER, indices_from_pool=PoolName.KV)
