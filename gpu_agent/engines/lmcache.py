"""Serve as LMCache's L2 tier in multi-process mode, in both forms that it loads by name.

    native_plugin   NodeConnector   keys as text; an object's layout is not known, its length is
    plugin          NodeAdapter     shapes and dtypes are part of the namespace; status, listing

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "gpu_agent.engines.lmcache",
        "class_name": "NodeAdapter", "adapter_params": {"address": "store:7440", "revision":
        "2026-11-01", "kv_format": "vllm 0.33 bf16"}}'

`adapter_params` are the options of `gpu_agent.options` and those below (docs/engines/lmcache.md). A
wrong one ends the start; a node that is not there is a miss. lmcache is imported only here.
"""

import concurrent.futures
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch  # noqa: F401 -- before lmcache_native, whose library needs torch's
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import EncodedObjectKey, KeyEntry, KeyListPage
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from gpu_agent.layouts.lmcache import Naming, ObjectKey, bytes_layout, object_layout, shapes_layout
from gpu_agent.objects.parts import Completions, ObjectName, ObjectResults
from gpu_agent.objects.store import QUERY_WORKERS, ObjectStore
from gpu_agent.options import Options, read_options
from kvstore.admin import answered
from kvstore.client import Client
from kvstore.errors import ConfigError, KVStoreError
from kvstore.results import PutOutcome
from kvstore.tracing import NamesRequest
from kvstore.transports.parallel import THREADS_MAX

log = logging.getLogger(__name__)
log.addFilter(NamesRequest())

STORE_TYPE = "kvstore"  # LMCache's name for this tier in /status
# LMCache frees a store's buffers 300 s after the call and a load's after 600 s, and its benchmark
# gives a lookup 2.5 s: deadlines must be far below these.
TIMEOUTS_S_MAX = {"lookup_timeout_s": 2.0, "save_timeout_s": 60.0, "load_timeout_s": 60.0}
# One call has a request's whole prefix, gigabytes of LMCache's own memory: no reason to refuse it.
PENDING_NBYTES_MAX = 1 << 38
STATUS_TIMEOUT_S = 0.5
LIST_TIMEOUT_S = 5.0
_STORED = {PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.BUSY}


def _options(params: Mapping[str, Any], *own: str) -> Options:
    """Parse options; `own` lists those of this form only.

    Raises ConfigError naming the option.
    """
    for name in ("model", "hashers"):
        if name in params:
            raise ConfigError(
                f"option {name!r} has no meaning here: LMCache names the model in every key, and "
                "no pages"
            )
    options = read_options(params, ("kv_format", *own), {"pending_nbytes_max": PENDING_NBYTES_MAX})
    for name, seconds_max in TIMEOUTS_S_MAX.items():
        seconds = getattr(options.agent, name)
        if seconds > seconds_max:
            raise ConfigError(
                f"{name}={seconds} is too long for LMCache, which waits and frees buffers: "
                f"{seconds_max}"
            )
    return options


class _Node:
    """Names, and objects at a node, for both forms; the first call connects."""

    def __init__(self, options: Options) -> None:
        kv_format = options.own.get("kv_format", "")
        if not isinstance(kv_format, str):
            raise ConfigError(f"kv_format={kv_format!r} must be a str")
        self.naming = Naming(options.identity, kv_format)
        # A thread never waits for a connection: a lookup would, behind loads of gigabytes.
        threads = 2 * options.agent.workers + QUERY_WORKERS + THREADS_MAX
        client_config = replace(
            options.client, connections_max=max(options.client.connections_max, threads)
        )
        self.client = Client(client_config)
        self.objects = ObjectStore(self.client, options.agent)
        self.objects.connect()

    def listed(
        self, model: str | None, digest: bytes, prefix_hash: bytes
    ) -> Iterator[tuple[bytes, ObjectKey, int]]:
        """Yield (namespace digest, key, bytes) of the objects after a position, in order."""
        known = sorted(
            (namespace.digest, namespace) for namespace, _ in self.client.namespaces(LIST_TIMEOUT_S)
        )
        for found, namespace in known:
            if found < digest or model not in (None, namespace.model):
                continue
            for page in self.client.list_pages(
                namespace, after=prefix_hash if found == digest else b""
            ):
                key = self.naming.key_of(namespace, page.prefix_hash)
                if key is None:
                    break  # of other options or another engine
                yield found, key, page.nbytes

    def close(self) -> None:
        self.objects.close()
        self.client.close()


