"""Results for an engine that polls a descriptor: readable while results wait.

    worker:  append, then signal            engine:  poll, clear, then take

The other order on either side loses a wake-up: a result appended between taking and clearing would wait for
the next one.
"""

import os
import threading
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Completions(Generic[Item]):
    """Thread-safe. `fileno()` is for polling only; `drain` clears it."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._items: list[Item] = []
        self._closed = False

    def fileno(self) -> int:
        return self._fd

    def add(self, item: Item) -> None:
        with self._lock:
            if self._closed:  # nobody polls any more, and the descriptor may be another file by now
                return
            self._items.append(item)
            os.eventfd_write(self._fd, 1)

    def drain(self) -> list[Item]:
        """What was added since; an empty list after `close`."""
        with self._lock:
            if self._closed:
                return []
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                pass  # a drain before this one took it all
            items, self._items = self._items, []
        return items

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)
