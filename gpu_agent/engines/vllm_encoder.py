"""Share the outputs of vLLM's encoders (images, sound, video) through the store.

    --ec-transfer-config '{"ec_connector": "KVStoreEncoderConnector",
      "ec_connector_module_path": "gpu_agent.engines.vllm_encoder", "ec_role": "ec_both",
      "ec_connector_extra_config": {"address": "store:7440"}}'

    SCHEDULER   TensorLoads: fetches outputs into host memory that all workers map
    WORKER      copies them to its device; the first one stores what it computed (TensorSaves)

vLLM has no way to report a failed load: an output that the scheduler counts on, and that a worker
lacks, ends the engine. So the scheduler counts only on outputs that are complete and verified in
host memory, and only once every worker has mapped it. All else is computed.

Options (docs/engines/vllm.md): those of gpu_agent.options, and `buffer_nbytes`.
"""

import importlib.metadata
import mmap
import os
import secrets
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger

from gpu_agent.engines.vllm_identity import prefill_context_rank
from gpu_agent.identity.vllm import check_encoder, encoder_namespace
from gpu_agent.objects.store import ObjectStore
from gpu_agent.objects.tensor_loads import TensorLoads
from gpu_agent.objects.tensors import (
    CHUNK_NBYTES,
    ChunkPool,
    TensorSaves,
    TensorSpec,
    chunk_layout,
)
from gpu_agent.options import Options, read_options
from kvstore.client import Client
from kvstore.errors import ConfigError
from kvstore.keys import Namespace
from kvstore.sync import start_thread
from kvstore.units import parse_nbytes

log = init_logger("vllm.kvstore.encoder")

BUFFER_NBYTES = 256 << 20
# An image that takes longer is computed: an encoder takes some ten or hundred milliseconds.
LOAD_TIMEOUT_S = 1.0
TOKEN_NBYTES = 32
_NEVER_UNMAPPED: list[torch.Tensor] = []
Rank = tuple[int, int]
Memory = tuple[str, int, bytes]  # path, bytes, token


@dataclass
class LoadOrder:
    """One output to copy from the slots of the shared memory into vLLM's encoder cache."""

    number: int
    identifier: str
    spec: TensorSpec
    slots: list[int]


@dataclass
class EncoderOrders(ECConnectorMetadata):
    """Orders for a step.

    `memory`: path, bytes and token of the shared memory, until all workers have mapped it.
    """

    step: int
    loads: list[LoadOrder]
    memory: Memory | None


@dataclass
class RankReport:
    """Report of one worker.

    `mapped`: whether it has the shared memory; None: not yet. `step`: the newest whose orders it
    took. `copied`: loads that have ended; `copying`: loads that run. `namespace`: of rank 0.
    """

    mapped: bool | None
    step: int
    copied: set[int]
    copying: set[int]
    namespace: Namespace | None


@dataclass
class EncoderReport(ECConnectorWorkerMetadata):
    """Reports of workers in one step."""

    ranks: dict[Rank, RankReport]

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "EncoderReport":
        """Add another worker's report."""
        assert isinstance(other, EncoderReport)
        self.ranks |= other.ranks
        return self


@dataclass
class _Load:
    """A load that some workers have not reported yet."""

    order: LoadOrder
    waiting: set[Rank]
    step: int = 0  # the newest that ordered it
    freed: bool = False


