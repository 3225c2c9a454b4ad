"""Encode the messages between a node and its I/O process, over two Unix sockets.

    order := nbytes of the body u32 | number u64 | kind u8 | body
    reply := nbytes of the body u32 | number of the order u64 | outcome u8 | body

    order         body                                      reply
    WRITE_PAGES   count of keys u32 | keys | slots
    WRITE_ROWS    count of pairs u32 | pairs | keys to delete
    SYNC_PAGES
    SYNC_ROWS
    TRIAL
    ALL_SPACES                                              pairs of namespaces
    ALL_PAGES                                               a run of pages
    SOME_ROWS     nbytes u32 | first key                    pairs, about nbytes; empty: the end
    PURGE_ROWS    0 u32 | needles, as keys to delete        number of files that contain one
    SPACE                                                   4 numbers | numbers of empty extents
    RELEASE       number of an extent
    READ_FILE     name of a small file                      its last bytes
    REPLACE_FILE  a pair: name and content
    CLOSE                                                   then the process ends

    slot := offset on disk | offset in the arena | nbytes | key number, 0 for none | key mark
    pair := nbytes u16 | nbytes u32 | key | value        key to delete := nbytes u16 | key
    run  := namespace u16 | nbytes of a hash u16 | count u32 | hashes | heads (`rows.RUN_HEAD`)
            | keys of damaged rows, as keys to delete

Data comes in replies of outcome MORE; DONE, FAILED or REFUSED is the last reply. Both ends belong
to one installation, so there is no version; lengths are checked all the same. Numbers are
little-endian, those of slots and counts u64.
"""

import array
import contextlib
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from node.disk.directory import FileSystem
from node.disk.encryption import MARK_NBYTES, PAGE_KEY_NBYTES, DiskLocation, PageEncryption
from node.disk.extents import Slot
from node.disk.rows import RUN_HEAD, PageRun

BODY_NBYTES_MAX = 64 << 20
_HEAD = struct.Struct("<IQB")
_COUNT = struct.Struct("<I")
_PAIR = struct.Struct("<HI")
_KEY = struct.Struct("<H")
_RUN = struct.Struct("<HHI")
_SIGNED = struct.Struct("<i")
_OPENED = struct.Struct("<QQ?QQ")
_RECV_NBYTES = 1 << 18
_SLOT_NUMBERS = 5
_SLOT_NBYTES = 8 * _SLOT_NUMBERS
Pair = tuple[bytes, bytes]

assert sys.byteorder == "little"  # what `array` packs


class Kind(IntEnum):
    """Kinds of orders."""

    WRITE_PAGES = 1
    WRITE_ROWS = 2
    SYNC_PAGES = 3
    SYNC_ROWS = 4
    TRIAL = 5
    ALL_SPACES = 6
    SOME_ROWS = 7
    CLOSE = 8
    PURGE_ROWS = 9
    SPACE = 10
    RELEASE = 11
    READ_FILE = 12
    REPLACE_FILE = 13
    ALL_PAGES = 14


class Outcome(IntEnum):
    """Outcomes of replies.

    FAILED: errno i32 and a text. REFUSED: a text, the setting or directory can not be used.
    """

    DONE = 0
    MORE = 1
    FAILED = 2
    REFUSED = 3


class Task(NamedTuple):
    """The command line of an I/O process."""

    orders_fd: int
    questions_fd: int
    arena_fd: int
    disk_nbytes: int
    extent_nbytes: int
    keep_own_extents: bool
    key_mark: str  # identifies the operator's key without revealing it
    log_level: str
    path: str

    def arguments(self) -> list[str]:
        """Return the command-line arguments."""
        return [str(int(value)) if isinstance(value, int) else value for value in self]

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> "Task":
        """Parse the command-line arguments."""
        *numbers, keep, key_mark, log_level, path = arguments
        orders_fd, questions_fd, arena_fd, disk_nbytes, extent_nbytes = map(int, numbers)
        return cls(
            orders_fd,
            questions_fd,
            arena_fd,
            disk_nbytes,
            extent_nbytes,
            keep == "1",
            key_mark,
            log_level,
            path,
        )


class Opened(NamedTuple):
    """The I/O process's first message: the reply to order 0, which is never sent.

    `device` and `inode` are the directory's.
    """

    extent_nbytes: int
    extent_count: int
    direct: bool
    device: int
    inode: int

    def pack(self) -> bytes:
        """Serialise the sizes."""
        return _OPENED.pack(*self)

    @classmethod
    def unpack(cls, body: bytes) -> "Opened":
        """Parse the sizes."""
        return cls(*_OPENED.unpack(body))


