"""Serve as the storage backend of SGLang's HiCache (0.5.23).

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
      "backend_name": "kvstore", "module_path": "gpu_agent.engines.sglang",
      "class_name": "KVStoreHiCache", "interface_v1": 1, "address": "store:7440"}'

The unit is a page of a host pool (`layouts/sglang.py`), so pages move between the engine's pool and
the node's memory in one copy, and over a socket without one. Each pool (KV, indexer, Mamba, ...)
has its own namespace; a prefix counts as stored as far as all of them can restore it. How to use
it: docs/engines/sglang.md.
"""

import collections
import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from gpu_agent.engines.sglang_weights import model_shape, served_weights, weight_version
from gpu_agent.host.pages import HostPages
from gpu_agent.identity.sglang import pool_namespace
from gpu_agent.identity.sglang_shards import pool_shards
from gpu_agent.identity.shards import ShardOptions, shard_options
from gpu_agent.layouts.sglang import host_pool, page_numbers
from gpu_agent.lookup_cache import covered, together
from gpu_agent.options import read_options
from gpu_agent.outage_log import startup_warning
from gpu_agent.pool import KVPool
from gpu_agent.weights_version import process_epochs
from kvstore.client import Client
from kvstore.config import check_settings, load, setting
from kvstore.deadline import Deadline
from kvstore.errors import ConfigError, InvalidRequest, KVStoreError
from kvstore.log_rate import LogRate
from kvstore.sync import start_thread
from kvstore.tracing import NamesRequest, request

log = logging.getLogger(__name__)
log.addFilter(LogRate())
log.addFilter(NamesRequest())
Result = TypeVar("Result")

# The engine waits 1 s and 0.25 s per 1024 tokens for a prefetch, lookup and reads together, and 10
# s for each thread when it detaches. Its own options are in the same mapping as ours.
DEFAULTS = {"lookup_timeout_s": 0.3, "load_timeout_s": 0.7, "save_timeout_s": 5.0, "workers": 1}
ENGINES_OWN = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
BATCH_PAGES_MAX = 128  # pages of one call of the engine
OPEN_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 2.0
STATS_MAX = 1024
# After new weights: the engine flushes KV of the old ones, but a backup of it may be running.
SETTLE_S = 15.0


