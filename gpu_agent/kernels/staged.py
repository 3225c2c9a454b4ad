"""Move pages through GPU buffers: kernels gather and scatter, the copy engine crosses the link.

    slots <-- kernel --> buffers in GPU memory <-- copy engine --> pages in host memory
    slots <------------------ copy engine ------------------> contiguous pages

Kernels that store to host memory themselves use the link no better and slow everything else on the
GPU 1.5 to 21 times (H200); the copy engine does not. `Device` hides the GPU, and pipeline.py has
the order of the work: both are tested without a GPU.
"""

import contextlib
import ctypes
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch

from gpu_agent.kernels.arena_lock import ArenaLock
from gpu_agent.kernels.device import Addresses, Device, Launch, LeavesLaunch
from gpu_agent.kernels.pipeline import Job, Pipeline
from gpu_agent.kernels.plan import TILE_NBYTES, Chunk, Plan, Run
from gpu_agent.pool import KVPool, UnitTable
from gpu_agent.transfer import (
    Fence,
    Gathered,
    Landed,
    MappedPages,
    Placed,
    Ready,
    Summed,
    check_pages,
)
from kvstore.buffers import fill
from kvstore.checksum import LEAF_SUM_NBYTES, cuts, leaf_nbytes
from kvstore.errors import ConfigError, InvalidRequest

# 8 MiB buffers starve beside kernels of 250 us (33 instead of 54 GB/s); 16 MiB reach 0.97 and 0.98
# of the link, 32 MiB half a percent more, and slow other kernels by two percent more (H200).
BUFFER_NBYTES = 16 << 20
BUFFER_NBYTES_MIN = 4096
# From this size on a contiguous page is copied without a kernel, which would compete with the
# engine's: a copy's fixed cost of 2 us is then less than a twentieth of its time.
RUN_NBYTES_MIN = 1 << 20
# Bytes of a chunk of such pages, which needs no buffer: enqueueing one takes 0.1 ms of Python, in
# which the link moves 6 MiB.
RUN_CHUNK_NBYTES = 64 << 20
# leaves.cu reads words of 8 bytes, and implements only the hash of more than 240 bytes.
WORD_NBYTES = 8
LEAVES_NBYTES_MIN = 241
# Host memory for the leaves of one job, which the next one reuses; a larger job's is larger.
SUMS_NBYTES = 64 << 10
CHUNK_LISTS_MAX = 64  # of one pool, cached: jobs have few different sizes
Cut: TypeAlias = Callable[[int, int], Iterator[Chunk]]


class _Tables(NamedTuple):
    """A plan, its tables in GPU memory with their addresses, and its chunks for a number of pages.

    `run`: set if the pages are contiguous and better copied directly; `makes_leaves`: as in
    `Transfer.makes_leaves`.
    """

    plan: Plan
    run: Run | None
    makes_leaves: bool
    uploaded: tuple[torch.Tensor, torch.Tensor]
    planes: int
    tiles: int
    chunks: Callable[[Cut, int, bool], tuple[Chunk, ...]]


def _tables(device: Device, pool: KVPool, buffer_nbytes: int) -> _Tables:
    plan, nbytes = Plan(pool), pool.layout.page_nbytes
    run = plan.run if nbytes >= RUN_NBYTES_MIN else None
    in_words = not any(
        number % WORD_NBYTES for number in (nbytes, *((run.base, run.stride) if run else ()))
    )
    # No page may be cut into chunks.
    makes_leaves = (
        in_words and nbytes >= LEAVES_NBYTES_MIN and plan.whole.row_nbytes <= buffer_nbytes
    )
    planes, tiles = device.upload(plan.planes), device.upload(plan.tiles)

    @lru_cache(CHUNK_LISTS_MAX)
    def chunks(cut: Cut, page_count: int, without_buffer: bool) -> tuple[Chunk, ...]:
        return tuple(cut(page_count, RUN_CHUNK_NBYTES if without_buffer else buffer_nbytes))

    return _Tables(
        plan, run, makes_leaves, (planes, tiles), planes.data_ptr(), tiles.data_ptr(), chunks
    )


