"""Pages in pieces: the bytes of a page lie in one run of memory or in several, as in an engine's pool whose K and V are
far apart, and travel one piece after the other.

    a page     | piece 0 ... | piece 1 | piece 2 ....... |      buffers of the caller, in the page's order
    a slot     |                                         |      at a node it is one run
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from kvstore.buffers import byte_view, copy
from kvstore.errors import InvalidRequest

Pieces: TypeAlias = tuple[memoryview, ...]  # flat views of bytes, one or more


def page_pieces(pages: Iterable[Any], nbytes: int, writable: bool = False) -> list[Pieces]:
    """The callers' pages, each a buffer as `byte_view` takes it or a list or tuple of such; all of exactly `nbytes`
    bytes. Raises InvalidRequest."""
    found: list[Pieces] = []
    for page in pages:
        several = isinstance(page, list | tuple)
        pieces = tuple([byte_view(piece, writable) for piece in page]) if several else (byte_view(page, writable),)
        if (have := pieces_nbytes(pieces)) != nbytes:
            of = f" in {len(pieces)} pieces" if len(pieces) > 1 else ""
            raise InvalidRequest(f"buffer {len(found)} has {have} bytes{of}, expected {nbytes}")
        found.append(pieces)
    return found


def pieces_nbytes(pieces: Iterable[memoryview]) -> int:
    return sum([piece.nbytes for piece in pieces])


def grouped(pieces: Iterable[memoryview], sizes: Iterable[int]) -> Iterator[list[memoryview]]:
    """The pieces one after the other, cut into groups of so many bytes; the last may be shorter. A piece is taken when
    those before it are used up, and not behind the last size."""
    left = iter(sizes)
    group: list[memoryview] = []
    room = next(left, 0)
    for piece in pieces if room else ():
        while piece.nbytes:
            some, piece = (piece, piece[:0]) if piece.nbytes <= room else (piece[:room], piece[room:])
            group.append(some)
            room -= some.nbytes
            if not room:
                yield group
                group, room = [], next(left, 0)
                if not room:
                    return
    if group:
        yield group


def meeting(targets: Iterable[memoryview], sources: Iterable[memoryview]) -> Iterator[tuple[memoryview, memoryview]]:
    """Runs of bytes in both, of the same length, in order."""
    left = iter(targets)
    target = next(left, memoryview(b""))
    for source in sources:
        while source.nbytes:
            while not target.nbytes:
                target = next(left)
            count = min(target.nbytes, source.nbytes)
            yield target[:count], source[:count]
            target, source = target[count:], source[count:]


def copy_pieces(targets: Iterable[memoryview], sources: Iterable[memoryview]) -> None:
    """The sources, one after the other, into the targets, which have room for them."""
    for target, source in meeting(targets, sources):
        copy(target, source)
