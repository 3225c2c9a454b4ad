"""A stream of a gRPC call's requests, of which a test says one after the other, or none."""

import queue
from collections.abc import Iterator
from typing import Any


class RequestStream:
    """Iterates over what is said, until `end`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def say(self, message: Any) -> None:
        self._queue.put(message)

    def end(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._queue.get, None)
