"""Power-loss harness: records what a disk tier asks of its files, and looks at what is left wherever the power may go.

    python tests/disk/power.py --runs 50        KVSTORE_SEED=... repeats a choice of operations

Per run: a RAM and a disk tier in this process, on a file layer and rows that are recorded, and
`THREADS` threads that put (durable or not), put again, remove and flush pages; then it is killed, and a
second one goes on with the same files. Now and then a sync fails and loses what it was to save.

    recorded   write begins, ends | sync begins, ends, fails | file made | rows written, synced | acknowledged

For many places in this record the files are made as the power may leave them: what a sync covers is
there, of everything else any sectors of 512 bytes are (writes are not in order, and may be torn); rows are a
prefix of RocksDB's log, torn too; a file whose directory was not synced may be missing. A tier opens that,
with RocksDB's own recovery. What must hold:

    every page that is found             has exactly bytes that were put under its key, no older than
    acknowledged, durable or flushed     what was found then, which is found, unless it was removed since
    removed, then flushed                is not found
    check(), rows                        have nothing to say

RocksDB is trusted in two points: it appends to one log here (this is checked), and what it
recovers when it is opened is on the medium then (`test_rows_of_a_killed_run_are_in_a_synced_table`).
"""

import argparse
import errno
import itertools
import logging
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvstore import Namespace, opaque_layout
from kvstore.checksum import checksum
from kvstore.errors import KVStoreError
from node.disk import writer
from node.disk.data_dir import open_data_dir
from node.disk.durability import Durability
from node.disk.extent_files import FileLayer
from node.disk.tier import DiskTier
from node.ram.arena import Arena
from node.ram.namespace import Namespaces
from node.ram.page import Page
from node.ram.reservation import Verdict
from node.ram.tier import RamTier
from node.slots import SlotAllocator

THREADS, KEYS_OF_A_THREAD = 3, 12
SECTOR_NBYTES = 512
EXTENT_NBYTES, RAM_NBYTES = 64 << 10, 192 << 10  # RAM for 24 of 36 pages: some are on disk only
ROOMY_NBYTES, TIGHT_NBYTES = 1 << 20, 128 << 10
SPACE = Namespace("power", opaque_layout(8192))
PAGE_NBYTES = SPACE.layout.page_nbytes
FAULTS = 0.01  # of all syncs


class Failure(Exception):
    """What must hold does not."""


class Killed(OSError):
    """The process is gone: nothing of it reaches the files any more."""


class Event(NamedTuple):
    """`kind`: write, sync, made, allocated, rows, sync rows. `name` of the file or directory."""

    kind: str
    name: str = ""
    offset: int = 0
    data: bytes = b""


