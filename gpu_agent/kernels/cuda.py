"""Run the staged pipeline on an NVIDIA GPU, through CuPy.

Needs the extra cuda12 or cuda13.
"""

import contextlib
import ctypes
import logging
import queue
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cupy
import torch
from cupy.cuda import compiler, driver, runtime

from gpu_agent.kernels.device import KERNELS, WARPS, Addresses, Launch, LeavesLaunch
from gpu_agent.kernels.host_memory import BatchCopy, HostMemory
from gpu_agent.kernels.interrupts import interrupts_kept
from gpu_agent.kernels.staged import BUFFER_NBYTES, StagedTransfer
from gpu_agent.transfer import Fence
from kvstore.errors import ConfigError

log = logging.getLogger(__name__)
SOURCES = {"transfer.cu": ("gather", "scatter"), "leaves.cu": ("leaves",)}  # file -> kernels in it
COMPILER_OPTIONS = ("--std=c++17",)
# fewer hold their multiprocessors longer and hurt other kernels more; measured on an H200
BLOCKS = 128
BLOCKS_MAX = 1024


class CudaDevice:
    """An NVIDIA GPU: `gpu_agent.kernels.device.Device`.

    `blocks`: thread blocks of a kernel, hence multiprocessors that it may use.

    The kernels are compiled here, or taken from CuPy's cache on disk. Raises ConfigError for a
    device that is no GPU; CuPy's errors if the kernels can not be compiled.
    """

    def __init__(self, device: torch.device, blocks: int = BLOCKS) -> None:
        if device.type != "cuda":
            raise ConfigError(f"device={device} must be a CUDA device")
        if not 1 <= blocks <= BLOCKS_MAX:
            raise ConfigError(f"blocks={blocks} must be in 1..{BLOCKS_MAX}")
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.host = HostMemory()
        self._blocks = blocks
        # Streams and events for waiting threads
        self._waits: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        torch.empty(1, device=self.device)  # torch makes the GPU's context, as the engine would
        self.batch = BatchCopy()
        with self.active():
            with interrupts_kept():
                self._modules = {file: _module(file) for file in SOURCES}
            self._kernels = {
                name: self._modules[file].get_function(name).ptr
                for file, names in SOURCES.items()
                for name in names
            }
            stream = self.stream()
            for (
                kernel,
                nothing,
                # CUDA loads a kernel at its first launch and may stop the GPU for that
            ) in KERNELS.items():
                CudaDevice.launch(self, kernel, nothing(), stream)
            stream.synchronize()

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this is the current device."""
        return _active(self.device.index)

    def stream(self) -> Any:
        """Make a stream."""
        return cupy.cuda.Stream(non_blocking=True)

    def event(self) -> Any:
        """Make an event."""
        # Waiting threads sleep: the engine needs the cores
        return cupy.cuda.Event(block=True, disable_timing=True)

    def memory(self, nbytes: int) -> Any:
        """Allocate device memory."""
        # Not from torch's cache, whose blocks other streams may still use
        return cupy.cuda.Memory(nbytes)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate page-locked host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, table: torch.Tensor) -> torch.Tensor:
        """Copy a table to the device."""
        copy = table.to(self.device)
        torch.cuda.current_stream(self.device).synchronize()
        return copy

    def fence(self) -> Fence:
        """Return a fence behind everything on the current stream."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, fence: Fence) -> None:
        """Wait for a fence by an event of our own.

        A wait for another process's event is a busy loop, on a core that the engine's own thread
        may need.
        """
        if fence is None or fence.query():  # type: ignore[no-untyped-call]
            return
        try:
            stream, event = self._waits.get_nowait()
        except queue.Empty:
            stream, event = self.stream(), self.event()
        runtime.streamWaitEvent(stream.ptr, fence.cuda_event)
        event.record(stream)
        event.synchronize()
        self._waits.put((stream, event))

    def mark(self, stream: Any) -> Fence:
        """Return a fence behind everything on a stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        external = torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
            stream.ptr, device=self.device
        )
        event.record(external)
        return event

    def page_locked(self, addresses: Sequence[int], nbytes: int) -> bool:
        """Return whether all of this memory is page-locked."""
        return self.host.locked(addresses, nbytes)

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory."""
        self.host.register(address, nbytes)

    def unregister(self, address: int) -> None:
        """Unlock memory."""
        self.host.unregister(address)

    def copy(
        self, targets: Addresses, sources: Addresses, nbytes: int, stream: Any, locked: bool
    ) -> None:
        """Copy equally long pieces: page-locked ones by one call for up to 256, others by one each.

        A copy of memory that is not locked returns when the driver has staged the bytes.
        """
        if (
            locked
            and len(targets) > 1
            and self.batch.available
            and self.batch.copy(targets, sources, nbytes, stream.ptr)
        ):
            return
        for target, source in zip(targets, sources, strict=True):
            runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, stream.ptr)

    def launch(self, kernel: str, launch: Launch | LeavesLaunch, stream: Any) -> None:
        """Launch a kernel by the driver's own call, several times faster than CuPy's."""
        blocks = max(1, min(self._blocks, launch.blocks))
        first, step = ctypes.addressof(launch), ctypes.sizeof(ctypes.c_int64)
        # The address of each
        arguments = array("Q", range(first, first + ctypes.sizeof(launch), step))
        driver.launchKernel(
            self._kernels[kernel],
            blocks,
            1,
            1,
            32 * WARPS,
            1,
            1,
            0,
            stream.ptr,
            arguments.buffer_info()[0],
            0,
        )


class CudaTransfer(StagedTransfer):
    """`StagedTransfer` on a GPU.

    One per GPU and process is enough: it is thread-safe, and a second one costs 64 MiB more.
    """

    def __init__(
        self,
        device: torch.device | str = "cuda",
        buffer_nbytes: int = BUFFER_NBYTES,
        blocks: int = BLOCKS,
    ) -> None:
        self.device = CudaDevice(torch.device(device), blocks)
        super().__init__(self.device, buffer_nbytes)

    def register_host(self, address: int, nbytes: int) -> None:
        """Page-lock mapped memory, such as a node's arena; see `HostMemory.register`."""
        with self.device.active():
            self.device.host.register(address, nbytes)

    def unregister_host(self, address: int) -> None:
        """Unlock memory before it is unmapped; see `HostMemory.unregister`."""
        with self.device.active():
            self.device.host.unregister(address)


@contextlib.contextmanager
def _active(index: int) -> Any:
    """Make a device current for CuPy and torch, which each keep their own."""
    with cupy.cuda.Device(index), torch.cuda.device(index):
        yield


def _module(file: str) -> Any:
    """Compile a file's kernels; an unwritable cache folder costs seconds, not the start."""
    source = Path(__file__).with_name(file).read_text()
    try:
        module = cupy.RawModule(code=source, options=COMPILER_OPTIONS)
        module.compile()
        return module.module
    except OSError as error:
        log.warning(
            "CuPy's kernel cache (CUPY_CACHE_DIR) is unusable, compiling without it: %s", error
        )
    binary, _ = compiler.compile_using_nvrtc(source, COMPILER_OPTIONS, filename=file)
    module = cupy.cuda.function.Module()
    module.load(binary)
    return module
