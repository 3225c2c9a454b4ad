"""Callers' buffers: every kind of memory becomes a flat byte view of itself, or is refused."""

import ctypes
import mmap
from array import array
from typing import Any

import pytest
import torch

from kvstore import InvalidRequest
from kvstore.buffers import byte_view, byte_views, copy


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
        "ctypes structure": type("Page", (ctypes.Structure,), {"_fields_": [("data", ctypes.c_ubyte * 64)]})(),
        "bfloat16 tensor": torch.zeros(4, 8, dtype=torch.bfloat16),
        "float8 tensor": torch.zeros(64, dtype=torch.float8_e4m3fn),
        "slice of a tensor": torch.zeros(10, 16)[3:4],
        "tensor with gradient": torch.zeros(16, requires_grad=True),
    }


@pytest.mark.parametrize("kind", buffers_of_64_bytes())
def test_a_view_is_the_callers_own_memory(kind: str) -> None:
    buffer = buffers_of_64_bytes()[kind]
    view = byte_view(buffer, writable=True)
    assert (view.nbytes, view.format, view.ndim) == (64, "B", 1)
    view[:] = bytes(range(64))
    again = byte_view(buffer)
    assert bytes(again) == bytes(range(64))


def test_a_view_keeps_the_tensor_alive() -> None:
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


def test_a_buffer_of_another_length_is_named_by_its_position() -> None:
    with pytest.raises(InvalidRequest, match="buffer 1 has 63 bytes, expected 64"):
        byte_views([bytearray(64), bytearray(63)], 64)


@pytest.mark.parametrize("source", [b"0123456789", bytearray(b"0123456789")], ids=["read-only", "writable"])
def test_a_copy_is_exact_and_holds_nothing(source: bytes | bytearray) -> None:
    target = memoryview(bytearray(b"." * 12))
    copy(target[1:11], memoryview(source))
    assert bytes(target) == b".0123456789."
    target.release()  # raises if something of it were kept
