"""A request stream of a gRPC call that a test controls message by message."""

import queue
from collections.abc import Iterator
from typing import Any


class RequestStream:
    """Iterate over the messages passed to `say`, until `end`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def say(self, message: Any) -> None:
        self._queue.put(message)

    def end(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._queue.get, None)
