"""Define what the staged pipeline needs of a GPU; cuda.py and simulated.py implement it."""

import contextlib
import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch

from gpu_agent.transfer import Fence

Addresses: TypeAlias = "array[int]"  # of type "Q", which the driver reads directly


WARPS = 16  # of a thread block: the bounds in transfer.cu and leaves.cu


def _int64s(*names: str) -> tuple[tuple[str, type[ctypes.c_int64]], ...]:
    return tuple((name, ctypes.c_int64) for name in names)


class Launch(ctypes.Structure):
    """Arguments of "gather" and "scatter" in transfer.cu, in their order.

    The first five are addresses.
    """

    _fields_ = (
        *_int64s("planes", "tiles", "slots", "page_table", "base"),
        *_int64s("stride", "tile_count", "page_first", "page_count", "job_pages", "skip_tokens"),
    )

    @property
    def blocks(self) -> int:
        """Return how many thread blocks have work."""
        return int(-(-self.tile_count * self.page_count // WARPS))


class LeavesLaunch(ctypes.Structure):
    """Arguments of "leaves" in leaves.cu, in their order.

    `table`, `base` and `out` are addresses.
    """

    _fields_ = (
        *_int64s("table", "base", "stride", "page_first", "page_count"),
        *_int64s("page_nbytes", "part_nbytes", "part_count", "out"),
    )

    @property
    def blocks(self) -> int:
        """Return how many thread blocks have work."""
        return int(self.page_count * self.part_count)


# The kernels, with the type of each one's launch.
KERNELS: dict[str, type[Launch] | type[LeavesLaunch]] = {
    "gather": Launch,
    "scatter": Launch,
    "leaves": LeavesLaunch,
}


class Device(Protocol):
    """The calls of a GPU that the pipeline uses; streams and events are CuPy's or similar.

    A stream has `wait_event(event)` and `synchronize()`; an event has `record(stream)`,
    `synchronize()` and `done`. Memory has an address `ptr` and lasts as long as its object. CUDA
    errors are RuntimeErrors.
    """

    device: torch.device

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the calling thread uses this GPU."""

    def stream(self) -> Any:
        """Make a stream."""

    def event(self) -> Any:
        """Make an event."""

    def memory(self, nbytes: int) -> Any:
        """Allocate GPU memory at a multiple of 256."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate a uint8 CPU tensor that copies and kernels may use asynchronously."""

    def page_locked(self, addresses: Sequence[int], nbytes: int) -> bool:
        """Return whether the copy engine reaches all of this host memory by itself."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock mapped host memory, which may take seconds. Raises ConfigError."""

    def unregister(self, address: int) -> None:
        """Unlock memory that is still mapped and that no copy uses. Raises ConfigError."""

    def upload(self, table: torch.Tensor) -> torch.Tensor:
        """Return a complete copy in GPU memory."""

    def fence(self) -> Fence:
        """Return a fence behind everything that the calling thread's engine has enqueued."""

    def wait(self, fence: Fence) -> None:
        """Wait until the fence has happened, without a busy loop."""

    def mark(self, stream: Any) -> Fence:
        """Return an event behind a stream's work, for the engine's streams to wait for."""

    def copy(
        self, targets: Addresses, sources: Addresses, nbytes: int, stream: Any, locked: bool
    ) -> None:
        """Enqueue copies of `nbytes` each between GPU and host memory.

        `locked` is what `page_locked` returned for the host's side.
        """

    def launch(self, kernel: str, launch: Launch | LeavesLaunch, stream: Any) -> None:
        """Enqueue one of `KERNELS`; `launch` is read before this returns."""