class KVStoreEncoderConnector(ECConnectorBase):
    """The connector, in both of vLLM's roles; vLLM calls each method in one of them."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        options = encoder_options(vllm_config.ec_transfer_config.ec_connector_extra_config)
        check_encoder(vllm_config)
        self._scheduler: _Scheduler | None = None
        self._worker: _Worker | None = None
        if role is ECConnectorRole.SCHEDULER:
            self._scheduler = _Scheduler(vllm_config, options) if self.is_consumer else None
        elif get_pp_group().is_first_rank:  # only these have an encoder
            self._worker = _Worker(vllm_config, options, self.is_producer)

    # ---- worker ----------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Copy the ordered outputs into the encoder cache."""
        orders = self._get_connector_metadata()
        if self._worker and isinstance(orders, EncoderOrders):
            self._worker.load(orders, encoder_cache)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        """Begin to store an output that was computed."""
        if self._worker and self._worker.saves:
            self._worker.saves.save(mm_hash, encoder_cache[mm_hash])

    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        """Return this worker's report for the scheduler."""
        return self._worker.report() if self._worker and self.is_consumer else None

    # ---- scheduler -------------------------------------------------------------------------

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Begin to fetch a request's outputs; return False while it is worth waiting for them."""
        return self._scheduler is None or self._scheduler.ensure(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        """Return whether an output is complete in host memory."""
        return self._scheduler is not None and self._scheduler.has(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Order the load of an output, if it was promised in this pass."""
        if self._scheduler:
            self._scheduler.allocated(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        """Return the workers' orders for the step."""
        if self._scheduler is None:
            return EncoderOrders(0, [], None)
        return self._scheduler.orders(scheduler_output.free_encoder_mm_hashes)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the workers' reports."""
        report = connector_output.ec_connector_worker_meta
        if self._scheduler and isinstance(report, EncoderReport):
            self._scheduler.reported(report.ranks)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """End a request; a client gets no reference to the outputs, which may be evicted."""
        if self._scheduler:
            self._scheduler.finished(request.request_id)
        return False, None

    def take_unavailable_requests(self) -> set[str]:
        """Return requests that can neither load nor compute an output."""
        return self._scheduler.take_unavailable() if self._scheduler else set()

    def shutdown(self) -> None:
        """End transfers in bounded time."""
        for part in (self._scheduler, self._worker):
            if part:
                part.close()


class _Scheduler:
    """The scheduler's side: fetches, promises and orders."""

    def __init__(self, vllm_config: Any, options: Options) -> None:
        parallel = vllm_config.parallel_config
        self._model = vllm_config.model_config
        self._window = vllm_config.scheduler_config.max_num_batched_tokens
        self._options = options
        self._ranks = parallel.tensor_parallel_size * getattr(
            parallel, "prefill_context_parallel_size", 1
        )
        self._mapped: dict[Rank, bool] = {}
        self._namespace: Namespace | None = None
        self._fd, self._memory, self._slots = _shared_memory(options.own["buffer_nbytes"])
        self._client = Client(options.client)
        self._store = ObjectStore(self._client, options.agent)
        self._store.connect()
        self._loads: TensorLoads | None = None  # until every worker has mapped the memory
        self._rows: dict[str, int] = {}  # of the outputs that this pass asked for
        self._promised: set[str] = set()  # pinned, in this pass
        self._cached: set[str] = set()  # in vLLM's own cache when this pass began, or since
        self._allocated = False  # an output in this pass: others may have left vLLM's cache for it
        self._running: dict[int, _Load] = {}
        self._step = self._number = 0
        # By request: seconds that it waited, and the time of the last pass if it still waits
        self._waits: dict[str, tuple[float, float | None]] = {}
        self._unavailable: set[str] = set()
        self._fields: Any = None

    def ensure(self, request: Any, computed: int) -> bool:
        """Begin to fetch the outputs of a request that needs more than its `computed` tokens.

        Return False to let the request wait: an output that the next step needs is on its way, or
        the engine can neither load nor compute it.
        """
        features = request.mm_features
        if not features or _end(features[-1]) <= computed:
            return True
        if self._loads:
            self._loads.poll()
        # What found no buffer, or belongs to a later chunk, begins late: one deadline for all
        now, (waited_s, last) = time.monotonic(), self._waits.get(request.request_id, (0.0, None))
        waited_s += now - last if last else 0.0
        patient, waiting = waited_s <= self._options.agent.load_timeout_s, False
        features = [feature for feature in features if _end(feature) > computed]
        rows_of = _rows_by_identifier(features)
        for feature in features:
            identifier, start = feature.identifier, feature.mm_position.offset
            cached = identifier in self._cached
            if cached and (not self._allocated or self._computable(feature)):
                continue
            rows = self._rows[identifier] = rows_of[identifier]
            soon = start < computed + self._window  # the next step may reach it
            if self._loads and rows:
                self._loads.begin(identifier, rows, feature.modality)
                if self._loads.find(identifier, rows) or not soon:
                    continue
                if self._loads.pending(identifier) and patient:
                    waiting = True
                    continue
            if cached and soon and patient:  # what this pass evicted is known after it
                waiting = True
            elif soon and not self._computable(feature):
                log.error(
                    "request %s has neither the media nor an embedding of its %s, and the store "
                    "does not have the output: it ends with an error",
                    *(request.request_id, feature.modality),
                )
                self._unavailable.add(request.request_id)
                return False
        if waiting or waited_s:
            self._waits[request.request_id] = waited_s, now if waiting else None
        return not waiting

    def _computable(self, feature: Any) -> bool:
        """Return whether the engine can compute an output.

        vLLM accepts embeddings without a tensor in an engine that has an encoder connector.
        """
        data = feature.data
        if not data or all(value.data is not None for value in data.values()):
            return True
        if self._fields is None:
            try:
                from vllm.distributed.ec_transfer.ec_connector.utils import (
                    PlaceholderMetadataResolver,
                )
            except ImportError:  # before 0.33, where no tensor may be missing
                return True
            self._fields = PlaceholderMetadataResolver(self._model)
        metadata = self._fields.fields_for(feature.modality)
        return any(value.data is not None for name, value in data.items() if name not in metadata)

    def has(self, identifier: str) -> bool:
        """Return whether an output is complete, and pin it until its workers have copied it."""
        rows = self._rows.get(identifier)
        if self._loads is None or rows is None or not self._loads.find(identifier, rows):
            return False
        if identifier not in self._promised:
            self._promised.add(identifier)
            self._loads.pin(identifier)
        return True

    def allocated(self, identifier: str) -> None:
        """Order the load of an output that `has` promised; others are computed."""
        self._cached.add(identifier)
        self._allocated = True
        if identifier not in self._promised or self._loads is None:
            return
        self._promised.discard(identifier)  # the pin is the order's from here on
        self._number += 1
        order = LoadOrder(self._number, identifier, *self._loads.content(identifier))
        self._running[order.number] = _Load(order, set(self._mapped))

    def orders(self, freed: list[str]) -> EncoderOrders:
        """Return all loads that are not reported yet: a step that computes nothing may be lost."""
        self._step += 1
        self._allocated = False
        self._cached.difference_update(freed)
        for identifier in self._promised:  # promised, but its request was not scheduled
            assert self._loads is not None
            self._loads.unpin(identifier)
        self._promised.clear()
        self._rows.clear()
        for load in self._running.values():
            load.freed |= load.order.identifier in freed
            if not load.freed:
                load.step = self._step
        loads = [load.order for load in self._running.values() if not load.freed]
        waits = self._loads is None and False not in self._mapped.values()
        return EncoderOrders(self._step, loads, self._memory if waits else None)

    def reported(self, ranks: dict[Rank, RankReport]) -> None:
        for rank, report in ranks.items():
            for load in self._running.values():
                # Freed and in no later order: a worker that does not know it by now never will
                lost = load.freed and load.step <= report.step
                number = load.order.number
                if number in report.copied or (lost and number not in report.copying):
                    load.waiting.discard(rank)
            self._namespace = report.namespace or self._namespace
            if report.mapped is not None and rank not in self._mapped:
                self._mapped[rank] = report.mapped
                if not report.mapped:
                    log.warning(
                        "rank %s can not map the scheduler's memory; nothing is loaded", rank
                    )
        for number in [number for number, load in self._running.items() if not load.waiting]:
            assert self._loads is not None
            self._loads.unpin(self._running.pop(number).order.identifier)
        if self._loads is None and self._namespace and len(self._mapped) == self._ranks:
            self._open(self._namespace)

    def _open(self, namespace: Namespace) -> None:
        if not all(self._mapped.values()):
            return
        pool = ChunkPool(_rows(self._slots))
        self._loads = TensorLoads(self._store, namespace, pool, self._options.agent.load_timeout_s)
        log.info(
            "encoder outputs: store at %s, %d ranks, %s",
            *(self._options.store, self._ranks, namespace.salt),
        )

    def finished(self, request_id: str) -> None:
        self._waits.pop(request_id, None)

    def take_unavailable(self) -> set[str]:
        found, self._unavailable = self._unavailable, set()
        return found

    def close(self) -> None:
        if self._loads:
            log.info("encoder outputs: %s", self._loads.stats)
        self._store.close()
        self._client.close()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


@dataclass
class _Memory:
    """The scheduler's memory in a worker. `rows`: None until it is mapped, or if it cannot be."""

    rows: torch.Tensor | None = None
    mapped: bool | None = None
    begun: bool = False


class _Worker:
    """A worker's side: copies, and saves on the first one."""

    def __init__(self, vllm_config: Any, options: Options, producer: bool) -> None:
        self._rank: Rank = (get_tp_group().rank_in_group, prefill_context_rank())
        device = vllm_config.device_config.device_type
        self._device = torch.device(device, torch.cuda.current_device() if device == "cuda" else 0)
        self._memory = _Memory()
        self._known = False  # whether the scheduler knows that the memory is mapped
        self._step = 0
        self._copies: dict[int, Any] = {}  # events, of loads that may be ordered again
        self._namespace: Namespace | None = None
        self.saves: TensorSaves | None = None
        self.unlock: Any = None  # once the memory is page-locked
        self._close: list[Any] = []
        if self._rank != (0, 0):
            return
        environment = {
            "vllm": ".".join(vllm.__version__.split(".")[:2]),
            "transformers": importlib.metadata.version("transformers"),
            "device": device,
        }
        self._namespace = encoder_namespace(
            *(vllm_config, options.identity, chunk_layout(), environment),
            not envs.VLLM_USE_MODELSCOPE,
        )
        if producer:
            client = Client(options.client)
            store = ObjectStore(client, options.agent)
            shape = (options.own["buffer_nbytes"] // CHUNK_NBYTES, CHUNK_NBYTES)
            memory = torch.empty(shape, dtype=torch.uint8, pin_memory=device == "cuda")
            self.saves = TensorSaves(store, self._namespace, memory)
            self._close = [self.saves, store, client]

    def load(self, orders: EncoderOrders, encoder_cache: dict[str, torch.Tensor]) -> None:
        self._step, self._known = orders.step, orders.memory is None
        if orders.memory and not self._memory.begun:
            self._memory.begun = True
            if self._device.type == "cuda":  # page-locking takes longer than a step
                try:
                    start_thread(partial(self._map, *orders.memory), "kvstore-encoder-memory")
                except RuntimeError as error:
                    log.warning("encoder outputs: no thread can be started: %s", error)
                    self._memory.mapped = False
            else:
                self._map(*orders.memory)
        ordered = {order.number for order in orders.loads}
        for number in [one for one in self._copies if one not in ordered]:
            if self._copies[number] is None:
                del self._copies[number]
        for order in orders.loads:
            if order.number not in self._copies:
                self._copies[order.number] = None
                if order.identifier not in encoder_cache:
                    encoder_cache[order.identifier] = self._copy(order)

    def _copy(self, order: LoadOrder) -> torch.Tensor:
        """Return the tensor; on a GPU it is complete before later work of the current stream."""
        spec, rows = order.spec, self._memory.rows
        assert rows is not None  # the scheduler orders nothing before
        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)
        flat = tensor.view(-1).view(torch.uint8)
        for slot, (at, start, nbytes) in zip(order.slots, spec.pieces(), strict=True):
            source = rows[slot, start : start + nbytes]
            flat[at : at + nbytes].copy_(source, non_blocking=True)
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copies[order.number] = event
        return tensor

    def _map(self, path: str, nbytes: int, token: bytes) -> None:
        try:
            with open(path, "r+b") as file:
                if os.pread(file.fileno(), TOKEN_NBYTES, nbytes) != token:
                    raise ValueError(f"{path} is another process's here")
                rows = _rows(mmap.mmap(file.fileno(), nbytes))
            if self._device.type == "cuda":
                _page_lock(self, rows, self._device)
            self._memory.rows, self._memory.mapped = rows, True
        # Another host, container or user; or no memory, also of the GPU's driver; or no CuPy
        except (OSError, ValueError, MemoryError, RuntimeError, ConfigError, ImportError) as error:
            log.warning("encoder outputs: the scheduler's memory can not be mapped: %s", error)
            self._memory.mapped = False

    def report(self) -> EncoderReport | None:
        copied, copying = set(), set()
        for number, event in self._copies.items():
            if event is None or event.query():
                self._copies[number] = None
                copied.add(number)
            else:
                copying.add(number)
        if self._known and not self._copies:
            return None
        mine = RankReport(self._memory.mapped, self._step, copied, copying, self._namespace)
        return EncoderReport({self._rank: mine})

    def close(self) -> None:
        if self.saves:
            log.info("encoder outputs: %s", self.saves.stats)
        for part in self._close:
            part.close()
        if self.unlock:
            self.unlock()


def _end(feature: Any) -> int:
    return int(feature.mm_position.offset + feature.mm_position.length)


def _rows_by_identifier(features: Iterable[Any]) -> dict[str, int]:
    """Return the rows of outputs; 0 if a client gives one name to media of several sizes."""
    found: dict[str, int] = {}
    for feature in features:
        rows = feature.mm_position.get_num_embeds()
        found[feature.identifier] = rows if found.get(feature.identifier, rows) == rows else 0
    return found


def _shared_memory(nbytes: int) -> tuple[int, Memory, mmap.mmap]:
    """Return new memory: its descriptor, its name and our mapping. Raises ConfigError."""
    # Behind the slots, because a worker elsewhere may find other memory at this path
    token = secrets.token_bytes(TOKEN_NBYTES)
    fd = os.memfd_create("kvstore-encoder", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        os.pwrite(fd, token, nbytes)
        return fd, (f"/proc/{os.getpid()}/fd/{fd}", nbytes, token), mmap.mmap(fd, nbytes)
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"there are no {nbytes} bytes of shared memory for encoder outputs: {error}; lower the "
            "option buffer_nbytes, or raise the process's limits (ulimit -f, -v)"
        ) from error


def _rows(memory: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8).view(-1, CHUNK_NBYTES)


def _page_lock(worker: _Worker, rows: torch.Tensor, device: torch.device) -> None:
    """Page-lock the memory until the worker is closed or dropped.

    It must not be unmapped before: copies from what is later mapped at its addresses would read
    the old memory. Raises ConfigError, RuntimeError and ImportError.
    """
    from gpu_agent.kernels.host_memory import HostMemory  # CuPy, which only a GPU needs

    host = HostMemory()
    with torch.cuda.device(device):
        host.register(rows.data_ptr(), rows.nbytes)
    worker.unlock = weakref.finalize(worker, _unlock, host, rows, device)
    worker.unlock.atexit = False  # the system frees it


def _unlock(host: Any, rows: torch.Tensor, device: torch.device) -> None:
    try:
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            host.unregister(rows.data_ptr())
    except (ConfigError, RuntimeError) as error:
        _NEVER_UNMAPPED.append(rows)
        log.warning("encoder outputs: the memory can not be unlocked: %s", error)


def encoder_options(values: Mapping[str, Any]) -> Options:
    """Return the connector's options. Raises ConfigError for an unknown or invalid one."""
    options = read_options(values, ("buffer_nbytes",), {"load_timeout_s": LOAD_TIMEOUT_S})
    given = options.own.get("buffer_nbytes", BUFFER_NBYTES)
    try:
        nbytes = parse_nbytes(str(given))
    except ValueError as error:
        raise ConfigError(f"option buffer_nbytes: {error}") from None
    if not CHUNK_NBYTES <= nbytes <= 64 << 30:
        raise ConfigError(f"option buffer_nbytes={given!r} must be from 1MiB to 64GiB")
    return replace(options, own={"buffer_nbytes": nbytes // CHUNK_NBYTES * CHUNK_NBYTES})
