"""Pages scattered over several pieces of memory: any cut gives the same pages, on every wire."""

import itertools
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvstore import (
    ByteRange,
    Client,
    InvalidRequest,
    Namespace,
    PutOutcome,
    opaque_layout,
    prefix_hashes,
)
from kvstore.buffers import chunks, copy_segments, page_segments, segments_nbytes, zip_segments
from kvstore.transports.frames import _VIEWS_MAX

NBYTES, COUNT = 300_007, 5
POISON = 0xA5


class Scattered:
    """Poisoned memory with pages in pieces at random places, with gaps between them.

    `pieces` has the pieces of each page in the page's order.
    """

    def __init__(self, rng: random.Random, sizes: Sequence[Sequence[int]]) -> None:
        flat = [
            (page, place, nbytes)
            for page, some in enumerate(sizes)
            for place, nbytes in enumerate(some)
        ]
        rng.shuffle(flat)
        gap = 3
        self._memory = bytearray([POISON]) * (sum(nbytes + gap for _, _, nbytes in flat) + gap)
        self._gaps = bytearray(len(self._memory))
        found: dict[tuple[int, int], memoryview] = {}
        at = gap
        self._gaps[:gap] = b"1" * gap
        for page, place, nbytes in flat:
            found[page, place] = memoryview(self._memory)[at : at + nbytes]
            self._gaps[at + nbytes : at + nbytes + gap] = b"1" * gap
            at += nbytes + gap
        self.pieces = [
            [found[page, place] for place in range(len(some))] for page, some in enumerate(sizes)
        ]

    def write(self, pages: Sequence[bytes]) -> None:
        for pieces, page in zip(self.pieces, pages, strict=True):
            copy_segments(pieces, [memoryview(page)])

    def read(self) -> list[bytes]:
        return [b"".join(pieces) for pieces in self.pieces]

    def check(self) -> None:
        beside = itertools.compress(range(len(self._gaps)), self._gaps)
        wrong = [at for at in beside if self._memory[at] != POISON]
        assert not wrong, f"bytes beside the pages were written: {wrong[:9]}"


def cut(rng: random.Random, nbytes: int, count: int) -> list[int]:
    edges = sorted(rng.sample(range(1, nbytes), min(count, nbytes) - 1))
    return [end - start for start, end in zip([0, *edges], [*edges, nbytes], strict=True)]


def poisoned(rng: random.Random, nbytes: int, *counts: int) -> Scattered:
    return Scattered(rng, [cut(rng, nbytes, count) for count in counts])


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture
def namespace() -> Namespace:
    return Namespace(f"pieces-{uuid.uuid4()}", opaque_layout(NBYTES))


@pytest.fixture
def pages(rng: random.Random) -> list[bytes]:
    return [rng.randbytes(NBYTES) for _ in range(COUNT)]


HASHES = prefix_hashes(list(range(COUNT)), 1)


# One piece; two, as K and V of a pool; as many as layers; more than a system call takes; and a mix.
COUNTS = [
    (1,) * COUNT,
    (2,) * COUNT,
    (64,) * COUNT,
    (_VIEWS_MAX + 100,) * COUNT,
    (1, 2, 3, 700, 5000),
]


@pytest.mark.parametrize("counts", COUNTS)
def test_pages_are_sent_and_received_in_pieces(
    client: Client,
    namespace: Namespace,
    rng: random.Random,
    pages: list[bytes],
    counts: tuple[int, ...],
) -> None:
    source, target = poisoned(rng, NBYTES, *counts), poisoned(rng, NBYTES, *reversed(counts))
    source.write(pages)
    assert client.put(namespace, HASHES, source.pieces) == [PutOutcome.STORED] * COUNT
    whole = [bytearray(NBYTES) for _ in HASHES]
    assert client.get(namespace, HASHES, whole) == [True] * COUNT
    assert whole == pages
    assert (
        client.get(namespace, HASHES, [tuple(pieces) for pieces in target.pieces], prefix=True)
        == [True] * COUNT
    )
    assert target.read() == pages
    assert source.read() == pages
    source.check()
    target.check()
    assert client.verify(namespace, HASHES) == (COUNT, 0, 0)


def test_whole_and_scattered_pages_share_a_batch(
    client: Client, namespace: Namespace, rng: random.Random, pages: list[bytes]
) -> None:
    some = poisoned(rng, NBYTES, 3, 4)
    some.write(pages[:2])
    assert client.put(namespace, HASHES, [*some.pieces, *pages[2:]]) == [PutOutcome.STORED] * COUNT
    others, whole = poisoned(rng, NBYTES, 7, 2), [bytearray(NBYTES) for _ in range(3)]
    assert client.get(namespace, HASHES, [*whole, *others.pieces]) == [True] * COUNT
    assert [*map(bytes, whole), *others.read()] == pages
    others.check()


