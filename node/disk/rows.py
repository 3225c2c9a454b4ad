"""Record in RocksDB which pages are on disk: one small row per page.

The only file that imports rocksdict.

    "F"                            format version, extent bytes, and of an encrypted directory
                                   the mark of its key: "5 67108864 1f0ac5d2"
    "N" u16be number               a Namespace message, plain or wrapped (`node.disk.encryption`)
    "P" u16be number, prefix hash  offset u64, slot nbytes u64, stored s u32, used s u32,
                                   expiry s u32, page checksum 16, its leaves 8 each if it has
                                   several, xxh3_64 of key and value before it u64

A page counts as stored only when its row exists. Rows of one batch appear together. The binding
holds the GIL while RocksDB works, so a node opens its rows in its I/O process only.
"""

import contextlib
import errno
import logging
import os
import re
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

with contextlib.suppress(ModuleNotFoundError):  # a node without a disk tier needs none
    from rocksdict import (
        BottommostLevelCompaction,
        CompactOptions,
        DBCompressionType,
        Options,
        Rdict,
        WriteBatch,
    )

from kvstore.checksum import CHECKSUM_NBYTES, LEAF_SUM_NBYTES, row_checksum
from kvstore.errors import ConfigError
from kvstore.keys import PREFIX_HASH_NBYTES_MAX, PREFIX_HASH_NBYTES_MIN
from kvstore.layout import SLOT_ALIGN_NBYTES

log = logging.getLogger(__name__)

FORMAT_VERSION = 5
PURGE_S = 2.0
CLOCK_STEP_S = 10  # tolerated step back of the wall clock between two runs, such as NTP makes
_LOOKED_AT_NBYTES = 1 << 20
_HEAD = struct.Struct("<QQIII16s")
# The same with the checksum as two numbers, as `page_table` keeps it
RUN_HEAD = struct.Struct("<QQIIIQQ")
RUN_ROWS = 1024
_SUM_NBYTES = 8
_EXTENT = re.compile("[1-9][0-9]{3,14}")

LOG_S = 10.0  # between two lines about a shortage, which affects every page
CODES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of shortages
FULL_CODES = (errno.ENOSPC, errno.EDQUOT)  # of a full file system or quota
WRITE_BUFFER_NBYTES = 16 << 20  # of rows in memory and in the log, until a file is made of them
WRITE_BUFFER_NBYTES_MIN = 1 << 20
_NO_THREAD = "can't start new thread"  # Python's whole message


class PageRow(NamedTuple):
    """A page on disk.

    Times in seconds since the epoch; `expiry_s` 0: it never expires. `leaves`: if it has several,
    so that a part of it can be verified (`kvstore.checksum.stored_leaves`).
    """

    namespace: int
    prefix_hash: bytes
    offset: int
    slot_nbytes: int
    stored_s: int
    used_s: int
    expiry_s: int
    checksum: bytes
    leaves: bytes = b""

    @property
    def key(self) -> bytes:
        """Return the row's key."""
        return page_key(self.namespace, self.prefix_hash)

    def value(self) -> bytes:
        """Serialise the row's value."""
        assert len(self.checksum) == CHECKSUM_NBYTES
        head = _HEAD.pack(
            self.offset, self.slot_nbytes, self.stored_s, self.used_s, self.expiry_s, self.checksum
        )
        body = head + self.leaves
        return body + row_checksum(self.key + body)


class PageRun(NamedTuple):
    """Verified rows of pages of one namespace.

    `heads`: for each hash what its value begins with, without leaves; see `rows`. `damaged`: keys
    of rows that are damaged.
    """

    namespace: int
    hashes: list[bytes]
    heads: bytes
    damaged: list[bytes]

    def rows(self) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """Yield (prefix hash, RUN_HEAD's numbers) of each page."""
        return zip(self.hashes, RUN_HEAD.iter_unpack(self.heads), strict=True)


