"""Which slots of a pool the tokens of some pages are in.

A pool has one or more index spaces. A space is of one of two kinds: token slots (`unit_tokens` 1)
or blocks of `unit_tokens` tokens. Planes that share a space share its indices.

    pages                0              1             2
    space "token"   [17 3 88 4 ...] [9 41 7 2 ...] [...]      page_tokens indices per page
    space "block"   [     12      ] [     5      ] [...]      page_tokens / unit_tokens per page
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from kvstore.errors import InvalidRequest

# What callers give: int64 indices in the order of the tokens, `pages * page_tokens / unit_tokens`
# of them; for a pool with several spaces one such tensor per space.
Units: TypeAlias = torch.Tensor | Mapping[str, torch.Tensor]


class Space(NamedTuple):
    """An index space: tokens per unit, and how many units the smallest tensor in it has."""

    unit_tokens: int
    slots: int


class UnitTable:
    """Checked indices of whole pages: per space a contiguous int64 CPU tensor `[pages * units per page]`.

    Made by `KVPool.unit_table`, which copies what the caller gave: engines reuse their index
    buffers. Immutable.
    """

    def __init__(self, rows: Mapping[str, torch.Tensor], page_count: int) -> None:
        self._rows = rows
        self.page_count = page_count

    def flat(self, space: str) -> torch.Tensor:
        """Indices of all pages: `[pages * units per page]`."""
        return self._rows[space]

    def select(self, pages: slice | Sequence[int]) -> "UnitTable":
        """The table of some of the pages, in that order."""
        every = range(self.page_count)
        chosen = every[pages] if isinstance(pages, slice) else pages
        if chosen == every:  # mostly: what torch takes to index is spared
            return self
        which = pages if isinstance(pages, slice) else list(pages)
        picked = {space: rows.view(self.page_count, -1)[which].reshape(-1) for space, rows in self._rows.items()}
        return UnitTable(picked, len(chosen))


def checked_rows(
    name: str, space: Space, indices: torch.Tensor, page_count: int, page_tokens: int, device: torch.device
) -> torch.Tensor:
    """A copy of `indices` on the CPU. Raises InvalidRequest."""
    if not isinstance(indices, torch.Tensor) or indices.dtype != torch.int64:
        kind = indices.dtype if isinstance(indices, torch.Tensor) else type(indices).__name__
        raise InvalidRequest(f"units of space {name!r} must be a torch.int64 tensor, not {kind}")
    if not indices.is_cpu and indices.device != device:
        raise InvalidRequest(f"units of space {name!r} are on {indices.device}; allowed are cpu and {device}")
    per_page = page_tokens // space.unit_tokens
    if indices.dim() != 1 or indices.numel() != page_count * per_page:
        raise InvalidRequest(
            f"units of space {name!r} have shape {list(indices.shape)}; {page_count} pages of {per_page} units "
            f"need [{page_count * per_page}]"
        )
    mine = indices.to("cpu", copy=True)
    if mine.numel():
        low, high = (int(bound) for bound in mine.aminmax())
        if low < 0 or high >= space.slots:
            wrong = low if low < 0 else high
            raise InvalidRequest(f"units of space {name!r} name slot {wrong}; allowed are 0..{space.slots - 1}")
    return mine