class Record:
    """Events in the order of their beginnings and ends; a place in it is a moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.moment = 0
        self.begun: dict[int, Event] = {}  # moment -> what began
        self.ended: dict[int, int] = {}  # its end
        self.failed: set[int] = set()
        self.logs: dict[int, int] = {}  # of rows and their syncs: bytes of the log at the end, or at the beginning
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
    """The real calls, recorded, and a little slower at random, so that threads meet."""

    def __init__(self, record: Record, root: Path, seed: str, faults: float) -> None:
        self._record, self._root, self._faults = record, root, faults
        self._rng = random.Random(seed)
        self._names: dict[int, str] = {}

    def _pause(self) -> None:
        time.sleep(self._rng.choice([0, 0, 0.0005, 0.002]))

    def open(self, path: Path, flags: int) -> int:
        is_new = not path.exists()
        fd = super().open(path, flags)
        self._names[fd] = str(path.relative_to(self._root))
        if is_new:
            self._record.begin(Event("made", self._names[fd]))
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
            raise OSError(errno.EIO, "a sync that failed")
        super().sync(fd)
        self._record.end(began)

    def sync_directory(self, path: Path) -> None:
        if path == self._root or self._root in path.parents:
            began = self._record.begin(Event("sync", str(path.relative_to(self._root))))
            super().sync_directory(path)
            self._record.end(began)


class Stored(NamedTuple):
    """What an operation makes of a key: a version, 0 for none. `began` is a moment."""

    version: int
    began: int


@dataclass
class History:
    """What became of one key; only one thread touches it."""

    key: bytes
    done: list[Stored] = field(default_factory=list)
    safe: list[tuple[int, int]] = field(default_factory=list)  # (moment, how much was done by then)
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def allowed(self, moment: int, evicting: bool) -> set[int]:
        """Versions that may be found after a power loss; 0: nothing is found."""
        done = [stored.version for stored in self.done if stored.began < moment]
        safe = max((count for at, count in self.safe if at < moment), default=0)
        return {*done[max(0, safe - 1) :]} | ({0} if evicting or not safe else set())

    @property
    def version(self) -> int:
        return self.done[-1].version if self.done else 0

    def content(self, version: int) -> bytes:
        return random.Random(self.key + version.to_bytes(4, "little")).randbytes(PAGE_NBYTES)


class Life:
    """A RAM and a disk tier on a directory, until they are killed."""

    def __init__(self, root: Path, disk_nbytes: int, layer: FileLayer) -> None:
        self.root = root
        self.arena = Arena(RAM_NBYTES)
        spaces = Namespaces(4, EXTENT_NBYTES)
        self.disk, self._lock = open_data_dir(
            root, disk_nbytes, EXTENT_NBYTES, RAM_NBYTES // 4, self.arena.view, layer=layer
        )
        spaces.below_count = self.disk.page_count
        self.disk.restore(lambda value, digest: spaces.open(value, digest, restored=True))
        slots = SlotAllocator(RAM_NBYTES, EXTENT_NBYTES)
        self.ram = RamTier(spaces, slots, self.arena.copy, lambda: time.monotonic_ns() // 1_000_000)
        self.space, _ = self.ram.open_namespace(SPACE, SPACE.digest)
        self.durability = Durability(self.ram, self.disk, 10.0)

    def start(self) -> None:
        self.ram.below = self.disk
        self.disk.writer.start(self.ram)

    def put(self, history: History, version: int) -> bool:
        """Whether the page is stored now, or was."""
        reservation = self.ram.reserve(SPACE.digest, [history.key], PAGE_NBYTES)
        if reservation.verdicts == [Verdict.WRITE]:
            view = self.arena.view(reservation.pages[0].offset, PAGE_NBYTES)
            view[:] = history.content(version)
            self.ram.commit(reservation, [checksum(view, self.space.seed(history.key))])
        return reservation.verdicts[0] in (Verdict.WRITE, Verdict.EXISTS)

    def look(self, history: History) -> int:
        """The version of a page on disk, 0 if there is none. Bytes that were never put are a failure."""
        record = self.disk.begin_read(SPACE.digest, history.key)
        if not record:
            return 0
        page = Page(self.space, history.key, 0)
        page.offset = 0
        if not self.disk.read(record, page):
            return 0
        found = bytes(self.arena.view(0, PAGE_NBYTES))
        for version in {stored.version for stored in history.done if stored.version}:
            if found == history.content(version):
                return version
        raise Failure(f"wrong bytes under {history.key.hex()}")

    def log(self) -> Path:
        """RocksDB's log: nothing else may have changed since it was opened."""
        return max((self.root / "rows").glob("*.log"))

    def close(self) -> None:
        self.disk.close()
        os.close(self._lock)
        self.arena.close()


class Load:
    """One thread, on keys of its own."""

    def __init__(self, life: Life, record: Record, histories: list[History], seed: str) -> None:
        self._life, self._record, self._histories = life, record, histories
        self._rng = random.Random(seed)
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._record.killed:
                operation = self._rng.choices([self._put, self._again, self._remove, self._flush], [50, 20, 20, 10])[0]
                try:
                    operation()
                except KVStoreError:  # the disk failed, or the process was killed; or RAM is full of pages in use
                    self._recover()
        except Exception as error:  # noqa: BLE001 -- raised again in the main thread
            self.error = error

    def _recover(self) -> None:
        if self._life.disk.poisoned and not self._record.killed:
            try:
                self._life.disk.recover()
            except OSError:
                time.sleep(0.001)

    def _put(self) -> None:
        """A new version, in the place of the one that is there."""
        history = self._rng.choice(self._histories)
        if history.version:
            self._forget(history)
        self._store(history, next(history.versions), durable=self._rng.random() < 0.5)

    def _again(self) -> None:
        history = self._rng.choice(self._histories)
        if history.version:
            self._store(history, history.version, durable=True)

    def _store(self, history: History, version: int, durable: bool) -> None:
        history.done.append(Stored(version, self._record.now()))
        if self._life.put(history, version) and durable:
            self._life.durability.keep(SPACE.digest, [history.key])
            history.safe.append((self._record.now(), len(history.done)))

    def _remove(self) -> None:
        self._forget(self._rng.choice(self._histories))

    def _forget(self, history: History) -> None:
        history.done.append(Stored(0, self._record.now()))
        self._life.ram.remove(SPACE.digest, [history.key])

    def _flush(self) -> None:
        """What is stored and not on disk may be evicted before a flush meets it; what is there after the
        flush was there all the time."""
        self._life.durability.flush()
        moment = self._record.now()
        present = self._life.ram.lookup(SPACE.digest, [history.key for history in self._histories], touch=False)
        for history, here in zip(self._histories, present, strict=True):
            if here == (history.version > 0):
                history.safe.append((moment, len(history.done)))