def page_runs(pages: Iterable[tuple[bytes, bytes]]) -> Iterator[PageRun]:
    """Verify rows and yield them in runs, at most RUN_ROWS each, in their order."""
    start, hashes, heads, damaged = b"", list[bytes](), list[bytes](), list[bytes]()
    for key, value in pages:
        intact = is_intact(key, value)
        other = hashes and (key[:3] != start or len(key) != 3 + len(hashes[0]))
        if (intact and other) or len(hashes) + len(damaged) == RUN_ROWS:
            yield PageRun(_namespace_of(start), hashes, b"".join(heads), damaged)
            hashes, heads, damaged = [], [], []
        if intact:
            start = key[:3]
            hashes.append(key[3:])
            heads.append(value[: _HEAD.size])
        else:
            damaged.append(key)
    if hashes or damaged:
        yield PageRun(_namespace_of(start), hashes, b"".join(heads), damaged)


def _namespace_of(key: bytes) -> int:
    return int.from_bytes(key[1:3], "big")


def is_expired(stored_s: int, expiry_s: int, now_s: int) -> bool:
    """Return whether a page's time to live was over at a start.

    A row from the future counts as expired, because its age is unknown: the clock of the run that
    wrote it was fast, or this one's is slow.
    """
    return expiry_s > 0 and (expiry_s <= now_s or stored_s > now_s + CLOCK_STEP_S)


def page_key(namespace: int, prefix_hash: bytes) -> bytes:
    """Return the key of a page's row, or of the first one with this start of a hash."""
    return b"P" + namespace.to_bytes(2, "big") + prefix_hash


def is_page_key(key: bytes) -> bool:
    """Return whether a key is that of a page's row."""
    return key.startswith(b"P")


def namespace_key(number: int) -> bytes:
    """Return the key of a namespace's row."""
    return b"N" + number.to_bytes(2, "big")


def is_intact(key: bytes, value: bytes) -> bool:
    """Return whether a page's row is as it was written."""
    leaves_nbytes = len(value) - _HEAD.size - _SUM_NBYTES
    return (
        PREFIX_HASH_NBYTES_MIN <= len(key) - 3 <= PREFIX_HASH_NBYTES_MAX
        and leaves_nbytes >= 0
        and not leaves_nbytes % LEAF_SUM_NBYTES
        and row_checksum(key + value[:-_SUM_NBYTES]) == value[-_SUM_NBYTES:]
    )


def parse_page_row(key: bytes, value: bytes) -> PageRow | None:
    """Parse a page's row; None if it is damaged."""
    if not is_intact(key, value):
        return None
    leaves = value[_HEAD.size : -_SUM_NBYTES]
    return PageRow._make((_namespace_of(key), key[3:], *_HEAD.unpack_from(value), leaves))


def page_at(key: bytes, pages: Iterable[tuple[bytes, bytes]]) -> PageRow | None:
    """Return the row of this key if it is the first of the given ones."""
    for found, value in pages:
        return parse_page_row(key, value) if found == key else None
    return None


def hashes_of(
    pages: Iterable[tuple[bytes, bytes]], number: int, key_prefix: bytes, after: bytes
) -> Iterator[bytes]:
    """Yield hashes of a namespace's pages in order that start so and are above `after`."""
    for key, value in pages:
        row = parse_page_row(key, value)
        if row is None:
            continue
        if row.namespace != number or not row.prefix_hash[: len(key_prefix)] <= key_prefix:
            return
        if row.prefix_hash > after and row.prefix_hash.startswith(key_prefix):
            yield row.prefix_hash


def format_row(extent_nbytes: int, key_mark: str = "") -> bytes:
    """Return the value of the format row."""
    return f"{FORMAT_VERSION} {extent_nbytes} {key_mark}".rstrip().encode()


def stored_extents(found: bytes, wanted_nbytes: int, keep_own: bool, key_mark: str = "") -> int:
    """Return the extent size in a format row; with `keep_own` any size will do.

    Raises ConfigError for another size, format or key.
    """
    version, nbytes, mark = [*found.decode(errors="replace").split(" ", 2), "", ""][:3]
    if version != str(FORMAT_VERSION):
        raise ConfigError(
            f"data_dir was written in format {version!r} by another version of kvstore, "
            f"this one reads format {FORMAT_VERSION}; start that version on it, delete it "
            "(its pages can be computed again), or name another directory"
        )
    own = int(nbytes) if keep_own and _EXTENT.fullmatch(nbytes) else 0
    extent_nbytes = own if own and own % SLOT_ALIGN_NBYTES == 0 else wanted_nbytes
    if nbytes != str(extent_nbytes):
        raise ConfigError(
            f"data_dir was written with extents of {nbytes} bytes, this node wants "
            f"{wanted_nbytes}; use the same disk_extent_nbytes, or another directory"
        )
    if problem := _key_conflict(mark, key_mark):
        raise ConfigError(f"data_dir {problem}")
    return extent_nbytes