class _SumsMemory:
    """Host memory for leaves, with its address.

    Asking a tensor for its address is slow.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._memory = device.host_memory(nbytes)
        self.nbytes, self.address = nbytes, self._memory.data_ptr()


class _Sums:
    """The leaves of a job's pages.

    The GPU writes them into host memory, chunk by chunk. `kept`: such memory of ended jobs.
    """

    def __init__(
        self, device: Device, kept: list[_SumsMemory], page_nbytes: int, page_count: int
    ) -> None:
        self._device, self._kept = device, kept
        self._page_nbytes = page_nbytes
        self._parts = len(cuts(page_nbytes))
        self._nbytes = page_count * self._parts * LEAF_SUM_NBYTES
        try:
            memory = kept.pop()
        except IndexError:
            memory = _SumsMemory(device, SUMS_NBYTES)
        self._memory = (
            memory if memory.nbytes >= self._nbytes else _SumsMemory(device, self._nbytes)
        )
        self._out = self._memory.address
        fill(self._out, 0, self._nbytes)  # it may hold leaves of the previous job

    def make(self, chunk: Chunk, table: int, base: int, stride: int, stream: Any) -> None:
        """Make the leaves of a chunk's pages, at a table's addresses or `stride` apart."""
        part_nbytes, pages = (
            leaf_nbytes(self._page_nbytes),
            (chunk.page_first, chunk.page_count, self._page_nbytes),
        )
        launch = LeavesLaunch(table, base, stride, *pages, part_nbytes, self._parts, self._out)
        self._device.launch("leaves", launch, stream)

    def of_pages(self) -> list[bytes]:
        """Return the leaves of all pages, once, when all chunks are done."""
        made, nbytes = ctypes.string_at(self._out, self._nbytes), self._parts * LEAF_SUM_NBYTES
        self._kept.append(self._memory)
        return [made[start : start + nbytes] for start in range(0, len(made), nbytes)]


class _Move:
    """The two halves of a chunk of one gather or scatter.

    Everything known before the first chunk is computed here, once: chunks follow each other every
    300 us.
    """

    def __init__(
        self,
        device: Device,
        tables: _Tables,
        pages: Sequence[torch.Tensor],
        kernel: str,
        skip_tokens: int,
        sums: _Sums | None,
    ) -> None:
        self._device, self._tables = device, tables
        self._kernel, self._skip_tokens, self._sums = kernel, skip_tokens, sums
        self._pages = _addresses(pages)
        self._locked = device.page_locked(self._pages, tables.plan.layout.page_nbytes)

    def kernel(self, chunk: Chunk, buffer: int, slots: int, stream: Any) -> None:
        span, tables = chunk.span, self._tables
        launch = Launch(
            tables.planes,
            tables.tiles + span.tile_first * TILE_NBYTES,
            slots,
            0,
            buffer + span.lead - span.offset,  # where byte 0 of the page would be
            span.row_nbytes,
            span.tile_count,
            chunk.page_first,
            chunk.page_count,
            len(self._pages),
            self._skip_tokens,
        )
        self._device.launch(self._kernel, launch, stream)

    def from_slots(self, chunk: Chunk, buffer: int, slots: int, stream: Any) -> None:
        self.kernel(chunk, buffer, slots, stream)
        self._sum(chunk, buffer, stream)

    def to_pages(self, chunk: Chunk, buffer: int, _: int, stream: Any) -> None:
        self._device.copy(
            self._parts(chunk), _rows(chunk, buffer), chunk.span.nbytes, stream, self._locked
        )

    def from_pages(self, chunk: Chunk, buffer: int, _: int, stream: Any) -> None:
        self._device.copy(
            _rows(chunk, buffer), self._parts(chunk), chunk.span.nbytes, stream, self._locked
        )
        self._sum(chunk, buffer, stream)

    def _sum(self, chunk: Chunk, buffer: int, stream: Any) -> None:
        if self._sums:
            self._sums.make(chunk, 0, buffer, chunk.span.row_nbytes, stream)

    def _parts(self, chunk: Chunk) -> Addresses:
        return _at(self._pages, chunk)


class _RunMove:
    """Move contiguous pages, by the copy engine alone.

    A kernel reads them in place. The first half of a gather is all of it: after it the slots have
    been read.
    """

    def __init__(
        self,
        device: Device,
        run: Run,
        page_nbytes: int,
        pages: Sequence[torch.Tensor],
        units: UnitTable,
        sums: _Sums | None,
    ) -> None:
        self._device, self._sums = device, sums
        self._pages = _addresses(pages)
        self._locked = device.page_locked(self._pages, page_nbytes)
        self._slots = array(
            "Q", [run.base + slot * run.stride for slot in units.flat(run.space).tolist()]
        )

    @property
    def addresses(self) -> list[torch.Tensor]:
        """Return the tables to upload: each page's slot address."""
        return [torch.frombuffer(self._slots, dtype=torch.int64)] if self._sums else []

    def to_pages(self, chunk: Chunk, _: int, slots: int, stream: Any) -> None:
        self.sum_slots(chunk, _, slots, stream)
        self._device.copy(
            _at(self._pages, chunk),
            _at(self._slots, chunk),
            chunk.span.nbytes,
            stream,
            self._locked,
        )

    def to_slots(self, chunk: Chunk, _: int, __: int, stream: Any) -> None:
        self._device.copy(
            _at(self._slots, chunk),
            _at(self._pages, chunk),
            chunk.span.nbytes,
            stream,
            self._locked,
        )

    def sum_slots(self, chunk: Chunk, _: int, slots: int, stream: Any) -> None:
        if self._sums:
            self._sums.make(chunk, slots, 0, 0, stream)

    def nothing(self, chunk: Chunk, _: int, __: int, stream: Any) -> None:
        """Do nothing: there is no second half."""