class Image:
    """What a power loss at a moment leaves, of all that was recorded since `base`, in a directory of its own."""

    def __init__(self, record: Record, moment: int, rng: random.Random) -> None:
        self._record, self._moment, self._rng = record, moment, rng
        self._luck = rng.choice([0.0, 1.0, rng.random()])  # share of what was not synced that is there
        self._syncs: dict[str, list[int]] = {}
        for began, event in record.begun.items():
            if event.kind == "sync" and began in record.ended:
                self._syncs.setdefault(event.name, []).append(began)

    def _covered(self, name: str, ended: int | None) -> bool:
        """Whether a sync of `name` that began after that end has ended; if the first one failed, none ever does."""
        if ended is None:
            return False
        first = next((began for began in self._syncs.get(name, []) if began > ended), None)
        return first is not None and first not in self._record.failed and self._record.ended[first] < self._moment

    def _lucky(self) -> bool:
        return self._rng.random() < self._luck

    def extents(self, target: Path) -> None:
        files: dict[str, bytearray] = {}
        ended = self._record.ended
        for began, (kind, name, offset, data) in self._record.begun.items():
            if began > self._moment:
                break
            if kind == "made" and name[-1].isdigit() and (self._covered("extents", began) or self._lucky()):
                files[name] = bytearray()
            elif kind == "allocated" and name in files and (self._covered(name, ended.get(began)) or self._lucky()):
                files[name].extend(bytes(offset - len(files[name])))
            elif kind == "write" and name in files:
                all_of_it = self._covered(name, ended.get(began))
                for start in range(0, len(data), SECTOR_NBYTES):
                    if offset + start < len(files[name]) and (all_of_it or self._lucky()):
                        files[name][offset + start : offset + start + SECTOR_NBYTES] = data[start : start + SECTOR_NBYTES]
        (target / "extents").mkdir()
        for name, content in files.items():
            (target / name).write_bytes(content)

    def rows(self, target: Path, rows: Path, log_name: str, opened: int) -> None:
        """`rows`: a copy of the directory of the life that opened it at moment `opened`, with all of its log."""
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
        log = bytearray(whole[: self._rng.choice([synced, written, self._rng.randint(synced, max(synced, written))])])
        for start in range(synced, len(log), SECTOR_NBYTES):
            if self._rng.random() < 0.1:
                log[start : start + SECTOR_NBYTES] = bytes(len(log[start : start + SECTOR_NBYTES]))
        (target / "rows" / log_name).write_bytes(log)


class Era(NamedTuple):
    """One life in the record: from `opened` to `ended`, and the rows as they were then."""

    opened: int
    ended: int
    rows: Path
    log_name: str


