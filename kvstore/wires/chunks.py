"""Page bytes in gRPC messages: a run of pages is cut into chunks that know no page borders."""

from collections.abc import Iterable, Iterator

from kvstore.buffers import copy
from kvstore.config import GRPC_CHUNK_NBYTES
from kvstore.errors import InvalidRequest


def split(views: Iterable[memoryview]) -> Iterator[bytes]:
    """The concatenated views in chunks of GRPC_CHUNK_NBYTES; the last one may be shorter."""
    return map(b"".join, runs(views))


def runs(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The same, each chunk as the pieces that it is made of."""
    gathered: list[memoryview] = []
    room = GRPC_CHUNK_NBYTES
    for view in views:
        while view.nbytes:
            piece, view = view[:room], view[room:]
            gathered.append(piece)
            room -= piece.nbytes
            if not room:
                yield gathered
                gathered, room = [], GRPC_CHUNK_NBYTES
    if gathered:
        yield gathered


def fill(views: Iterable[memoryview], chunks: Iterator[bytes]) -> None:
    """Copies chunks one after the other through the views. Takes no chunk more than it needs.

    Raises InvalidRequest if the chunks are too few, empty, or leave bytes over.
    """
    rest = memoryview(b"")
    for view in views:
        while view.nbytes:
            if not rest.nbytes:
                rest = memoryview(next(chunks, b""))
                if not rest.nbytes:
                    raise InvalidRequest(f"page bytes ended early: {view.nbytes} bytes of a page are missing")
            count = min(rest.nbytes, view.nbytes)
            copy(view[:count], rest[:count])
            view, rest = view[count:], rest[count:]
    if rest.nbytes:
        raise InvalidRequest(f"{rest.nbytes} page bytes more than announced")