class Broken(Exception):
    """The other side sent an invalid message."""


class Channel:
    """One end of a socket.

    For one thread at a time; a partly received frame is kept after a timeout.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._got = bytearray()

    def send(self, number: int, kind: int, body: bytes = b"") -> None:
        """Send a frame. Raises OSError."""
        assert len(body) <= BODY_NBYTES_MAX
        self._set_timeout(None)
        self._sock.sendall(_HEAD.pack(len(body), number, kind) + body)

    def recv(self, timeout_s: float | None = None) -> tuple[int, int, bytes]:
        """Return (number, kind or outcome, body).

        Raises EOFError if the other side is gone, TimeoutError, Broken.
        """
        self._set_timeout(timeout_s)
        self._fill(_HEAD.size)
        nbytes, number, kind = _HEAD.unpack_from(self._got)
        if nbytes > BODY_NBYTES_MAX:
            raise Broken(f"a body of {nbytes} bytes, at most {BODY_NBYTES_MAX}")
        end = _HEAD.size + nbytes
        self._fill(end)
        body = bytes(memoryview(self._got)[_HEAD.size : end])
        del self._got[:end]
        return number, kind, body

    def wait(self) -> None:
        """Wait until something arrives. Raises EOFError at the end of the connection."""
        self._set_timeout(None)
        self._fill(1)

    def _set_timeout(self, timeout_s: float | None) -> None:
        if self._sock.gettimeout() != timeout_s:  # saves a system call
            self._sock.settimeout(timeout_s)

    def _fill(self, nbytes: int) -> None:
        while len(self._got) < nbytes:
            try:
                data = self._sock.recv(_RECV_NBYTES)
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError
            self._got += data

    def close(self) -> None:
        """Close the channel and wake a thread that waits here."""
        with contextlib.suppress(OSError):  # not connected any more
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def pack_slots(slots: Iterable[Slot]) -> bytes:
    """Pack slots, with each encryption key once."""
    keys: dict[bytes, int] = {}
    numbers = array.array("Q")
    for arena_offset, nbytes, (offset, encryption) in slots:
        key = keys.setdefault(encryption.key, len(keys) + 1) if encryption else 0
        mark = int.from_bytes(encryption.mark, "little") if encryption else 0
        numbers.extend((offset, arena_offset, nbytes, key, mark))
    return _COUNT.pack(len(keys)) + b"".join(keys) + numbers.tobytes()


def unpack_slots(body: bytes) -> list[Slot]:
    """Parse slots. Raises Broken."""
    if len(body) < _COUNT.size:
        raise Broken("slots without a count of keys")
    (key_count,) = _COUNT.unpack_from(body)
    start = _COUNT.size + key_count * PAGE_KEY_NBYTES
    if start > len(body) or (len(body) - start) % _SLOT_NBYTES:
        raise Broken(f"{key_count} keys and slots in {len(body)} bytes")
    keys = [body[at : at + PAGE_KEY_NBYTES] for at in range(_COUNT.size, start, PAGE_KEY_NBYTES)]
    numbers = array.array("Q", body[start:]).tolist()
    return [
        _slot(keys, *numbers[at : at + _SLOT_NUMBERS])
        for at in range(0, len(numbers), _SLOT_NUMBERS)
    ]


def _slot(
    keys: list[bytes], offset: int, arena_offset: int, nbytes: int, key: int, mark: int
) -> Slot:
    if key > len(keys):
        raise Broken(f"a slot of key {key}, there are {len(keys)}")
    encryption = (
        PageEncryption(offset, keys[key - 1], mark.to_bytes(MARK_NBYTES, "little")) if key else None
    )
    return Slot(arena_offset, nbytes, DiskLocation(offset, encryption))


def pack_counts(*numbers: int) -> bytes:
    """Serialise numbers."""
    return array.array("Q", numbers).tobytes()


def unpack_counts(body: bytes) -> list[int]:
    """Parse numbers. Raises Broken."""
    if len(body) % 8:
        raise Broken(f"numbers in {len(body)} bytes")
    return array.array("Q", body).tolist()


def pack_space(space: FileSystem) -> bytes:
    """Serialise the space of a file system."""
    return pack_counts(*map(int, space[:-1]), *sorted(space.empty))


def unpack_space(body: bytes) -> FileSystem:
    """Parse the space of a file system. Raises Broken."""
    free, total, reserve, failed, *empty = unpack_counts(body)
    return FileSystem(free, total, reserve, bool(failed), frozenset(empty))


def pack_pairs(pairs: Iterable[Pair]) -> bytes:
    """Serialise rows."""
    parts: list[bytes] = []
    for key, value in pairs:
        parts += (_PAIR.pack(len(key), len(value)), key, value)
    return b"".join(parts)


def pair_nbytes(pair: Pair) -> int:
    """Return the bytes of a serialised row."""
    return _PAIR.size + len(pair[0]) + len(pair[1])


def unpack_pairs(
    body: bytes, start: int = 0, count: int | None = None
) -> Iterator[tuple[bytes, bytes, int]]:
    """Yield (key, value, next start) of `count` rows, or up to the end. Raises Broken."""
    end = len(body)
    while start < end if count is None else count:
        if start + _PAIR.size > end:
            raise Broken("a pair is cut off")
        key_nbytes, value_nbytes = _PAIR.unpack_from(body, start)
        middle = start + _PAIR.size + key_nbytes
        after = middle + value_nbytes
        if after > end:
            raise Broken("a pair is cut off")
        yield body[start + _PAIR.size : middle], body[middle:after], after
        start = after
        count = None if count is None else count - 1


def pack_run(run: PageRun) -> bytes:
    """Serialise a run of rows."""
    width = len(run.hashes[0]) if run.hashes else 0
    head = _RUN.pack(run.namespace, width, len(run.hashes))
    return b"".join((head, *run.hashes, run.heads, _packed_keys(run.damaged)))


def unpack_run(body: bytes) -> PageRun:
    """Parse a run of rows. Raises Broken."""
    if len(body) < _RUN.size:
        raise Broken("a run of rows without a head")
    namespace, width, count = _RUN.unpack_from(body)
    middle = _RUN.size + count * width
    end = middle + count * RUN_HEAD.size
    if end > len(body) or (count and not width):
        raise Broken("a run of rows is cut off")
    hashes = [body[at : at + width] for at in range(_RUN.size, middle, width)] if count else []
    return PageRun(namespace, hashes, body[middle:end], _unpacked_keys(body, end))


def _packed_keys(keys: Iterable[bytes]) -> bytes:
    return b"".join(_KEY.pack(len(key)) + key for key in keys)


def _unpacked_keys(body: bytes, start: int) -> list[bytes]:
    keys = []
    while start < len(body):
        if start + _KEY.size > len(body):
            raise Broken("a key is cut off")
        (nbytes,) = _KEY.unpack_from(body, start)
        start += _KEY.size + nbytes
        if start > len(body):
            raise Broken("a key is cut off")
        keys.append(body[start - nbytes : start])
    return keys


def pack_rows(pairs: list[Pair], gone: Iterable[bytes]) -> bytes:
    """Serialise rows and the keys of rows to delete."""
    return _COUNT.pack(len(pairs)) + pack_pairs(pairs) + _packed_keys(gone)


def unpack_rows(body: bytes) -> tuple[list[Pair], list[bytes]]:
    """Parse (rows, keys to delete). Raises Broken."""
    if len(body) < _COUNT.size:
        raise Broken("rows without a count")
    (count,) = _COUNT.unpack_from(body)
    pairs, start = [], _COUNT.size
    for key, value, after in unpack_pairs(body, start, count):
        pairs.append((key, value))
        start = after
    return pairs, _unpacked_keys(body, start)


def pack_question(nbytes: int, first_key: bytes) -> bytes:
    """Serialise a request for rows."""
    return _COUNT.pack(nbytes) + first_key


def unpack_question(body: bytes) -> tuple[int, bytes]:
    """Parse a request for rows. Raises Broken."""
    if len(body) < _COUNT.size:
        raise Broken("a question without a size")
    return _COUNT.unpack_from(body)[0], body[_COUNT.size :]


def pack_error(error: OSError) -> bytes:
    """Serialise an error."""
    return _SIGNED.pack(error.errno or 0) + (error.strerror or str(error)).encode()


def unpack_error(body: bytes) -> OSError:
    """Parse an error."""
    number, text = _SIGNED.unpack_from(body)[0], body[_SIGNED.size :].decode(errors="replace")
    return OSError(number, text) if number else OSError(text)