def pairs(namespaces: dict[int, bytes], pages: Iterable[PageRow]) -> list[tuple[bytes, bytes]]:
    """Serialise new rows."""
    described = [(namespace_key(number), message) for number, message in namespaces.items()]
    return described + [(row.key, row.value()) for row in pages]


class Rows:
    """An open row database. Raises OSError where the disk fails.

    `extent_nbytes`: of the extents that the rows describe.
    """

    def __init__(
        self,
        directory: Path,
        extent_nbytes: int,
        keep_own: bool = False,
        key_mark: str = "",
        write_buffer_nbytes: int = WRITE_BUFFER_NBYTES,
    ) -> None:
        """Open the database.

        `extent_nbytes` is for new rows; with `keep_own`, older rows may use another size. Raises
        ConfigError for another size, key or format.
        """
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(DBCompressionType.none())
        options.set_write_buffer_size(write_buffer_nbytes)
        options.set_max_open_files(64)
        options.set_keep_log_file_num(2)
        self._directory = directory
        self._failed = False
        with _DiskErrors():
            self._db = Rdict(str(directory), options)
            found = self._db.get(b"F")
            if found is None:
                found = self._db[b"F"] = format_row(extent_nbytes, key_mark)
        try:
            self.extent_nbytes = stored_extents(found, extent_nbytes, keep_own, key_mark)
        except ConfigError:
            self._db.close()
            raise

    def write(
        self, namespaces: dict[int, bytes], pages: Iterable[PageRow], gone: Iterable[bytes]
    ) -> None:
        """Write new namespaces and pages and delete rows, atomically."""
        self.put(pairs(namespaces, pages), gone)

    def put(self, new: Iterable[tuple[bytes, bytes]], gone: Iterable[bytes]) -> None:
        """Write serialised rows atomically; deletions first, because a key may be written again."""
        batch = WriteBatch(raw_mode=True)
        for key in gone:
            batch.delete(key)
        for key, value in new:
            batch.put(key, value)
        if batch.len():
            with self._noting_failure():
                self._db.write(batch)

    def sync(self) -> None:
        """Make everything written before durable."""
        with self._noting_failure():
            self._db.flush_wal(True)

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            with _DiskErrors():
                yield
        except OSError as error:
            self._failed |= not is_shortage(error)
            raise

    @property
    def failed(self) -> bool:
        """Return whether a write or merge failed: RocksDB may take no more until reopened."""
        with _DiskErrors():
            return self._failed or bool(self._db.property_int_value("rocksdb.background-errors"))

    def trial(self) -> None:
        """Write and sync the format row again, and read it. Raises OSError if that fails."""
        with _DiskErrors():
            value = cast(bytes, self._db.get(b"F"))
        self.put([(b"F", value)], [])
        self.sync()
        with _DiskErrors():
            if self._db.get(b"F") != value:
                raise OSError(errno.EIO, "rows: a trial row can not be read back")

    def purge(self, needles: Sequence[bytes]) -> int:
        """Rewrite everything without deleted data and old logs.

        Return how many files still contain a needle; files that RocksDB is about to delete get a
        moment.
        """
        everything = CompactOptions()
        everything.set_bottommost_level_compaction(BottommostLevelCompaction.force())
        with _DiskErrors():
            self._db.flush()
            self._db.compact_range(None, None, everything)
            self._db.flush_wal(True)
        end = time.monotonic() + PURGE_S
        while (found := files_with(self._directory, needles)) and time.monotonic() < end:
            time.sleep(PURGE_S / 10)
        return found

    def namespaces(self) -> Iterator[tuple[int, bytes]]:
        """Yield the namespace rows."""
        return numbered(self.scan(b"N"))

    def pages(self, start: bytes = b"P") -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) of page rows from the key `start` on; see `parse_page_row`."""
        return self.scan(start)

    def all_pages(self) -> Iterator[PageRun]:
        """Yield all page rows at a start."""
        return page_runs(self.pages())

    def page(self, key: bytes) -> PageRow | None:
        """Return the row of a page; None if there is none."""
        return page_at(key, self.pages(key))

    def scan(self, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) of rows of one kind from the key `start` on."""
        kind = start[:1]
        with _DiskErrors():
            for key, value in cast(Iterator[tuple[bytes, bytes]], self._db.items(from_key=start)):
                if not key.startswith(kind):
                    return
                yield key, value

    def close(self) -> None:
        """Close the database."""
        with _DiskErrors():
            self._db.close()


