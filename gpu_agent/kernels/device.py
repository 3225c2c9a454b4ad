"""What the staged pipeline needs of a GPU. cuda.py is one; simulated.py is one for tests."""

import contextlib
import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch

from gpu_agent.transfer import Fence

Addresses: TypeAlias = "array[int]"  # of type "Q": the driver reads it as it is


WARPS = 16  # of a thread block: the bounds in transfer.cu and leaves.cu


def _int64s(*names: str) -> tuple[tuple[str, type[ctypes.c_int64]], ...]:
    return tuple((name, ctypes.c_int64) for name in names)


class Launch(ctypes.Structure):
    """Arguments of "gather" and "scatter" in transfer.cu, in their order; the first five are
    addresses.
    """

    _fields_ = (
        *_int64s("planes", "tiles", "slots", "page_table", "base"),
        *_int64s("stride", "tile_count", "page_first", "page_count", "job_pages", "skip_tokens"),
    )

    @property
    def blocks(self) -> int:
        """Thread blocks that have something to do."""
        return int(-(-self.tile_count * self.page_count // WARPS))


class LeavesLaunch(ctypes.Structure):
    """Arguments of "leaves" in leaves.cu, in their order; `table`, `base` and `out` are addresses."""

    _fields_ = (
        *_int64s("table", "base", "stride", "page_first", "page_count"),
        *_int64s("page_nbytes", "part_nbytes", "part_count", "out"),
    )

    @property
    def blocks(self) -> int:
        return int(self.page_count * self.part_count)


# The kernels, and what a launch of each that does nothing looks like.
KERNELS: dict[str, type[Launch] | type[LeavesLaunch]] = {
    "gather": Launch,
    "scatter": Launch,
    "leaves": LeavesLaunch,
}


class Device(Protocol):
    """Streams and events are CuPy's, or have their methods: a stream `wait_event(event)` and
    `synchronize()`; an event `record(stream)`, `synchronize()` and `done`. Memory has an address
    `ptr` and lasts as long as its object. Errors of CUDA are RuntimeErrors.
    """

    device: torch.device

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Within it, the calling thread's calls mean this GPU."""

    def stream(self) -> Any: ...

    def event(self) -> Any: ...

    def memory(self, nbytes: int) -> Any:
        """GPU memory at a multiple of 256."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """A uint8 CPU tensor that copies may read, and kernels write, while the caller goes on."""

    def page_locked(self, addresses: Sequence[int], nbytes: int) -> bool:
        """Whether `nbytes` from each address on are host memory that the copy engine reaches by
        itself.
        """

    def register(self, address: int, nbytes: int) -> None:
        """Makes mapped host memory page-locked.

        Raises ConfigError. May take seconds.
        """

    def unregister(self, address: int) -> None:
        """The reverse.

        No copy may be under way there, and it must still be mapped. Raises ConfigError.
        """

    def upload(self, table: torch.Tensor) -> torch.Tensor:
        """A copy in GPU memory, complete on return."""

    def fence(self) -> Fence:
        """A mark behind what the calling thread's engine has enqueued."""

    def wait(self, fence: Fence) -> None:
        """Blocks the caller until `fence` has happened, without a spinning core."""

    def mark(self, stream: Any) -> Fence:
        """An event behind what `stream` has been given, for the engine's streams to wait for."""

    def copy(
        self, targets: Addresses, sources: Addresses, nbytes: int, stream: Any, locked: bool
    ) -> None:
        """Enqueues copies of `nbytes` each, between GPU and host memory in either direction.

        `locked`: what `page_locked` says of the host's side.
        """

    def launch(self, kernel: str, launch: Launch | LeavesLaunch, stream: Any) -> None:
        """Enqueues one of `KERNELS`; `launch` is read before it returns."""
