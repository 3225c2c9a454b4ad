"""Share an engine's tensors and stream events with another process.

    memory   GPU: CUDA IPC, as torch shares tensors between processes
             CPU: a file in shared memory, whose descriptor the child inherits; for tests
    events   CUDA events that both processes know

Descriptions go to the other process as JSON: numbers, names, and handles as hex.

The engine records an event with each order, which costs microseconds and never waits. The worker
process waits for the event before it reads or writes the engine's blocks. Events are reused in
turn: an order whose event was recorded again waits for newer work too, which is late, never wrong.
"""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gpu_agent.pool import KVPool
from gpu_agent.transfer import Fence
from kvstore.errors import ConfigError, ProtocolError
from kvstore.layout import DTYPE_NBYTES, PageLayout

EVENTS = 16
NO_EVENT = -1
# The order of what torch's `_share_cuda_` returns and `_new_shared_cuda` takes.
_CUDA_FIELDS = (
    "device",
    "handle",
    "nbytes",
    "offset",
    "counter",
    "counter_offset",
    "event",
    "event_sync",
)


class IpcEvents:
    """Record events in the engine's process.

    CPU memory, which no stream writes, needs none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._next = 0
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._events = [
                    torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
                    for _ in range(EVENTS)
                ]

    def handles(self) -> list[str]:
        """Return handles for the other process.

        Raises ConfigError.
        """
        try:
            with torch.cuda.device(self._device) if self._events else contextlib.nullcontext():
                return [
                    event.ipc_handle().hex()  # type: ignore[no-untyped-call]
                    for event in self._events
                ]
        except RuntimeError as error:
            raise ConfigError(
                f"events on {self._device} can not be shared with another process: {error}"
            ) from error

    def record(self) -> int:
        """Record an event behind all work of the calling thread's stream, and return its number."""
        if not self._events:
            return NO_EVENT
        number, self._next = self._next, (self._next + 1) % EVENTS
        self._events[number].record(torch.cuda.current_stream(self._device))
        return number


class OpenedEvents:
    """Open the engine's events in the other process."""

    def __init__(self, device: torch.device, handles: list[str]) -> None:
        try:
            raw = [bytes.fromhex(handle) for handle in handles]
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"no handles of events: {error!r}") from error
        self._events: list[Fence] = [
            torch.cuda.Event.from_ipc_handle(device, handle)  # type: ignore[no-untyped-call]
            for handle in raw
        ]

    def fence(self, number: int) -> Fence:
        """Return the event of that number.

        Raises ProtocolError if there is none.
        """
        if number == NO_EVENT and not self._events:
            return None
        if not 0 <= number < len(self._events):
            raise ProtocolError(f"event {number} of {len(self._events)}")
        return self._events[number]


def described_pools(pools: Iterable[KVPool]) -> tuple[list[Any], list[Any], list[int]]:
    """Describe the storages under these pools, the pools as views of them, and what to inherit.

    The last are descriptors that the child must inherit. A description serves one process: torch
    counts the processes that have the memory mapped. Raises ConfigError if the memory can not be
    shared.
    """
    numbers: dict[int, int] = {}
    storages: list[Any] = []
    inherited: list[int] = []
    described = []
    for pool in pools:
        views = []
        for plane in pool.planes:
            storage = plane.bits.untyped_storage()
            # Not its address, which changes when memory becomes shared
            if storage._cdata not in numbers:
                numbers[storage._cdata] = len(storages)
                storages.append(described_storage(storage, inherited))
            views.append(
                {
                    "storage": numbers[storage._cdata],
                    "offset": plane.bits.storage_offset(),
                    "shape": list(plane.bits.shape),
                    "stride": list(plane.bits.stride()),
                    "space": plane.space,
                }
            )
        described.append(views)
    return storages, described, inherited


def described_storage(storage: torch.UntypedStorage, inherited: list[int]) -> dict[str, Any]:
    """Describe a storage for another process."""
    try:
        if storage.device.type == "cuda":
            values = storage._share_cuda_()  # type: ignore[no-untyped-call]
            return {
                name: value.hex() if isinstance(value, bytes) else value
                for name, value in zip(_CUDA_FIELDS, values, strict=True)
            }
        descriptor, nbytes = storage._share_fd_cpu_()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the engine's memory on {storage.device} can not be mapped elsewhere: {error}"
        ) from error
    inherited.append(descriptor)
    return {"descriptor": descriptor, "nbytes": nbytes}


def opened_memory(setup: Mapping[str, Any]) -> tuple[OpenedEvents, list[torch.UntypedStorage]]:
    """Open the engine's events and storages that `SETUP` describes, in the other process.

    The worker process and the probe of `kvstore doctor --gpu` both use this, so that the probe
    tests the same functions. Raises KeyError, ProtocolError or ConfigError.
    """
    device = torch.device(setup["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        _begin_cuda()
    return OpenedEvents(device, setup["events"]), opened_storages(setup["storages"])


def _begin_cuda() -> None:
    """Initialise CUDA, because opening a storage does not.

    Without it torch's allocator has no devices, indexes them all the same, and crashes with
    SIGSEGV.
    """
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"CUDA can not be used here: {error}") from error


def opened_storages(described: Iterable[Mapping[str, Any]]) -> list[torch.UntypedStorage]:
    """Map storages in the other process.

    Raises ProtocolError for a malformed description, ConfigError if mapping fails.
    """
    return [_opened_storage(storage) for storage in described]


def _opened_storage(described: Mapping[str, Any]) -> torch.UntypedStorage:
    storages: Any = torch.UntypedStorage
    try:
        if "descriptor" in described:
            opened: torch.UntypedStorage = storages._new_shared_fd_cpu(
                described["descriptor"], described["nbytes"]
            )
            return opened
        values = [described[name] for name in _CUDA_FIELDS]
        _begin_cuda()
        opened = storages._new_shared_cuda(
            *(bytes.fromhex(v) if isinstance(v, str) else v for v in values)
        )
        return opened
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"no description of memory: {error!r}") from error
    except RuntimeError as error:
        raise ConfigError(f"the engine's memory can not be mapped: {error}") from error


def opened_pool(
    views: Iterable[Mapping[str, Any]], layout: PageLayout, storages: list[torch.UntypedStorage]
) -> KVPool:
    """Make the described pool over memory mapped here.

    Raises ProtocolError or InvalidRequest.
    """
    tensors, spaces = {}, {}
    try:
        for piece, view in zip(layout.slices, views, strict=True):
            storage = storages[view["storage"]]
            dtype = getattr(torch, piece.plane.dtype)
            _check_inside(view, DTYPE_NBYTES[piece.plane.dtype], storage.nbytes())
            empty = torch.empty(0, dtype=dtype, device=storage.device)
            tensor = empty.set_(storage, view["offset"], view["shape"], view["stride"])
            tensors[piece.group, piece.layer, piece.plane.name] = tensor
            spaces[piece.group, piece.plane.name] = view["space"]
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ProtocolError(f"no description of a pool: {error!r}") from error
    return KVPool(layout, tensors, spaces)


def _check_inside(view: Mapping[str, Any], item_nbytes: int, nbytes: int) -> None:
    """Raise ValueError for a view outside its storage, which torch would enlarge."""
    steps = (
        (size - 1) * stride for size, stride in zip(view["shape"], view["stride"], strict=True)
    )
    end = (view["offset"] + sum(steps) + 1) * item_nbytes
    if view["offset"] < 0 or min(view["stride"], default=0) < 0 or end > nbytes:
        raise ValueError(f"a view of {end} bytes in memory of {nbytes}")
