"""Page-lock host memory, and copy many pieces of it to and from a GPU in one call.

The copy engine reads and writes page-locked memory by itself. A mapping of shared memory that is
registered here is as fast as memory from CUDA's own allocator.
"""

import bisect
import ctypes
import logging
import threading
from array import array
from collections.abc import Sequence
from typing import Any

from cupy.cuda import runtime

from gpu_agent.kernels.device import Addresses
from kvstore.errors import ConfigError

log = logging.getLogger(__name__)

BATCH_MAX = 256
# requested by version, so that the function has the same signature with any driver
_CUDA_VERSION = 12080
_NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_PORTABLE, _MAPPED = 1, 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


class HostMemory:
    """Ranges registered by us, and CUDA's attributes of others.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []  # ascending
        self._ends: list[int] = []

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock the range for all GPUs of this process.

        It takes about as long as writing the range once. Raises ConfigError if the range is
        registered already, or if CUDA refuses, as for unmapped memory or beyond the limit of locked
        memory.
        """
        with self._lock:
            index = bisect.bisect_left(self._starts, address + nbytes)
            if index and self._ends[index - 1] > address:
                raise ConfigError(
                    f"can not page-lock {nbytes} bytes at {address:#x}: "
                    f"{self._starts[index - 1]:#x}..{self._ends[index - 1]:#x} is registered "
                    "already"
                )
        try:  # without our lock: a large arena takes seconds, and copies call `locked` meanwhile
            runtime.hostRegister(address, nbytes, _PORTABLE | _MAPPED)
        except runtime.CUDARuntimeError as error:
            raise ConfigError(
                f"can not page-lock {nbytes} bytes at {address:#x}: {error}"
            ) from error
        with self._lock:
            index = bisect.bisect_left(self._starts, address)
            self._starts.insert(index, address)
            self._ends.insert(index, address + nbytes)

    def unregister(self, address: int) -> None:
        """Unlock the range registered at `address`.

        No copy may use it, and it must still be mapped. Raises ConfigError for other addresses.
        """
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
        """Return whether copies at each address may bypass the driver's staging.

        One check does for addresses in one registered range, as an arena's pages; otherwise both
        ends of each are checked.
        """
        if self._registered(min(addresses), max(addresses) + nbytes):
            return True
        return all(
            self._registered(address, address + nbytes) or _locked(address, nbytes)
            for address in addresses
        )

    def _registered(self, start: int, end: int) -> bool:
        with self._lock:
            index = bisect.bisect(self._starts, start) - 1
            return index >= 0 and end <= self._ends[index]


def _locked(address: int, nbytes: int) -> bool:
    ends = (address, address + nbytes - 1)
    return all(runtime.pointerGetAttributes(end).type == runtime.memoryTypeHost for end in ends)


class _Location(ctypes.Structure):
    """CUmemLocation: a hint for managed memory only; zero says nothing."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


def _driver_function() -> Any:
    """Return the driver's function; None without a driver or with an older one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        look_up = driver.cuGetProcAddress_v2
    except (OSError, AttributeError):
        return None
    address, status = ctypes.c_void_p(), ctypes.c_int()
    flags = ctypes.c_uint64(0)
    failed = look_up(
        b"cuMemcpyBatchAsync", ctypes.byref(address), _CUDA_VERSION, flags, ctypes.byref(status)
    )
    if failed or not address.value:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
    )
    return prototype(address.value)


class BatchCopy:
    """Enqueue many copies by one call of the driver, `cuMemcpyBatchAsync` (CUDA 12.8).

    CuPy does not wrap it. One call per page loses about 2 µs each on the GPU. One call with
    thousands of entries costs the CPU more than the copies take (16,384 entries: 43 ms on an H200's
    host), hence BATCH_MAX.

    Thread-safe. Host memory must be page-locked, and a context current in the calling thread.
    """

    def __init__(self) -> None:
        self._function = _driver_function()
        self._attributes = _Attributes(order=_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)  # the one set of attributes holds from entry 0 on

    @property
    def available(self) -> bool:
        """Return whether `copy` may be called; some GPUs refuse it at the first call."""
        return self._function is not None

    def copy(self, targets: Addresses, sources: Addresses, nbytes: int, stream: int) -> bool:
        """Enqueue copies of `nbytes` each on a stream's handle; return False if the driver refused.

        Some may be enqueued then, and all may be enqueued again. An H200 refuses (error 1) the
        first batch in each direction between page-locked memory and memory shared through CUDA IPC.
        """
        sizes = array("Q", (nbytes,)) * min(len(targets), BATCH_MAX)
        for start in range(0, len(targets), BATCH_MAX):
            failed_at = ctypes.c_size_t(0)
            code = self._function(
                targets.buffer_info()[0] + start * targets.itemsize,
                sources.buffer_info()[0] + start * sources.itemsize,
                sizes.buffer_info()[0],
                min(BATCH_MAX, len(targets) - start),
                ctypes.byref(self._attributes),
                ctypes.byref(self._first),
                1,
                ctypes.byref(failed_at),
                stream,
            )
            if code:
                if code == _NOT_SUPPORTED:
                    self._function = None
                log.info("cuMemcpyBatchAsync: CUDA error %d, copying one by one", code)
                return False
        return True
