"""What the client needs of a way to a node. `shm.py`, `bulk.py` and `grpc_wire.py` are the three ways."""

from collections.abc import Sequence
from typing import Any, Protocol

from kvstore.deadline import Deadline
from kvstore.pb import kvstore_pb2 as pb
from kvstore.seals import Seals


class Wire(Protocol):
    """Thread-safe. Methods raise the errors of `kvstore.errors` and nothing else.

    `seeds[i]` seeds the checksum of key i. Buffers are flat byte views of the right size. `seals`: of a keyed
    namespace, those that follow the pages' bytes: made where a page is sent, checked where it has arrived.
    """

    name: str

    def call(self, op: str, request: Any, deadline: Deadline) -> Any:
        """One request, one reply. `op` is the field's name in BulkRequest."""

    def put(
        self, request: pb.PutRequest, pages: Sequence[memoryview], deadline: Deadline, seals: Seals | None = None
    ) -> list[int]:
        """One PutVerdict per key; WRITE means: sent and committed."""

    def get(
        self,
        request: pb.GetRequest,
        buffers: Sequence[memoryview],
        seeds: Sequence[int],
        deadline: Deadline,
        seals: Seals | None = None,
    ) -> tuple[list[bool], list[int]]:
        """(hit, intact and with its seal, per key; positions whose bytes did not match their checksum). What has not
        its seal is in `seals.forged`."""

    def close(self) -> None: ...
