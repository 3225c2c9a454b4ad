"""Describe the bytes of a page, for any engine's pool.

    page := for each group, for each layer of the group, for each plane of the group:
                units x unit_nbytes                      units = page_tokens / unit_tokens

    |<------------- layer 0 ------------->|<------------- layer 1 ------------->| ...
    | plane k: unit unit .. | plane v: ..  | plane k: unit unit .. | plane v: ..  |

A layer of one group is therefore one byte range. The node stores `(key, bytes)` and knows no more
than `page_nbytes`; nobody compares a layout's name.
"""

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from kvstore.config import GET_RANGES_MAX
from kvstore.errors import InvalidRequest

# Bytes per element. Packed four-bit values are described as uint8 with half the elements.
DTYPE_NBYTES = {
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "float32": 4,
    "int32": 4,
    "float64": 8,
    "int64": 8,
}
SLOT_ALIGN_NBYTES = 4096  # alignment of a node's slots, for O_DIRECT and large copies
PAGE_TOKENS_MAX = 1 << 16
PLANES_MAX = 1 << 16  # layers x planes over all groups: bounds what a peer may make us compute
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


class ByteRange(NamedTuple):
    """`nbytes` bytes of a page, starting at `offset`."""

    offset: int
    nbytes: int


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(f"layout: {message}")


@dataclass(frozen=True)
class Plane:
    """One tensor of a layer: K, V, a scale, an MLA latent, an indexer row...

    A unit is what one index of the engine's pool addresses: one token (`unit_tokens=1`) or one
    block of tokens. `unit_shape` is the unit's shape in elements of `dtype`, row-major in the page.
    """

    name: str
    dtype: str
    unit_shape: tuple[int, ...]
    unit_tokens: int = 1

    def __post_init__(self) -> None:
        _check(
            bool(_NAME.match(self.name)), f"plane name {self.name!r} is not [A-Za-z0-9_.-]{{1,64}}"
        )
        known = ", ".join(DTYPE_NBYTES)
        _check(
            self.dtype in DTYPE_NBYTES,
            f"plane {self.name}: dtype {self.dtype!r} is not one of {known}",
        )
        object.__setattr__(self, "unit_shape", tuple(self.unit_shape))
        _check(
            1 <= len(self.unit_shape) <= 8 and all(1 <= n < 1 << 40 for n in self.unit_shape),
            f"plane {self.name}: unit_shape {self.unit_shape} needs 1 to 8 positive sizes",
        )
        _check(
            1 <= self.unit_tokens <= PAGE_TOKENS_MAX,
            f"plane {self.name}: unit_tokens {self.unit_tokens} is not in 1..{PAGE_TOKENS_MAX}",
        )

    @property
    def unit_nbytes(self) -> int:
        """Return the bytes of one unit of the plane."""
        return DTYPE_NBYTES[self.dtype] * prod(self.unit_shape)


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose planes have the same shapes and dtypes.

    `layers` are the model's layer numbers.
    """

    name: str
    layers: tuple[int, ...]
    planes: tuple[Plane, ...]

    def __post_init__(self) -> None:
        _check(
            bool(_NAME.match(self.name)), f"group name {self.name!r} is not [A-Za-z0-9_.-]{{1,64}}"
        )
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "planes", tuple(self.planes))
        _check(
            bool(self.layers) and bool(self.planes),
            f"group {self.name} needs at least one layer and one plane",
        )
        _check(
            all(0 <= layer < 1 << 16 for layer in self.layers),
            f"group {self.name}: a layer number is not in 0..65535",
        )
        _check(len(set(self.layers)) == len(self.layers), f"group {self.name} names a layer twice")
        names = [plane.name for plane in self.planes]
        _check(len(set(names)) == len(names), f"group {self.name} names a plane twice")


class PlaneSlice(NamedTuple):
    """Position of one plane of one layer in a page."""

    group: str
    layer: int
    plane: Plane
    offset: int
    units: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of the slice."""
        return self.units * self.plane.unit_nbytes


