"""The staged pipeline: slots <-- kernel --> buffers in GPU memory <-- copy engine --> pages in host memory.

    gather     fill: kernel  slots -> buffer      drain: copies  buffer -> pages
    scatter    fill: copies  pages -> buffer      drain: kernel  buffer -> slots

    first stream    fill 0 | fill 1 |      | fill 2 |      | fill 3 | ...
    second stream          | drain 0 ......| drain 1 ......| drain 2 ...
    buffer              0        1               0               1

Kernels that store to host memory themselves fill the link no better and slow everything else on the
GPU 1.5 to 21 times (H200); the copy engine does not. What a GPU can do is behind `Device`, so that
this file is tested without one.
"""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from gpu_agent.kernels.plan import Chunk, Plan
from gpu_agent.pool import KVPool
from gpu_agent.transfer import Fence, Gathered, Landed, Placed, check_pages
from gpu_agent.units import UnitTable
from kvstore.errors import ConfigError, InvalidRequest

# 8 MiB buffers starve beside kernels of 250 us (33 instead of 54 GB/s), 32 MiB gain nothing (H200).
BUFFER_NBYTES = 16 << 20
BUFFER_NBYTES_MIN = 4096
JOBS_MAX = 4  # of one direction in flight; further callers wait for their turn
CHUNKS_AHEAD = 64  # of one job enqueued and not yet waited for


class Launch(NamedTuple):
    """Arguments of the kernels in transfer.cu, in their order; the first five are addresses."""

    planes: int
    tiles: int
    slots: int
    page_table: int
    base: int
    stride: int
    tile_count: int
    page_first: int
    page_count: int
    job_pages: int
    skip_tokens: int


class Device(Protocol):
    """What the pipeline needs of a GPU. Streams and events are CuPy's, or have their methods: a stream
    `wait_event(event)` and `synchronize()`; an event `record(stream)`, `synchronize()` and `done`.
    Memory has an address `ptr` and lasts as long as its object. Errors of CUDA are RuntimeErrors."""

    device: torch.device

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Within it, the calling thread's calls mean this GPU."""

    def stream(self) -> Any: ...

    def event(self) -> Any: ...

    def memory(self, nbytes: int) -> Any:
        """GPU memory at a multiple of 256."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """A uint8 CPU tensor that copies may read while the caller goes on."""

    def upload(self, table: torch.Tensor) -> torch.Tensor:
        """A copy in GPU memory, complete on return."""

    def fence(self) -> Fence:
        """A mark behind what the calling thread's engine has enqueued."""

    def wait(self, fence: Fence) -> None:
        """Blocks the caller until `fence` has happened, without a spinning core."""

    def mark(self, stream: Any) -> Fence:
        """An event behind what `stream` has been given, for the engine's streams to wait for."""

    def to_gpu(self, targets: Sequence[int], sources: Sequence[int], nbytes: int, stream: Any) -> None:
        """Enqueues copies of `nbytes` each from addresses in host memory to addresses in GPU memory."""

    def to_host(self, targets: Sequence[int], sources: Sequence[int], nbytes: int, stream: Any) -> None:
        """The same, from GPU memory to host memory."""

    def launch(self, kernel: str, launch: Launch, stream: Any) -> None:
        """Enqueues "gather" or "scatter"."""


