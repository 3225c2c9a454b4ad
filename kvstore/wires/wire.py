"""What the client needs of a way to a node. `shm.py`, `bulk.py` and `grpc_wire.py` are the three ways."""

from collections.abc import Sequence
from typing import Any, Protocol

from kvstore.deadline import Deadline
from kvstore.pb import kvstore_pb2 as pb


class Wire(Protocol):
    """Thread-safe. Methods raise the errors of `kvstore.errors` and nothing else.

    `seeds[i]` seeds the checksum of key i. Buffers are flat byte views of the right size.
    """

    name: str

    def call(self, op: str, request: Any, deadline: Deadline) -> Any:
        """One request, one reply. `op` is the field's name in BulkRequest."""

    def put(self, request: pb.PutRequest, pages: Sequence[memoryview], deadline: Deadline) -> list[int]:
        """One PutVerdict per key; WRITE means: sent and committed."""

    def get(
        self, request: pb.GetRequest, buffers: Sequence[memoryview], seeds: Sequence[int], deadline: Deadline
    ) -> tuple[list[bool], list[int]]:
        """(hit and intact, per key; positions whose bytes did not match their checksum)."""

    def close(self) -> None: ...