@dataclass(frozen=True)
class PageLayout:
    """Layout of a page: `page_tokens` tokens of every layer and plane of one shard, contiguous."""

    page_tokens: int
    groups: tuple[LayerGroup, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        _check(
            1 <= self.page_tokens <= PAGE_TOKENS_MAX,
            f"page_tokens {self.page_tokens} is not in 1..{PAGE_TOKENS_MAX}",
        )
        _check(bool(self.groups), "a layout needs at least one group")
        names = [group.name for group in self.groups]
        _check(len(set(names)) == len(names), "two groups have the same name")
        count = sum(len(group.layers) * len(group.planes) for group in self.groups)
        _check(count <= PLANES_MAX, f"{count} planes in a page, at most {PLANES_MAX}")
        for group in self.groups:
            for plane in group.planes:
                _check(
                    self.page_tokens % plane.unit_tokens == 0,
                    f"page_tokens {self.page_tokens} is no multiple of unit_tokens "
                    f"{plane.unit_tokens} ({plane.name})",
                )

    @cached_property
    def slices(self) -> tuple[PlaneSlice, ...]:
        """Return every plane of every layer in page order, without gaps."""
        slices, offset = [], 0
        for group in self.groups:
            for layer in group.layers:
                for plane in group.planes:
                    piece = PlaneSlice(
                        group.name, layer, plane, offset, self.page_tokens // plane.unit_tokens
                    )
                    slices.append(piece)
                    offset += piece.nbytes
        return tuple(slices)

    @cached_property
    def page_nbytes(self) -> int:
        """Return the bytes of a page."""
        return sum(
            len(group.layers) * (self.page_tokens // plane.unit_tokens) * plane.unit_nbytes
            for group in self.groups
            for plane in group.planes
        )

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Return the layer numbers that have bytes in a page, ascending."""
        return tuple(sorted({layer for group in self.groups for layer in group.layers}))

    def layer_ranges(self, layer: int) -> tuple[ByteRange, ...]:
        """Return the byte ranges of one layer, one per group that has it.

        Raises InvalidRequest if none has.
        """
        ranges: list[ByteRange] = []
        for piece in self.slices:
            if piece.layer != layer:
                continue
            if ranges and sum(ranges[-1]) == piece.offset:
                ranges[-1] = ByteRange(ranges[-1].offset, ranges[-1].nbytes + piece.nbytes)
            else:
                ranges.append(ByteRange(piece.offset, piece.nbytes))
        if not ranges:
            raise InvalidRequest(
                f"layer {layer} is not in the layout; it has {self.layers[0]}..{self.layers[-1]}"
            )
        return tuple(ranges)

    @cached_property
    def canonical(self) -> bytes:
        """Return the text whose SHA-256 is the fingerprint (docs/FORMAT.md)."""
        lines = ["kvstore-layout-1", f"page_tokens={self.page_tokens}"]
        for group in self.groups:
            lines.append(f"group {group.name} layers={_join(group.layers)}")
            for plane in group.planes:
                shape = _join(plane.unit_shape)
                lines.append(
                    f"plane {plane.name} dtype={plane.dtype} unit_tokens={plane.unit_tokens} "
                    f"unit_shape={shape}"
                )
        return ("\n".join(lines) + "\n").encode("ascii")

    @cached_property
    def fingerprint(self) -> bytes:
        """Return 32 bytes that are equal exactly when the layouts are equal."""
        return hashlib.sha256(self.canonical).digest()


def _join(numbers: Sequence[int]) -> str:
    return ",".join(str(n) for n in numbers)


def slot_nbytes(page_nbytes: int) -> int:
    """Return the memory that a page takes in a node: its bytes, rounded up to the alignment."""
    return -(-page_nbytes // SLOT_ALIGN_NBYTES) * SLOT_ALIGN_NBYTES


def opaque_layout(page_nbytes: int, page_tokens: int = 1) -> PageLayout:
    """Return the layout of a page without inner structure, for tools, traces and benchmarks."""
    plane = Plane("bytes", "uint8", (page_nbytes,), unit_tokens=page_tokens)
    return PageLayout(page_tokens, (LayerGroup("opaque", (0,), (plane,)),))


def check_ranges(ranges: Sequence[tuple[int, int]], page_nbytes: int) -> None:
    """Raise InvalidRequest unless a get's ranges are valid.

    They are (offset, nbytes) in any order. They may not overlap, so that a reply is never larger
    than its pages.
    """
    if len(ranges) > GET_RANGES_MAX:
        raise InvalidRequest(
            f"{len(ranges)} ranges in one get, at most {GET_RANGES_MAX}; ask for them in parts"
        )
    end = 0
    ordered = True
    for offset, nbytes in ranges:
        if offset < 0 or nbytes < 1 or offset + nbytes > page_nbytes:
            raise InvalidRequest(
                f"range {offset}+{nbytes} is empty or leaves the page of {page_nbytes} bytes"
            )
        ordered = ordered and offset >= end
        end = offset + nbytes
    if not ordered:
        in_order = sorted(ranges)
        for (offset, nbytes), (following, _) in itertools.pairwise(in_order):
            if offset + nbytes > following:
                raise InvalidRequest(
                    f"range {offset}+{nbytes} overlaps the one at {following}; ask for a byte once"
                )
