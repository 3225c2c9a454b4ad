"""Page-locked host memory: what the copy engine reads and writes by itself.

A mapping of shared memory that is registered here is as fast as memory from CUDA's own allocator.
"""

import bisect
import threading

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
        long as writing them once. Raises ConfigError if CUDA refuses: registered already, not mapped,
        or over the limit of locked memory."""
        try:
            runtime.hostRegister(address, nbytes, _PORTABLE | _MAPPED)
        except runtime.CUDARuntimeError as error:
            raise ConfigError(f"can not page-lock {nbytes} bytes at {address:#x}: {error}") from error
        with self._lock:
            index = bisect.bisect(self._starts, address)
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

    def locked(self, address: int, nbytes: int) -> bool:
        """Whether a copy may use these bytes without the driver's staging: both ends decide."""
        with self._lock:
            index = bisect.bisect(self._starts, address) - 1
            if index >= 0 and address + nbytes <= self._ends[index]:
                return True
        ends = (address, address + nbytes - 1)
        return all(runtime.pointerGetAttributes(end).type == runtime.memoryTypeHost for end in ends)
