"""Page bytes in gRPC messages: a run of pages is cut into chunks that know no page borders."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from kvstore.buffers import copy
from kvstore.checksum import Leaves
from kvstore.config import GRPC_CHUNK_NBYTES
from kvstore.errors import InvalidRequest
from kvstore.pieces import grouped


def runs(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The concatenated views in chunks of GRPC_CHUNK_NBYTES, each as the pieces that it is made of; the last one may
    be shorter. A view is taken when those before it are used up."""
    return grouped(views, itertools.repeat(GRPC_CHUNK_NBYTES))


def fill(pages: Iterable[Sequence[memoryview]], chunks: Iterator[memoryview]) -> list[bytes]:
    """Copies chunks one after the other through the views of each page, and hashes each right behind, while it is in
    the cache: the leaves of each page. Takes no chunk more than it needs.

    Raises InvalidRequest if the chunks are too few, empty, or leave bytes over.
    """
    made = []
    rest = empty = memoryview(b"")
    for page in pages:
        running = Leaves(sum(view.nbytes for view in page))
        for view in page:
            while view.nbytes:
                if not rest.nbytes:
                    rest = next(chunks, empty)
                    if not rest.nbytes:
                        raise InvalidRequest(f"page bytes ended early: {view.nbytes} bytes of a page are missing")
                count = min(rest.nbytes, view.nbytes)
                copy(view[:count], rest[:count])
                running.update(view[:count])
                view, rest = view[count:], rest[count:]
        made.append(running.digest())
    if rest.nbytes:
        raise InvalidRequest(f"{rest.nbytes} page bytes more than announced")
    return made
