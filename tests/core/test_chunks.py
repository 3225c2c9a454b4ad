"""Pages in gRPC messages: cut into chunks and joined again; invalid chunks are refused."""

import random

import pytest
from waiting import OthersRun

from kvstore.checksum import leaves
from kvstore.config import GRPC_CHUNK_NBYTES
from kvstore.errors import InvalidRequest
from kvstore.transports.frames import fill, runs


@pytest.mark.parametrize(
    "sizes",
    [
        [1],
        [GRPC_CHUNK_NBYTES],
        [GRPC_CHUNK_NBYTES - 1, 2],
        [3 * GRPC_CHUNK_NBYTES + 7],
        [1000] * 3000,
        [5, 1 << 21, 5],
    ],
)
def test_cut_chunk_is_filled_again_and_hashed(sizes: list[int]) -> None:
    rng = random.Random(3)
    pages = [rng.randbytes(size) for size in sizes]
    chunks = [b"".join(run) for run in runs(memoryview(page) for page in pages)]
    assert b"".join(chunks) == b"".join(pages)
    assert all(len(chunk) == GRPC_CHUNK_NBYTES for chunk in chunks[:-1])
    assert 0 < len(chunks[-1]) <= GRPC_CHUNK_NBYTES
    buffers = [bytearray(size) for size in sizes]
    made = fill(([memoryview(buffer)] for buffer in buffers), map(memoryview, chunks))
    assert buffers == pages
    assert made == [leaves(page) for page in pages]


def test_hash_is_of_the_bytes_in_the_callers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash of the chunk would not detect a wrong copy."""

    def wrong(target: memoryview, source: memoryview) -> None:
        target[:] = source
        target[0] ^= 1

    monkeypatch.setattr("kvstore.transports.frames.copy", wrong)
    buffer = memoryview(bytearray(4))
    assert fill([[buffer]], iter([memoryview(b"abcd")])) == [leaves(buffer)] != [leaves(b"abcd")]


def test_chunks_may_be_cut_anywhere() -> None:
    buffers = [bytearray(4), bytearray(4)]
    fill(([memoryview(buffer)] for buffer in buffers), map(memoryview, [b"a", b"bcdef", b"gh"]))
    assert buffers == [b"abcd", b"efgh"]


def test_only_needed_chunks_are_consumed() -> None:
    chunks = iter([memoryview(b"abcd"), memoryview(b"next")])
    fill([[memoryview(bytearray(4))]], chunks)
    assert next(chunks) == b"next"


@pytest.mark.parametrize(
    ("chunks", "named"),
    [
        ([], "4 bytes of a page are missing"),
        ([b"abc"], "1 bytes of a page are missing"),
        ([b"abc", b"", b"d"], "1 bytes of a page are missing"),
        ([b"abcde"], "1 page bytes more than announced"),
    ],
)
def test_wrong_number_of_bytes_is_refused(chunks: list[bytes], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        fill([[memoryview(bytearray(4))]], map(memoryview, chunks))


def test_no_pages_make_no_chunks() -> None:
    assert list(runs([])) == []
    assert fill([], iter([])) == []


def test_other_threads_run_while_chunks_are_copied(others_run: OthersRun) -> None:
    chunk, buffer = bytes(8 << 20), memoryview(bytearray(8 << 20))
    assert others_run(lambda: fill([[buffer]], iter([memoryview(chunk)])))
