"""Define what the client needs of a transport.

`shm.py`, `bulk.py` and `grpc_wire.py` implement it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from kvstore.buffers import Pieces
from kvstore.deadline import Deadline
from kvstore.page_hmac import PageHmacs
from kvstore.pb import kvstore_pb2 as pb


class Wire(Protocol):
    """A transport; thread-safe.

    Methods raise the errors of `kvstore.errors` and nothing else.

    `seeds[i]` seeds the checksum of key i. The segments of a page are flat byte views, together of
    the right size. `hmacs`: for a keyed namespace, the HMACs that follow the pages' bytes: made
    where a page is sent, verified where it has arrived. No thread touches a page's memory after a
    method has returned or raised.
    """

    name: str

    def call(self, op: str, request: Any, deadline: Deadline) -> Any:
        """Send one request and return its reply. `op` is the field's name in BulkRequest."""

    def put(
        self,
        request: pb.PutRequest,
        pages: Sequence[Pieces],
        deadline: Deadline,
        hmacs: PageHmacs | None = None,
    ) -> list[int]:
        """Put pages and return one PutStatus per key; WRITE means sent and committed."""

    def get(
        self,
        request: pb.GetRequest,
        buffers: Sequence[Pieces],
        seeds: Sequence[int],
        deadline: Deadline,
        hmacs: PageHmacs | None = None,
    ) -> tuple[list[bool], list[int]]:
        """Read pages; return a hit per key and the positions whose bytes failed their checksum.

        A hit is intact and, in a keyed namespace, has its HMAC. Pages without one are in
        `hmacs.forged`.
        """

    def close(self) -> None:
        """Close the connections."""
