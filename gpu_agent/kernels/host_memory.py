"""Page-locked host memory: what the copy engine reads and writes by itself.

A mapping of shared memory that is registered here is as fast as memory from CUDA's own allocator.
"""

import bisect
import threading
from collections.abc import Sequence

from cupy.cuda import runtime

from kvstore.errors import ConfigError

_PORTABLE, _MAPPED = 1, 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


class HostMemory:
    """Ranges registered by us, and what CUDA says of others. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []  # ascending
        self._ends: list[int] = []

    def register(self, address: int, nbytes: int) -> None:
        """Locks the pages of `address .. address + nbytes`, for all GPUs of this process. Takes about as
        long as writing them once. Raises ConfigError for memory that is registered here already, or if
        CUDA refuses: not mapped, or over the limit of locked memory."""
        with self._lock:
            index = bisect.bisect_left(self._starts, address + nbytes)
            if index and self._ends[index - 1] > address:
                raise ConfigError(
                    f"can not page-lock {nbytes} bytes at {address:#x}: "
                    f"{self._starts[index - 1]:#x}..{self._ends[index - 1]:#x} is registered already"
                )
        try:  # without our lock: a large arena takes seconds, and copies ask `locked` meanwhile
            runtime.hostRegister(address, nbytes, _PORTABLE | _MAPPED)
        except runtime.CUDARuntimeError as error:
            raise ConfigError(f"can not page-lock {nbytes} bytes at {address:#x}: {error}") from error
        with self._lock:
            index = bisect.bisect_left(self._starts, address)
            self._starts.insert(index, address)
            self._ends.insert(index, address + nbytes)

    def unregister(self, address: int) -> None:
        """The range registered at `address`. No copy may be under way in it, and it must still be
        mapped. Raises ConfigError for any other address."""
        with self._lock:
            if address not in self._starts:
                raise ConfigError(f"no memory is registered at {address:#x}")
            index = self._starts.index(address)
            del self._starts[index], self._ends[index]
        try:
            runtime.hostUnregister(address)
        except runtime.CUDARuntimeError as error:
            raise ConfigError(f"can not unlock the memory at {address:#x}: {error}") from error

    def locked(self, addresses: Sequence[int], nbytes: int) -> bool:
        """Whether copies of `nbytes` at each address may go without the driver's staging. One question
        for all that lie in one registered range, as an arena's pages do; else both ends of each decide."""
        if self._registered(min(addresses), max(addresses) + nbytes):
            return True
        return all(self._registered(address, address + nbytes) or _locked(address, nbytes) for address in addresses)

    def _registered(self, start: int, end: int) -> bool:
        with self._lock:
            index = bisect.bisect(self._starts, start) - 1
            return index >= 0 and end <= self._ends[index]


def _locked(address: int, nbytes: int) -> bool:
    ends = (address, address + nbytes - 1)
    return all(runtime.pointerGetAttributes(end).type == runtime.memoryTypeHost for end in ends)
