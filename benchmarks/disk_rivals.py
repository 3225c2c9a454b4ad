"""Store pages in RocksDB, as BlobDB and plain SST files, beside the disk tier.

No WAL, no compression, direct I/O for flush, compaction and reads. rocksdict accepts and returns
`bytes` only, so each page is copied once between it and the arena, which the time includes.
"""

import contextlib
import os
import time
from pathlib import Path

from rocksdict import DBCompressionType, Options, Rdict, ReadOptions, WriteOptions

from kvstore.checksum import checksum
from node.memory.arena import Arena
from node.memory.page import Page

SETTLE_S = 60.0
_UNSETTLED = (
    "rocksdb.num-running-flushes",
    "rocksdb.num-running-compactions",
    "rocksdb.compaction-pending",
)


class RocksPages:
    """One database that holds whole pages under their prefix hashes."""

    def __init__(self, directory: Path, arena: Arena, blobs: bool) -> None:
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(DBCompressionType.none())
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        if blobs:
            options.set_enable_blob_files(True)
            options.set_min_blob_size(4096)
            options.set_blob_file_size(256 << 20)
            options.set_enable_blob_gc(True)
            options.set_blob_compression_type(DBCompressionType.none())
        self.pid = os.getpid()
        self._db = Rdict(str(directory), options)
        self._no_wal = WriteOptions()
        self._no_wal.disable_wal = True  # type: ignore[assignment]
        self._reads = {verified: ReadOptions() for verified in (True, False)}
        self._reads[False].set_verify_checksums(False)
        self._arena = arena

    def write(self, pages: list[Page], gone: list[Page]) -> None:
        """Write pages, after removing those that are gone."""
        for page in gone:
            self._db.delete(page.prefix_hash, write_opt=self._no_wal)
        for page in pages:
            value = bytes(self._arena.view(page.offset, page.namespace.page_nbytes))
            self._db.put(page.prefix_hash, value, write_opt=self._no_wal)
        self._db.flush()

    def settle(self) -> None:
        """Wait until the compactions are over."""
        end = time.monotonic() + SETTLE_S
        while (
            any(self._db.property_int_value(name) for name in _UNSETTLED) and time.monotonic() < end
        ):
            time.sleep(0.01)

    def read(self, page: Page, offset: int, verified: bool) -> None:
        """Read a page; `verified` uses RocksDB's checksum, else ours is checked.

        `verified`: RocksDB checks its own checksum; else we check ours.
        """
        # A list: releases the GIL
        [value] = self._db.get([page.prefix_hash], read_opt=self._reads[verified])
        self._arena.view(offset, page.namespace.page_nbytes)[:] = value
        if not verified:
            assert checksum(value, page.namespace.seed(page.prefix_hash)) == page.checksum

    def close(self) -> None:
        """Stop everything that was started."""
        with contextlib.suppress(OSError):
            self._db.close()
