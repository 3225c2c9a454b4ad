"""Move KV directly between the GPU and the store as SGLang's UnifiedCacheLinker (0.5.23).

There is no host tier between them.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "KVStoreLinker", "linker_module_path":
      "gpu_agent.engines.sglang_linker", "linker_extra_config": {"address": "store:7440"}}'

For models whose cache is plain K and V or plain latents. A load that fails ends its requests, so
the pages that `lookup` reports are pinned at the node for `hold_s`. How to use it:
docs/engines/sglang.md.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
from collections import deque
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)

from gpu_agent.agent import Agent
from gpu_agent.engines.sglang_weights import weight_version, weights_of
from gpu_agent.identity.sglang import linker_namespace
from gpu_agent.kernels.available import transfer_for
from gpu_agent.layouts.sglang import mha_pool, mla_pool
from gpu_agent.load_pipeline import LoadJob
from gpu_agent.lookup_cache import LayerBatch
from gpu_agent.options import read_options
from gpu_agent.pool import KVPool
from gpu_agent.transfer import Fence
from gpu_agent.weights_version import process_epochs
from kvstore.client import Client
from kvstore.config import check_settings, load, setting
from kvstore.errors import ConfigError, KVStoreError
from kvstore.sync import Future, start_thread
from kvstore.threads import ThreadPool, wait_for
from kvstore.tracing import NamesRequest, carried, request

log = logging.getLogger(__name__)
log.addFilter(NamesRequest())

# A refused load would fail its requests, so none is refused for its size.
DEFAULTS = {"lookup_timeout_s": 0.1, "load_timeout_s": 5.0, "pending_nbytes_max": 1 << 40}
OFFLOADS_MAX = 256  # waiting; more are refused, and the engine offers their pages again


@dataclasses.dataclass(frozen=True)
class LinkerConfig:
    """Settings of this adapter only.

    Environment: KVSTORE_SGLANG_LINKER_HOLD_S.
    """

    hold_s: float = setting(30.0, "how long pages found by a lookup are pinned", 1.0, 3600.0)
    timeout_per_ki_token_s: float = setting(
        0.5, "extra time of a batch of loads for each 1024 tokens", 0.0, 60.0
    )

    def __post_init__(self) -> None:
        check_settings(self)


class _Pages(DevicePoolEntry):
    """The engine's view of a plain pool, and ours of the same tensors."""

    def __init__(self, kvcache: Any, page_size: int) -> None:
        """View a KV pool. Raises ConfigError for one that holds anything but K and V or latents."""
        first = kvcache.start_layer or 0
        if type(kvcache) is MHATokenToKVPool and kvcache.k_scale_buffer is None:
            self.view: KVPool = mha_pool(kvcache.k_buffer, kvcache.v_buffer, page_size, first)
            components = [list(kvcache.k_buffer), list(kvcache.v_buffer)]
        elif type(kvcache) is MLATokenToKVPool:
            self.view = mla_pool(kvcache.kv_buffer, page_size, first)
            components = [list(kvcache.kv_buffer)]
        else:
            raise ConfigError(
                f"the linker serves plain MHA and MLA pools, not {type(kvcache).__name__}: use "
                "--enable-hierarchical-cache with KVStoreHiCache"
            )
        super().__init__(
            name=PoolName.KV,
            indices_from_pool=PoolName.KV,
            device_pool=kvcache,
            components=components,
            layer_mapping={layer: layer for layer in range(len(components[0]))},
            page_size=page_size,
            rows_are_pages=False,
        )
        self.rank_replicated = len(components) == 1
        self.first_layer = first


