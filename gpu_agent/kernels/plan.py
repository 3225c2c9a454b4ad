"""Describe a pool and its page layout to the kernels, as two tables of integers.

    plane table   one row per plane slice: addresses and strides of the engine's tensor, the width
                  of a word, the shape of a unit as rows of contiguous bytes
    tile table    the flat page cut into pieces that one warp moves, none across two slices

    flat page     | slice 0 ................. | slice 1 ..... | slice 2 ................ |
    tiles         |   0   |   1   |   2   | 3 |   4   |   5   |   6   |   7   |    8     |
    span                  |<----- whole tiles: a layer, or what fits in a buffer ->|

All tables are int64 or int32 CPU tensors; `transfer.cu` reads the same rows.
"""

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gpu_agent.pool import KVPool, PoolPlane
from kvstore.errors import InvalidRequest
from kvstore.layout import PageLayout

OUTER_MAX = 8  # dimensions of a unit
WARP_THREADS = 32
# Bytes of a word -> words that each thread of a warp has in flight; more would not fit its
# registers. Same as the switch in transfer.cu.
LOADS = {16: 4, 8: 4, 4: 14, 2: 8, 1: 8}
ROW_WORDS_MAX = 1 << 30  # with a tile's words added still below 2^31, the bound of `divisor`
ROWS_MAX = 1 << 31
PLANE_FIELDS = 14 + 4 * OUTER_MAX
TILE_FIELDS = 4
TILE_NBYTES = 4 * TILE_FIELDS
# Layers move together until each of a page's copies has this many bytes: below it a copy's fixed
# cost of about 1 us shows (H200: 21 GB/s with 32 KiB, 52 with 256 KiB).
FRAGMENT_NBYTES_MIN = 128 << 10
# Page byte b lies in a staging row at an address that equals b modulo this, so that a span that
# starts anywhere keeps the alignment for which words were chosen.
ROW_ALIGN_NBYTES = 256


class Divisor(NamedTuple):
    """Divide by multiplication: `n // value` is `(high32(n * magic) + n) >> shift`.

    It is exact for 0 <= n < 2^31 (Granlund, Montgomery 1994).
    """

    value: int
    magic: int
    shift: int