class NodeConnector:
    """The form `native_plugin`.

    Raises ConfigError.
    """

    def __init__(self, **params: Any) -> None:
        self._node = _Node(_options(params))
        self._completions: Completions[tuple[int, bool, str, list[bool]]] = Completions()
        self._ids = itertools.count(1)

    def event_fd(self) -> int:
        """Return the descriptor that signals completions."""
        return self._completions.fileno()

    def submit_batch_set(self, keys: list[str], views: list[memoryview]) -> int:
        """Begin to store objects."""
        found = self._node.objects.put(self._sized(keys, views), views)
        return self._submit(
            found, lambda values: [value in _STORED for value in values], every=True
        )

    def submit_batch_get(self, keys: list[str], views: list[memoryview]) -> int:
        """Begin to read objects."""
        return self._submit(self._node.objects.get(self._sized(keys, views), views), _truths)

    def submit_batch_exists(self, keys: list[str]) -> int:
        """Begin a lookup of objects."""
        return self._submit(self._node.objects.exists(self._named(keys)), _truths)

    def submit_batch_delete(self, keys: list[str]) -> int:
        """Begin to remove objects."""
        return self._submit(self._node.objects.remove(self._named(keys)), _truths)

    def drain_completions(self) -> list[tuple[int, bool, str, list[bool]]]:
        """Return completed calls."""
        return self._completions.drain()

    def close(self) -> None:
        """Close node and descriptor."""
        self._node.close()
        self._completions.close()

    def _sized(self, keys: list[str], views: list[memoryview]) -> list[ObjectName]:
        of = self._node.naming.of_text
        return [of(key, bytes_layout(view.nbytes)) for key, view in zip(keys, views, strict=True)]

    def _named(self, keys: list[str]) -> list[ObjectName]:
        return [self._node.naming.of_text(key, None) for key in keys]

    def _submit(
        self,
        done: "concurrent.futures.Future[ObjectResults[Any]]",
        bits: Callable[[list[Any]], list[bool]],
        every: bool = False,
    ) -> int:
        """Number a call and post its results; with `every`, it succeeds only if all keys do.

        Otherwise it succeeds if the node answered for one.
        """
        number = next(self._ids)

        def post(future: "concurrent.futures.Future[ObjectResults[Any]]") -> None:
            results = future.result()
            per_key = bits(results.values)
            good = all(per_key) if every else not results.error or any(per_key)
            self._completions.add((number, good, results.error, per_key))

        done.add_done_callback(post)
        return number


def _truths(values: list[Any]) -> list[bool]:
    return [bool(value) for value in values]