def _key_conflict(mark: str, key_mark: str) -> str:
    """Return how a directory's key mark differs from this node's; empty if it does not."""
    if mark == key_mark:
        return ""
    if not key_mark:
        remedy = "start with encrypt_key_file or encrypt_key_command, or name another directory"
        return f"is encrypted with key {mark}; {remedy}"
    if not mark:
        return (
            "was made without encryption; start without encrypt_key_file and encrypt_key_command, "
            "name another directory, or delete it (its pages can be computed again)"
        )
    return (
        f"is encrypted with key {mark}, the key given is {key_mark}; give that of this "
        "directory, or name another one"
    )


def numbered(rows: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield (number, value) of namespace rows; keys of other lengths are skipped."""
    return (
        (int.from_bytes(key[1:], "big"), value)
        for key, value in rows
        if len(key) == len(namespace_key(0))
    )


def files_with(directory: Path, needles: Sequence[bytes]) -> int:
    """Return how many files in a directory contain one of these byte strings."""
    return sum(_has(path, needles) for path in sorted(directory.iterdir()) if needles)


def _has(path: Path, needles: Sequence[bytes]) -> bool:
    kept, overlap = b"", max(map(len, needles))
    try:
        with path.open("rb") as file:
            while some := file.read(_LOOKED_AT_NBYTES):
                kept = kept[-overlap:] + some
                if any(needle in kept for needle in needles):
                    return True
    except FileNotFoundError:  # it has just been deleted
        pass
    return False


class _DiskErrors:
    """Convert RocksDB's plain Exceptions to OSError, which the tier handles."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if (
            kind is not None
            and kind.__module__ in ("builtins", "rocksdict")
            and type(error) is Exception
        ):
            raise os_error(f"rows: {error}") from error


def is_shortage(error: BaseException) -> bool:
    """Return whether an error is a passing shortage of descriptors, memory or threads.

    The disk itself works, and a moment later there may be enough.
    """
    if isinstance(error, OSError):
        return error.errno in CODES
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _NO_THREAD in str(error)
    )


def is_full(error: BaseException) -> bool:
    """Return whether an error says that the file system, or a quota of it, is full."""
    return isinstance(error, OSError) and error.errno in FULL_CODES


def os_error(text: str) -> OSError:
    """Return an OSError, with the code of a shortage or full file system if the text names one."""
    code = next((code for code in (*CODES, *FULL_CODES) if os.strerror(code) in text), None)
    return OSError(code, text) if code else OSError(text)


def write_buffer_nbytes(room_nbytes: int) -> int:
    """Return the rows' write buffer for a disk of this size: a small one has few rows."""
    return max(WRITE_BUFFER_NBYTES_MIN, min(room_nbytes // 64, WRITE_BUFFER_NBYTES))


class Shortages:
    """Log now and then that the node, not the disk, is short of something."""

    def __init__(self) -> None:
        self._tell_again = 0.0

    def report(self, doing: str, error: BaseException) -> None:
        """Log a shortage, unless one was logged recently."""
        if time.monotonic() >= self._tell_again:
            self._tell_again = time.monotonic() + LOG_S
            log.warning(
                "disk tier, %s: the node is short of memory, descriptors or threads: %r",
                doing,
                error,
            )