def divisor(value: int) -> Divisor:
    """Return the divisor for a value from 1 to 2^31."""
    shift = (value - 1).bit_length()
    return Divisor(value, (1 << 32) * ((1 << shift) - value) // value + 1, shift)


class Unit(NamedTuple):
    """A unit in memory: rows of contiguous bytes, and the dimensions that lead from row to row.

    `outer`: (size, stride in bytes), innermost first; their row-major order is the order of a page.
    """

    row_nbytes: int
    outer: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return math.prod(size for size, _ in self.outer)


def merged(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Unit:
    """Merge a view's dimensions into the longest rows; strides are in elements."""
    row_nbytes, outer = itemsize, list[tuple[int, int]]()
    for size, stride in reversed(
        [(n, s * itemsize) for n, s in zip(shape, strides, strict=True) if n > 1]
    ):
        if not outer and stride == row_nbytes:
            row_nbytes *= size
        elif outer and stride == outer[-1][0] * outer[-1][1]:
            outer[-1] = (outer[-1][0] * size, outer[-1][1])
        else:
            outer.append((size, stride))
    return Unit(row_nbytes, tuple(outer))


def unit_of(plane: PoolPlane) -> Unit:
    """Return the unit of a plane."""
    bits = plane.bits
    return merged(tuple(bits.shape[1:]), bits.stride()[1:], bits.element_size())


@dataclass(frozen=True)
class Span:
    """Whole tiles, and the bytes `offset .. offset + nbytes` of the page that they cover."""

    tile_first: int
    tile_count: int
    offset: int
    nbytes: int

    @functools.cached_property
    def row_nbytes(self) -> int:
        """Return the bytes from page to page in a staging buffer."""
        return -(-(self.lead + self.nbytes) // ROW_ALIGN_NBYTES) * ROW_ALIGN_NBYTES

    @functools.cached_property
    def lead(self) -> int:
        """Return the unused bytes before the span's first byte in a staging row."""
        return self.offset % ROW_ALIGN_NBYTES


class Chunk(NamedTuple):
    """Content of one buffer: a span of consecutive pages of a job.

    `layers`: those that are complete with it, when a job goes layer by layer.
    """

    page_first: int
    page_count: int
    span: Span
    layers: tuple[int, ...] = ()


class Run(NamedTuple):
    """Pages that are contiguous: page i lies at `base + i * stride`."""

    space: str
    base: int
    stride: int


def run_of(pool: KVPool) -> Run | None:
    """Return a page's contiguous bytes; None if a page is gathered from several places.

    With the layout `BLHNC` pages are contiguous (docs/layouts.md).
    """
    found = set()
    for plane in pool.planes:
        bits, piece, unit = plane.bits, plane.piece, unit_of(plane)
        if piece.units != 1 or unit.outer or unit.row_nbytes != piece.nbytes:
            return None
        found.add(
            Run(plane.space, bits.data_ptr() - piece.offset, bits.stride(0) * bits.element_size())
        )
    return found.pop() if len(found) == 1 else None


class Plan:
    """The tables of one pool.

    `planes`: int64 `[slices, PLANE_FIELDS]`. `tiles`: int32 `[tiles, TILE_FIELDS]`, in page order.
    Words are chosen for page addresses that are multiples of `page_align` (1..16, a power of two).
    Raises InvalidRequest for a unit that is too large for the kernels' 32-bit quotients.
    """

    def __init__(self, pool: KVPool, page_align: int = 16) -> None:
        self.layout: PageLayout = pool.layout
        before, count = dict[str, int](), 0
        for name, space in pool.spaces.items():
            before[name], count = count, count + self.layout.page_tokens // space.unit_tokens
        self.units_per_page = count  # indices per page, all spaces together
        rows = [_plane_row(plane, before[plane.space], page_align) for plane in pool.planes]
        self.planes = torch.tensor(rows, dtype=torch.int64)
        pieces = [plane.piece for plane in pool.planes]
        slices = (
            (piece.offset, piece.nbytes, row[3], row[7])
            for piece, row in zip(pieces, rows, strict=True)
        )
        self.tiles, self._offsets, self._slice_tiles = _cut(tuple(slices))
        self.whole = self._span(0, len(self.tiles))
        self.run = run_of(pool)
        self.layers = tuple(self._layers())

    def gather_chunks(self, page_count: int, buffer_nbytes: int) -> Iterator[Chunk]:
        """Yield chunks of whole pages, or pieces of pages larger than a buffer.

        Nothing moves before the first chunk is gathered, so it is a quarter of a buffer.
        """
        page, row = 0, self.whole.row_nbytes
        if page_count * row > buffer_nbytes:
            if row > buffer_nbytes // 4:
                # Behind the last: a page is shorter than its row
                tile = bisect_left(self._offsets, buffer_nbytes // 4)
                yield from self._split(0, min(tile, len(self.tiles)), buffer_nbytes)
                page = 1
            else:
                page = buffer_nbytes // 4 // row
                yield Chunk(0, page, self.whole)
        yield from self._chunks(self.whole, page, page_count, buffer_nbytes)

    def scatter_chunks(self, page_count: int, buffer_nbytes: int) -> Iterator[Chunk]:
        """Yield chunks whose last one is a quarter: nothing moves while it is scattered."""
        row, small = self.whole.row_nbytes, buffer_nbytes // 4
        if page_count * row <= buffer_nbytes:
            yield from self._chunks(self.whole, 0, page_count, buffer_nbytes)
        elif row > small:
            yield from self._chunks(self.whole, 0, page_count - 1, buffer_nbytes)
            tile = bisect_left(self._offsets, self.layout.page_nbytes - small)
            yield from self._split(page_count - 1, tile, buffer_nbytes)
        else:
            yield from self._chunks(self.whole, 0, page_count - small // row, buffer_nbytes)
            yield Chunk(page_count - small // row, small // row, self.whole)

    def page_chunks(self, page_count: int, buffer_nbytes: int) -> Iterator[Chunk]:
        """Yield chunks that cut no page that fits into a buffer."""
        yield from self._chunks(self.whole, 0, page_count, buffer_nbytes)

    def layer_chunks(self, page_count: int, buffer_nbytes: int) -> Iterator[Chunk]:
        """Yield layers in ascending order, each of all pages; small ones together with the next."""
        for layers, spans in self.layers:
            last = None
            for span in spans:
                for chunk in self._chunks(span, 0, page_count, buffer_nbytes):
                    if last:
                        yield last
                    last = chunk
            if last:
                yield last._replace(layers=layers)

    def cut(self, span: Span, nbytes_max: int) -> Iterator[Span]:
        """Yield the span in pieces with staging rows of at most `nbytes_max` bytes (>= 4 KiB)."""
        first, end = span.tile_first, span.tile_first + span.tile_count
        while first < end:
            start = self._offsets[first]
            room = nbytes_max // ROW_ALIGN_NBYTES * ROW_ALIGN_NBYTES - start % ROW_ALIGN_NBYTES
            stop = min(end, bisect_right(self._offsets, start + room) - 1)
            yield self._span(first, stop)
            first = stop

    def _chunks(
        self, span: Span, page_first: int, page_end: int, buffer_nbytes: int
    ) -> Iterator[Chunk]:
        """Yield few, about equal chunks: enqueueing one costs as much as 3 MiB on the link."""
        count, pages_max = page_end - page_first, max(1, buffer_nbytes // span.row_nbytes)
        chunks = max(1, -(-count // pages_max))
        pages = max(1, -(-count // chunks))
        pieces = [span] if span.row_nbytes <= buffer_nbytes else list(self.cut(span, buffer_nbytes))
        for page in range(page_first, page_end, pages):
            for piece in pieces:
                yield Chunk(page, min(pages, page_end - page), piece)

    def _split(self, page: int, tile: int, buffer_nbytes: int) -> Iterator[Chunk]:
        """Yield one page, cut before a tile other than the first."""
        for first, end in ((0, tile), (tile, len(self.tiles))):
            if first < end:
                yield from self._chunks(self._span(first, end), page, page + 1, buffer_nbytes)

    def _layers(self) -> Iterator[tuple[tuple[int, ...], list[Span]]]:
        """Yield consecutive layers and the spans that hold them, one per run of their slices."""
        group: list[int] = []
        for layer in self.layout.layers:
            group.append(layer)
            spans = self._spans(group)
            mean = sum(span.nbytes for span in spans) // len(spans)
            if mean >= FRAGMENT_NBYTES_MIN or layer == self.layout.layers[-1]:
                yield tuple(group), spans
                group = []

    def _spans(self, layers: list[int]) -> list[Span]:
        runs: list[tuple[int, int]] = []
        for number, piece in enumerate(self.layout.slices):
            first, end = self._slice_tiles[number], self._slice_tiles[number + 1]
            if piece.layer in layers:
                runs.append((runs.pop()[0] if runs and runs[-1][1] == first else first, end))
        return [self._span(first, end) for first, end in runs]

    def _span(self, first: int, end: int) -> Span:
        return Span(
            first, end - first, self._offsets[first], self._offsets[end] - self._offsets[first]
        )


def _plane_row(plane: PoolPlane, slots_before: int, page_align: int) -> list[int]:
    """Return the fields of `struct Plane` in transfer.cu."""
    bits, piece, unit = plane.bits, plane.piece, unit_of(plane)
    slot_stride = bits.stride(0) * bits.element_size()
    word = math.gcd(
        16,
        page_align,
        bits.data_ptr(),
        slot_stride,
        unit.row_nbytes,
        piece.offset,
        *(stride for _, stride in unit.outer),
    )
    row_words, rows = unit.row_nbytes // word, piece.units * unit.rows
    if row_words > ROW_WORDS_MAX or rows >= ROWS_MAX:
        raise InvalidRequest(
            f"group {piece.group} layer {piece.layer} plane {piece.plane.name}: {rows} rows of "
            f"{row_words} words of {word} bytes in a page; a kernel counts fewer than {ROWS_MAX} "
            f"rows of at most {ROW_WORDS_MAX} words"
        )
    fields = [
        bits.data_ptr(),
        slot_stride,
        piece.offset,
        word,
        slots_before,
        piece.units,
        piece.plane.unit_tokens,
    ]
    fields += [*divisor(row_words), *divisor(unit.rows), len(unit.outer)]
    for size, stride in unit.outer:
        fields += [*divisor(size), stride]
    return fields + [0] * (PLANE_FIELDS - len(fields))


@functools.lru_cache(maxsize=64)
def _cut(
    slices: tuple[tuple[int, int, int, int], ...],
) -> tuple[torch.Tensor, list[int], list[int]]:
    """Return the tiles of all slices, where each starts, and each slice's first tile.

    A tile has its offset in the page, bytes, word size and words of a row. Cutting takes
    milliseconds, and pools that come and go, as in Hugging Face transformers, are cut alike, so
    results are cached.
    """
    tiles, starts, slice_tiles = list[torch.Tensor](), list[torch.Tensor](), [0]
    for number, (offset, nbytes, word, row_words) in enumerate(slices):
        cut, start = _tiles(number, nbytes, word, row_words)
        tiles.append(cut)
        starts.append(start + offset)
        slice_tiles.append(slice_tiles[-1] + len(cut))
    return (
        torch.cat(tiles),
        [*torch.cat(starts).tolist(), slices[-1][0] + slices[-1][1]],
        slice_tiles,
    )


def _tiles(plane: int, nbytes: int, word: int, row_words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tiles (plane, row, column, words) of a slice, and the byte where each starts."""
    words = nbytes // word
    count = -(-words // (WARP_THREADS * LOADS[word]))
    # About equal: the longest sets the pace
    tile_words = -(-words // (count * WARP_THREADS)) * WARP_THREADS
    first = torch.arange(0, words, tile_words, dtype=torch.int64)
    fields = (
        torch.full_like(first, plane),
        first // row_words,
        first % row_words,
        (words - first).clamp(max=tile_words),
    )
    return torch.stack(fields, 1).to(torch.int32), first * word