class NodeAdapter(L2AdapterInterface):
    """The form `plugin`.

    Its own option is `max_capacity_gb`: 0 unless LMCache is to evict, which the node does by
    itself. Raises ConfigError.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        options = _options(params, "max_capacity_gb")
        capacity = options.own.get("max_capacity_gb", 0)
        if not isinstance(capacity, int | float) or capacity < 0:
            raise ConfigError(f"max_capacity_gb={capacity!r} must be a number from 0 on")
        super().__init__(max_capacity_bytes=int(capacity * (1 << 30)))
        self._node = _Node(options)
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._warned = False
        self._stored: dict[int, L2StoreResult] = {}
        self._found: dict[int, Any] = {}
        self._loaded: dict[int, Any] = {}
        self._store_event, self._lookup_event, self._load_event = (
            create_event_notifier() for _ in range(3)
        )

    def get_store_event_fd(self) -> int:
        """Return the descriptor that signals stores."""
        return int(self._store_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that signals lookups."""
        return int(self._lookup_event.fileno())

    def get_load_event_fd(self) -> int:
        """Return the descriptor that signals loads."""
        return int(self._load_event.fileno())

    def get_memory_tags(self) -> Any:
        """Return the kind of memory that holds the objects: remote storage.

        LMCache calls it since 0.5.7.
        """
        # Missing in 0.5.6
        from lmcache.v1.distributed.api import (
            MemoryResidency,
            MemorySegment,
            MemoryTags,
        )

        return MemoryTags(MemorySegment.STORAGE, MemoryResidency.REMOTE)

    # ---- store, lookup, load ---------------------------------------------------------------

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begin to store objects."""
        number = next(self._ids)
        sizes = [item.get_size() for item in objects]

        def stored(future: "concurrent.futures.Future[ObjectResults[PutOutcome | None]]") -> None:
            outcomes = future.result().values
            new = [
                size * (outcome is PutOutcome.STORED)
                for outcome, size in zip(outcomes, sizes, strict=True)
            ]
            there = [i for i, outcome in enumerate(outcomes) if outcome in _STORED]
            if there:
                _notify(self._notify_keys_stored, [keys[i] for i in there], [new[i] for i in there])
            self._publish(
                self._stored,
                number,
                L2StoreResult(len(there) == len(keys), sum(new)),
                self._store_event,
            )

        self._node.objects.put(*self._sized(keys, objects)).add_done_callback(stored)
        return number

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return completed stores."""
        with self._lock:
            stored = dict(self._stored)
            self._stored.clear()
        return stored

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Begin a lookup."""
        number = next(self._ids)
        layouts = {
            group: shapes_layout(tuple(map(tuple, layout.shapes)), tuple(layout.dtypes))
            for group, layout in group_layout_descs.items()
        }
        names = [self._node.naming.of(key, layouts.get(key.object_group_id)) for key in keys]
        self._node.objects.exists(names).add_done_callback(
            lambda future: self._publish(
                self._found, number, _bitmap(future.result().values), self._lookup_event
            )
        )
        return number

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return a lookup's result; None while it runs."""
        with self._lock:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing: objects are not locked, and an evicted one is a miss of the load."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begin to load objects."""
        number = next(self._ids)

        def loaded(future: "concurrent.futures.Future[ObjectResults[bool | None]]") -> None:
            values = future.result().values
            hits = [key for key, value in zip(keys, values, strict=True) if value]
            if hits:
                _notify(self._notify_keys_accessed, hits)
            self._publish(self._loaded, number, _bitmap(values), self._load_event)

        self._node.objects.get(*self._sized(keys, objects)).add_done_callback(loaded)
        return number

    def query_load_result(self, task_id: int) -> Any:
        """Return a load's result; None while it runs."""
        with self._lock:
            return self._loaded.pop(task_id, None)

    def _sized(
        self, keys: list[Any], objects: list[Any]
    ) -> tuple[list[ObjectName], list[memoryview]]:
        views = [item.byte_array for item in objects]
        kinds = [_shapes(item) for item in objects]
        if not self._warned and any(len(shapes) > 1 for shapes, _ in kinds):
            self._warned = True
            log.warning(
                "LMCache's objects hold several layer groups. If the model has recurrent layers, "
                "LMCache stores states that do not exist: run `lmcache server` with "
                "--separate-object-groups and a --chunk-size of one block of vLLM"
            )
        names = [
            self._node.naming.of(key, object_layout(*kind, view.nbytes))
            for key, kind, view in zip(keys, kinds, views, strict=True)
        ]
        return names, views

    def _publish(self, results: dict[int, Any], number: int, result: Any, event: Any) -> None:
        with self._lock:
            results[number] = result
        event.notify()

    # ---- management ------------------------------------------------------------------------

    def delete(self, keys: list[Any]) -> None:
        """Remove objects."""
        if not keys:
            return
        removed = (
            self._node.objects.remove([self._node.naming.of(key, None) for key in keys])
            .result()
            .values
        )
        gone = [(key, nbytes) for key, nbytes in zip(keys, removed, strict=True) if nbytes]
        if gone:
            self._notify_keys_deleted(*map(list, zip(*gone, strict=True)))

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> Any:
        """List keys of a model, by page. Raises ValueError for an invalid page size or cursor."""
        if page_size < 1:
            raise ValueError(f"page_size {page_size} must be at least 1")
        digest, prefix_hash = map(bytes.fromhex, (cursor or ".").split("."))
        try:
            listed = self._node.listed(model_name, digest, prefix_hash)
            entries = list(itertools.islice(listed, page_size + 1))
        except KVStoreError as error:
            log.warning("could not list keys: %s", error)
            return KeyListPage((), None)
        shown = entries[:page_size]
        token = (
            f"{shown[-1][0].hex()}.{shown[-1][1].chunk_hash.hex()}"
            if len(entries) > page_size
            else None
        )
        return KeyListPage(
            tuple(KeyEntry(_encoded(key), nbytes) for _, key, nbytes in shown), token
        )

    def report_status(self) -> dict[str, Any]:
        """Query the node or the members briefly; `is_healthy` says whether one answered."""
        client, objects = self._node.client, self._node.objects
        status: dict[str, Any] = {
            "is_healthy": True,
            "type": STORE_TYPE,
            "address": client.config.address,
        }
        try:
            nodes = answered(client.statuses(timeout_s=STATUS_TIMEOUT_S)).values()
            status["node"] = {
                "state": " ".join(sorted({node.state for node in nodes})),
                "ram_used_bytes": sum(node.ram.used_nbytes for node in nodes),
                "ram_capacity_bytes": sum(node.ram.capacity_nbytes for node in nodes),
                "objects_in_ram": sum(node.ram.page_count for node in nodes),
                "objects_on_disk": sum(node.disk.page_count for node in nodes),
            }
        except KVStoreError as error:
            status |= {"is_healthy": False, "error": str(error)}
        return status | {
            "wire": client.wire_name,
            **client.stats._asdict(),
            "objects": asdict(objects.stats),
        }

    def close(self) -> None:
        """Close node and descriptors."""
        self._node.close()
        for event in (self._store_event, self._lookup_event, self._load_event):
            event.close()


def _shapes(item: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the shapes and dtypes of an object's layer groups."""
    if item.meta.shapes is None:
        return [item.get_shape()], [item.get_dtype()]
    return item.get_shapes(), item.get_dtypes()


def _notify(listeners: Callable[..., None], *told: Any) -> None:
    """Call a listener of LMCache; a failing one must not cost a request its answer."""
    try:
        listeners(*told)
    except Exception:
        log.exception("a listener of LMCache failed")


def _encoded(key: ObjectKey) -> Any:
    fields = key._asdict()
    return EncodedObjectKey(chunk_hash_hex=fields.pop("chunk_hash").hex(), **fields)


def _bitmap(values: Sequence[bool | None]) -> Any:
    bitmap = Bitmap(len(values))
    for position, value in enumerate(values):
        if value:
            bitmap.set(position)
    return bitmap