class KVStoreLinker(UnifiedCacheLinker):
    """The linker: called by the scheduler's thread; transfers run on the agent's threads."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Any = None,
        forward_stream: Any = None,
    ) -> None:
        """Connect the linker. Raises ConfigError for a wrong option or an unsupported model."""
        _check_served(components, params)
        self.forward_stream = forward_stream
        known = [field.name for field in dataclasses.fields(LinkerConfig)]
        options = read_options(extra_config or {}, known, DEFAULTS)
        self._config: LinkerConfig = load(LinkerConfig, "KVSTORE_SGLANG_LINKER", options.own)
        entry = _Pages(params.token_to_kv_pool_allocator.get_kvcache(), params.page_size)
        self.pools = {PoolName.KV: entry}
        self._entry, self._page_size = entry, params.page_size
        group = params.attn_tp_cache_group or params.tp_cache_group
        ranked = torch.distributed.is_initialized() and group is not None
        rank = torch.distributed.get_rank(group=group) if ranked else 0
        size = torch.distributed.get_world_size(group=group) if ranked else 1
        self._writes = not entry.rank_replicated or rank == 0
        identity, facts = weights_of(options.identity, server_args)
        shard = (0, 1) if entry.rank_replicated else (rank, size)
        namespace = linker_namespace(
            identity, facts, params, entry.device_pool.dtype, entry.view.layout, shard
        )
        self._client = Client(options.client)
        self._epochs, self._version = process_epochs(), weight_version()
        self._namespace, self._limits = namespace, options.agent
        self._agent = self._made()
        self.layer_done_counter = LayerWiseLoadCounter(len(entry.components[0]))
        self._queued: dict[str, tuple[list[bytes], torch.Tensor]] = {}
        self._batches: dict[int, tuple[LayerBatch, list[tuple[LoadJob, int]]]] = {}
        self._offloads = ThreadPool(1, "kvstore-offload")
        # Starts its thread now: later, if none can be started, that would raise
        self._offloads.submit(lambda: None)
        # (offload, its slots are read) of each, the oldest first
        self._pending: deque[
            tuple[concurrent.futures.Future[bool], concurrent.futures.Future[None]]
        ] = deque()
        with contextlib.suppress(KVStoreError):  # connected now, so that the first request need not
            self._client.open(namespace, 2.0)

    def _made(self) -> Agent:
        namespace = dataclasses.replace(
            self._namespace, epoch=self._epochs.current(self._namespace.epoch)
        )
        view = self._entry.view
        return Agent(self._client, namespace, view, self._limits, transfer_for(view.device))

    # ---- loads -----------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Return every length up to the first missing page; found pages are held for `hold_s`.

        These can not be evicted for `hold_s`.
        """
        hashes, _ = _kv(transfers)
        if not hashes:
            return []
        with request(rid):
            try:
                there = self._agent.ask(hashes, self._config.hold_s) or ()
            except KVStoreError as error:
                log.warning("lookup failed: %s", error)
                return []
        return list(range(1, [*there, False].index(False) + 1))

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue a load."""
        hashes, slots = _kv(transfers)
        if not hashes or slots is None:
            return False
        if rid in self._queued:
            raise RuntimeError(f"a load of {rid} is queued already")
        self._entry.prepare_locations(slots)  # raises for invalid pages
        self._queued[rid] = hashes, slots.detach().to("cpu", torch.int64)
        return True

    def start_layer_wise_loading(self) -> int:
        """Begin queued loads and return the index of their layer counter; -1 without any."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        counter = self.layer_done_counter
        index: int = counter.update_producer()
        batch = LayerBatch(
            [self._entry.first_layer + layer for layer in range(counter.num_layers)],
            len(queued),
            lambda layer: counter.complete(index, layer - self._entry.first_layer),
            functools.partial(counter.fail, index),
        )
        tokens = sum(slots.numel() for _, slots in queued.values())
        timeout_s = (
            self._agent.config.load_timeout_s + self._config.timeout_per_ki_token_s * tokens / 1024
        )
        jobs = []
        for rid, (hashes, slots) in queued.items():
            with request(rid):
                job = self._agent.load(hashes, slots, placed=batch.placed, timeout_s=timeout_s)
            job.done.add_done_callback(functools.partial(batch.loaded, len(hashes)))
            jobs.append((job, len(hashes)))
        self._batches[index] = batch, jobs
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait for a batch of loads and return whether all pages arrived."""
        _, jobs = self._batches.pop(counter_index, (None, []))
        wait_for([job.done for job, _ in jobs])  # nothing writes to the slots after this
        # The counter misses a failure after the last layer, and pages that are reported as loaded
        # are stored for all engines. So the results of the loads count, too.
        whole = all(job.done.result().pages == pages for job, pages in jobs)
        return bool(self.layer_done_counter.finish(counter_index)) and whole

    def cancel_queued_load(self, rid: str) -> bool:
        """Cancel a queued load."""
        return self._queued.pop(rid, None) is not None

    # ---- offloads --------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Begin to store pages.

        `session_id` names the request whose pages they are: all calls of a session, here and in the
        nodes' logs, have one request id.
        """
        hashes, slots = _kv(transfers)
        if not hashes or slots is None or len(self._pending) >= OFFLOADS_MAX:
            return False
        gathered: concurrent.futures.Future[None] = Future()
        if not self._writes:
            done: concurrent.futures.Future[bool] = Future()
            done.set_result(True)
            self._pending.append((done, gathered))
            return True
        events = self.record_offload_ready() if self._entry.view.device.type == "cuda" else []
        with request(session_id):
            done = self._offloads.submit(carried(self._save), hashes, slots, events, gathered)
        self._pending.append((done, gathered))
        return True

    def _save(
        self,
        hashes: list[bytes],
        slots: torch.Tensor,
        events: list[Fence],
        gathered: "concurrent.futures.Future[None]",
    ) -> bool:
        try:
            for event in events:
                if event is not None:
                    event.synchronize()
            job = self._agent.save(hashes, slots.detach().to("cpu", torch.int64))
            wait_for([job.gathered])
            gathered.set_result(None)
            return not job.done.result().dropped
        except Exception:  # no error may reach the scheduler, which takes the result
            log.exception("an offload failed")
            return False
        finally:
            if not gathered.done():
                gathered.set_result(None)

    def num_completed_offloads(self) -> int:
        """Return how many offloads, from the first on, have ended."""
        return next(
            (n for n, (done, _) in enumerate(self._pending) if not done.done()),
            len(self._pending),
        )

    def pop_completed_offload(self) -> bool:
        """Remove the first offload and return whether it succeeded."""
        done, _ = self._pending.popleft()
        return done.result()

    # ---- the end ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Wait until every transfer has ended."""
        self._queued.clear()
        for index in list(self._batches):
            self.finish_layer_wise_loading(index)
        # Offloads that have not begun are dropped. The running one may go on after it has read its
        # slots.
        wait_for([read for done, read in self._pending if not (done.done() or done.cancel())])
        self._pending.clear()
        self.layer_done_counter.reset()
        version = weight_version()
        # R2: the engine flushes after an update, and this is how we notice it
        if version != self._version:
            self._version = version
            self._epochs.advance()
            old, self._agent = self._agent, self._made()
            with contextlib.suppress(RuntimeError):  # without a thread it ends when it is garbage
                start_thread(old.close, "kvstore-close")

    def close(self) -> None:
        """End all transfers and close."""
        self.reset()
        self._offloads.shutdown()
        self._agent.close()
        self._client.close()


def _check_served(components: Any, params: Any) -> None:
    """Raise ConfigError for a model with more state than the KV of full attention."""
    others = sorted(str(kind) for kind in set(components) - {ComponentType.FULL})
    if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        others.append("a draft model's KV")
    if others:
        raise ConfigError(
            f"the linker stores KV of full attention only, and this model has "
            f"{' and '.join(others)} too: use --enable-hierarchical-cache with KVStoreHiCache"
        )


def _kv(transfers: list[PoolTransfer]) -> tuple[list[bytes], torch.Tensor | None]:
    """Return (keys, device slots) of the KV transfer; no keys if there is none."""
    for transfer in transfers:
        if transfer.name == PoolName.KV and transfer.keys:
            return [bytes.fromhex(key) for key in transfer.keys], transfer.device_indices
    return [], None