class StagedTransfer:
    """`gpu_agent.transfer.Transfer` for pools on one GPU.

    GPU memory held from the start: two buffers of `buffer_nbytes` in each direction, 64 MiB by
    default, and 8 bytes for each index of the largest job so far. Per pool, while it lives: about 1
    % of a page for rows of 16-byte words, up to 6 % for words of one byte. Pages move at full speed
    in page-locked memory only; elsewhere the driver stages them. Raises ConfigError if the memory
    can not be allocated.
    """

    def __init__(self, device: Device, buffer_nbytes: int = BUFFER_NBYTES) -> None:
        if buffer_nbytes < BUFFER_NBYTES_MIN:
            raise ConfigError(f"buffer_nbytes={buffer_nbytes} must be at least {BUFFER_NBYTES_MIN}")
        self._device = device
        self._buffer_nbytes = buffer_nbytes
        self._sums: list[_SumsMemory] = []  # memory that no job uses now
        self._lock = threading.Lock()  # guards _tables
        self._tables: weakref.WeakKeyDictionary[KVPool, _Tables] = weakref.WeakKeyDictionary()
        with device.active():
            try:
                self._out, self._in = (
                    Pipeline(device, buffer_nbytes),
                    Pipeline(device, buffer_nbytes),
                )
            except RuntimeError as error:
                raise ConfigError(
                    f"no memory for 4 x {buffer_nbytes} bytes on {device.device}: {error}"
                ) from error
            # Waits for drains of both lanes, which must not wait for each other. Concurrent jobs
            # share it.
            self._placed = device.stream()
        self._arena = ArenaLock(device, self._idle)

    def fence(self, pool: KVPool) -> Fence:
        """Return a fence behind the engine's work."""
        self._check_device(pool)
        with self._device.active():
            return self._device.fence()

    def makes_leaves(self, pool: KVPool) -> bool:
        """Return whether leaves can be made: no page is cut, and words can be read."""
        return self._tables_of(pool).makes_leaves

    def pieces(self, pool: KVPool, units: UnitTable) -> None:
        """Return None: a GPU's slots are not host memory."""

    def gather(
        self,
        pool: KVPool,
        units: UnitTable,
        pages: Sequence[torch.Tensor],
        fence: Fence,
        gathered: Gathered | None = None,
        landed: Landed | None = None,
        summed: Summed | None = None,
    ) -> None:
        """Copy slots into pages; see `Transfer.gather`."""
        check_pages(pool, units, pages)
        with self._device.active():
            tables = self._prepare(pool, fence)
            if units.page_count:
                run, nbytes = tables.run, pool.layout.page_nbytes
                sums = _Sums(self._device, self._sums, nbytes, units.page_count) if summed else None
                cut = (
                    self._uncut(tables.plan, tables.plan.gather_chunks)
                    if summed
                    else tables.plan.gather_chunks
                )
                chunks = tables.chunks(cut, units.page_count, bool(run))
                drained = partial(_land, landed, nbytes) if landed else None
                if run:
                    alone = _RunMove(self._device, run, nbytes, pages, units, sums)
                    job = Job(
                        alone.addresses,
                        chunks,
                        alone.to_pages,
                        alone.nothing,
                        all_filled=gathered,
                        drained=drained,
                    )
                else:
                    move = _Move(self._device, tables, pages, "gather", 0, sums)
                    slots = _slots(pool, units)
                    job = Job(
                        slots,
                        chunks,
                        move.from_slots,
                        move.to_pages,
                        all_filled=gathered,
                        drained=drained,
                    )
                self._out.run(job)
                if summed and sums:
                    summed(sums.of_pages())
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
        ready: Ready | None = None,
        summed: Summed | None = None,
    ) -> None:
        """Copy pages into slots; see `Transfer.scatter`."""
        check_pages(pool, units, pages)
        pool.check_skip(skip_tokens, units.page_count)
        with self._device.active():
            tables = self._prepare(pool, fence)
            if units.page_count:
                run, nbytes = None if skip_tokens else tables.run, pool.layout.page_nbytes
                sums = _Sums(self._device, self._sums, nbytes, units.page_count) if summed else None
                cut: Cut = tables.plan.layer_chunks if placed else tables.plan.scatter_chunks
                if summed:
                    cut = self._uncut(tables.plan, cut)
                chunks = tables.chunks(cut, units.page_count, bool(run))
                queued = partial(self._place, placed) if placed else None
                before = partial(_await, ready) if ready else None
                if run:
                    alone = _RunMove(self._device, run, nbytes, pages, units, sums)
                    job = Job(
                        alone.addresses,
                        chunks,
                        alone.to_slots,
                        alone.sum_slots,
                        before,
                        queued=queued,
                    )
                else:
                    move = _Move(self._device, tables, pages, "scatter", skip_tokens, sums)
                    job = Job(
                        _slots(pool, units),
                        chunks,
                        move.from_pages,
                        move.kernel,
                        before,
                        queued=queued,
                    )
                self._in.run(job)
                if summed and sums:
                    summed(sums.of_pages())
            elif placed:
                for layer in pool.layout.layers:
                    placed(layer, None)

    def host_memory(self, memory: memoryview) -> bool:
        """Begin to page-lock memory; return whether it is locked."""
        return self._arena.use(memory)

    def await_host_memory(self, timeout_s: float) -> bool:
        """Wait until memory is locked."""
        return self._arena.wait(timeout_s)

    @contextlib.contextmanager
    def _idle(self) -> Iterator[None]:
        with self._out.idle(), self._in.idle():
            yield

    def _place(self, placed: Placed, chunk: Chunk, drained: Any) -> None:
        self._placed.wait_event(drained)
        if chunk.layers:
            event = self._device.mark(self._placed)
            for layer in chunk.layers:
                placed(layer, event)

    def _uncut(self, plan: Plan, cut: Cut) -> Cut:
        """Return a cut that leaves pages whole."""
        return cut if plan.whole.row_nbytes <= self._buffer_nbytes // 4 else plan.page_chunks

    def _prepare(self, pool: KVPool, fence: Fence) -> _Tables:
        """Return the pool's tables after waiting for the fence.

        It waits here, not on our streams, where a job of a busy engine would delay later jobs.
        """
        tables = self._tables_of(pool)
        self._device.wait(fence)
        return tables

    def _tables_of(self, pool: KVPool) -> _Tables:
        self._check_device(pool)
        with self._lock:
            tables = self._tables.get(pool)
            if tables is None:
                with self._device.active():
                    tables = self._tables[pool] = _tables(self._device, pool, self._buffer_nbytes)
            return tables

    def _check_device(self, pool: KVPool) -> None:
        if pool.device != self._device.device:
            raise InvalidRequest(
                f"the pool is on {pool.device}, this transfer serves {self._device.device}"
            )


