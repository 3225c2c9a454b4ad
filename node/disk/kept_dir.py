"""A data directory in the hands of a keeper, as the node sees it: rows and files to call as if they were here.

    KeptDir -- KeeperProcess -- two sockets -- node.disk.keeper -- DataDir
       +-- rows    written, synced and scanned there
       +-- files   written and synced there; read here, by the thread that wants the page

A keeper that was ended is an OSError for whoever has an order for it, until `revive` starts another.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from kvstore.errors import ConfigError, Exhausted
from node.disk import orders
from node.disk.data_dir import (
    allow_open_files,
    make_directory,
    refused,
    release_lock,
    take_lock,
    warn_if_open,
)
from node.disk.extent_files import FileLayer, OpenExtents, Slot
from node.disk.keeper_process import END_S, KeeperProcess, Patience, Silent
from node.disk.orders import Kind, Pair, Task
from node.disk.rows import PageRow, numbered, page_at, pairs

log = logging.getLogger(__name__)

START_S = 120.0  # a node's start waits so long for its keeper, of which 20 may go by for the lock of the one before
RECOVER_S = 30.0  # all that is ordered in a `recover`, a new keeper too: then it has failed, and may be tried again
# A list or a scrub waits so long for a disk that hangs: less than a client does by default, or it would take the node
# for one that hangs, and leave it alone.
QUESTION_S = 4.0
QUESTION_NBYTES = 16 << 10  # of the first answer, because a scrub looks at a few rows; then twice as many, up to
QUESTION_NBYTES_MAX = 1 << 20
ORDER_KEYS_MAX = 1 << 14  # rows to delete with one order


class KeptDir:
    """Raises ConfigError like `node.disk.data_dir.DataDir`. `arena_fd`: the arena's file, for the keeper to map.
    `pulse` is called now and then while the start waits for the keeper, and may raise to end it."""

    def __init__(
        self,
        path: Path,
        disk_nbytes: int,
        extent_nbytes: int,
        arena_fd: int,
        keep_own_extents: bool = False,
        key_mark: str = "",
        pulse: Callable[[], None] = lambda: None,
    ) -> None:
        path = path.absolute()
        log_level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
        self._task = Task(
            -1, -1, arena_fd, disk_nbytes, extent_nbytes, keep_own_extents, key_mark, log_level, str(path)
        )
        with contextlib.ExitStack() as undo, refused(path):
            make_directory(path, FileLayer())
            self._lock = take_lock(path / "lock", 0.0)
            undo.callback(release_lock, self._lock)
            self.keeper = KeeperProcess(self._task, Patience(START_S, pulse))
            undo.callback(self.keeper.abandon)
            self.extent_nbytes, self.extent_count, direct, *_ = self.keeper.opened
            allow_open_files(self.extent_count)
            flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
            self._open = OpenExtents(path / "extents", self.extent_nbytes, self.extent_count, flags, FileLayer())
            warn_if_open(path)
            undo.pop_all()
        self._turn = threading.Lock()  # of who changes the keeper
        self._closed = False
        self._orders_end: float | None = None
        self.rows = KeptRows(self, Patience(START_S, pulse))
        self.files = KeptFiles(self, self._open, direct)

    def trouble(self) -> str:
        return self.keeper.trouble()

    def order(self, kind: Kind, body: bytes = b"") -> bytes:
        """Has the keeper do it; what that brings. Raises OSError, within `limited` also if it takes too long."""
        timeout_s = None if self._orders_end is None else max(0.0, self._orders_end - time.monotonic())
        try:
            return self.keeper.orders.ask(kind, body, timeout_s)
        except Silent as error:
            raise OSError(f"the disk hangs: no answer in {RECOVER_S:g} s") from error

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """What is ordered meanwhile, by the one thread that gives orders, has RECOVER_S, all of it together."""
        self._orders_end = time.monotonic() + RECOVER_S
        try:
            yield
        finally:
            self._orders_end = None

    def revive(self) -> None:
        """Starts a keeper in the place of one that has ended. Raises OSError. What was not synced by then
        is as after a crash: perhaps there."""
        with self._turn:
            self._check_open()
            if self.keeper.trouble():
                self._revive()

    def _check_open(self) -> None:
        if self._closed:
            raise OSError("the node stops")

    def _revive(self) -> None:
        try:
            fresh = KeeperProcess(self._task, Patience(RECOVER_S, self._check_open))
        except ConfigError as error:
            raise OSError(str(error)) from error
        if fresh.opened != self.keeper.opened:
            fresh.abandon()
            raise OSError(f"{self._task.path} is not the directory any more that it was; restart the node")
        self.keeper.close()
        self.keeper = fresh
        log.warning("a new keeper, process %d", fresh.pid)

    def close(self) -> None:
        """Raises OSError if the rows could not be closed; everything is free all the same."""
        self._closed = True  # a `revive` sees it, and ends
        is_ours = self._turn.acquire(timeout=END_S)
        try:
            if is_ours:
                self.keeper.close()
            else:
                self.keeper.abandon()
                raise OSError("a new keeper is being started and can not be ended: the disk hangs")
        finally:
            self._open.close()
            release_lock(self._lock)
            if is_ours:
                self._turn.release()


class KeptRows:
    """`node.disk.rows.Rows` through a keeper."""

    def __init__(self, directory: KeptDir, patience: Patience) -> None:
        """`patience` is that of a start, which reads all rows."""
        self._directory = directory
        self._patience = patience

    def write(self, namespaces: dict[int, bytes], pages: Iterable[PageRow], gone: Iterable[bytes]) -> None:
        """All or nothing, but that keys of a large removal go first, in orders of their own."""
        order, keys = self._directory.order, list(gone)
        while len(keys) > ORDER_KEYS_MAX:
            order(Kind.WRITE_ROWS, orders.pack_rows([], keys[:ORDER_KEYS_MAX]))
            del keys[:ORDER_KEYS_MAX]
        order(Kind.WRITE_ROWS, orders.pack_rows(pairs(namespaces, pages), keys))

    def sync(self) -> None:
        self._directory.order(Kind.SYNC_ROWS)

    def purge(self, needles: Sequence[bytes]) -> int:
        return orders.unpack_counts(self._directory.order(Kind.PURGE_ROWS, orders.pack_rows([], needles)))[0]

    def namespaces(self) -> Iterator[tuple[int, bytes]]:
        return numbered(self._all(b"N"))

    def all_pages(self) -> Iterator[Pair]:
        return self._all(b"P")

    def _all(self, kind: bytes) -> Iterator[Pair]:
        try:
            for piece in self._directory.keeper.orders.stream(Kind.ALL_ROWS, kind, self._patience):
                for key, value, _ in orders.unpack_pairs(piece):
                    yield key, value
        except Silent as error:
            raise OSError(f"the disk hangs: no answer in {self._patience.seconds:g} s") from error

    def pages(self, start: bytes = b"P") -> Iterator[Pair]:
        """Asked for piece by piece: nothing is kept open there while somebody reads slowly here."""
        nbytes = QUESTION_NBYTES
        while some := self._some(nbytes, start):
            yield from some
            start = some[-1][0] + b"\0"
            nbytes = min(2 * nbytes, QUESTION_NBYTES_MAX)

    def page(self, key: bytes) -> PageRow | None:
        return page_at(key, self._some(1, key))

    def _some(self, nbytes: int, start: bytes) -> list[Pair]:
        """From the key `start` on, one at least if there is one."""
        try:
            question = orders.pack_question(nbytes, start)
            piece = self._directory.keeper.questions.ask(Kind.SOME_ROWS, question, QUESTION_S)
        except Silent as error:
            raise Exhausted(f"the disk has not answered for {QUESTION_S:g} s; ask again later") from error
        return [(key, value) for key, value, _ in orders.unpack_pairs(piece)]


class KeptFiles:
    """`node.disk.extent_files.ExtentFiles` through a keeper, but for reading."""

    def __init__(self, directory: KeptDir, opened: OpenExtents, direct: bool) -> None:
        self._directory = directory
        self._open = opened
        self.direct = direct

    def write_all(self, slots: Sequence[Slot]) -> None:
        self._directory.order(Kind.WRITE_PAGES, orders.pack_slots(slots))

    def read(self, offset: int, view: memoryview) -> bool:
        """Not by the keeper: a read waits for no write, and the thread that wants the page lets the others run."""
        return self._open.read(offset, view)

    def sync(self) -> None:
        self._directory.order(Kind.SYNC_PAGES)

    def trial(self) -> None:
        self._directory.order(Kind.TRIAL)
