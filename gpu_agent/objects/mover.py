"""How a part's objects travel between callers' memory and a node: straight, by the client's own calls.

A load receives where the bytes are wanted and compares what is there with its checksum. What could not be read holds
nothing of meaning then, and is no hit.
"""

from gpu_agent.objects.parts import Part
from kvstore.client import Client
from kvstore.results import PutOutcome


class ObjectMover:
    """Thread-safe. Methods raise KVStoreErrors; `values` is filled when they do not. A view is not touched any more
    when they return, nor is it after the part's deadline."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def put(self, part: Part, values: list[PutOutcome | None]) -> None:
        views: dict[bytes, memoryview] = dict(zip(part.hashes, part.views, strict=True))  # each once
        timeout_s = part.deadline.remaining()
        outcomes = self._client.put(part.namespace, list(views), list(views.values()), timeout_s=timeout_s)
        by_hash = dict(zip(views, outcomes, strict=True))
        values[:] = [by_hash[prefix_hash] for prefix_hash in part.hashes]

    def get(self, part: Part, values: list[bool | None]) -> None:
        timeout_s = part.deadline.remaining()
        values[:] = self._client.get(part.namespace, part.hashes, part.views, timeout_s=timeout_s)