@dataclasses.dataclass(frozen=True)
class HiCacheConfig:
    """Settings of this adapter only.

    Environment: KVSTORE_SGLANG_TIMEOUT_PER_KI_TOKEN_S.
    """

    timeout_per_ki_token_s: float = setting(
        0.2, "extra time of a load or save for each 1024 tokens", 0.0, 60.0
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclasses.dataclass(frozen=True)
class _Pool:
    """A host pool of the engine.

    `view` is None for an anchor that has slots but no memory; `flat`: its pages' bytes are the
    engine's flat pages.
    """

    host: Any
    view: KVPool | None
    flat: bool = False


class KVStoreHiCache(HiCacheStorage):
    """Store HiCache's pages.

    The engine's threads call it: one that looks up, one that reads, one that writes, and the
    scheduler. It never raises into them; a failing store is a miss.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        """Connect the backend. Raises ConfigError for wrong options or weights without a name."""
        self._engine = storage_config
        known = (
            *ENGINES_OWN,
            "head_shards",
            "layer_shards",
            *(field.name for field in dataclasses.fields(HiCacheConfig)),
        )
        options = read_options(storage_config.extra_config or {}, known, DEFAULTS)
        # SGLang's own option of this meaning
        lcm = storage_config.tp_lcm_size if storage_config.should_split_heads else None
        shards = shard_options(options.own)
        self._shards = ShardOptions(shards.heads or lcm, shards.layers)
        self._model = model_shape() if self._shards != ShardOptions() else None
        self._config = options.agent
        self._interface_v1 = bool(options.own.get("interface_v1"))
        self._per_ki_token_s = load(
            HiCacheConfig, "KVSTORE_SGLANG", options.own
        ).timeout_per_ki_token_s
        self._identity, self._facts = served_weights(options.identity, storage_config.model_name)
        self._epochs = process_epochs()
        self._version, self._settled = weight_version(), 0.0
        self._client = Client(options.client)
        self._pools: dict[str, _Pool] = {}
        self._pages: dict[str, HostPages] = {}
        self._lock = threading.Lock()  # for _stats and for making _pages
        self._stats: dict[str, collections.deque[Any]] = {
            name: collections.deque(maxlen=STATS_MAX)
            for name in ("prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth")
        }

    # ---- pools -----------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the KV pool."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register another pool."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool_name, host_pool)

    def on_host_pools_registered(self) -> None:
        """Check the pools. Raises ConfigError if the interface does not fit them."""
        anchor = self._pools[PoolName.KV.value]
        if not anchor.flat and not self._interface_v1:
            raise ConfigError(
                f'{type(anchor.host).__name__} has no flat pages: set "interface_v1": 1'
            )
        for name, pages in self._pages.items():
            try:
                for namespace in pages.namespaces:
                    self._client.open(namespace, OPEN_TIMEOUT_S)
            except KVStoreError as error:
                log.warning("%s", startup_warning(error))
                return
            log.info(
                "pool %s: pages of %d tokens and %d bytes, namespace %s at %s by %s",
                *(
                    name,
                    pages.namespace.layout.page_tokens,
                    pages.page_nbytes,
                    pages.namespace.digest.hex(),
                ),
                *(self._client.config.address, self._client.wire_name),
            )

    def _register(self, name: Any, host: Any) -> None:
        name = getattr(name, "value", name)
        if name in self._pools and self._pools[name].host is host:
            return
        if getattr(host, "kv_buffer", host) is None:
            self._pools[name] = _Pool(host, None)
            return
        try:
            self._pools[name] = pool = _Pool(host, *host_pool(host))
        except InvalidRequest as error:
            raise ConfigError(
                f"pool {name}: {error}; try --hicache-mem-layout page_first"
            ) from error
        with self._lock:
            self._pages[name] = self._made(name, pool)

    def _made(self, name: str, pool: _Pool) -> HostPages:
        assert pool.view is not None
        identity = dataclasses.replace(
            self._identity, epoch=self._epochs.current(self._identity.epoch)
        )
        cut = pool_shards(name, pool.host, pool.view, self._engine, self._shards, self._model)
        first, *more = [
            (
                pool_namespace(
                    *(identity, self._facts, self._engine, name, pool.host),
                    *(shard.view.layout, shard.heads, shard.layers),
                ),
                shard.view,
            )
            for shard in cut.shards
        ]
        return HostPages(
            *(self._client, *first, self._config, BATCH_PAGES_MAX, more, cut.runs, cut.writes)
        )

    # ---- which pages are there -------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Return whether a page is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return how many leading pages are stored."""
        return int(self.batch_exists_v2(keys, None, extra_info).kv_hit_pages)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return how many leading pages are stored in all pools."""
        return _guarded(
            "a query", PoolTransferResult.empty(), lambda: self._exists(keys, pool_transfers or [])
        )

    def _exists(self, keys: list[str], transfers: Sequence[PoolTransfer]) -> PoolTransferResult:
        self._follow_weights()
        # Transfers in groups of blocks are a second form of pages that limits no hit.
        gates = [
            transfer for transfer in transfers if transfer.hit_policy != PoolHitPolicy.BLOCK_GROUPS
        ]
        if self._pools[PoolName.KV.value].view is None and not gates:
            return PoolTransferResult.empty()  # an anchor has no stored pages
        hashes, deadline = _hashes(keys), Deadline(self._config.lookup_timeout_s)
        lengths = [self._covered(PoolName.KV, hashes, 0, deadline)]
        hits = {PoolName.KV: lengths[0][-1]} if lengths[0] else {}
        for transfer in gates:
            if not together(lengths):
                break
            trailing = (
                0
                if transfer.hit_policy == PoolHitPolicy.ALL_PAGES
                else max(1, len(transfer.keys or ()))
            )
            lengths.append(
                self._covered(transfer.name, hashes[: hits[PoolName.KV]], trailing, deadline)
            )
            if lengths[-1]:
                hits[transfer.name] = lengths[-1][-1]
        restorable = together(lengths)
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def _covered(
        self, name: Any, hashes: list[bytes], trailing: int, deadline: Deadline
    ) -> list[int]:
        pool = self._pools[getattr(name, "value", name)]
        if pool.view is None:
            return list(range(1, len(hashes) + 1))
        present = self._pages_of(name).present(hashes, deadline.remaining())
        return covered(present, trailing)

    # ---- pages of the host pools -----------------------------------------------------------

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load pages into the KV pool."""
        with self._timed("prefetch", keys) as done:
            done.extend(
                self._move(
                    PoolName.KV, keys, host_indices, HostPages.load, self._config.load_timeout_s
                )
            )
        return done

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Save pages of the KV pool."""
        with self._timed("backup", keys) as done:
            done.extend(
                self._move(
                    PoolName.KV, keys, host_indices, HostPages.save, self._config.save_timeout_s
                )
            )
        return done

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages into several pools."""
        return self._move_all(transfers, HostPages.load, self._config.load_timeout_s)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Save pages of several pools."""
        return self._move_all(transfers, HostPages.save, self._config.save_timeout_s)

    def _move_all(
        self, transfers: Sequence[PoolTransfer], move: Callable[..., list[bool]], timeout_s: float
    ) -> dict[str, list[bool]]:
        """Move the pages of several pools within one deadline."""
        end = time.monotonic() + timeout_s
        with request():
            return {
                transfer.name: self._move(
                    transfer.name,
                    transfer.keys or [],
                    transfer.host_indices,
                    move,
                    end - time.monotonic(),
                )
                for transfer in transfers
            }

    def _move(
        self,
        name: Any,
        keys: list[str],
        indices: torch.Tensor,
        move: Callable[..., list[bool]],
        timeout_s: float,
    ) -> list[bool]:
        def run() -> list[bool]:
            if not keys or self._pools[getattr(name, "value", name)].view is None:
                return [True] * len(keys)
            if not self._follow_weights() and move is HostPages.save:
                return [False] * len(keys)
            pages = self._pages_of(name)
            tokens = pages.namespace.layout.page_tokens
            numbers = page_numbers(indices, tokens, len(keys))
            return move(
                pages,
                _hashes(keys),
                numbers,
                self._timeout_s(max(timeout_s, 0.0), tokens * len(keys)),
            )

        return _guarded(f"pages of {name}", [False] * len(keys), run)

    # ---- flat pages ------------------------------------------------------------------------

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Read a page."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Read pages."""
        targets = target_locations or [None] * len(keys)
        with self._timed("prefetch", keys) as done:
            done.extend(self._copy(keys, targets, HostPages.get, self._config.load_timeout_s))
        return [target if there else None for target, there in zip(targets, done, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store a page."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages."""
        with self._timed("backup", keys) as done:
            done.extend(self._copy(keys, values, HostPages.put, self._config.save_timeout_s))
        return all(done)

    def _copy(
        self, keys: list[str], tensors: Any, copy: Callable[..., list[bool]], timeout_s: float
    ) -> list[bool]:
        def run() -> list[bool]:
            if not self._follow_weights() and copy is HostPages.put:
                return [False] * len(keys)
            pages = self._pages_of(PoolName.KV)
            tokens = pages.namespace.layout.page_tokens * len(keys)
            return copy(pages, _hashes(keys), tensors, self._timeout_s(timeout_s, tokens))

        return _guarded("flat pages", [False] * len(keys), run)

    # ---- the rest --------------------------------------------------------------------------

    def clear(self) -> None:
        """Make everything stored so far a miss (`gpu_agent/weights_version.py`)."""
        self._epochs.advance()
        made = {name: self._made(name, self._pools[name]) for name in list(self._pages)}
        with self._lock:
            old, self._pages = list(self._pages.values()), made
        # In the background: closing waits for the running call. What it stores is of the old epoch.
        # Without a thread, the old agents end when they are garbage.
        with contextlib.suppress(RuntimeError):
            start_thread(functools.partial(_close, old), "kvstore-close")
        log.info("cleared: pages stored before are not used any more")

    def get_stats(self) -> StorageMetrics:
        """Return the metrics since the last call."""
        stats = StorageMetrics()
        with self._lock:
            for name, values in self._stats.items():
                getattr(stats, name).extend(values)
                values.clear()
        return stats

    def close(self) -> None:
        """End within the deadline of the running call."""
        end = time.monotonic() + CLOSE_TIMEOUT_S
        for pages in list(self._pages.values()):
            pages.close(max(0.0, end - time.monotonic()))
        self._client.close()

    def _pages_of(self, name: Any) -> HostPages:
        return self._pages[getattr(name, "value", name)]

    def _follow_weights(self) -> bool:
        """Start a new epoch when an update names a new weight version.

        Return False while KV of the old weights may still arrive.
        """
        version = weight_version()
        with self._lock:
            changed, self._version = version != self._version, version
            if changed:
                self._settled = time.monotonic() + SETTLE_S
        if changed:
            self.clear()
        return time.monotonic() >= self._settled

    def _timeout_s(self, base_s: float, tokens: int) -> float:
        return base_s + self._per_ki_token_s * tokens / 1024

    @contextlib.contextmanager
    def _timed(self, what: str, keys: list[str]) -> Iterator[list[bool]]:
        """Record a call's pages and GB/s for the engine's metrics."""
        done: list[bool] = []
        start = time.monotonic()
        yield done
        pages = self._pages.get(PoolName.KV.value)
        if pages is not None and what == "backup" and not pages.writes:
            return  # nothing was written
        if self._engine.enable_storage_metrics and pages is not None and keys:
            gb = done.count(True) * pages.page_nbytes / 1e9
            with self._lock:
                self._stats[f"{what}_pgs"].append(len(keys))
                self._stats[f"{what}_bandwidth"].append(gb / max(time.monotonic() - start, 1e-9))


def _close(retired: Sequence[HostPages]) -> None:
    for pages in retired:
        pages.close(0.0)


def _hashes(keys: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(key) for key in keys]


def _guarded(what: str, failed: Result, call: Callable[[], Result]) -> Result:
    with request():  # the engine passes no request name
        try:
            return call()
        except KVStoreError as error:
            log.warning("%s failed: %s", what, error)
        except Exception:  # no error may reach the engine's threads
            log.exception("%s failed", what)
        return failed