def _addresses(pages: Sequence[torch.Tensor]) -> Addresses:
    return (
        pages.addresses
        if isinstance(pages, MappedPages)
        else array("Q", [page.data_ptr() for page in pages])
    )


def _slots(pool: KVPool, units: UnitTable) -> list[torch.Tensor]:
    """Return the indices in the order of the plane table's `slots_before`."""
    return [units.flat(space) for space in pool.spaces]


def _land(landed: Landed, page_nbytes: int, chunk: Chunk) -> None:
    if chunk.span.offset + chunk.span.nbytes == page_nbytes:
        landed(range(chunk.page_first, chunk.page_first + chunk.page_count))


def _await(ready: Ready, chunk: Chunk) -> None:
    if not chunk.span.offset:  # a page that is cut comes piece by piece, its first byte once
        ready(range(chunk.page_first, chunk.page_first + chunk.page_count))


def _at(places: Addresses, chunk: Chunk) -> Addresses:
    """Return where a chunk's bytes are in each of its pages, which begin at `places`."""
    some, offset = places[chunk.page_first : chunk.page_first + chunk.page_count], chunk.span.offset
    return array("Q", [place + offset for place in some]) if offset else some


def _rows(chunk: Chunk, buffer: int) -> Addresses:
    """Return where a chunk's bytes are in a buffer, page by page."""
    first, step = buffer + chunk.span.lead, chunk.span.row_nbytes
    return array("Q", range(first, first + chunk.page_count * step, step))
