"""Measure the start of a node with 1,000,000 pages on disk, and their cost in RAM.

Rows are made as the disk tier makes them, in random order of keys, slots and uses. The pages
themselves do not exist: a start never reads them, and scrubbing, which would, is off. The limit is
reading and checking the rows alone, in this process, right before. "cold": the rows' files were
dropped from the page cache. CPU: user and system time of the node's threads until it serves,
without its I/O process, which reads the rows meanwhile. Resident bytes: RssAnon of the node then,
less that of a node with no rows, per page. Aim: ready to serve in 10 s; about 64 resident bytes a
page.

    python benchmarks/restart.py [--dir DIR] [--pages 1000000] [--page-kib 1024] [--starts 3]
        [--json]
"""

import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from measure import Report, median, parser, progress, timed
from workplace import add_dir, cpu_s, file_system, private_nbytes, workplace

from kvstore import Client, client_config
from kvstore.keys import Namespace
from kvstore.layout import opaque_layout
from kvstore.messages import namespace_message
from kvstore.tools.node_process import NodeProcess
from node.disk.rows import PageRow, Rows, parse_page_row

EXTENT_NBYTES = 64 << 20
BATCH_ROWS = 64  # as many as the disk tier's writer combines
AIM_S = 10.0
AIM_NBYTES = 64
NODE_FLAGS = ("--ram-bytes", "64MiB", "--extent-bytes", "64MiB", "--scrub-bytes-per-s", "0")


class Start(NamedTuple):
    """Seconds, CPU seconds and resident bytes of a node until it serves."""

    seconds: float
    cpu_s: float
    nbytes: int


class Population:
    """Rows of `count` pages that fill a disk, and the flags of a node for it."""

    def __init__(self, directory: Path, count: int, page_nbytes: int) -> None:
        self.directory, self.count, self.page_nbytes = directory, count, page_nbytes
        per_extent = EXTENT_NBYTES // page_nbytes
        self.capacity_nbytes = max(1, -(-count // per_extent)) * EXTENT_NBYTES
        self._offsets = [
            number // per_extent * EXTENT_NBYTES + number % per_extent * page_nbytes
            for number in range(count)
        ]
        random.shuffle(self._offsets)

    def write(self, tick: Callable[[], None]) -> None:
        """Write the rows."""
        namespace = Namespace(model="benchmark", layout=opaque_layout(self.page_nbytes))
        rows = Rows(self.directory / "rows", EXTENT_NBYTES)
        rows.write({1: namespace_message(namespace).SerializeToString()}, [], [])
        for start in range(0, self.count, BATCH_ROWS):
            rows.write({}, self._batch(start), [])
            tick()
        rows.sync()
        rows.close()
        extents = self.directory / "extents"
        extents.mkdir()
        for number in range(self.capacity_nbytes // EXTENT_NBYTES):
            with open(extents / f"{number:06d}", "wb") as file:
                file.truncate(EXTENT_NBYTES)  # rows of an empty extent are dropped

    def _batch(self, start: int) -> Iterator[PageRow]:
        now_s = int(time.time())
        for offset in self._offsets[start : start + BATCH_ROWS]:
            used_s = now_s - random.randrange(7 * 24 * 3600)
            page_hash, checksum = secrets.token_bytes(32), secrets.token_bytes(16)
            yield PageRow(1, page_hash, offset, self.page_nbytes, used_s, used_s, 0, checksum)

    def scan(self) -> None:
        """Read and check every row: the limit."""
        rows = Rows(self.directory / "rows", EXTENT_NBYTES)
        assert (
            sum(parse_page_row(key, value) is not None for key, value in rows.pages()) == self.count
        )
        rows.close()

    def drop_cache(self) -> None:
        """Drop the rows' files from the page cache."""
        for path in (self.directory / "rows").iterdir():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def start(self) -> Start:
        """Start and stop a node; every row must have become a page."""
        begun = time.perf_counter()
        disk = ("--data-dir", str(self.directory), "--disk-bytes", str(self.capacity_nbytes))
        with NodeProcess(*NODE_FLAGS, *disk, "--disk-extent-bytes", str(EXTENT_NBYTES)) as node:
            start = Start(time.perf_counter() - begun, cpu_s(node.pid), private_nbytes(node.pid))
            with Client(client_config(address=node.address, timeout_s=30.0)) as client:
                found = client.node_status().disk
            assert (found.page_count, found.rows_damaged) == (self.count, 0), (
                "not every row became a page"
            )
        return start


def rows_of(
    full: Population, empty: Population, starts: int, tick: Callable[[], None]
) -> list[dict[str, Any]]:
    """Return the table's rows."""
    nothing = [empty.start() for _ in range(starts)]
    base_nbytes = median([start.nbytes for start in nothing])
    found = []
    for name in ("cold", "warm"):
        scans, started = [], []
        for _ in range(starts):
            if name == "cold":
                full.drop_cache()
            scans.append(timed(full.scan))
            if name == "cold":
                full.drop_cache()
            started.append(full.start())
            tick()
        seconds = median([start.seconds for start in started])
        per_page = (median([start.nbytes for start in started]) - base_nbytes) / full.count
        met = seconds <= AIM_S
        found.append(
            {
                "rows": f"{full.count:,}",
                "page cache": name,
                "ready after s": round(seconds, 2),
                "CPU s": round(median([start.cpu_s for start in started]), 2),
                "rows alone s": round(median(scans), 2),
                "node without rows s": round(median([start.seconds for start in nothing]), 2),
                "resident bytes a page": round(per_page, 1),
                f"aim {AIM_S:g} s": "met" if met else "missed",
            }
        )
    return found


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    add_dir(options)
    options.add_argument("--pages", type=int, default=1_000_000, help="rows (%(default)s)")
    options.add_argument("--page-kib", type=int, default=1024, help="page size (%(default)s)")
    options.add_argument(
        "--starts", type=int, default=3, help="starts, cold and warm each (%(default)s)"
    )
    args = options.parse_args(argv)
    report = Report(
        f"Start of a node with {args.pages:,} pages on disk", "python benchmarks/restart.py"
    )
    with workplace(args.dir, args.pages * 1024) as directory:
        full = Population(directory / "full", args.pages, args.page_kib << 10)
        empty = Population(directory / "empty", 0, args.page_kib << 10)
        for population in (full, empty):
            population.directory.mkdir()
        with progress(-(-args.pages // BATCH_ROWS) + 2 * args.starts) as tick:
            full.write(tick)
            empty.write(tick)
            report.rows = rows_of(full, empty, args.starts, tick)
        report.notes.append(
            f"{file_system(directory)}; pages of {args.page_kib} KiB; medians of {args.starts} "
            "starts"
        )
        report.notes.append(f"aim of the resident bytes: about {AIM_NBYTES}")
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
