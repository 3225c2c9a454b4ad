"""Requests to the I/O process survive packing and unpacking; cut or oversized ones are refused."""

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from node.disk import io_protocol
from node.disk.encryption import DiskLocation, PageEncryption
from node.disk.extents import Slot
from node.disk.io_protocol import Broken, Channel, Kind, Opened, Outcome, Task
from node.disk.io_worker import IoWorker

LAST = (1 << 44) - 4096
SLOTS = [
    Slot(0, 4096, DiskLocation(4096, None)),
    Slot(1 << 20, 4096, DiskLocation(8192, PageEncryption(8192, b"k" * 64, b"\1" * 8))),
    Slot((1 << 46) - 4096, 4096, DiskLocation(LAST, PageEncryption(LAST, b"l" * 64, b"\xff" * 8))),
    Slot(2 << 20, 4096, DiskLocation(0, PageEncryption(0, b"k" * 64, bytes(8)))),
]
PAIRS = [(b"P\0\1" + bytes(8), b"row"), (b"N\0\1", b""), (b"N\0\2", bytes(70_000))]
GONE = [b"P\0\1" + bytes(64), b"x"]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    """Yield a bare socket and the channel at its other end."""
    ours, theirs = socket.socketpair()
    yield ours, Channel(theirs)
    ours.close()
    theirs.close()


def test_requests_are_unpacked_as_packed() -> None:
    assert io_protocol.unpack_slots(io_protocol.pack_slots(SLOTS)) == SLOTS
    assert io_protocol.unpack_rows(io_protocol.pack_rows(PAIRS, GONE)) == (PAIRS, GONE)
    assert [pair[:2] for pair in io_protocol.unpack_pairs(io_protocol.pack_pairs(PAIRS))] == PAIRS
    assert io_protocol.unpack_question(io_protocol.pack_question(1 << 20, b"P\0\1")) == (
        1 << 20,
        b"P\0\1",
    )
    task = Task(4, 5, 6, 1 << 44, 1 << 30, True, "1f0ac5d2", "INFO", "/a b/c")
    assert Task.from_arguments(task.arguments()) == task
    opened = Opened(1 << 30, 7, True, 1 << 63, 1 << 63)
    assert Opened.unpack(opened.pack()) == opened


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), OSError("rows: a word")]
)
def test_error_of_the_io_process_is_equal_at_the_node(error: OSError) -> None:
    found = io_protocol.unpack_error(io_protocol.pack_error(error))
    assert (found.errno, str(found)) == (error.errno, str(error))


def test_cut_requests_are_refused() -> None:
    slots = io_protocol.pack_slots(SLOTS)
    for body in (slots, io_protocol.pack_rows(PAIRS[:2], GONE)):
        unpack = io_protocol.unpack_slots if body is slots else io_protocol.unpack_rows
        whole = {repr(unpack(body))}
        for cut in range(1, len(body)):
            try:
                found = repr(unpack(body[:cut]))
            except Broken:
                continue
            assert found not in whole, f"the first {cut} bytes of {len(body)} are read as the whole"


def test_frame_with_an_oversized_length_is_refused(
    ends: tuple[socket.socket, Channel],
) -> None:
    sock, channel = ends
    sock.sendall((io_protocol.BODY_NBYTES_MAX + 1).to_bytes(4, "little") + bytes(9))
    with pytest.raises(Broken, match="at most"):
        channel.recv(1.0)


def test_frame_in_pieces_survives_a_timeout(
    ends: tuple[socket.socket, Channel],
) -> None:
    sock, channel = ends
    other, theirs = socket.socketpair()
    with other, theirs:
        Channel(other).send(7, Kind.TRIAL, b"body")
        frame = theirs.recv(100)
    for cut in (1, 5, len(frame) - 1):
        sock.sendall(frame[:cut])
        with pytest.raises(TimeoutError):
            channel.recv(0.01)
        sock.sendall(frame[cut:])
        assert channel.recv(1.0) == (7, Kind.TRIAL, b"body")
    sock.close()
    with pytest.raises(EOFError):
        channel.recv(1.0)


def test_closing_a_channel_wakes_its_reader() -> None:
    """Closing a channel wakes its reader although the other end stays open.

    The other end may be an I/O process in a disk call that not even SIGKILL ends.
    """
    ours, theirs = socket.socketpair()
    channel, ended = Channel(ours), threading.Event()

    def wait() -> None:
        with contextlib.suppress(EOFError, OSError):
            channel.recv(None)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    threading.Event().wait(0.2)
    with theirs:
        channel.close()
        assert ended.wait(60.0)


@pytest.mark.parametrize(
    ("offset", "arena_offset", "nbytes"),
    [
        (4 << 16, 0, 4096),
        ((1 << 16) - 4096, 0, 8192),
        (0, (1 << 20) - 4096, 8192),
        (0, 1 << 20, 4096),
    ],
)
def test_slot_outside_an_extent_or_the_arena_is_not_written(
    ends: tuple[socket.socket, Channel], offset: int, arena_offset: int, nbytes: int
) -> None:
    outside = Slot(arena_offset, nbytes, DiskLocation(offset, None))
    last, written = Slot((1 << 20) - 4096, 4096, DiskLocation((4 << 16) - 4096, None)), list[Slot]()
    sizes = {"extent_nbytes": 1 << 16, "extent_count": 4, "arena_nbytes": 1 << 20}
    directory: Any = SimpleNamespace(
        **sizes, files=SimpleNamespace(write_all=written.extend), close=lambda: None
    )
    node, channel = Channel(ends[0]), ends[1]
    node.send(1, Kind.WRITE_PAGES, io_protocol.pack_slots([last]))
    node.send(2, Kind.WRITE_PAGES, io_protocol.pack_slots([last, outside]))
    node.send(3, Kind.CLOSE)
    IoWorker(directory).serve(channel)
    assert [node.recv(1.0)[1] for _ in range(3)] == [Outcome.DONE, Outcome.FAILED, Outcome.DONE]
    assert written == [last]
