"""Remember what happened to this node and its cluster, for operators.

    add --> memory, the newest KEPT --> `kvstore cluster events`, console
            KEPT_SAME of a kind and member: one that flaps pushes no others out
     |
     +----> a thread --> data_dir/events.jsonl, one JSON object per line

A call of `add` takes microseconds and never touches the disk, so it may be made under any lock. A
disk that fails, is full or hangs costs only the lines of the file. Without a data directory the
events are lost with the process.
"""

import contextlib
import enum
import json
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvstore.log_rate import LogRate

log = logging.getLogger(__name__)
log.addFilter(LogRate())

FILE_NAME = "events.jsonl"
KEPT = 1024  # events in memory; all of them fit one message
KEPT_SAME = 64  # of one kind and member
KEPT_S = 30 * 24 * 3600.0  # older ones are not read at a start
TEXT_MAX = 300  # characters
FILE_NBYTES_MAX = 1 << 20  # a larger file is replaced by one with the events in memory
CLOSE_S = 1.0


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

    def __init__(self, data_dir: str = "", member: Callable[[], str] = str) -> None:
        """Read the events of earlier runs. An unreadable file is logged and left out."""
        self._member = member
        self._path = Path(data_dir) / FILE_NAME if data_dir else None
        self._lock = threading.Condition()
        self._is_torn = False  # the file ends within a line, of a run that was killed
        self._events: deque[Event] = deque()
        self._counts: Counter[tuple[str, str]] = Counter()  # of kept events, by kind and member
        for event in self._read():
            self._remember(event)
        self._unwritten: deque[Event] = deque(maxlen=KEPT)
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def kept(self) -> bool:
        """Return whether events outlive this process."""
        return self._path is not None

    def add(self, kind: Kind, member: str, text: str, unix_ms: int = 0) -> None:
        """Remember an event. An empty `member` means this node, `unix_ms` 0 now."""
        now_ms, whose = time.time_ns() // 1_000_000, member or self._member()
        event = Event(unix_ms or now_ms, kind.value, whose, text[:TEXT_MAX])
        with self._lock:
            self._remember(event)
            if self._path is None or self._closed:
                return
            self._unwritten.append(event)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="events", daemon=True)
                self._thread.start()
            self._lock.notify_all()

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
        """Write what waits, if the disk answers within CLOSE_S."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_S)

    # ---- the file ------------------------------------------------------------------------

    def _read(self) -> list[Event]:
        if self._path is None:
            return []
        try:
            with open(self._path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - FILE_NBYTES_MAX))
                content = file.read(FILE_NBYTES_MAX)
        except FileNotFoundError:
            return []
        except OSError as error:
            log.warning("earlier events can not be read: %s", error)
            return []
        self._is_torn = not content.endswith(b"\n")
        oldest_ms = (time.time() - KEPT_S) * 1000
        events = [event for line in content.splitlines() if (event := _parsed(line)) is not None]
        return [event for event in events if event.unix_ms >= oldest_ms]

    def _write(self) -> None:
        """Write events until the end; those that the disk does not take stay in memory only."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._unwritten or self._closed)
                events, all_events = list(self._unwritten), list(self._events)
                self._unwritten.clear()
                if not events:
                    return
            try:
                self._append(events, all_events)
            except OSError as error:
                self._is_torn = True
                log.warning("%d events are not in %s: %s", len(events), self._path, error)

    def _append(self, events: list[Event], all_events: list[Event]) -> None:
        assert self._path is not None
        is_large = self._path.exists() and self._path.stat().st_size > FILE_NBYTES_MAX
        path = self._path.with_suffix(".new") if is_large else self._path
        lines = b"".join(event.line() for event in (all_events if is_large else events))
        with open(path, "wb" if is_large else "ab", opener=_open_private) as file:
            file.write(b"\n" + lines if self._is_torn and not is_large else lines)
        if is_large:
            path.replace(self._path)
        self._is_torn = False


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


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
