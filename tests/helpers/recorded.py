"""Record a tier's file operations in order, and rebuild the files that a power loss may leave.

    recorded   write begins, ends | sync begins, ends, fails | file made, allocated | rows written,
               synced

Synced data survives. Of all other writes, any sectors of 512 bytes survive: writes are unordered
and may be torn. Of the rows, a prefix of RocksDB's log survives, which may be torn too. A file
whose directory was not synced may be missing, or have its size from before it was allocated.
"""

import bisect
import errno
import random
import shutil
import threading
import time
from pathlib import Path
from typing import NamedTuple

from node.disk.extents import FileLayer

SECTOR_NBYTES = 512


class Killed(OSError):
    """The process is dead: none of its operations reach the files any more."""


class Event(NamedTuple):
    """A recorded operation.

    `kind`: write, sync, made, allocated, rows or sync rows. `name`: of the file or directory.
    """

    kind: str
    name: str = ""
    offset: int = 0
    data: bytes = b""


class Record:
    """The beginnings and ends of events in order; a position in this order is a moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.moment = 0
        self.begun: dict[int, Event] = {}  # moment -> the event that began
        self.ended: dict[int, int] = {}  # moment of beginning -> moment of end
        self.failed: set[int] = set()
        # Moment of a write or sync of rows -> bytes of the log after the write, or before the sync
        self.logs: dict[int, int] = {}
        self.killed = False

    def begin(self, event: Event) -> int:
        if self.killed:
            raise Killed(errno.EIO, "killed")
        return self.now(event)

    def now(self, event: Event | None = None) -> int:
        with self._lock:
            self.moment += 1
            if event is not None:
                self.begun[self.moment] = event
            return self.moment

    def end(self, began: int) -> None:
        self.ended[began] = self.now()

    def fail(self, began: int) -> None:
        self.end(began)
        self.failed.add(began)


class RecordingLayer(FileLayer):
    """A file layer that records its calls and adds random delays, so that threads interleave."""

    def __init__(self, record: Record, root: Path, seed: str, faults: float) -> None:
        self._record, self._root, self._faults = record, root, faults
        self._rng = random.Random(seed)
        self._names: dict[int, str] = {}

    def _pause(self) -> None:
        time.sleep(self._rng.choice([0, 0, 0.001, 0.004]))

    def open(self, path: Path, flags: int) -> int:
        name = str(path.relative_to(self._root))
        if not path.exists():
            self._record.begin(Event("made", name))
        fd = super().open(path, flags)
        self._names[fd] = name
        return fd

    def allocate(self, fd: int, nbytes: int) -> None:
        began = self._record.begin(Event("allocated", self._names[fd], nbytes))
        super().allocate(fd, nbytes)
        self._record.end(began)

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        began = self._record.begin(Event("write", self._names[fd], offset, bytes(view)))
        self._pause()
        moved = super().write(fd, view, offset)
        self._record.end(began)
        return moved

    def sync(self, fd: int) -> None:
        began = self._record.begin(Event("sync", self._names[fd]))
        self._pause()
        if self._rng.random() < self._faults and self._names[fd] != "extents/trial":
            self._record.fail(began)
            raise OSError(errno.EIO, "sync failed by the test")
        super().sync(fd)
        self._record.end(began)

    def sync_directory(self, path: Path) -> None:
        if path == self._root or self._root in path.parents:
            began = self._record.begin(Event("sync", str(path.relative_to(self._root))))
            super().sync_directory(path)
            self._record.end(began)


class Image:
    """The files after a power loss at a moment, rebuilt in another directory."""

    def __init__(self, record: Record, moment: int, rng: random.Random) -> None:
        self._record, self._moment, self._rng = record, moment, rng
        # Share of unsynced data that survives
        self._luck = rng.choice([0.0, 1.0, rng.random()])
        self._syncs: dict[str, list[int]] = {}
        for began, event in record.begun.items():
            if event.kind == "sync" and began in record.ended:
                self._syncs.setdefault(event.name, []).append(began)

    def _covered(self, name: str, ended: int | None, is_data: bool = True) -> bool:
        """Return whether a sync of `name` that began after `ended` has ended before the power loss.

        If the first such sync failed, its data is lost for good. Metadata in the file system's
        journal is saved by the next sync that succeeds.
        """
        syncs, failed = self._syncs.get(name, []), self._record.failed
        place = len(syncs) if ended is None else bisect.bisect(syncs, ended)
        while not is_data and place < len(syncs) and syncs[place] in failed:
            place += 1
        return (
            place < len(syncs)
            and syncs[place] not in failed
            and self._record.ended[syncs[place]] < self._moment
        )

    def _lucky(self) -> bool:
        return self._rng.random() < self._luck

    def extents(self, target: Path) -> None:
        files: dict[str, bytearray] = {}
        ended = self._record.ended
        for began, (kind, name, offset, data) in self._record.begun.items():
            if began > self._moment:
                break
            if (
                kind == "made"
                and name[-1].isdigit()
                and (self._covered("extents", began, False) or self._lucky())
            ):
                files[name] = bytearray()
            elif (
                kind == "allocated"
                and name in files
                and (self._covered(name, ended.get(began), False) or self._lucky())
            ):
                files[name].extend(bytes(offset - len(files[name])))
            elif kind == "write" and name in files:
                all_of_it = self._covered(name, ended.get(began))
                for start in range(0, len(data), SECTOR_NBYTES):
                    if offset + start < len(files[name]) and (all_of_it or self._lucky()):
                        files[name][offset + start : offset + start + SECTOR_NBYTES] = data[
                            start : start + SECTOR_NBYTES
                        ]
        (target / "extents").mkdir()
        for name, content in files.items():
            (target / name).write_bytes(content)

    def rows(self, target: Path, rows: Path, log_name: str, opened: int) -> None:
        """Rebuild the rows from a copy of the directory with its whole log.

        `opened` is the moment at which that life opened it.
        """
        shutil.copytree(rows, target / "rows")
        whole = (rows / log_name).read_bytes()
        synced = written = 0
        for began, nbytes in self._record.logs.items():
            if not opened < began <= self._moment:
                continue
            is_sync = self._record.begun[began].kind == "sync rows"
            if is_sync and self._record.ended.get(began, self._moment) < self._moment:
                synced = max(synced, nbytes)
            written = max(written, nbytes)
        log = bytearray(
            whole[
                : self._rng.choice(
                    [synced, written, self._rng.randint(synced, max(synced, written))]
                )
            ]
        )
        for start in range(synced, len(log), SECTOR_NBYTES):
            if self._rng.random() < 0.1:
                log[start : start + SECTOR_NBYTES] = bytes(len(log[start : start + SECTOR_NBYTES]))
        (target / "rows" / log_name).write_bytes(log)
