"""Remember what happened to this node and its cluster, for operators.

    add --> memory, the newest KEPT --> `kvstore cluster events`, console
            KEPT_SAME of a kind and member: one that flaps pushes no others out
     |
     +----> data_dir/events.jsonl, one JSON object per line (`node.disk.small_file`)

A call of `add` takes microseconds and never touches the disk, so it may be made under any lock.
Without a data directory the events are lost with the process.
"""

import contextlib
import enum
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from node.disk.small_file import SmallFile

FILE_NAME = "events.jsonl"
KEPT = 1024  # events in memory; all of them fit one message
KEPT_SAME = 64  # of one kind and member
KEPT_S = 30 * 24 * 3600.0  # older ones are not read at a start
TEXT_MAX = 300  # characters


class Kind(enum.Enum):
    """Enumerate the kinds of events."""

    STARTED = "started"
    STOPPED = "stopped"
    JOINED = "joined"
    SERVING = "serving"  # it has fetched the pages that it owns
    DRAINING = "draining"
    DRAINED = "drained"
    LEFT = "left"
    LOST = "lost"
    RETURNED = "returned"
    FORGOTTEN = "forgotten"
    VIEW = "view"  # another change of the view
    UNDER_REPLICATED = "under-replicated"
    REPAIRED = "repaired"
    DISK_STOPPED = "disk-stopped"
    DISK_RECOVERED = "disk-recovered"
    DISK_LIMITED = "disk-limited"  # its file system has no space for more
    DISK_GREW = "disk-grew"
    CERTIFICATE = "certificate"  # near its end, or expired


class Event(NamedTuple):
    """An event.

    `member`: the member that it concerns; empty on a node without a cluster.
    """

    unix_ms: int
    kind: str
    member: str
    text: str

    def line(self) -> bytes:
        """Serialise the event as a line of the file."""
        return json.dumps(self._asdict()).encode() + b"\n"


class EventLog:
    """The newest events of a node. Thread-safe.

    `member` returns this node's member id, used where an event names none.
    """

    def __init__(self, file: SmallFile | None = None, member: Callable[[], str] = str) -> None:
        """Read the events of earlier runs."""
        self._member = member
        self._file = file
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._counts: Counter[tuple[str, str]] = Counter()  # of kept events, by kind and member
        for event in _parsed_events(file.read() if file is not None else b""):
            self._remember(event)

    @property
    def kept(self) -> bool:
        """Return whether events outlive this process."""
        return self._file is not None

    def add(self, kind: Kind, member: str, text: str, unix_ms: int = 0) -> None:
        """Remember an event. An empty `member` means this node, `unix_ms` 0 now."""
        now_ms, whose = time.time_ns() // 1_000_000, member or self._member()
        event = Event(unix_ms or now_ms, kind.value, whose, text[:TEXT_MAX])
        with self._lock:
            self._remember(event)
        if self._file is not None:
            self._file.save(self._lines)

    def add_once(self, kind: Kind, member: str, text: str, unix_ms: int = 0) -> None:
        """Remember an event unless an equal one is kept, perhaps of an earlier run.

        Without `unix_ms`, events of any time are equal.
        """
        event = Event(unix_ms, kind.value, member or self._member(), text[:TEXT_MAX])
        with self._lock:
            known = {other if unix_ms else other._replace(unix_ms=0) for other in self._events}
        if event not in known:
            self.add(kind, member, text, unix_ms)

    def _remember(self, event: Event) -> None:
        """Add an event to those in memory, and drop one if there are too many."""
        same = event.kind, event.member
        self._events.append(event)
        self._counts[same] += 1
        if self._counts[same] > KEPT_SAME:
            self._events.remove(next(one for one in self._events if (one.kind, one.member) == same))
            self._counts[same] -= 1
        elif len(self._events) > KEPT:
            oldest = self._events.popleft()
            self._counts[oldest.kind, oldest.member] -= 1

    def since(self, unix_ms: int = 0, limit: int = KEPT) -> list[Event]:
        """Return the newest events from a time on, the oldest first."""
        with self._lock:
            found = [event for event in self._events if event.unix_ms >= unix_ms]
        return found[-limit:]

    def close(self) -> None:
        """Write the newest events, if the disk takes them soon."""
        if self._file is not None:
            self._file.close()

    def _lines(self) -> bytes:
        """Return all events as the content of the file."""
        return b"".join(event.line() for event in self.since())


def _parsed_events(content: bytes) -> list[Event]:
    """Return the events of a file that are no older than KEPT_S."""
    oldest_ms = (time.time() - KEPT_S) * 1000
    events = [event for line in content.splitlines() if (event := _parsed(line)) is not None]
    return [event for event in events if event.unix_ms >= oldest_ms]


def _parsed(line: bytes) -> Event | None:
    """Return the event of a line; None for a torn line, or one that no node wrote."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        fields = json.loads(line)
        event = Event(**fields)
        texts = (event.kind, event.member, event.text)
        if (
            type(event.unix_ms) is int
            and 0 <= event.unix_ms < 1 << 63
            and all(isinstance(text, str) and len(text) <= TEXT_MAX for text in texts)
        ):
            return event
    return None
