"""Run the I/O process of a node, which makes every call that a disk may block.

It maps the arena, opens the data directory, and carries out the node's orders: write these slots to
those locations, write these rows, sync. So a hanging disk call, and RocksDB, whose binding holds
the GIL while it works, stop only this process.

    node                                    I/O process
    writer thread  --- orders ---------->   main thread: one order after the other
    lists, scrubs  --- questions ------->   another: rows, while an order is running

It ends with its node: when the sockets close it ends at once, even within an order, which is no
worse than a power failure. It ignores SIGINT, SIGTERM and SIGHUP, which a terminal or a supervisor
may send to all processes: the node still has pages to write.
"""

import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.errors import ConfigError
from node.disk import io_protocol
from node.disk.data_dir import DataDir
from node.disk.extents import Slot
from node.disk.io_protocol import Broken, Channel, Kind, Opened, Outcome, Task
from node.process import set_up_log

log = logging.getLogger(__name__)

# Of one reply to ALL_SPACES: a few fit into the socket, so that both sides work
STREAM_NBYTES = 64 << 10
DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class IoWorker:
    """Carry out orders on an open directory."""

    def __init__(self, directory: DataDir) -> None:
        self._directory = directory
        self._calls: dict[int, Callable[[bytes], None]] = {
            Kind.WRITE_PAGES: self._write_pages,
            Kind.WRITE_ROWS: lambda body: directory.rows.put(*io_protocol.unpack_rows(body)),
            Kind.SYNC_PAGES: lambda _: directory.files.sync(),
            Kind.SYNC_ROWS: lambda _: directory.rows.sync(),
            Kind.TRIAL: lambda _: directory.trial(),
            Kind.RELEASE: lambda body: directory.files.release(*io_protocol.unpack_counts(body)),
            Kind.REPLACE_FILE: self._replace_file,
            Kind.CLOSE: lambda _: directory.close(),
        }

    def serve(self, channel: Channel) -> None:
        """Serve requests until CLOSE is done. Raises EOFError if the node has gone."""
        kind = 0
        while kind != Kind.CLOSE:
            number, kind, body = channel.recv()
            try:
                for piece in self._pieces(kind, body):
                    channel.send(number, Outcome.MORE, piece)
                channel.send(number, Outcome.DONE)
            except OSError as error:
                channel.send(number, Outcome.FAILED, io_protocol.pack_error(error))
            except MemoryError:
                channel.send(
                    number,
                    Outcome.FAILED,
                    io_protocol.pack_error(OSError(errno.ENOMEM, "the I/O process has no memory")),
                )
            except (
                Exception
            ) as error:  # a failed order: the node stops its disk tier and reports the reason
                log.exception("an order of kind %d failed", kind)
                channel.send(
                    number,
                    Outcome.FAILED,
                    io_protocol.pack_error(OSError(f"internal error: {error!r}")),
                )

    def _pieces(self, kind: int, body: bytes) -> Iterator[bytes]:
        """Yield the requested rows, or carry an order out and yield nothing."""
        if kind == Kind.ALL_SPACES:
            yield from _packed(self._directory.rows.scan(b"N"), STREAM_NBYTES)
        elif kind == Kind.ALL_PAGES:
            yield from map(io_protocol.pack_run, self._directory.rows.all_pages())
        elif kind == Kind.SOME_ROWS:
            nbytes, first = io_protocol.unpack_question(body)
            yield next(_packed(self._directory.rows.scan(first), nbytes))
        elif kind == Kind.PURGE_ROWS:
            yield io_protocol.pack_counts(
                self._directory.rows.purge(io_protocol.unpack_rows(body)[1])
            )
        elif kind == Kind.READ_FILE:
            yield self._directory.read_file(body.decode())
        elif kind == Kind.SPACE:
            yield io_protocol.pack_space(self._directory.space())
        else:
            self._calls[kind](body)

    def _write_pages(self, body: bytes) -> None:
        slots = io_protocol.unpack_slots(body)
        for slot in slots:
            self._check(slot)
        self._directory.files.write_all(slots)

    def _replace_file(self, body: bytes) -> None:
        for name, content, _ in io_protocol.unpack_pairs(body):
            self._directory.replace_file(name.decode(), content)

    def _check(self, slot: Slot) -> None:
        (arena_offset, nbytes, location), directory = slot, self._directory
        number, within = divmod(location.offset, directory.extent_nbytes)
        is_on_disk = number < directory.extent_count and within + nbytes <= directory.extent_nbytes
        if not is_on_disk or arena_offset + nbytes > directory.arena_nbytes:
            raise Broken(
                f"a slot is outside: {nbytes} bytes at {location.offset} on disk, {arena_offset} "
                "in the arena"
            )


def _packed(rows: Iterator[io_protocol.Pair], nbytes: int) -> Iterator[bytes]:
    """Yield rows in parts of this size or one row more; the last one may be empty."""
    room = 0
    while room <= 0:
        some, room = [], nbytes
        for pair in rows:
            some.append(pair)
            room -= io_protocol.pair_nbytes(pair)
            if room <= 0:
                break
        yield io_protocol.pack_pairs(some)


def main() -> None:
    """Serve the process that started this one; see `node.disk.io_process`."""
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    # RocksDB's files name models, tenants and hashes, and their mode follows the umask
    os.umask(0o077)
    task = Task.from_arguments(sys.argv[1:])
    set_up_log(task.log_level)
    channel = Channel(socket.socket(fileno=task.orders_fd))
    questions = Channel(socket.socket(fileno=task.questions_fd))
    opened: list[IoWorker] = []
    threading.Thread(
        target=_answer, args=(questions, opened), name="questions", daemon=True
    ).start()
    try:
        directory = DataDir(
            Path(task.path),
            task.disk_nbytes,
            task.extent_nbytes,
            task.arena_fd,
            keep_own_extents=task.keep_own_extents,
            key_mark=task.key_mark,
        )
    except ConfigError as error:
        channel.send(0, Outcome.REFUSED, str(error).encode())
        return
    opened.append(IoWorker(directory))
    identity = os.stat(task.path)
    facts = Opened(
        directory.extent_nbytes,
        directory.extent_count,
        directory.files.direct,
        identity.st_dev,
        identity.st_ino,
    )
    with contextlib.suppress(EOFError, BrokenPipeError):
        channel.send(0, Outcome.DONE, facts.pack())
        opened[0].serve(channel)
    os._exit(0)  # a thread may still hang in a disk call


def _answer(questions: Channel, opened: list[IoWorker]) -> None:
    """Answer requests for rows, and end the process when the node has gone."""
    try:
        with contextlib.suppress(EOFError, BrokenPipeError):
            questions.wait()
            opened[0].serve(questions)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
