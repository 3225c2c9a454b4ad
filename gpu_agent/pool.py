"""View an engine's KV tensors through a `PageLayout`, and check the indices of its slots.

The engine owns the memory; the pool holds views of it and copies nothing. Strides are read, never
assumed: a plane may be a slice of a wider tensor, a transposed view, or a block pool in any order.

A pool has one or more index spaces of two kinds: token slots (`unit_tokens` 1) or blocks of
`unit_tokens` tokens. Planes that share a space share its indices.

    pages                0              1             2
    space "token"   [17 3 88 4 ...] [9 41 7 2 ...] [...]      page_tokens indices per page
    space "block"   [     12      ] [     5      ] [...]      page_tokens / unit_tokens per page
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from kvstore.errors import InvalidRequest
from kvstore.layout import DTYPE_NBYTES, PageLayout, PlaneSlice

# The slots of a caller's pages: `pages * page_tokens / unit_tokens` int64 indices in the order of
# the tokens; for a pool with several spaces one such tensor per space.
Units: TypeAlias = torch.Tensor | Mapping[str, torch.Tensor]


class IndexSpace(NamedTuple):
    """An index space: tokens per unit, and how many units its smallest tensor has."""

    unit_tokens: int
    slots: int


class UnitTable:
    """Checked indices of whole pages. Immutable.

    It has a contiguous int64 CPU tensor `[pages * units per page]` per space. `KVPool.unit_table`
    copies them, because engines reuse their index buffers.
    """

    def __init__(self, rows: Mapping[str, torch.Tensor], page_count: int) -> None:
        self._rows = rows
        self.page_count = page_count

    def flat(self, space: str) -> torch.Tensor:
        """Return the indices of all pages: `[pages * units per page]`."""
        return self._rows[space]

    def select(self, pages: slice | Sequence[int]) -> "UnitTable":
        """Return the table of some pages, in that order."""
        every = range(self.page_count)
        chosen = every[pages] if isinstance(pages, slice) else pages
        if chosen == every:  # the usual case, which avoids torch's cost of indexing
            return self
        which = pages if isinstance(pages, slice) else list(pages)
        picked = {
            space: rows.view(self.page_count, -1)[which].reshape(-1)
            for space, rows in self._rows.items()
        }
        return UnitTable(picked, len(chosen))


def checked_rows(
    name: str,
    space: IndexSpace,
    indices: torch.Tensor,
    page_count: int,
    page_tokens: int,
    device: torch.device,
) -> torch.Tensor:
    """Return a checked copy of `indices` on the CPU. Raises InvalidRequest."""
    if not isinstance(indices, torch.Tensor) or indices.dtype != torch.int64:
        kind = indices.dtype if isinstance(indices, torch.Tensor) else type(indices).__name__
        raise InvalidRequest(f"units of space {name!r} must be a torch.int64 tensor, not {kind}")
    if not indices.is_cpu and indices.device != device:
        raise InvalidRequest(
            f"units of space {name!r} are on {indices.device}; allowed are cpu and {device}"
        )
    per_page = page_tokens // space.unit_tokens
    if indices.dim() != 1 or indices.numel() != page_count * per_page:
        raise InvalidRequest(
            f"units of space {name!r} have shape {list(indices.shape)}; {page_count} pages of "
            f"{per_page} units need [{page_count * per_page}]"
        )
    mine = indices.to("cpu", copy=True)
    if mine.numel():
        low, high = (int(bound) for bound in mine.aminmax())
        if low < 0 or high >= space.slots:
            wrong = low if low < 0 else high
            raise InvalidRequest(
                f"units of space {name!r} name slot {wrong}; allowed are 0..{space.slots - 1}"
            )
    return mine


_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NBYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Elements are moved as integers of the same size: exact for NaNs, and torch lacks no kernel for
# 8-bit floats.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the layout's name of a torch dtype.

    Raises InvalidRequest if a layout can not hold it.
    """
    if dtype not in _NAMES:
        raise InvalidRequest(
            f"{dtype} has no name in a layout; known are {', '.join(DTYPE_NBYTES)}"
        )
    return _NAMES[dtype]


@dataclass(frozen=True)
class PoolPlane:
    """One plane of one layer: its position in a page, and the engine's tensor as integers.

    `bits`: `[slots, *unit_shape]`, any strides, an integer dtype of the plane's element size.
    """

    piece: PlaneSlice
    bits: torch.Tensor
    space: str