class Run:
    """Two lives on one directory, and what power losses leave of them."""

    def __init__(self, root: Path, seed: str) -> None:
        self._root, self._seed = root, seed
        self._rng = random.Random(seed)
        self._record = Record()
        self._evicting = self._rng.random() < 0.25
        self._faults = self._rng.choice([0.0, FAULTS])
        self._disk_nbytes = TIGHT_NBYTES if self._evicting else ROOMY_NBYTES
        keys = [self._rng.randbytes(self._rng.choice([16, 32])) for _ in range(THREADS * KEYS_OF_A_THREAD)]
        self._histories = [History(key) for key in keys]
        self._eras: list[Era] = []
        self.counts: Counter[str] = Counter()

    def live(self, seconds: float) -> None:
        record, number, root = self._record, len(self._eras), self._root / "data"
        record.killed = False
        # What an earlier life left unsynced may be lost by a sync that fails now: it is trusted all the same.
        layer = RecordingLayer(record, root, f"{self._seed} {number}", 0.0 if number else self._faults)
        life = Life(root, self._disk_nbytes, layer)
        opened, unchanged = record.now(), _contents(root / "rows")
        self._record_rows(life)
        for history in self._histories if number else []:
            version = life.look(history)
            self._check(history, version, "after a kill")
            history.done.append(Stored(version, record.now()))
        life.start()
        mine = [self._histories[i::THREADS] for i in range(THREADS)]
        loads = [Load(life, record, some, f"{self._seed} {number} {i}") for i, some in enumerate(mine)]
        for load in loads:
            load.thread.start()
        time.sleep(seconds)
        record.killed = True
        for load in loads:
            load.thread.join()
        life.disk.writer.stop(10.0)
        rows, log_name = self._root / f"rows {number}", life.log().name
        shutil.copytree(root / "rows", rows)
        life.close()
        shutil.rmtree(root / "rows")
        shutil.copytree(rows, root / "rows")
        for load in loads:
            if load.error:
                raise Failure(f"under load: {load.error!r}") from load.error
        if _contents(rows) != unchanged:
            raise Failure("RocksDB changed more than its log: these images would not be true")
        self._eras.append(Era(opened, record.now(), rows, log_name))

    def _record_rows(self, life: Life) -> None:
        record, rows = self._record, life.disk.rows
        write, sync = rows.write, rows.sync

        def recorded_write(*args: Any) -> None:
            began = record.begin(Event("rows"))
            write(*args)
            record.logs[began] = life.log().stat().st_size
            record.end(began)

        def recorded_sync() -> None:
            began = record.begin(Event("sync rows"))
            record.logs[began] = life.log().stat().st_size
            sync()
            record.end(began)

        rows.write, rows.sync = recorded_write, recorded_sync  # type: ignore[method-assign]

    def lose_power(self, count: int) -> None:
        """At so many moments, spread over both lives."""
        for number in range(count):
            era = self._eras[number % len(self._eras)]
            moment = self._rng.randint(era.opened, era.ended)
            target = self._root / f"image {number}"
            target.mkdir()
            image = Image(self._record, moment, self._rng)
            image.extents(target)
            image.rows(target, era.rows, era.log_name, era.opened)
            self._inspect(target, moment)
            shutil.rmtree(target)
            self.counts["images"] += 1

    def _inspect(self, target: Path, moment: int) -> None:
        life = Life(target, self._disk_nbytes, FileLayer())
        try:
            for history in self._histories:
                self._check(history, life.look(history), f"after a power loss at {moment}", moment)
            if wrong := life.disk.check():
                raise Failure("; ".join(wrong))
            if life.disk.counters.rows_damaged:
                raise Failure(f"{life.disk.counters.rows_damaged} damaged rows")
            self.counts["torn"] += life.disk.counters.pages_corrupt
        finally:
            life.close()

    def _check(self, history: History, version: int, when: str, moment: int | None = None) -> None:
        allowed = history.allowed(self._record.moment + 1 if moment is None else moment, self._evicting)
        if version not in allowed:
            raise Failure(f"{when}: version {version} under {history.key.hex()[:16]}, allowed {sorted(allowed)}")
        self.counts["found"] += version > 0
        self.counts["promised"] += 0 not in allowed
        self.counts["gone"] += allowed == {0}


def _contents(rows: Path) -> dict[str, bytes]:
    """All of RocksDB's files but its logs, of rows and of words."""
    return {p.name: p.read_bytes() for p in rows.iterdir() if p.suffix != ".log" and not p.name.startswith("LOG")}


def play(root: Path, seed: str, seconds: float, images: int) -> Counter[str]:
    """Raises Failure; then `root` is left as it was."""
    run = Run(root, seed)
    run.live(seconds)
    run.live(seconds)
    run.lose_power(images)
    return run.counts


def main() -> int:
    parser = argparse.ArgumentParser(description="Loses power at random moments and checks what is left.")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--images", type=int, default=100, help="power losses of each run")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each of the two lives of a run")
    parser.add_argument("--dir", help="where to put files (default: a temporary directory, in memory if there is one)")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # tiers tell of each torn page, and of each kill
    writer.IDLE_S, writer.SYNC_PAGES = 0.02, 30  # so that each comes to pass within a short life
    seed = int(os.environ.get("KVSTORE_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"KVSTORE_SEED={seed}", flush=True)
    where = arguments.dir or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    root, counts, started = Path(tempfile.mkdtemp(prefix="kvstore-power-", dir=where)), Counter[str](), time.monotonic()
    for number in range(arguments.runs):
        place = root / str(number)
        place.mkdir()
        try:
            counts += play(place, f"{seed} {number}", arguments.seconds, arguments.images)
        except Failure as failure:
            print(f"FAILED in run {number}, seed {seed}, files left in {place}: {failure}")
            return 1
        shutil.rmtree(place)
    print(
        f"{counts['images']} power losses in {time.monotonic() - started:.0f} s, seed {seed}: {counts['found']} pages found, "
        f"0 wrong; {counts['promised']} promised pages, 0 lost; {counts['gone']} pages gone for good, 0 came back; "
        f"{counts['torn']} torn pages of no promise dropped"
    )
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
