"""Measure the disk tier, beside direct file I/O and beside RocksDB with the pages inside.

    limit     as many threads doing `pwrite` and `pread` of the same sizes, from and to the same
              arena, on preallocated files in the same directory, `O_DIRECT` where it works: no
              rows, no eviction, no checksum
    tier      the node's disk tier and its I/O process: `store` in batches as its writer thread
              makes them (slot, bytes, row), `begin` and `read` with verification of every page
    RocksDB   BlobDB and SST files, see disk_rivals.py

Three operations: the first write of an empty store, sustained writing into a full one, where each
new page displaces the oldest, and reading in random order. Each write ends with everything on the
medium: `fdatasync` of the limit's files, `sync` of the tier, `flush` of RocksDB. The contenders
take turns of 256 MiB, and RocksDB ends its compactions in its own turn, untimed. GB/s: 10^9 page
bytes in the median turn. Written / page bytes: bytes that the kernel counts as sent to storage by
the writing process in a contender's turns, over the page bytes of those turns, without the file
system's journal. Aim: sustained write and read at least 0.85 of the limit; at most 1.05 bytes
written per page byte.

    python benchmarks/disk.py [--dir DIR] [--page-kib 1024 4096] [--gib 2] [--json]
"""

import functools
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from disk_rivals import RocksPages
from measure import Report, Samples, median, parser, progress, rounds
from workplace import add_dir, direct_works, file_system, workplace, written_nbytes

from kvstore.checksum import checksum
from kvstore.keys import Namespace
from kvstore.layout import opaque_layout
from node.disk.encryption import PLAIN, Vault
from node.disk.io_process import ProcessStorage
from node.disk.tier import DiskTier
from node.disk.writer import BATCH_NBYTES_MAX, BATCH_PAGES_MAX
from node.memory.arena import Arena
from node.memory.page import NamespaceIndex, Page, State
from node.memory.tenant_usage import TenantUsage
from node.slab import SlotAllocator

PAGE_KIB = (1024, 4096)
TURN_NBYTES = 256 << 20  # of one turn; also the arena, so that a turn's pages are all different
EXTENT_NBYTES = 64 << 20
SPACE_FACTOR = 6  # four stores, and room for two that are being compacted
READ_THREADS = (1, 4)
AIM = 0.85
AIM_WRITTEN = 1.05
SUSTAINED, FIRST = "sustained write", "first write"


class Store(Protocol):
    """A contender.

    `write` returns when the pages are on the medium; `read` when the page is in the slot.

    `pid`: the process that writes.
    """

    pid: int

    def write(self, pages: list[Page], gone: list[Page]) -> None:
        """Write pages, after removing those that are gone."""

    def settle(self) -> None:
        """Wait until nothing is left to do."""

    def close(self) -> None:
        """Stop everything that was started."""


class Pages:
    """Make pages of one size, numbered, with the same bytes in the arena each turn."""

    def __init__(self, arena: Arena, page_nbytes: int) -> None:
        self._arena = arena
        account = TenantUsage(SlotAllocator(arena.nbytes, arena.nbytes), list).of("default")
        self._index = NamespaceIndex(
            Namespace(model="benchmark", layout=opaque_layout(page_nbytes)), account
        )
        self.turn_count = arena.nbytes // page_nbytes
        self.made: list[Page] = []

    def turn(self) -> list[Page]:
        """Return the pages of one more turn."""
        nbytes = self._index.page_nbytes
        for slot in range(self.turn_count):
            page = Page(self._index, secrets.token_bytes(32), 0)
            page.offset, page.state = slot * nbytes, State.VISIBLE
            page.checksum = checksum(
                self._arena.view(page.offset, nbytes), self._index.seed(page.prefix_hash)
            )
            self.made.append(page)
        return self.made[-self.turn_count :]


