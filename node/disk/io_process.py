"""Call rows and files of a data directory through the I/O process.

    ProcessStorage -- IoProcess -- two sockets -- node.disk.io_worker -- DataDir
       +-- rows    written, synced and scanned there
       +-- files   written and synced there; read here, by the thread that wants the page

After the I/O process has ended, orders raise OSError until `revive` starts another.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import node
from kvstore.errors import ConfigError, Exhausted
from kvstore.programs import command
from node.disk import io_protocol
from node.disk.data_dir import (
    allow_open_files,
    make_directory,
    refused,
    release_lock,
    take_lock,
    warn_if_open,
)
from node.disk.directory import FileSystem
from node.disk.extents import FileLayer, OpenExtents, Slot
from node.disk.io_protocol import Broken, Channel, Kind, Opened, Outcome, Pair, Task
from node.disk.rows import PageRow, PageRun, numbered, os_error, page_at, pairs

log = logging.getLogger(__name__)

END_S = 10.0  # a stopping node waits this long for its I/O process, then kills it
KILL_S = 5.0  # a killed process that still exists is in a disk call
PULSE_S = 0.2  # between two checks whether to go on waiting for a start
OWED_MAX = 16  # late answers; beyond, they must arrive before the next order is sent
# for the start of an I/O process, including up to 20 for the lock of the previous one
START_S = 120.0
# For all orders of a `recover`, including a new process: then it has failed, and may be retried
RECOVER_S = 30.0
# A list or a scrub waits this long for a hanging disk. A client waits longer by default: otherwise
# it would take the node for a hanging one, and stop calling it.
QUESTION_S = 4.0
# Bytes of the first reply: small, because a scrub reads a few rows. Each next one has twice as
# many.
QUESTION_NBYTES = 16 << 10
QUESTION_NBYTES_MAX = 1 << 20
ORDER_KEYS_MAX = 1 << 14  # rows to delete with one order


class NotAnswering(Exception):
    """No answer in time: the disk, or the I/O process, hangs."""


class Timeouts(NamedTuple):
    """Time limit for each message from a starting process.

    `pulse` is called meanwhile, and may raise to end the start.
    """

    seconds: float
    pulse: Callable[[], None]


class IoProcess:
    """A running I/O process.

    Raises ConfigError if it can not use its directory, OSError if it can not be started or is not
    ready in time.
    """

    def __init__(self, task: Task, timeouts: Timeouts) -> None:
        (order_end, its_order_end), (question_end, its_question_end) = (
            socket.socketpair(),
            socket.socketpair(),
        )
        self.orders = IoChannel(order_end, self._why_gone)
        self.questions = IoChannel(question_end, self._why_gone)
        with contextlib.ExitStack() as undo, its_order_end, its_question_end:
            undo.callback(self._close_sockets)
            task = task._replace(
                orders_fd=its_order_end.fileno(), questions_fd=its_question_end.fileno()
            )
            self._process = subprocess.Popen(
                command("node.disk.io_worker", *task.arguments()),
                cwd=Path(
                    node.__file__
                ).parent.parent,  # `-m` searches there first, wherever the node was started
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(task.orders_fd, task.questions_fd, task.arena_fd),
            )
            undo.callback(self.kill)
            its_order_end.close()  # now, or its end would not be noticed
            its_question_end.close()
            self.opened = self._begun(timeouts)
            undo.pop_all()

    def _begun(self, timeouts: Timeouts) -> Opened:
        try:
            return Opened.unpack(self.orders.unasked(timeouts))
        except NotAnswering as error:
            raise OSError(
                f"its I/O process ({self.pid}) was not ready in {timeouts.seconds:g} s and "
                "was killed: the disk hangs"
            ) from error

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def trouble(self) -> str:
        """Return how the process ended; empty while it runs. It never waits."""
        status = self._process.poll()
        if status is None:
            return ""
        how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
        return f"its I/O process ({self.pid}) ended {how}"

    def _why_gone(self) -> str:
        """End a process whose sockets closed or that broke the protocol, and say why.

        One that breaks the protocol is killed, too: it must not write any more.
        """
        self.kill()
        return self.trouble() or f"its I/O process ({self.pid}) can not be killed: the disk hangs"

    def kill(self) -> None:
        """Kill the process; its current disk call is its last."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)

    def close(self) -> None:
        """Let the process close the rows and end. Raises OSError if it could not, or hangs."""
        end = time.monotonic() + END_S
        try:
            if not self.trouble():
                self.orders.ask(Kind.CLOSE, timeout_s=END_S)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(max(0.0, end - time.monotonic()))
        except NotAnswering as error:
            raise OSError(
                f"its I/O process ({self.pid}) did not answer for {END_S:g} s and was killed"
            ) from error
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End the process without closing anything."""
        self.kill()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self.orders.close()
        self.questions.close()


class IoChannel:
    """A socket to an I/O process: an order, its answer, the next one.

    Thread-safe. Raises OSError with the process's error, or with the reason from `gone`.
    """

    def __init__(self, sock: socket.socket, gone: Callable[[], str]) -> None:
        self._channel = Channel(sock)
        self._gone = gone
        self._lock = threading.Lock()
        self._number = 0
        self._heard = 0

    def ask(self, kind: Kind, body: bytes = b"", timeout_s: float | None = None) -> bytes:
        """Send a request and return its whole reply.

        Raises NotAnswering without a reply in time; a late reply is skipped.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise NotAnswering
        try:
            while self._number - self._heard >= OWED_MAX:
                self._recv(end)
            self._send(kind, body)
            return b"".join(self._answer(lambda: self._recv(end)))
        finally:
            self._lock.release()

    def stream(self, kind: Kind, body: bytes, timeouts: Timeouts) -> Iterator[bytes]:
        """Send a request and yield its reply in parts.

        Raises NotAnswering if a part does not come in time.
        """
        with self._lock:
            self._send(kind, body)
            yield from self._answer(lambda: self._recv_patiently(timeouts))

    def unasked(self, timeouts: Timeouts) -> bytes:
        """Return the first message of the process.

        Raises ConfigError if it can not start, NotAnswering if nothing comes.
        """
        return b"".join(self._answer(lambda: self._recv_patiently(timeouts)))

    def _send(self, kind: Kind, body: bytes) -> None:
        self._number += 1
        try:
            self._channel.send(self._number, kind, body)
        except OSError as error:
            raise OSError(self._gone()) from error

    def _answer(self, recv: Callable[[], tuple[int, int, bytes]]) -> Iterator[bytes]:
        """Yield the parts of the reply to the last request; late replies are skipped."""
        while True:
            number, outcome, body = recv()
            if number != self._number:
                continue
            if outcome == Outcome.FAILED:
                raise io_protocol.unpack_error(body)
            if outcome == Outcome.REFUSED:
                raise ConfigError(body.decode(errors="replace"))
            yield body
            if outcome == Outcome.DONE:
                return

    def _recv_patiently(self, timeouts: Timeouts) -> tuple[int, int, bytes]:
        end = time.monotonic() + timeouts.seconds
        while True:
            timeouts.pulse()
            now = time.monotonic()
            try:
                return self._recv(min(end, now + PULSE_S))
            except NotAnswering:
                if now >= end:
                    raise

    def _recv(self, end: float | None) -> tuple[int, int, bytes]:
        try:
            reply = self._channel.recv(None if end is None else max(0.001, end - time.monotonic()))
            self._heard = reply[0]
            return reply
        except TimeoutError as error:
            raise NotAnswering from error
        except (EOFError, Broken, OSError) as error:  # OSError: closed here, by a stop
            raise OSError(self._gone()) from error

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


