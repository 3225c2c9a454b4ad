"""Cut a call's objects into parts of one namespace each, and put their values together again.

`Completions` hands results to an engine that polls a descriptor, readable while results wait:

    worker:  append, then signal            engine:  poll, clear, then take

The other order on either side loses a wake-up: a result appended between taking and clearing would
wait for the next one.
"""

import concurrent.futures
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from kvstore.deadline import Deadline
from kvstore.errors import InvalidRequest
from kvstore.keys import Namespace
from kvstore.layout import PageLayout
from kvstore.sync import Future

# One task of a thread: large enough that its round trip does not count (half a millisecond beside
# busy cores, in which one moves 3 MiB), small enough that the threads share a call of a few large
# objects.
PART_NBYTES = 16 << 20
# A call of many objects is cut into larger parts, to keep the bookkeeping small.
PARTS_MAX = 64

Item = TypeVar("Item")
Value = TypeVar("Value")


class ObjectName(NamedTuple):
    """Name of an object. `scope`: a namespace with an unspecified layout (`objects.store.ANY`).

    `layout`: the object's own; None means any, which `ObjectStore.exists` and `remove` accept.
    """

    scope: Namespace
    prefix_hash: bytes
    layout: PageLayout | None


@dataclass(frozen=True)
class ObjectResults(Generic[Value]):
    """One value per object.

    `error`: why the store could not answer for all; empty if it did.
    """

    values: list[Value]
    error: str = ""


@dataclass(frozen=True)
class ObjectPart:
    """Some objects of one namespace, and their positions in their call."""

    namespace: Namespace
    positions: list[int]
    hashes: list[bytes]
    views: list[memoryview]
    deadline: Deadline

    @property
    def nbytes(self) -> int:
        """Return the bytes of the part."""
        return len(self.hashes) * self.namespace.layout.page_nbytes


@dataclass(frozen=True)
class Ended(Generic[Value]):
    """A part, its values and why some are missing."""

    part: ObjectPart
    values: list[Value]
    error: str


def cut(
    names: Sequence[ObjectName],
    views: Sequence[memoryview],
    space: Callable[[Namespace, PageLayout], Namespace],
    deadline: Deadline,
) -> list[ObjectPart]:
    """Split objects into parts of one namespace; `space(scope, layout)` returns it.

    Raises InvalidRequest for a name without a layout or a view of another length.
    """
    if len(names) != len(views):
        raise InvalidRequest(f"{len(names)} names for {len(views)} buffers")
    groups: dict[bytes, tuple[Namespace, list[int]]] = {}
    for position, (name, view) in enumerate(zip(names, views, strict=True)):
        if name.layout is None or name.layout.page_nbytes != view.nbytes:
            raise InvalidRequest(
                f"object {position} has {view.nbytes} bytes, which its layout does not say"
            )
        namespace = space(name.scope, name.layout)
        groups.setdefault(namespace.digest, (namespace, []))[1].append(position)
    step_nbytes = max(PART_NBYTES, sum(view.nbytes for view in views) // PARTS_MAX)
    return [
        ObjectPart(
            namespace,
            some,
            [names[i].prefix_hash for i in some],
            [views[i] for i in some],
            deadline,
        )
        for namespace, positions in groups.values()
        for some in runs(positions, max(1, step_nbytes // namespace.layout.page_nbytes))
    ]


class Batch(Generic[Value]):
    """A call whose parts end one by one, in any thread.

    `done` gets the results with the last one.
    """

    def __init__(self, count: int, parts: int, default: Value) -> None:
        self.done: concurrent.futures.Future[ObjectResults[Value]] = Future()
        self._values = [default] * count
        self._left = parts
        self._error = ""
        self._lock = threading.Lock()
        if not parts:
            self.done.set_result(ObjectResults(self._values))

    def end(self, ended: Ended[Value]) -> bool:
        """Take one part's values; return whether it was the last."""
        with self._lock:
            for position, value in zip(ended.part.positions, ended.values, strict=True):
                self._values[position] = value
            self._error = self._error or ended.error
            self._left -= 1
            last = not self._left
        if last:
            self.done.set_result(ObjectResults(self._values, self._error))
        return last


def runs(positions: Sequence[int], step: int) -> Iterator[list[int]]:
    """Yield positions in lists of at most `step`."""
    for start in range(0, len(positions), step):
        yield list(positions[start : start + step])


class Completions(Generic[Item]):
    """A queue of results with a descriptor.

    Thread-safe. `fileno()` is for polling only; `drain` clears it.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._items: list[Item] = []
        self._closed = False

    def fileno(self) -> int:
        """Return the descriptor that signals completions."""
        return self._fd

    def add(self, item: Item) -> None:
        """Add a completion and signal it."""
        with self._lock:
            # nothing polls any more, and the descriptor may be another file by now
            if self._closed:
                return
            self._items.append(item)
            os.eventfd_write(self._fd, 1)

    def drain(self) -> list[Item]:
        """Return the results added since the last call; an empty list after `close`."""
        with self._lock:
            if self._closed:
                return []
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                pass  # the previous drain took everything
            items, self._items = self._items, []
        return items

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)
