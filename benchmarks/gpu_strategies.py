"""Define the ways to move pages that benchmarks/transfer.py compares on a GPU.

A strategy makes one move of all pages; its `timed` gives the seconds between two CUDA events around
the GPU's work. The transfer's own streams are timed by events that its device records.
"""

import abc
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import cupy
import torch
from gpu_work import Work

from gpu_agent.kernels.cuda import CudaDevice
from gpu_agent.kernels.device import Launch
from gpu_agent.kernels.host_memory import HostMemory
from gpu_agent.kernels.plan import Plan
from gpu_agent.kernels.staged import StagedTransfer

DIRECT_BLOCKS = 8
HOST = HostMemory()  # the arenas of all works


class NotedEvent(cupy.cuda.Event):
    """An event with its time; the device remembers the last one of each stream."""

    def __init__(self, device: "TimedDevice") -> None:
        super().__init__(block=True)
        self._device = device

    def record(self, stream: Any = None) -> None:
        """Record the event and remember it."""
        super().record(stream)
        self._device.last[stream.ptr] = self


class TimedDevice(CudaDevice):
    """Time a transfer by an event before its first and after its last operation."""

    first: Any = None

    def restart(self) -> None:
        """Forget the events of the last run."""
        self.first = None
        self.last: dict[int, Any] = {}

    def seconds(self) -> float:
        """Return the seconds by CUDA events."""
        return (
            max(cupy.cuda.get_elapsed_time(self.first, last) for last in self.last.values()) / 1e3
        )

    def event(self) -> Any:
        """Make an event."""
        return NotedEvent(self)

    def copy(self, targets: Any, sources: Any, nbytes: int, stream: Any, locked: bool) -> None:
        """Copy, and remember the stream."""
        self._note(stream)
        super().copy(targets, sources, nbytes, stream, locked)

    def launch(self, kernel: str, launch: Launch, stream: Any) -> None:
        """Launch, and remember the stream."""
        self._note(stream)
        super().launch(kernel, launch, stream)

    def _note(self, stream: Any) -> None:
        if self.first is None:
            self.first = cupy.cuda.Event()
            self.first.record(stream)


class Strategy(abc.ABC):
    """One work's move in both directions on one stream."""

    name = ""
    checked = True  # False: it moves no pool, so its bytes are not checked
    jobs = 1  # of each direction in flight when both run at once

    def __init__(self, work: Work) -> None:
        self.work = work
        self.units = work.units
        self.stream = torch.cuda.Stream()
        self.prepare()

    @abc.abstractmethod
    def prepare(self) -> None:
        """Make what a server would make once."""

    @abc.abstractmethod
    def gather(self) -> None:
        """Move slots to pages."""

    @abc.abstractmethod
    def scatter(self) -> None:
        """Move pages to slots."""

    def timed(self, move: Callable[[], None]) -> tuple[float, float]:
        """Return the seconds by CUDA events and by the wall clock."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun = time.perf_counter()
        with torch.cuda.stream(self.stream):
            start.record()
            move()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, time.perf_counter() - begun

    def run(self, move: Callable[[], None]) -> None:
        """Run one move to its end."""
        with torch.cuda.stream(self.stream):
            move()
        self.stream.synchronize()


class Staged(Strategy):
    """Use the staged transfer."""

    name = "staged pipeline"
    jobs = 2  # as many as the agent's workers

    def prepare(self) -> None:
        """Make what a server would make once."""
        self.device = TimedDevice(torch.device("cuda"))
        self.device.host = HOST
        self.device.restart()
        self.transfer = StagedTransfer(self.device)
        self.table = self.work.table(self.units)

    def gather(self) -> None:
        """Move slots to pages."""
        self.transfer.gather(self.work.pool, self.table, self.work.pages, None)

    def scatter(self) -> None:
        """Move pages to slots."""
        self.transfer.scatter(self.work.pool, self.table, self.work.pages, None)

    def timed(self, move: Callable[[], None]) -> tuple[float, float]:
        """Return the seconds of one move."""
        self.device.restart()
        begun = time.perf_counter()
        move()
        wall = time.perf_counter() - begun
        return self.device.seconds(), wall


class StagedLayerwise(Staged):
    """Use the staged transfer, layer by layer."""

    name = "staged pipeline, layer by layer"

    def scatter(self) -> None:
        """Move pages to slots."""
        self.transfer.scatter(
            self.work.pool, self.table, self.work.pages, None, placed=lambda *_: None
        )


class TorchIndex(Strategy):
    """Use torch's indexing."""

    name = "torch index + copy per page"

    def prepare(self) -> None:
        """Make what a server would make once."""
        work = self.work
        self.staged = torch.empty((work.count, work.page_nbytes), dtype=torch.uint8, device="cuda")
        self.index = self.units.cuda()

    def gather(self) -> None:
        """Move slots to pages."""
        for plane in self.work.pool.planes:
            start, nbytes = plane.piece.offset, plane.piece.nbytes
            rows = plane.bits[self.index].view(torch.uint8).view(self.work.count, nbytes)
            self.staged[:, start : start + nbytes] = rows
        for page, row in zip(self.work.pages, self.staged, strict=True):
            page.copy_(row, non_blocking=True)

    def scatter(self) -> None:
        """Move pages to slots."""
        for page, row in zip(self.work.pages, self.staged, strict=True):
            row.copy_(page, non_blocking=True)
        for plane in self.work.pool.planes:
            start, nbytes = plane.piece.offset, plane.piece.nbytes
            rows = self.staged[:, start : start + nbytes].contiguous().view(plane.bits.dtype)
            plane.bits[self.index] = rows.view(-1, *plane.bits.shape[1:])