class KVPool:
    """Views of an engine's tensors, one for each (group, layer, plane) of `layout`.

    `tensors[group, layer, plane]`: `[slots, *unit_shape]` of the plane's dtype, all on one device.
    `spaces[group, plane]` names the index space of a plane; by default it is "token" for planes
    indexed by token and "block" for planes indexed by block. Groups whose slots are numbered
    separately (sliding windows, several block tables) need their own spaces.

    Raises InvalidRequest naming group, layer and plane. Immutable.
    """

    def __init__(
        self,
        layout: PageLayout,
        tensors: Mapping[tuple[str, int, str], torch.Tensor],
        spaces: Mapping[tuple[str, str], str] | None = None,
    ) -> None:
        self.layout = layout
        named = dict(spaces or {})
        wanted = {(piece.group, piece.layer, piece.plane.name) for piece in layout.slices}
        _same_names("tensors", set(tensors), wanted)
        planes = []
        for piece in layout.slices:
            tensor = tensors[piece.group, piece.layer, piece.plane.name]
            _check_tensor(piece, tensor)
            default = "token" if piece.plane.unit_tokens == 1 else "block"
            space = named.get((piece.group, piece.plane.name), default)
            bits = tensor.detach().view(_BITS[tensor.element_size()])
            planes.append(PoolPlane(piece, bits, space))
        unknown = set(named) - {(group, plane) for group, _, plane in wanted}
        if unknown:
            raise InvalidRequest(
                f"spaces names planes that the layout does not have: {sorted(unknown)}"
            )
        self.planes = tuple(planes)
        self.device = planes[0].bits.device
        for plane in planes:
            if plane.bits.device != self.device:
                raise InvalidRequest(
                    f"{_where(plane.piece)}: is on {plane.bits.device}, others are on "
                    f"{self.device}; a pool lies on one device"
                )
        self.spaces = _spaces(self.planes)

    def unit_table(self, units: Units, page_count: int) -> UnitTable:
        """Check indices for `page_count` pages and copy them to the CPU.

        Checks are space, dtype, device, length and range. Indices on a GPU wait for its stream.
        Raises InvalidRequest.
        """
        if isinstance(units, torch.Tensor):
            if len(self.spaces) > 1:
                raise InvalidRequest(
                    f"this pool has the index spaces {', '.join(self.spaces)}: give units as a "
                    "mapping from space to tensor"
                )
            units = {next(iter(self.spaces)): units}
        _same_names("units", set(units), set(self.spaces))
        rows = {
            name: checked_rows(
                name, space, units[name], page_count, self.layout.page_tokens, self.device
            )
            for name, space in self.spaces.items()
        }
        return UnitTable(rows, page_count)

    def check_skip(self, skip_tokens: int, page_count: int) -> None:
        """Raise InvalidRequest unless `skip_tokens` leading tokens of the pages are whole units."""
        tokens = page_count * self.layout.page_tokens
        if not 0 <= skip_tokens <= tokens:
            raise InvalidRequest(
                f"skip_tokens {skip_tokens} is not in 0..{tokens}, the tokens of {page_count} pages"
            )
        for name, space in self.spaces.items():
            if skip_tokens % space.unit_tokens:
                raise InvalidRequest(
                    f"skip_tokens {skip_tokens} is no multiple of {space.unit_tokens}, the tokens "
                    f"of a unit in space {name!r}"
                )


def _where(piece: PlaneSlice) -> str:
    return f"group {piece.group} layer {piece.layer} plane {piece.plane.name}"


def _same_names(what: str, given: set[Any], wanted: set[Any]) -> None:
    missing, extra = sorted(wanted - given), sorted(given - wanted)
    if missing or extra:
        problem = (
            f"lacks {missing[0]!r}" if missing else f"has {extra[0]!r}, which is not in the pool"
        )
        raise InvalidRequest(f"{what}: {problem} ({len(missing)} missing, {len(extra)} unknown)")


def _check_tensor(piece: PlaneSlice, tensor: torch.Tensor) -> None:
    plane = piece.plane
    if tensor.dtype != _DTYPES[plane.dtype]:
        raise InvalidRequest(
            f"{_where(piece)}: dtype is {tensor.dtype}, the layout says {plane.dtype}; "
            "bytes seen as another type are a layout of their own"
        )
    if tuple(tensor.shape[1:]) != plane.unit_shape or tensor.dim() < 2 or tensor.shape[0] < 1:
        raise InvalidRequest(
            f"{_where(piece)}: shape is {list(tensor.shape)}, expected [slots, "
            f"{', '.join(map(str, plane.unit_shape))}]"
        )
    if any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise InvalidRequest(
            f"{_where(piece)}: strides {tensor.stride()} put several elements at one address"
        )


def _spaces(planes: tuple[PoolPlane, ...]) -> dict[str, IndexSpace]:
    spaces: dict[str, IndexSpace] = {}
    for plane in planes:
        tokens, slots = plane.piece.plane.unit_tokens, plane.bits.shape[0]
        known = spaces.get(plane.space, IndexSpace(tokens, slots))
        if known.unit_tokens != tokens:
            raise InvalidRequest(
                f"{_where(plane.piece)}: has {tokens} tokens per unit, others in its index space "
                f"{plane.space!r} have {known.unit_tokens}; name different spaces"
            )
        spaces[plane.space] = IndexSpace(tokens, min(slots, known.slots))
    return spaces
