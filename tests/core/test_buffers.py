"""Buffers of the caller: each kind of memory becomes a flat byte view, or is refused."""

import ctypes
import errno
import mmap
import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from waiting import OthersRun

from kvstore import InvalidRequest
from kvstore.buffers import HELD_NBYTES_MAX, advise, byte_view, copy, copying

MADV_POPULATE_WRITE = 23


def buffers_of_64_bytes() -> dict[str, Any]:
    return {
        "bytearray": bytearray(64),
        "memoryview": memoryview(bytearray(64)),
        "slice of a memoryview": memoryview(bytearray(128))[32:96],
        "2-d memoryview": memoryview(bytearray(64)).cast("B", (8, 8)),
        "memoryview of floats": memoryview(bytearray(64)).cast("f"),
        "array": array("d", [0.0] * 8),
        "mmap": mmap.mmap(-1, 64),
        "ctypes array": (ctypes.c_uint16 * 32)(),
        "ctypes structure": type(
            "Page", (ctypes.Structure,), {"_fields_": [("data", ctypes.c_ubyte * 64)]}
        )(),
        "bfloat16 tensor": torch.zeros(4, 8, dtype=torch.bfloat16),
        "float8 tensor": torch.zeros(64, dtype=torch.float8_e4m3fn),
        "slice of a tensor": torch.zeros(10, 16)[3:4],
        "tensor with gradient": torch.zeros(16, requires_grad=True),
    }


@pytest.mark.parametrize("kind", buffers_of_64_bytes())
def test_view_shares_the_callers_memory(kind: str) -> None:
    buffer = buffers_of_64_bytes()[kind]
    view = byte_view(buffer, writable=True)
    assert (view.nbytes, view.format, view.ndim) == (64, "B", 1)
    view[:] = bytes(range(64))
    again = byte_view(buffer)
    assert bytes(again) == bytes(range(64))


@pytest.mark.parametrize(
    "nothing",
    [bytearray(), (ctypes.c_float * 3 * 0)(), (ctypes.c_float * 0 * 3)(), torch.empty(0, 3)],
)
def test_empty_buffer_has_an_empty_view(nothing: Any) -> None:
    """One of several dimensions may be 0, as in the slice of a pool without slots."""
    view = byte_view(nothing, writable=True)
    assert (view.nbytes, view.format, view.ndim) == (0, "B", 1)


def test_view_keeps_its_tensor_alive() -> None:
    view = byte_view(torch.arange(256, dtype=torch.uint8))
    torch.zeros(256, dtype=torch.uint8)
    assert bytes(view) == bytes(range(256))


@pytest.mark.parametrize(
    ("buffer", "named"),
    [
        (memoryview(bytearray(64))[::2], "bytearray|memoryview.*not contiguous"),
        (torch.zeros(8, 8).t(), r"strides \(1, 8\) is not contiguous"),
        (torch.zeros(8, 8)[:, :4], "is not contiguous"),
        (torch.zeros(4, device="meta"), "a tensor on meta"),
        ("text", "a str is neither a buffer nor a torch CPU tensor"),
        (7, "a int is neither"),
        (None, "a NoneType is neither"),
    ],
)
def test_other_memory_is_refused(buffer: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        byte_view(buffer)


@pytest.mark.parametrize(
    "buffer", [b"x" * 64, memoryview(b"x" * 64), bytearray(64)], ids=["bytes", "memoryview", "own"]
)
def test_read_only_memory_may_be_sent_but_not_received_into(buffer: Any) -> None:
    if isinstance(buffer, bytearray):
        buffer = memoryview(buffer).toreadonly()
    assert byte_view(buffer).nbytes == 64
    with pytest.raises(InvalidRequest, match="is read-only"):
        byte_view(buffer, writable=True)


LARGE = 16 << 20
READ_ONLY, WRITABLE = bytes, bytearray


@pytest.mark.parametrize("nbytes", [10, HELD_NBYTES_MAX, HELD_NBYTES_MAX + 1, 3 << 20])
@pytest.mark.parametrize("kind", [READ_ONLY, WRITABLE])
def test_copy_is_exact_and_keeps_no_buffer(kind: Callable[[bytes], Any], nbytes: int) -> None:
    source, target = (
        random.Random(nbytes).randbytes(nbytes),
        memoryview(bytearray(b"." * (nbytes + 2))),
    )
    owner = kind(source)
    view = memoryview(owner)
    copy(target[1:-1], view)
    assert bytes(target) == b"." + source + b"."
    target.release()  # raises while a buffer is exported
    view.release()
    if kind is WRITABLE:
        owner.append(0)  # so does this


def test_copy_pieces_stay_within_their_views() -> None:
    source, target = memoryview(bytes(range(10))), memoryview(bytearray(12))
    with copying(target[1:-1], source) as copy_piece:
        copy_piece(2, 5)
        copy_piece(9, 10)
        for start, end in ((5, 11), (-1, 2), (3, 2)):
            with pytest.raises(AssertionError):
                copy_piece(start, end)
        with pytest.raises(BufferError):
            source.release()
    assert bytes(target) == bytes([0, 0, 0, 2, 3, 4, 0, 0, 0, 0, 9, 0])
    source.release()


@pytest.mark.parametrize("nbytes", [10, HELD_NBYTES_MAX + 1])
def test_copy_into_read_only_memory_is_refused(nbytes: int) -> None:
    with pytest.raises((TypeError, BufferError)):
        copy(memoryview(bytes(nbytes)), memoryview(bytes(nbytes)))


@pytest.mark.parametrize("kind", [READ_ONLY, WRITABLE])
def test_other_threads_run_during_a_large_copy(
    kind: Callable[[int], Any], others_run: OthersRun
) -> None:
    source, target = memoryview(kind(LARGE)), memoryview(bytearray(LARGE))
    assert others_run(lambda: copy(target, source))


def test_other_threads_run_while_page_tables_are_filled(others_run: OthersRun) -> None:
    with mmap.mmap(-1, LARGE) as memory:

        def populate() -> None:
            memory.madvise(mmap.MADV_DONTNEED)  # holds the GIL, but only shortly
            advise(memory, MADV_POPULATE_WRITE, 0, LARGE)

        try:
            populate()
        except OSError as error:
            pytest.skip(f"this kernel lacks MADV_POPULATE_WRITE: {error}")
        assert others_run(populate)


@pytest.mark.parametrize("nbytes", [7, 9])
def test_copy_between_views_of_different_lengths_is_refused(nbytes: int) -> None:
    with (
        pytest.raises(AssertionError),
        copying(memoryview(bytearray(8)), memoryview(bytes(nbytes))),
    ):
        pass


def test_advise_applies_to_its_range_only() -> None:
    with mmap.mmap(-1, 4 << 12, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = b"1" * len(memory)
        advise(memory, mmap.MADV_DONTNEED, 1 << 12, 2 << 12)
        assert memory[:] == b"1" * (1 << 12) + bytes(2 << 12) + b"1" * (1 << 12)


def test_advice_refused_by_the_kernel_is_an_oserror() -> None:
    with mmap.mmap(-1, 1 << 16) as memory:
        with pytest.raises(OSError, match="Invalid argument") as caught:
            advise(memory, 4711, 0, 1 << 16)
        assert caught.value.errno == errno.EINVAL
