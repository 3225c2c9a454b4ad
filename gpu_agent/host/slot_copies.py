"""Gather and scatter host pools with large units: one copy per unit and plane, slot to page.

`TorchTransfer` gathers a plane of all pages at once and copies the result into the pages: right for
token slots, which are too small to be copied one by one, and twice the traffic for whole pages.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from gpu_agent.kernels.plan import Unit, unit_of
from gpu_agent.pool import KVPool, PoolPlane, UnitTable
from gpu_agent.transfer import (
    Fence,
    Gathered,
    Landed,
    Placed,
    Ready,
    Summed,
    TorchTransfer,
    check_pages,
)
from kvstore.buffers import Pieces, byte_view

# Pages reported together: enough to be worth a call, few enough that their checksums are made while
# they are still in a cache.
RUN_NBYTES = 4 << 20


class SlotCopies(TorchTransfer):
    """Transfer for CPU pools.

    Copies release the GIL and use torch's threads.
    """

    @torch.inference_mode()
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
        rows = slots_of(pool, units)
        for run in _runs(pool, units.page_count):
            for number in run:
                for plane in pool.planes:
                    for slot, target in _pairs(plane, rows[plane.space][number], pages[number]):
                        _fill(target, slot)
            if landed:
                landed(run)
        if gathered:
            gathered()

    @torch.inference_mode()
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
        # Single layers or parts of a page: host pages are moved whole
        if placed or skip_tokens:
            return super().scatter(pool, units, pages, fence, skip_tokens, placed, ready)
        check_pages(pool, units, pages)
        rows = slots_of(pool, units)
        for run in _runs(pool, units.page_count):
            if ready:
                ready(run)
            for number in run:
                for plane in pool.planes:
                    for slot, source in _pairs(plane, rows[plane.space][number], pages[number]):
                        _empty(source, slot)


def slots_of(pool: KVPool, units: UnitTable) -> dict[str, list[list[int]]]:
    """Return the slot indices by space and page."""
    return {space: units.flat(space).view(units.page_count, -1).tolist() for space in pool.spaces}


def _runs(pool: KVPool, count: int) -> Iterator[range]:
    step = max(1, RUN_NBYTES // pool.layout.page_nbytes)
    for start in range(0, count, step):
        yield range(start, min(start + step, count))


def _pairs(
    plane: PoolPlane, slots: list[int], page: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (slot of the pool, its bytes in the page) for each unit of a plane."""
    offset, nbytes = plane.piece.offset, plane.piece.plane.unit_nbytes
    for slot in slots:
        yield plane.bits[slot], page[offset : offset + nbytes]
        offset += nbytes


def _fill(target: torch.Tensor, slot: torch.Tensor) -> None:
    if _aligned(target, slot):
        target.view(slot.dtype).view(slot.shape).copy_(slot)
    else:
        target.copy_(slot.contiguous().view(-1).view(torch.uint8))


def _empty(source: torch.Tensor, slot: torch.Tensor) -> None:
    # Inside a page a plane may start at any byte, an int32 may not.
    words = source if _aligned(source, slot) else source.clone()
    slot.copy_(words.view(slot.dtype).view(slot.shape))


def _aligned(run: torch.Tensor, slot: torch.Tensor) -> bool:
    return run.storage_offset() % slot.element_size() == 0


# Pages of a pool in host memory as segments that a client sends from and receives into, so that no
# page is copied on its way to a socket.
#
#     a page      K of layers 0..n | V of layers 0..n          its bytes in their order
#     the pool    | .. K run .. |          | .. V run .. |     a segment for each run of memory
#
# For engines that do not use the slots of a load before it ends, nor those of missing pages: bytes
# arrive there before they are verified.

# Average bytes of a page's segments: smaller ones cost more, one by one, than a copy of the page.
PIECE_NBYTES_MIN = 16 << 10


class SlotSegments(SlotCopies):
    """`SlotCopies`, with pages of `pool` as segments if these are large enough.

    It keeps the pool's memory alive.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        planes = [(plane, unit_of(plane)) for plane in pool.planes]
        worth = pool.layout.page_nbytes >= sum(unit.rows for _, unit in planes) * PIECE_NBYTES_MIN
        self._planes = [_Runs.of(plane, unit) for plane, unit in planes] if worth else []

    def pieces(self, pool: KVPool, units: UnitTable) -> list[Pieces] | None:
        """Return the segments of each page in the pool; None if pages must be copied."""
        if pool is not self._pool or not self._planes:
            return None
        slots = slots_of(pool, units)
        return [
            tuple(
                [
                    piece
                    for plane in self._planes
                    for slot in slots[plane.space][page]
                    for piece in plane.pieces(slot)
                ]
            )
            for page in range(units.page_count)
        ]


class _Runs(NamedTuple):
    """Start addresses of the runs of a plane's slot 0, in a unit's order."""

    space: str
    memory: memoryview
    slot_nbytes: int  # distance from one slot to the next
    starts: list[int]
    nbytes: int

    @staticmethod
    def of(plane: PoolPlane, unit: Unit) -> "_Runs":
        bits, size, nbytes = plane.bits, plane.bits.element_size(), unit.row_nbytes
        steps = [range(0, count * step, step) for count, step in reversed(unit.outer)]
        starts = list(map(sum, itertools.product(*steps)))
        slot_nbytes = bits.stride(0) * size
        extent = (bits.shape[0] - 1) * slot_nbytes + starts[-1] + nbytes
        return _Runs(
            plane.space,
            byte_view(bits.as_strided((extent // size,), (1,))),
            slot_nbytes,
            starts,
            nbytes,
        )

    def pieces(self, slot: int) -> list[memoryview]:
        first = slot * self.slot_nbytes
        return [self.memory[first + start : first + start + self.nbytes] for start in self.starts]