class ProcessStorage:
    """A data directory in an I/O process. Raises ConfigError like `node.disk.data_dir.DataDir`.

    `arena_fd`: the arena's file, for the I/O process to map. `pulse` is called now and then during
    the start, and may raise to end it.
    """

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
            -1,
            -1,
            arena_fd,
            disk_nbytes,
            extent_nbytes,
            keep_own_extents,
            key_mark,
            log_level,
            str(path),
        )
        with contextlib.ExitStack() as undo, refused(path):
            make_directory(path, FileLayer())
            self._lock = take_lock(path / "lock", 0.0)
            undo.callback(release_lock, self._lock)
            self.process = IoProcess(self._task, Timeouts(START_S, pulse))
            undo.callback(self.process.abandon)
            self.extent_nbytes, self.extent_count, direct, *_ = self.process.opened
            allow_open_files(self.extent_count)
            flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
            self._open = OpenExtents(
                path / "extents", self.extent_nbytes, self.extent_count, flags, FileLayer()
            )
            warn_if_open(path)
            undo.pop_all()
        self._turn = threading.Lock()  # held while the process is replaced
        self._closed = False
        self._orders_end: float | None = None
        self.rows = ProcessRows(self, Timeouts(START_S, pulse))
        self.files = ProcessFiles(self, self._open, direct)

    def trouble(self) -> str:
        """Return how the process ended; empty while it runs."""
        return self.process.trouble()

    @property
    def is_replacing(self) -> bool:
        """Return whether another process is being started."""
        return self._turn.locked()

    def order(self, kind: Kind, body: bytes = b"") -> bytes:
        """Let the process carry an order out and return the result.

        Raises OSError; within `limited` also if it takes too long.
        """
        timeout_s = (
            None if self._orders_end is None else max(0.0, self._orders_end - time.monotonic())
        )
        try:
            return self.process.orders.ask(kind, body, timeout_s)
        except NotAnswering as error:
            raise OSError(f"the disk hangs: no answer in {RECOVER_S:g} s") from error

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Limit all orders within the block to RECOVER_S together."""
        self._orders_end = time.monotonic() + RECOVER_S
        try:
            yield
        finally:
            self._orders_end = None

    def revive(self) -> None:
        """Restart a process that has ended. Raises OSError.

        Unsynced writes may be lost, as after a crash.
        """
        with self._turn:
            self._check_open()
            if self.process.trouble():
                self._revive()

    def restart(self) -> None:
        """Replace the process, so that the rows are reopened. Raises OSError.

        What it wrote is in the host's memory at least: the new process syncs all of it.
        """
        with self._turn:
            self._check_open()
            self.process.kill()
            self._revive()

    def trial(self) -> None:
        """Write, sync and read a test file and a row. Raises OSError."""
        self.order(Kind.TRIAL)

    def space(self) -> FileSystem:
        """Return the space of the file system. Raises OSError."""
        return io_protocol.unpack_space(self.order(Kind.SPACE))

    def read_file(self, name: str) -> bytes:
        """Return the last bytes of a small file. Raises OSError, also after QUESTION_S."""
        try:
            return self.process.questions.ask(Kind.READ_FILE, name.encode(), QUESTION_S)
        except NotAnswering as error:
            raise OSError(f"the disk hangs: no answer in {QUESTION_S:g} s") from error

    def replace_file(self, name: str, content: bytes) -> None:
        """Replace a small file atomically. Raises OSError."""
        self.order(Kind.REPLACE_FILE, io_protocol.pack_pairs([(name.encode(), content)]))

    def _check_open(self) -> None:
        if self._closed:
            raise OSError("the node stops")

    def _revive(self) -> None:
        try:
            fresh = IoProcess(self._task, Timeouts(RECOVER_S, self._check_open))
        except ConfigError as error:
            raise os_error(str(error)) from error
        if fresh.opened != self.process.opened:
            fresh.abandon()
            raise OSError(f"{self._task.path} was replaced by another directory; restart the node")
        self.process.close()
        self.process = fresh
        log.warning("a new I/O process, %d", fresh.pid)

    def close(self) -> None:
        """Close everything. Raises OSError if the rows could not be closed."""
        self._closed = True  # ends a running `revive`
        is_ours = self._turn.acquire(timeout=END_S)
        try:
            if is_ours:
                self.process.close()
            else:
                self.process.abandon()
                raise OSError("a new I/O process is starting and can not be killed: the disk hangs")
        finally:
            self._open.close()
            release_lock(self._lock)
            if is_ours:
                self._turn.release()


class ProcessRows:
    """`node.disk.rows.Rows` through an I/O process."""

    def __init__(self, directory: ProcessStorage, timeouts: Timeouts) -> None:
        """Prepare access to the rows; `timeouts` is for the start, which reads all of them."""
        self._directory = directory
        self._timeouts = timeouts

    def write(
        self, namespaces: dict[int, bytes], pages: Iterable[PageRow], gone: Iterable[bytes]
    ) -> None:
        """Write rows atomically; the keys of a large removal go first, in orders of their own."""
        order, keys = self._directory.order, list(gone)
        while len(keys) > ORDER_KEYS_MAX:
            order(Kind.WRITE_ROWS, io_protocol.pack_rows([], keys[:ORDER_KEYS_MAX]))
            del keys[:ORDER_KEYS_MAX]
        order(Kind.WRITE_ROWS, io_protocol.pack_rows(pairs(namespaces, pages), keys))

    def sync(self) -> None:
        """Make all rows durable."""
        self._directory.order(Kind.SYNC_ROWS)

    def purge(self, needles: Sequence[bytes]) -> int:
        """Rewrite the rows without deleted data; return how many files still contain a needle."""
        return io_protocol.unpack_counts(
            self._directory.order(Kind.PURGE_ROWS, io_protocol.pack_rows([], needles))
        )[0]

    def namespaces(self) -> Iterator[tuple[int, bytes]]:
        """Yield the namespace rows."""
        return numbered(
            (key, value)
            for piece in self._all(Kind.ALL_SPACES)
            for key, value, _ in io_protocol.unpack_pairs(piece)
        )

    def all_pages(self) -> Iterator[PageRun]:
        """Yield all page rows, which the I/O process verifies meanwhile."""
        try:
            yield from map(io_protocol.unpack_run, filter(None, self._all(Kind.ALL_PAGES)))
        except Broken as error:
            raise OSError(f"the I/O process sent an invalid message: {error}") from error

    def _all(self, kind: Kind) -> Iterator[bytes]:
        try:
            yield from self._directory.process.orders.stream(kind, b"", self._timeouts)
        except NotAnswering as error:
            raise OSError(f"the disk hangs: no answer in {self._timeouts.seconds:g} s") from error

    def pages(self, start: bytes = b"P") -> Iterator[Pair]:
        """Yield page rows, requested in parts, so that slow readers keep nothing open."""
        nbytes = QUESTION_NBYTES
        while some := self._some(nbytes, start):
            yield from some
            start = some[-1][0] + b"\0"
            nbytes = min(2 * nbytes, QUESTION_NBYTES_MAX)

    def page(self, key: bytes) -> PageRow | None:
        """Return the row of a page; None if there is none."""
        return page_at(key, self._some(1, key))

    def _some(self, nbytes: int, start: bytes) -> list[Pair]:
        """Return rows from the key `start` on, at least one if there is one."""
        process = self._directory.process
        try:
            question = io_protocol.pack_question(nbytes, start)
            piece = process.questions.ask(Kind.SOME_ROWS, question, QUESTION_S)
        except OSError as error:
            if self._directory.is_replacing or process is not self._directory.process:
                raise Exhausted("the rows are being reopened; try again later") from error
            raise
        except NotAnswering as error:
            raise Exhausted(
                f"the disk has not answered for {QUESTION_S:g} s; try again later"
            ) from error
        return [(key, value) for key, value, _ in io_protocol.unpack_pairs(piece)]


class ProcessFiles:
    """`node.disk.extents.ExtentFiles` through an I/O process, but for reading."""

    def __init__(self, directory: ProcessStorage, opened: OpenExtents, direct: bool) -> None:
        self._directory = directory
        self._open = opened
        self.direct = direct

    def write_all(self, slots: Sequence[Slot]) -> None:
        """Write whole slots."""
        self._directory.order(Kind.WRITE_PAGES, io_protocol.pack_slots(slots))

    def read(self, offset: int, view: memoryview) -> bool:
        """Read in this process: reads wait for no writes, and the thread releases the GIL."""
        return self._open.read(offset, view)

    def sync(self) -> None:
        """Make all written pages durable."""
        self._directory.order(Kind.SYNC_PAGES)

    def release(self, number: int) -> None:
        """Return an extent's blocks to the file system. No page of it may be in use."""
        self._directory.order(Kind.RELEASE, io_protocol.pack_counts(number))
