"""Pages of a pool in host memory as they lie there: pieces that a client sends from and receives into, so that no page
is copied on its way to a wire.

    a page      K of layers 0..n | V of layers 0..n          its bytes in their order
    the pool    | .. K run .. |          | .. V run .. |     a piece for each run of memory

For engines to which the slots of a load are nobody's until it ends, and those of pages that did not come nobody's
still: bytes lie in them before they are known to be the right ones.
"""

import itertools
from typing import NamedTuple

from gpu_agent.host.unit_copies import UnitCopies, slots_of
from gpu_agent.kernels.plan import Unit, unit_of
from gpu_agent.pool import KVPool, PoolPlane
from gpu_agent.units import UnitTable
from kvstore.buffers import byte_view
from kvstore.pieces import Pieces

# On average, of a page's: smaller ones cost more, one by one, than a copy of the page.
PIECE_NBYTES_MIN = 16 << 10


class UnitPieces(UnitCopies):
    """`UnitCopies`, and pages of `pool` in pieces if these are large enough. It keeps the pool's memory."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        planes = [(plane, unit_of(plane)) for plane in pool.planes]
        worth = pool.layout.page_nbytes >= sum(unit.rows for _, unit in planes) * PIECE_NBYTES_MIN
        self._planes = [_Runs.of(plane, unit) for plane, unit in planes] if worth else []

    def pieces(self, pool: KVPool, units: UnitTable) -> list[Pieces] | None:
        if pool is not self._pool or not self._planes:
            return None
        slots = slots_of(pool, units)
        return [
            tuple(
                [piece for plane in self._planes for slot in slots[plane.space][page] for piece in plane.pieces(slot)]
            )
            for page in range(units.page_count)
        ]


class _Runs(NamedTuple):
    """Of one plane: where the runs of slot 0 begin in its memory, in the order of a unit's bytes."""

    space: str
    memory: memoryview
    slot_nbytes: int  # from one slot to the next
    starts: list[int]
    nbytes: int

    @staticmethod
    def of(plane: PoolPlane, unit: Unit) -> "_Runs":
        bits, size, nbytes = plane.bits, plane.bits.element_size(), unit.row_nbytes
        steps = [range(0, count * step, step) for count, step in reversed(unit.outer)]
        starts = list(map(sum, itertools.product(*steps)))
        slot_nbytes = bits.stride(0) * size
        extent = (bits.shape[0] - 1) * slot_nbytes + starts[-1] + nbytes
        return _Runs(plane.space, byte_view(bits.as_strided((extent // size,), (1,))), slot_nbytes, starts, nbytes)

    def pieces(self, slot: int) -> list[memoryview]:
        first = slot * self.slot_nbytes
        return [self.memory[first + start : first + start + self.nbytes] for start in self.starts]
