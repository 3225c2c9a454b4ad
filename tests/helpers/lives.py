"""RAM and disk tiers that are killed, their users, and which pages may be found afterwards."""

import itertools
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from recorded import Record

from kvstore import Namespace, opaque_layout
from kvstore.checksum import checksum
from kvstore.errors import Exhausted, KVStoreError
from node.disk.data_dir import DataDir
from node.disk.durability import Durability, Wait
from node.disk.encryption import PLAIN, Vault
from node.disk.extents import FileLayer
from node.disk.tier import DiskTier
from node.memory.arena import Arena
from node.memory.page import Namespaces, Page, PutStatus
from node.memory.tier import RamTier
from node.slab import SlotAllocator

EXTENT_NBYTES, RAM_NBYTES = 16 << 10, 192 << 10  # RAM for 24 of 36 pages: some are on disk only
# Two pages; others are refused, and written only when a durable put requires it
QUEUE_NBYTES = 16 << 10
SPACE = Namespace("power", opaque_layout(8192))
PAGE_NBYTES = SPACE.layout.page_nbytes


class Failure(Exception):
    """An invariant is violated."""


class Stored(NamedTuple):
    """The effect of an operation on a key: a version, or 0 for none.

    `began` is a moment of the record.
    """

    version: int
    began: int


@dataclass
class History:
    """The history of one key, which only one thread uses."""

    key: bytes
    done: list[Stored] = field(default_factory=list)
    safe: list[tuple[int, int]] = field(default_factory=list)  # (moment, operations done by then)
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def allowed(self, moment: int, evicting: bool) -> set[int]:
        """Return the versions that may be found after a power loss; 0 means no page."""
        done = [stored.version for stored in self.done if stored.began < moment]
        safe = max((count for at, count in self.safe if at < moment), default=0)
        return {*done[max(0, safe - 1) :]} | ({0} if evicting or not safe else set())

    @property
    def version(self) -> int:
        return self.done[-1].version if self.done else 0

    def content(self, version: int) -> bytes:
        return random.Random(self.key + version.to_bytes(4, "little")).randbytes(PAGE_NBYTES)


class LateDurability(Durability):
    """Pause after each barrier, so that others can write before what follows."""

    def _barrier(self, wait: Wait) -> None:
        super()._barrier(wait)
        time.sleep(random.choice([0.0, 0.002, 0.01]))


class Life:
    """A RAM and a disk tier on a directory, until they are killed."""

    def __init__(
        self, root: Path, disk_nbytes: int, layer: FileLayer, vault: Vault = PLAIN
    ) -> None:
        self.root = root
        self.arena = Arena(RAM_NBYTES)
        spaces = Namespaces(4, EXTENT_NBYTES)
        directory = DataDir(
            root, disk_nbytes, EXTENT_NBYTES, self.arena.fd, key_mark=vault.mark, layer=layer
        )
        self.disk = DiskTier(directory, self.arena.view, QUEUE_NBYTES, vault=vault)
        spaces.below_count = self.disk.page_count
        slots = SlotAllocator(RAM_NBYTES, EXTENT_NBYTES)
        self.ram = RamTier(
            spaces,
            slots,
            self.arena.copy,
            self.arena.zero,
            lambda: time.monotonic_ns() // 1_000_000,
        )
        self.disk.restore(lambda value, digest: spaces.open(value, digest, restored=True))
        self.space, _ = self.ram.open_namespace(SPACE, SPACE.digest)
        self.durability = LateDurability(self.ram, self.disk, 10.0)

    def start(self) -> None:
        self.ram.below = self.disk
        self.disk.writer.start(self.ram)

    def put(self, history: History, version: int) -> bool:
        """Put a page; return whether it is stored now, or already was."""
        reservation = self.ram.reserve(SPACE.digest, [history.key], PAGE_NBYTES)
        if reservation.verdicts == [PutStatus.WRITE]:
            view = self.arena.view(reservation.pages[0].offset, PAGE_NBYTES)
            view[:] = history.content(version)
            self.ram.commit(reservation, [checksum(view, self.space.seed(history.key))])
        return reservation.verdicts[0] in (PutStatus.WRITE, PutStatus.EXISTS)

    def look(self, history: History) -> int:
        """Return the version of a page on disk, or 0 if there is none.

        Raises Failure for bytes that were never put.
        """
        found = self.disk.reading.begin(SPACE.digest, [history.key])
        if not found:
            return 0
        page = Page(self.space, history.key, 0)
        page.offset = 0
        if not self.disk.reading.read(found[history.key], page):
            return 0
        content = bytes(self.arena.view(0, PAGE_NBYTES))
        for version in {stored.version for stored in history.done if stored.version}:
            if content == history.content(version):
                return version
        raise Failure(f"wrong bytes under {history.key.hex()}")

    def log(self) -> Path:
        """Return RocksDB's log, its only file that may have changed since it was opened."""
        return max((self.root / "rows").glob("*.log"))

    def close(self) -> None:
        self.disk.close()
        self.arena.close()


class Load:
    """One thread, with its own keys."""

    def __init__(self, life: Life, record: Record, histories: list[History], seed: str) -> None:
        self._life, self._record, self._histories = life, record, histories
        self._rng = random.Random(seed)
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._record.killed:
                operation = self._rng.choices(
                    [self._put, self._again, self._remove, self._flush], [35, 40, 10, 15]
                )[0]
                try:
                    operation()
                # The disk failed, the process was killed, or RAM is full of pages in use
                except KVStoreError:
                    self._recover()
        except Exception as error:  # noqa: BLE001 -- raised again in the main thread
            self.error = error

    def _recover(self) -> None:
        if self._life.disk.stop_reason and not self._record.killed:
            try:
                self._life.disk.recover()
            except OSError:
                time.sleep(0.001)

    def _put(self) -> None:
        """Put new versions in place of the existing ones."""
        some = self._rng.sample(self._histories, self._rng.randint(1, 4))
        for history in some:
            if history.version:
                self._forget(history)
            self._store(history, next(history.versions))
        if self._rng.random() < 0.3:
            self._keep(some)

    def _again(self) -> None:
        """Put existing pages again, durably."""
        some = [history for history in self._rng.sample(self._histories, 2) if history.version]
        for history in some:
            self._store(history, history.version)
        self._keep(some)

    def _store(self, history: History, version: int) -> None:
        history.done.append(Stored(version, self._record.now()))
        if not self._life.put(history, version):
            raise Exhausted("no slot for the page")

    def _keep(self, some: list[History]) -> None:
        durability = self._life.durability
        durability.keep(SPACE.digest, [history.key for history in some], durability.begin_wait())
        for history in some:
            history.safe.append((self._record.now(), len(history.done)))

    def _remove(self) -> None:
        self._forget(self._rng.choice(self._histories))

    def _forget(self, history: History) -> None:
        history.done.append(Stored(0, self._record.now()))
        self._life.ram.remove(SPACE.digest, [history.key])

    def _flush(self) -> None:
        """Flush, and record the pages that are still present as safe.

        A stored page may be evicted before the flush reaches it. A page that is present after the
        flush was present during it.
        """
        self._life.durability.flush(self._life.durability.begin_wait())
        moment = self._record.now()
        present = self._life.ram.lookup(
            SPACE.digest, [history.key for history in self._histories], touch=False
        )
        for history, here in zip(self._histories, present, strict=True):
            if here == (history.version > 0):
                history.safe.append((moment, len(history.done)))