class _Ticket:
    """What a job in flight owns: its indices on both sides, and an event for each chunk ahead."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.filled = device.event()
        self.drained = [device.event() for _ in range(CHUNKS_AHEAD)]
        self._reserve(1 << 18)

    def _reserve(self, nbytes: int) -> None:
        self._host, self.slots = self._device.host_memory(nbytes), self._device.memory(nbytes)

    def load(self, slots: torch.Tensor, stream: Any) -> None:
        """Enqueues the upload of int64 `slots`. Only while no earlier job of this ticket runs."""
        if slots.nbytes > len(self._host):
            self._reserve(1 << (slots.nbytes - 1).bit_length())
        self._host[: slots.nbytes].copy_(slots.view(torch.uint8))
        self._device.to_gpu([self.slots.ptr], [self._host.data_ptr()], slots.nbytes, stream)


@dataclass(frozen=True)
class _Job:
    """`fill` and `drain` enqueue one half of a chunk: (chunk, buffer address, slots address, stream).

    Hooks, on the job's own thread: `all_filled` when the last fill has happened, `queued(chunk, stream)`
    when a drain is enqueued, `drained(chunk)` when it has happened; in the order of the chunks.
    """

    slots: torch.Tensor
    chunks: list[Chunk]
    fill: Callable[[Chunk, int, int, Any], None]
    drain: Callable[[Chunk, int, int, Any], None]
    all_filled: Callable[[], None] = field(default=lambda: None)
    queued: Callable[[Chunk, Any], None] = field(default=lambda *_: None)
    drained: Callable[[Chunk], None] = field(default=lambda *_: None)


class _Pipeline:
    """Two buffers and two long-lived streams of one direction, shared by its jobs chunk by chunk: a
    small job does not wait for all of a large one. torch's own streams come from a pool that others
    draw from too; two roles on one stream would be served one after the other.

    Thread-safe. `_lock` covers what is enqueued for one chunk; nobody waits for the GPU under it.
    """

    def __init__(self, device: Device, buffer_nbytes: int) -> None:
        self._device = device
        self._first, self._second = device.stream(), device.stream()
        self._buffers = [device.memory(buffer_nbytes) for _ in range(2)]
        self._filled, self._free = [device.event() for _ in range(2)], [device.event() for _ in range(2)]
        self._next = 0
        self._lock = threading.Lock()
        self._tickets: queue.SimpleQueue[_Ticket] = queue.SimpleQueue()
        for _ in range(JOBS_MAX):
            self._tickets.put(_Ticket(device))

    def run(self, job: _Job) -> None:
        """Returns when all chunks are drained."""
        ticket = self._tickets.get()
        try:
            # A single chunk has nothing to overlap with: one stream saves two waits between streams.
            first = self._first if len(job.chunks) > 1 else self._second
            with self._lock:
                ticket.load(job.slots, first)
            done = 0
            for number, chunk in enumerate(job.chunks):
                if number - done == CHUNKS_AHEAD:
                    done = self._drained(job, ticket, done)
                self._enqueue(job, ticket, number, first)
                job.queued(chunk, self._second)
                while done < number and ticket.drained[done % CHUNKS_AHEAD].done:
                    done = self._drained(job, ticket, done)
            for number in range(done, len(job.chunks)):
                if number == max(done, len(job.chunks) - 2):  # the fill of the last chunk ends before this drain
                    ticket.filled.synchronize()
                    job.all_filled()
                self._drained(job, ticket, number)
        except BaseException:
            self._first.synchronize()
            self._second.synchronize()
            raise
        finally:
            self._tickets.put(ticket)

    def _enqueue(self, job: _Job, ticket: _Ticket, number: int, first: Any) -> None:
        chunk, second = job.chunks[number], self._second
        with self._lock:
            turn, self._next = self._next, 1 - self._next
            buffer = self._buffers[turn].ptr
            first.wait_event(self._free[turn])
            job.fill(chunk, buffer, ticket.slots.ptr, first)
            if first is not second:
                self._filled[turn].record(first)
                second.wait_event(self._filled[turn])
            if number == len(job.chunks) - 1:
                ticket.filled.record(first)
            job.drain(chunk, buffer, ticket.slots.ptr, second)
            self._free[turn].record(second)
            ticket.drained[number % CHUNKS_AHEAD].record(second)

    def _drained(self, job: _Job, ticket: _Ticket, number: int) -> int:
        """Waits for the drain of a chunk; the number of drained chunks."""
        ticket.drained[number % CHUNKS_AHEAD].synchronize()
        job.drained(job.chunks[number])
        return number + 1


class _Tables(NamedTuple):
    """A plan, and its tables in GPU memory."""

    plan: Plan
    planes: torch.Tensor
    tiles: torch.Tensor


class StagedTransfer:
    """`gpu_agent.transfer.Transfer` for pools on one GPU.

    GPU memory held from the start: two buffers of `buffer_nbytes` in each direction, 64 MiB by default,
    and 8 bytes for each index of the largest job so far. Per pool, while it lives: about 1 % of a page
    for rows of 16-byte words, up to 6 % for words of one byte.
    Pages travel at full speed in page-locked memory only; elsewhere the driver stages them.
    Raises ConfigError if the memory can not be had.
    """

    def __init__(self, device: Device, buffer_nbytes: int = BUFFER_NBYTES) -> None:
        if buffer_nbytes < BUFFER_NBYTES_MIN:
            raise ConfigError(f"buffer_nbytes={buffer_nbytes} must be at least {BUFFER_NBYTES_MIN}")
        self._device = device
        self._buffer_nbytes = buffer_nbytes
        self._lock = threading.Lock()  # _tables
        self._tables: weakref.WeakKeyDictionary[KVPool, _Tables] = weakref.WeakKeyDictionary()
        with device.active():
            try:
                self._out, self._in = _Pipeline(device, buffer_nbytes), _Pipeline(device, buffer_nbytes)
            except RuntimeError as error:
                raise ConfigError(f"no room for 4 x {buffer_nbytes} bytes on {device.device}: {error}") from error

    def fence(self, pool: KVPool) -> Fence:
        self._check_device(pool)
        with self._device.active():
            return self._device.fence()

    def gather(
        self,
        pool: KVPool,
        units: UnitTable,
        pages: Sequence[torch.Tensor],
        fence: Fence,
        gathered: Gathered | None = None,
        landed: Landed | None = None,
    ) -> None:
        check_pages(pool, units, pages)
        addresses = [page.data_ptr() for page in pages]

        def fill(chunk: Chunk, buffer: int, slots: int, stream: Any) -> None:
            self._device.launch("gather", _launch(tables, chunk, buffer, slots, units.page_count), stream)

        def drain(chunk: Chunk, buffer: int, _: int, stream: Any) -> None:
            staged, page = _addresses(chunk, buffer, addresses)
            self._device.to_host(page, staged, chunk.span.nbytes, stream)

        def drained(chunk: Chunk) -> None:
            if landed and chunk.span.offset + chunk.span.nbytes == pool.layout.page_nbytes:
                landed(range(chunk.page_first, chunk.page_first + chunk.page_count))

        with self._device.active():
            tables = self._prepare(pool, fence)
            chunks = list(tables.plan.chunks(units.page_count, self._buffer_nbytes))
            if chunks:
                all_filled = gathered or (lambda: None)
                self._out.run(_Job(_indices(pool, units), chunks, fill, drain, all_filled, drained=drained))
            elif gathered:
                gathered()

    def scatter(
        self,
        pool: KVPool,
        units: UnitTable,
        pages: Sequence[torch.Tensor],
        fence: Fence,
        skip_tokens: int = 0,
        placed: Placed | None = None,
    ) -> None:
        check_pages(pool, units, pages)
        pool.check_skip(skip_tokens, units.page_count)
        addresses = [page.data_ptr() for page in pages]

        def fill(chunk: Chunk, buffer: int, _: int, stream: Any) -> None:
            staged, page = _addresses(chunk, buffer, addresses)
            self._device.to_gpu(staged, page, chunk.span.nbytes, stream)

        def drain(chunk: Chunk, buffer: int, slots: int, stream: Any) -> None:
            launch = _launch(tables, chunk, buffer, slots, units.page_count)
            self._device.launch("scatter", launch._replace(skip_tokens=skip_tokens), stream)

        def queued(chunk: Chunk, stream: Any) -> None:
            if placed and chunk.ends is not None:
                placed(chunk.ends, self._device.mark(stream))

        with self._device.active():
            tables = self._prepare(pool, fence)
            cut = tables.plan.layer_chunks if placed else tables.plan.chunks
            chunks = list(cut(units.page_count, self._buffer_nbytes))
            if chunks:
                self._in.run(_Job(_indices(pool, units), chunks, fill, drain, queued=queued))
            elif placed:
                for layer in pool.layout.layers:
                    placed(layer, None)

    def _prepare(self, pool: KVPool, fence: Fence) -> _Tables:
        """Tables of the pool. Waits for `fence` here, not on our streams: a job whose engine is still
        busy would hold up those behind it."""
        self._check_device(pool)
        with self._lock:
            tables = self._tables.get(pool)
            if tables is None:
                plan = Plan(pool)
                tables = _Tables(plan, self._device.upload(plan.planes), self._device.upload(plan.tiles))
                self._tables[pool] = tables
        self._device.wait(fence)
        return tables

    def _check_device(self, pool: KVPool) -> None:
        if pool.device != self._device.device:
            raise InvalidRequest(f"the pool is on {pool.device}, this transfer serves {self._device.device}")


def _indices(pool: KVPool, units: UnitTable) -> torch.Tensor:
    """Indices of all spaces, one after the other."""
    return torch.cat([units.flat(space) for space in pool.spaces])


def _addresses(chunk: Chunk, buffer: int, pages: Sequence[int]) -> tuple[list[int], list[int]]:
    """Where the chunk's bytes are, page by page: in the buffer, and in the pages."""
    span, last = chunk.span, chunk.page_first + chunk.page_count
    staged = [buffer + span.lead + number * span.row_nbytes for number in range(chunk.page_count)]
    return staged, [page + span.offset for page in pages[chunk.page_first : last]]


def _launch(tables: _Tables, chunk: Chunk, buffer: int, slots: int, job_pages: int) -> Launch:
    span = chunk.span
    tile_nbytes = tables.tiles.stride(0) * tables.tiles.element_size()
    return Launch(
        planes=tables.planes.data_ptr(),
        tiles=tables.tiles.data_ptr() + span.tile_first * tile_nbytes,
        slots=slots,
        page_table=0,
        base=buffer + span.lead - span.offset,  # where byte 0 of the page would be
        stride=span.row_nbytes,
        tile_count=span.tile_count,
        page_first=chunk.page_first,
        page_count=chunk.page_count,
        job_pages=job_pages,
        skip_tokens=0,
    )
