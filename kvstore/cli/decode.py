"""Decode a page: its planes with shapes and exact statistics, without numpy or torch.

Types of 8 and 16 bits have few values, so their codes are counted first and only the values that
occur are decoded: a plane of four million bfloat16 takes about as long as counting it.
"""

import math
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from struct import pack, unpack
from typing import Any

from kvstore.layout import DTYPE_NBYTES, PageLayout, PlaneSlice


@dataclass(frozen=True)
class Statistics:
    """Statistics of the finite values; None if there are none.

    `std` is the standard deviation of the population.
    """

    count: int
    nan_count: int
    inf_count: int
    zero_count: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None


@dataclass(frozen=True)
class PlaneStatistics:
    """Statistics of one plane of one layer of a page.

    `shape`: (units, *unit_shape).
    """

    group: str
    layer: int
    plane: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    statistics: Statistics

    def as_dict(self) -> dict[str, Any]:
        """Return the values as a flat dict for JSON."""
        values = asdict(self)
        statistics = values.pop("statistics")
        return {**values, **statistics}


def layer_slices(layout: PageLayout, layer: int | None) -> list[PlaneSlice]:
    """Return the planes in page order; only those of one layer if it is given."""
    return [piece for piece in layout.slices if layer is None or piece.layer == layer]


def decode(pieces: Sequence[PlaneSlice], data: memoryview) -> Iterator[PlaneStatistics]:
    """Yield the statistics of each slice; `data` holds exactly their bytes, in order."""
    assert data.nbytes == sum(piece.nbytes for piece in pieces)
    start = 0
    for piece in pieces:
        plane = piece.plane
        statistics = plane_statistics(plane.dtype, data[start : start + piece.nbytes])
        shape = (piece.units, *plane.unit_shape)
        yield PlaneStatistics(
            piece.group,
            piece.layer,
            plane.name,
            plane.dtype,
            shape,
            piece.offset,
            piece.nbytes,
            statistics,
        )
        start += piece.nbytes


def plane_statistics(dtype: str, data: memoryview) -> Statistics:
    """Return the statistics of little-endian elements of `dtype`, one of DTYPE_NBYTES."""
    if dtype in _CODE_VALUES:
        value = _CODE_VALUES[dtype]
        codes = Counter(_elements("B" if DTYPE_NBYTES[dtype] == 1 else "H", data))
        return _statistics([(value(code), count) for code, count in codes.items()])
    values = _elements(_WIDE_TYPECODES[dtype], data)
    return _statistics(list(zip(values, repeat(1))))


def _elements(typecode: str, data: memoryview) -> "array[Any]":
    elements = array(typecode)
    elements.frombytes(data)
    if sys.byteorder == "big":
        elements.byteswap()
    return elements


def _statistics(weighted: Iterable[tuple[float, int]]) -> Statistics:
    """Return the statistics of (value, count) pairs.

    Sums are exact (fsum), so the order of the pairs does not matter.
    """
    finite, nan_count, inf_count = [], 0, 0
    for value, count in weighted:
        if math.isfinite(value):
            finite.append((value, count))
        elif math.isnan(value):
            nan_count += count
        else:
            inf_count += count
    finite_count = sum(count for _, count in finite)
    total = finite_count + nan_count + inf_count
    if not finite:
        return Statistics(total, nan_count, inf_count, 0, None, None, None, None)
    zero_count = sum(count for value, count in finite if value == 0)
    low, high = min(finite)[0], max(finite)[0]
    # Scaled by a power of two, which changes no digit: squares of float64 would overflow.
    scale = math.ldexp(0.5, math.frexp(max(abs(low), abs(high)))[1])
    scaled = [(value / scale, count) for value, count in finite]
    mean = math.fsum(value * count for value, count in scaled) / finite_count
    variance = math.fsum((value - mean) ** 2 * count for value, count in scaled) / finite_count
    return Statistics(
        total,
        nan_count,
        inf_count,
        zero_count,
        low,
        high,
        mean * scale,
        math.sqrt(variance) * scale,
    )


def _int8(code: int) -> int:
    return code - 256 if code >= 128 else code


def _int16(code: int) -> int:
    return code - 65536 if code >= 32768 else code


def _float16(code: int) -> float:
    return float(unpack("<e", pack("<H", code))[0])


def _bfloat16(code: int) -> float:
    """Convert a bfloat16, the upper half of a float32."""
    return float(unpack("<f", pack("<I", code << 16))[0])


def _float8_e5m2(code: int) -> float:
    """Convert a float8_e5m2, the upper half of a float16."""
    return _float16(code << 8)


def _float8_e4m3fn(code: int) -> float:
    """Sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, NaN is all ones."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -size if code & 128 else size


_CODE_VALUES: dict[str, Callable[[int], float]] = {
    "uint8": float,
    "int8": _int8,
    "float8_e4m3fn": _float8_e4m3fn,
    "float8_e5m2": _float8_e5m2,
    "float16": _float16,
    "bfloat16": _bfloat16,
    "int16": _int16,
}
_WIDE_TYPECODES = {"float32": "f", "int32": "i", "float64": "d", "int64": "q"}
