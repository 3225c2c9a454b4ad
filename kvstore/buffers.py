"""Callers' buffers as flat byte views, without a copy and without importing torch."""

import ctypes
from collections.abc import Iterable
from typing import Any

from kvstore.errors import InvalidRequest


def byte_view(buffer: Any, writable: bool = False) -> memoryview:
    """A flat `memoryview` of bytes over the caller's own memory, which it keeps alive.

    Takes anything with the buffer protocol (bytes, bytearray, mmap, numpy, ctypes) and torch CPU
    tensors, which have none. Raises InvalidRequest for memory that is not contiguous, not on the
    CPU, or read-only where it must be written.
    """
    view = _tensor_view(buffer) if hasattr(buffer, "data_ptr") else _buffer_view(buffer)
    if writable and view.readonly:
        raise InvalidRequest(f"a {type(buffer).__name__} is read-only; pass a writable buffer to read into")
    return view


def byte_views(buffers: Iterable[Any], nbytes: int, writable: bool = False) -> list[memoryview]:
    """`byte_view` of each, each of exactly `nbytes` bytes."""
    views = [byte_view(buffer, writable) for buffer in buffers]
    for position, view in enumerate(views):
        if view.nbytes != nbytes:
            raise InvalidRequest(f"buffer {position} has {view.nbytes} bytes, expected {nbytes}")
    return views


def copy(target: memoryview, source: memoryview) -> None:
    """`target[:] = source` for flat views of one length, without the GIL, which the assignment keeps: other
    threads copy and hash meanwhile. Read-only sources have no address here and take the assignment."""
    if source.readonly:
        target[:] = source
        return
    assert target.nbytes == source.nbytes
    to, start = ctypes.c_char.from_buffer(target), ctypes.c_char.from_buffer(source)
    ctypes.memmove(ctypes.addressof(to), ctypes.addressof(start), source.nbytes)


def _buffer_view(buffer: Any) -> memoryview:
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise InvalidRequest(f"a {type(buffer).__name__} is neither a buffer nor a torch CPU tensor") from error
    if not view.c_contiguous:
        raise InvalidRequest(
            f"a {type(buffer).__name__} with strides {view.strides} is not contiguous; pass a contiguous one"
        )
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _tensor_view(tensor: Any) -> memoryview:
    if tensor.device.type != "cpu":
        raise InvalidRequest(
            f"a tensor on {tensor.device} can not be sent from here; pass a CPU tensor or use the agent"
        )
    if not tensor.is_contiguous():
        raise InvalidRequest(f"a tensor with strides {tuple(tensor.stride())} is not contiguous; pass a contiguous one")
    memory = (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    memory.owner = tensor  # the view holds the ctypes array, which holds the tensor
    return memoryview(memory).cast("B")