class BareFiles:
    """The limit: pages in files of the tier's extent size, without any index on disk."""

    def __init__(self, directory: Path, arena: Arena, capacity: int, page_nbytes: int) -> None:
        directory.mkdir()
        self.pid = os.getpid()
        self._arena, self._page_nbytes = arena, page_nbytes
        self._per_file = EXTENT_NBYTES // page_nbytes
        self._where: dict[bytes, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        direct = os.O_DIRECT if direct_works(directory) else 0
        self._fds = []
        for number in range(-(-capacity // self._per_file)):
            self._fds.append(os.open(directory / f"{number:06d}", os.O_RDWR | os.O_CREAT | direct))
            os.posix_fallocate(self._fds[-1], 0, EXTENT_NBYTES)
            os.fsync(self._fds[-1])

    def write(self, pages: list[Page], gone: list[Page]) -> None:
        """Write pages, after removing those that are gone."""
        self._free += [self._where.pop(page.prefix_hash) for page in reversed(gone)]
        used = set()
        for page in pages:
            slot = self._where[page.prefix_hash] = self._free.pop()
            fd, within = (
                self._fds[slot // self._per_file],
                slot % self._per_file * self._page_nbytes,
            )
            moved = os.pwritev(fd, [self._arena.view(page.offset, self._page_nbytes)], within)
            assert moved == self._page_nbytes
            used.add(fd)
        for fd in used:
            os.fdatasync(fd)

    def read(self, page: Page, offset: int) -> None:
        """Read a page into the arena at an offset."""
        slot = self._where[page.prefix_hash]
        fd, within = self._fds[slot // self._per_file], slot % self._per_file * self._page_nbytes
        moved = os.preadv(fd, [self._arena.view(offset, self._page_nbytes)], within)
        assert moved == self._page_nbytes

    def settle(self) -> None:
        """Wait until nothing is left to do."""

    def close(self) -> None:
        """Stop everything that was started."""
        for fd in self._fds:
            os.close(fd)


class Tier:
    """The node's disk tier."""

    def __init__(
        self, directory: Path, arena: Arena, capacity: int, page_nbytes: int, vault: Vault = PLAIN
    ) -> None:
        self._page_nbytes = page_nbytes
        kept = ProcessStorage(
            directory, capacity * page_nbytes, EXTENT_NBYTES, arena.fd, key_mark=vault.mark
        )
        self.pid = kept.process.pid
        self._tier = DiskTier(kept, arena.view, queue_nbytes_max=0, vault=vault)

    def write(self, pages: list[Page], gone: list[Page]) -> None:
        """Write pages; the tier evicts by itself."""
        count = min(BATCH_PAGES_MAX, BATCH_NBYTES_MAX // self._page_nbytes)
        for start in range(0, len(pages), count):
            self._tier.store(pages[start : start + count])
        self._tier.sync()
        assert self._tier.present(
            pages[0].namespace.digest, [page.prefix_hash for page in pages + gone]
        ) == ([True] * len(pages) + [False] * len(gone))

    def read(self, page: Page, offset: int) -> None:
        """Read a page into the arena at an offset."""
        target = Page(page.namespace, page.prefix_hash, 0)
        target.offset = offset
        found = self._tier.reading.begin(page.namespace.digest, [page.prefix_hash])
        assert found, "a page is not on disk"
        assert self._tier.reading.read(found[page.prefix_hash], target), (
            "a page on disk is not what was written"
        )

    def settle(self) -> None:
        """Wait until nothing is left to do."""

    def close(self) -> None:
        """Stop everything that was started."""
        assert not self._tier.check()
        self._tier.close()


# ---- turns -------------------------------------------------------------------------------


class Written:
    """Timed turns of writing, with the bytes that each store sent to storage."""

    def __init__(self) -> None:
        self.device_nbytes: dict[str, int] = {}
        self.page_nbytes: dict[str, int] = {}

    def turn(
        self, name: str, store: Store, turns: Iterator[tuple[list[Page], list[Page]]]
    ) -> Samples:
        """Run one turn and return its samples."""
        pages, gone = next(turns)
        before, start = written_nbytes(store.pid), time.perf_counter()
        store.write(pages, gone)
        seconds = time.perf_counter() - start
        store.settle()
        self.device_nbytes[name] = (
            self.device_nbytes.get(name, 0) + written_nbytes(store.pid) - before
        )
        self.page_nbytes[name] = self.page_nbytes.get(name, 0) + TURN_NBYTES
        return {"turn": [seconds]}

    def ratio(self, name: str) -> float:
        """Return written bytes per page byte."""
        return self.device_nbytes[name] / self.page_nbytes[name]


def write_turns(
    stores: dict[str, Store], turns: list[tuple[list[Page], list[Page]]], tick: Callable[[], None]
) -> Any:
    """Run turns that every store takes in the same order; return samples and bytes written."""
    written = Written()
    contenders = {
        name: functools.partial(written.turn, name, store, iter(turns))
        for name, store in stores.items()
    }
    return rounds(contenders, len(turns), 0, tick), written


def read_turn(
    pool: ThreadPoolExecutor, threads: int, read: Callable[[Page, int], None], pages: list[Page]
) -> Samples:
    """Read one turn's bytes in random order on several threads."""
    nbytes = pages[0].namespace.page_nbytes
    chosen = random.sample(pages, TURN_NBYTES // nbytes)

    def part(number: int) -> None:
        for position in range(number, len(chosen), threads):
            read(chosen[position], position * nbytes)

    start = time.perf_counter()
    list(pool.map(part, range(threads)))
    return {"turn": [time.perf_counter() - start]}


def size_rows(
    directory: Path, arena: Arena, page_nbytes: int, nbytes: int, tick: Callable[[], None]
) -> list[Any]:
    """Return the rows of one size."""
    pages = Pages(arena, page_nbytes)
    count, capacity = nbytes // TURN_NBYTES, nbytes // page_nbytes
    fill: list[tuple[list[Page], list[Page]]] = [(pages.turn(), []) for _ in range(count)]
    more = [(pages.turn(), fill[i][0]) for i in range(count)]
    bare = BareFiles(directory / "limit", arena, capacity, page_nbytes)
    tier = Tier(directory / "tier", arena, capacity, page_nbytes)
    blob = RocksPages(directory / "blob", arena, blobs=True)
    sst = RocksPages(directory / "sst", arena, blobs=False)
    stores: dict[str, Store] = {
        "limit": bare,
        "tier": tier,
        "RocksDB BlobDB": blob,
        "RocksDB SST": sst,
    }
    rows = []
    for op, turns in ((FIRST, fill), (SUSTAINED, more)):
        samples, written = write_turns(stores, turns, tick)
        rows += op_rows(page_nbytes, op, samples, written)
    reads: dict[str, Callable[[Page, int], None]] = {"limit": bare.read, "tier": tier.read}
    for name, rocks in (("RocksDB BlobDB", blob), ("RocksDB SST", sst)):
        reads[name] = functools.partial(rocks.read, verified=True)
        reads[f"{name}, only our checksum"] = functools.partial(rocks.read, verified=False)
    there = pages.made[-capacity:]
    for threads in READ_THREADS:
        with ThreadPoolExecutor(threads) as pool:
            contenders = {
                name: functools.partial(read_turn, pool, threads, read, there)
                for name, read in reads.items()
            }
            samples = rounds(contenders, count, 1, tick)
        rows += op_rows(
            page_nbytes,
            f"random read, {threads} threads" if threads > 1 else "random read",
            samples,
            None,
        )
    for store in stores.values():
        store.close()
    return rows


def op_rows(
    page_nbytes: int, op: str, samples: dict[str, Samples], written: Written | None
) -> list[dict[str, Any]]:
    """Return the rows of one operation."""
    seconds = {name: median(found["turn"]) for name, found in samples.items()}
    rows = []
    for name, spent in seconds.items():
        ratio = seconds["limit"] / spent
        amplification = None if written is None else written.ratio(name)
        row = {
            "page KiB": page_nbytes >> 10,
            "operation": op,
            "contender": name,
            "GB/s": round(TURN_NBYTES / spent / 1e9, 2),
            "of limit": round(ratio, 2),
            "written / page bytes": None if amplification is None else round(amplification, 3),
        }
        met = ratio >= AIM and (amplification is None or amplification <= AIM_WRITTEN)
        aimed = name == "tier" and op != FIRST
        rows.append(row | {f"aim {AIM}": ("met" if met else "missed") if aimed else None})
    return rows


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    add_dir(options)
    options.add_argument(
        "--page-kib", type=int, nargs="+", default=PAGE_KIB, help="page sizes (%(default)s)"
    )
    options.add_argument("--gib", type=float, default=2.0, help="data of each store (%(default)s)")
    args = options.parse_args(argv)
    nbytes = max(2, int(args.gib * (1 << 30)) // TURN_NBYTES) * TURN_NBYTES
    report = Report(
        f"The disk tier, {nbytes / (1 << 30):g} GiB a store", "python benchmarks/disk.py"
    )
    arena = Arena(TURN_NBYTES)
    for start in range(0, TURN_NBYTES, 1 << 20):
        arena.view(start, 1 << 20)[:] = os.urandom(1 << 20)
    count = nbytes // TURN_NBYTES
    with workplace(args.dir, SPACE_FACTOR * nbytes) as base:
        direct = "O_DIRECT" if direct_works(base) else "the page cache: O_DIRECT does not work here"
        report.notes.append(
            f"{file_system(base)}, {direct}; medians of {count} turns; random bytes, no compression"
        )
        with progress(len(args.page_kib) * (2 * count + len(READ_THREADS) * (count + 1))) as tick:
            for kib in args.page_kib:
                with workplace(base) as directory:
                    report.rows += size_rows(directory, arena, kib << 10, nbytes, tick)
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