def test_misses_touch_no_piece(
    client: Client, namespace: Namespace, rng: random.Random, pages: list[bytes]
) -> None:
    client.put(namespace, [*HASHES[:2], *HASHES[3:]], [*pages[:2], *pages[3:]])
    target = poisoned(rng, NBYTES, *(5,) * COUNT)
    assert client.get(namespace, HASHES, target.pieces, prefix=True) == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert target.read() == [*pages[:2], *[bytes([POISON]) * NBYTES] * 3]
    assert client.get(namespace, HASHES, target.pieces) == [True, True, False, True, True]
    assert target.read() == [*pages[:2], bytes([POISON]) * NBYTES, *pages[3:]]
    target.check()


def test_ranges_are_received_into_pieces_in_order(
    client: Client, namespace: Namespace, rng: random.Random, pages: list[bytes]
) -> None:
    client.put(namespace, HASHES, pages)
    edges = sorted(rng.sample(range(NBYTES + 1), 8))
    ranges = [
        ByteRange(start, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]
    target = poisoned(rng, sum(part.nbytes for part in ranges), *(6,) * COUNT)
    assert client.get_ranges(namespace, HASHES, ranges, target.pieces) == [True] * COUNT
    wanted = [
        b"".join(page[part.offset : part.offset + part.nbytes] for part in ranges) for page in pages
    ]
    assert target.read() == wanted
    target.check()


@pytest.mark.parametrize("ask", ["put", "get"])
def test_pieces_of_wrong_size_are_refused(client: Client, namespace: Namespace, ask: str) -> None:
    call: Callable[..., Any] = getattr(client, ask)
    for wrong in ([bytearray(NBYTES - 1), bytearray(2)], [], [bytearray(NBYTES), bytearray(1)]):
        with pytest.raises(InvalidRequest, match=f"buffer 1 has .* expected {NBYTES}"):
            call(namespace, HASHES[:2], [bytearray(NBYTES), wrong])
    if ask == "get":
        with pytest.raises(InvalidRequest, match="read-only"):
            client.get(namespace, HASHES[:1], [[bytearray(7), bytes(NBYTES - 7)]])


def test_empty_pieces_are_ignored(client: Client, namespace: Namespace, pages: list[bytes]) -> None:
    half = NBYTES // 2
    assert client.put(
        namespace, HASHES[:1], [[b"", pages[0][:half], b"", pages[0][half:], b""]]
    ) == [PutOutcome.STORED]
    into = [bytearray(n) for n in (0, half, 0, 0, NBYTES - half, 0)]
    assert client.get(namespace, HASHES[:1], [into]) == [True]
    assert b"".join(into) == pages[0]


def test_buffer_of_wrong_length_is_named_by_its_position() -> None:
    with pytest.raises(InvalidRequest, match="buffer 1 has 63 bytes, expected 64"):
        page_segments([bytearray(64), bytearray(63)], 64)
    with pytest.raises(InvalidRequest, match="buffer 0 has 65 bytes in 2 pieces, expected 64"):
        page_segments([(bytearray(64), bytearray(1))], 64)


@pytest.mark.parametrize("page", [bytes(64), (bytearray(60), bytes(4))], ids=["one", "several"])
def test_read_only_memory_is_refused_for_receiving(page: Any) -> None:
    assert segments_nbytes(page_segments([page], 64)[0]) == 64
    with pytest.raises(InvalidRequest, match="is read-only"):
        page_segments([page], 64, writable=True)


def views(rng: random.Random, data: bytes) -> list[memoryview]:
    sizes = (
        []
        if not data
        else cut(rng, len(data), rng.randrange(1, 9))
        if len(data) > 9
        else [len(data)]
    )
    starts = itertools.accumulate(sizes, initial=0)
    return [
        memoryview(data)[start : start + size] for start, size in zip(starts, sizes, strict=False)
    ]


def test_chunks_have_their_sizes_and_all_bytes_in_order(rng: random.Random) -> None:
    for _ in range(300):
        data = rng.randbytes(rng.randrange(200))
        size = rng.randrange(1, 60)
        groups = list(chunks(views(rng, data), itertools.repeat(size)))
        assert b"".join(piece for group in groups for piece in group) == data
        assert all(segments_nbytes(group) == size for group in groups[:-1])
        assert all(0 < segments_nbytes(group) <= size for group in groups)


def test_chunks_consume_nothing_after_the_last_group() -> None:
    taken = iter([memoryview(b"abc"), memoryview(b"def"), memoryview(b"ghi")])
    assert [b"".join(group) for group in chunks(taken, [2, 3])] == [b"ab", b"cde"]
    assert list(chunks(taken, [])) == []
    assert next(taken) == b"ghi"


def test_zipped_segments_keep_order_and_skip_empty_pieces(rng: random.Random) -> None:
    for _ in range(300):
        data = rng.randbytes(rng.randrange(200))
        target = bytearray(len(data))

        def some(pieces: list[memoryview]) -> Iterator[memoryview]:
            for piece in pieces:
                yield from [piece, piece[:0]] if rng.random() < 0.3 else [piece]

        room = memoryview(target)
        sizes = cut(rng, len(data), rng.randrange(1, 9)) if len(data) > 9 else [len(data)]
        starts = itertools.accumulate(sizes, initial=0)
        into = [room[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        for to, source in zip_segments(some(into), some(views(rng, data))):
            assert 0 < to.nbytes == source.nbytes
            to[:] = source
        assert target == data