class CopyPerPage(Strategy):
    """Pages that are contiguous in GPU memory already: the copies alone, without a gather."""

    name = "one copy per page (no gather)"
    checked = False

    def prepare(self) -> None:
        """Make what a server would make once."""
        self.staged = torch.empty(
            (self.work.count, self.work.page_nbytes), dtype=torch.uint8, device="cuda"
        )

    def gather(self) -> None:
        """Move slots to pages."""
        for page, row in zip(self.work.pages, self.staged, strict=True):
            page.copy_(row, non_blocking=True)

    def scatter(self) -> None:
        """Move pages to slots."""
        for page, row in zip(self.work.pages, self.staged, strict=True):
            row.copy_(page, non_blocking=True)


class Fragments(Strategy):
    """Copies of each page's tokens of one layer and plane, which are contiguous in block pools."""

    name = "batched copies of per-layer fragments"

    def prepare(self) -> None:
        """Make what a server would make once."""
        work = self.work
        self.units = work.runs
        self.device = CudaDevice(torch.device("cuda"))
        starts = work.runs.view(work.count, -1)[:, 0].tolist()
        slices = [(plane, plane.piece.offset) for plane in work.pool.planes]
        self.nbytes = slices[0][0].piece.nbytes
        steps = [plane.bits.stride(0) * plane.bits.element_size() for plane, _ in slices]
        self.slots = [
            plane.bits.data_ptr() + start * step
            for start in starts
            for (plane, _), step in zip(slices, steps, strict=True)
        ]
        self.targets = [page.data_ptr() + offset for page in work.pages for _, offset in slices]

    def gather(self) -> None:
        """Move slots to pages."""
        self._copy(self.targets, self.slots)

    def scatter(self) -> None:
        """Move pages to slots."""
        self._copy(self.slots, self.targets)

    def _copy(self, targets: list[int], sources: list[int]) -> None:
        if not self.device.batch.available or not self.device.batch.copy(
            array("Q", targets), array("Q", sources), self.nbytes, self.stream.cuda_stream
        ):
            raise RuntimeError("this driver has no cuMemcpyBatchAsync")


class Direct(Strategy):
    """Run the same kernels directly on the pages in host memory."""

    name = f"direct kernel ({DIRECT_BLOCKS} blocks)"

    def prepare(self) -> None:
        """Make what a server would make once."""
        self.device = CudaDevice(torch.device("cuda"), blocks=DIRECT_BLOCKS)
        self.plan = Plan(self.work.pool)
        self.tables = [self.plan.planes.cuda(), self.plan.tiles.cuda(), self.units.cuda()]
        self.tables.append(torch.tensor([page.data_ptr() for page in self.work.pages]).cuda())
        count, addresses = self.work.count, [table.data_ptr() for table in self.tables]
        self.arguments = Launch(*addresses, 0, 0, len(self.plan.tiles), 0, count, count, 0)
        torch.cuda.synchronize()

    def gather(self) -> None:
        """Move slots to pages."""
        self.device.launch(
            "gather", self.arguments, cupy.cuda.ExternalStream(self.stream.cuda_stream)
        )

    def scatter(self) -> None:
        """Move pages to slots."""
        self.device.launch(
            "scatter", self.arguments, cupy.cuda.ExternalStream(self.stream.cuda_stream)
        )


class DirectFromHost(Direct):
    """Run the kernels with the indices in host memory, as a caller has them."""

    name = f"direct kernel ({DIRECT_BLOCKS} blocks), indices uploaded"

    def prepare(self) -> None:
        """Make what a server would make once."""
        super().prepare()
        self.slots = self.units.pin_memory()

    def scatter(self) -> None:
        """Move pages to slots."""
        self.tables[2].copy_(self.slots, non_blocking=True)
        super().scatter()


class Limit(Strategy):
    """One copy of everything between GPU memory and the arena."""

    name = "limit: one big copy"
    checked = False

    def prepare(self) -> None:
        """Make what a server would make once."""
        self.staged = torch.empty(self.work.nbytes, dtype=torch.uint8, device="cuda")
        self.host = self.work.arena[: self.work.nbytes]

    def gather(self) -> None:
        """Move slots to pages."""
        self.host.copy_(self.staged, non_blocking=True)

    def scatter(self) -> None:
        """Move pages to slots."""
        self.staged.copy_(self.host, non_blocking=True)


STRATEGIES: tuple[type[Strategy], ...] = (
    Limit,
    Staged,
    StagedLayerwise,
    TorchIndex,
    CopyPerPage,
    Fragments,
    Direct,
)
TINY: tuple[type[Strategy], ...] = (Staged, DirectFromHost)
BACKGROUND: tuple[type[Strategy], ...] = (Staged, CopyPerPage, Direct)


def products() -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield matrix products as an engine makes them, with functions that time one.

    They are replayed from a CUDA graph, so that the GPU is measured and not Python's lock.
    """
    for name, sizes, count in (
        ("4096^3", (4096, 4096, 4096), 20),
        ("64x4096x14336", (64, 4096, 14336), 200),
    ):
        rows, inner, columns = sizes
        left = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
        right = torch.randn(inner, columns, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
        torch.mm(left, right, out=out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                torch.mm(left, right, out=out)

        def seconds(
            graph: Any = graph, count: int = count, _alive: Any = (left, right, out)
        ) -> float:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / count

        yield name, seconds
