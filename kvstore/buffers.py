"""View and copy callers' buffers: flat byte views without a copy, and without importing torch.

Large copies release the GIL. A page's bytes lie in one run of memory or in several segments, as in
an engine's pool whose K and V are far apart. Segments are sent one after the other:

    a page     | segment 0 ..... | segment 1 | segment 2 ..... |   the caller's buffers, in order
    a slot     |                                               |   at a node: one run of memory
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from kvstore.errors import InvalidRequest

# Up to this size, bytes are copied, hashed or joined with the GIL held: 5 to 15 us. Releasing and
# retaking the GIL costs as much, and up to `sys.getswitchinterval()`, 5 ms, beside a thread that
# computes.
HELD_NBYTES_MAX = 64 << 10

Pieces: TypeAlias = tuple[memoryview, ...]  # flat views of bytes, one or more

_libc = ctypes.CDLL(None, use_errno=True)
_PyBUF_WRITABLE = 1


class _PyBuffer(ctypes.Structure):
    """Python's `Py_buffer`, part of its stable interface.

    `obj` is no py_object: the C functions count it.
    """

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


# A private instance: `ctypes.pythonapi` and its functions' types are shared by the whole process.
_python = ctypes.PyDLL(None)
_export, _release = _python.PyObject_GetBuffer, _python.PyBuffer_Release
_export.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release.argtypes = (ctypes.c_void_p,)
_release.restype = None
# PyDLL keeps the GIL during these calls; `ctypes.memmove` releases it.
_memmove, _memset = _python.memmove, _python.memset
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_memmove.restype = _memset.restype = ctypes.c_void_p


def byte_view(buffer: Any, writable: bool = False) -> memoryview:
    """Return a flat `memoryview` of bytes over the caller's memory, which it keeps alive.

    Takes anything with the buffer protocol (bytes, bytearray, mmap, numpy, ctypes) and torch CPU
    tensors, which have none. Raises InvalidRequest for memory that is not contiguous, not on the
    CPU, or read-only where it must be written.
    """
    view = _tensor_view(buffer) if hasattr(buffer, "data_ptr") else _buffer_view(buffer)
    if writable and view.readonly:
        raise InvalidRequest(
            f"a {type(buffer).__name__} is read-only; pass a writable buffer to read into"
        )
    return view


def copy(target: memoryview, source: memoryview) -> None:
    """Copy between flat views of one length; the source may be read-only.

    More than HELD_NBYTES_MAX bytes are copied with the GIL released, so that other threads run.
    """
    if source.nbytes <= HELD_NBYTES_MAX:
        target[:] = source
        return
    with copying(target, source) as copy_piece:
        copy_piece(0, source.nbytes)


def move(target: int, source: int, nbytes: int) -> None:
    """Copy bytes between two addresses, with or without the GIL, as `copy` does."""
    (_memmove if nbytes <= HELD_NBYTES_MAX else ctypes.memmove)(target, source, nbytes)


def fill(target: int, value: int, nbytes: int) -> None:
    """Set a number of bytes from an address on, with or without the GIL, as `copy` does."""
    (_memset if nbytes <= HELD_NBYTES_MAX else ctypes.memset)(target, value, nbytes)


@contextlib.contextmanager
def copying(target: memoryview, source: memoryview) -> Iterator[Callable[[int, int], None]]:
    """Yield `copy_piece(start, end)`, which copies that range between two views without the GIL.

    Looking the two addresses up takes as long as copying 64 KiB from a CPU cache, so it is done
    once.
    """
    nbytes = source.nbytes
    assert target.nbytes == nbytes
    to = _exported(target, _PyBUF_WRITABLE)
    try:
        origin = _exported(source, 0)
        try:
            to_address, address = to.buf, origin.buf

            def copy_piece(start: int, end: int) -> None:
                assert 0 <= start <= end <= nbytes
                ctypes.memmove(to_address + start, address + start, end - start)

            yield copy_piece
        finally:
            _release(ctypes.byref(origin))
    finally:
        _release(ctypes.byref(to))


def advise(memory: mmap.mmap, advice: int, start: int, nbytes: int) -> None:
    """Call `memory.madvise(advice, start, nbytes)` with the GIL released; mmap's method holds it.

    Filling page tables takes 75 µs per MiB. Raises OSError.
    """
    found = _exported(memory, 0)
    try:
        if _libc.madvise(ctypes.c_void_p(found.buf + start), ctypes.c_size_t(nbytes), advice):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        _release(ctypes.byref(found))


def _exported(buffer: Any, flags: int) -> _PyBuffer:
    """Return a buffer's address; its bytes stay in place until `_release`.

    ctypes gives no address of read-only memory; the C function behind every memoryview does. Raises
    BufferError if the buffer does not allow what `flags` request.
    """
    found = _PyBuffer()
    _export(buffer, ctypes.byref(found), flags)
    return found


def _buffer_view(buffer: Any) -> memoryview:
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise InvalidRequest(
            f"a {type(buffer).__name__} is neither a buffer nor a torch CPU tensor"
        ) from error
    if not view.c_contiguous:
        raise InvalidRequest(
            f"a {type(buffer).__name__} with strides {view.strides} is not contiguous; pass a "
            "contiguous one"
        )
    if view.format == "B" and view.ndim == 1:
        return view
    # An empty view with several dimensions can not be cast: a slice of a pool without slots.
    return view.cast("B") if view.nbytes else memoryview(b"" if view.readonly else bytearray())


def _tensor_view(tensor: Any) -> memoryview:
    if tensor.device.type != "cpu":
        raise InvalidRequest(
            f"a tensor on {tensor.device} can not be sent from here; pass a CPU tensor or use the "
            "agent"
        )
    if not tensor.is_contiguous():
        raise InvalidRequest(
            f"a tensor with strides {tuple(tensor.stride())} is not contiguous; pass a contiguous "
            "one"
        )
    memory = (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(
        tensor.data_ptr()
    )
    memory.owner = tensor  # the view holds the ctypes array, which holds the tensor
    return memoryview(memory).cast("B")


def page_segments(pages: Iterable[Any], nbytes: int, writable: bool = False) -> list[Pieces]:
    """Return the segments of each page, checked to be exactly `nbytes` long.

    A page is a buffer as `byte_view` takes it, or a list or tuple of such. Raises InvalidRequest.
    """
    found: list[Pieces] = []
    for page in pages:
        several = isinstance(page, list | tuple)
        pieces = (
            tuple([byte_view(piece, writable) for piece in page])
            if several
            else (byte_view(page, writable),)
        )
        if (have := segments_nbytes(pieces)) != nbytes:
            of = f" in {len(pieces)} pieces" if len(pieces) > 1 else ""
            raise InvalidRequest(f"buffer {len(found)} has {have} bytes{of}, expected {nbytes}")
        found.append(pieces)
    return found


def segments_nbytes(pieces: Iterable[memoryview]) -> int:
    """Return the bytes of all segments together."""
    return sum([piece.nbytes for piece in pieces])


def chunks(pieces: Iterable[memoryview], sizes: Iterable[int]) -> Iterator[list[memoryview]]:
    """Cut consecutive segments into groups of the given sizes; the last group may be shorter.

    A segment is taken when those before it are used up, and never beyond the last size.
    """
    left = iter(sizes)
    group: list[memoryview] = []
    room = next(left, 0)
    for piece in pieces if room else ():
        while piece.nbytes:
            some, piece = (
                (piece, piece[:0]) if piece.nbytes <= room else (piece[:room], piece[room:])
            )
            group.append(some)
            room -= some.nbytes
            if not room:
                yield group
                group, room = [], next(left, 0)
                if not room:
                    return
    if group:
        yield group


def zip_segments(
    targets: Iterable[memoryview], sources: Iterable[memoryview]
) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield pairs of equally long runs of bytes that cover targets and sources in order."""
    left = iter(targets)
    target = next(left, memoryview(b""))
    for source in sources:
        while source.nbytes:
            while not target.nbytes:
                target = next(left)
            count = min(target.nbytes, source.nbytes)
            yield target[:count], source[:count]
            target, source = target[count:], source[count:]


def copy_segments(targets: Iterable[memoryview], sources: Iterable[memoryview]) -> None:
    """Copy consecutive sources into the targets, which must be large enough."""
    for target, source in zip_segments(targets, sources):
        copy(target, source)
