"""Measure a range of a page on disk, beside the whole page.

    bare range    `preadv` of 1 MiB with `O_DIRECT` from the node's own files, at random places: the
                  limit
    range         `get_ranges` of 1 MiB that is one leaf of the page
    page          `get` of the page

One caller, one page a call. The pages of a size are three times the RAM. Before each call one is
chosen that is not in RAM, untimed. The contenders take turns.

    python benchmarks/disk_ranges.py [--dir DIR] [--page-mib 16 64] [--rounds 10] [--json]
"""

import functools
import mmap
import os
import random
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import Report, Samples, median, parser, percentile, progress, rounds, timed
from workplace import add_dir, direct_works, file_system, workplace

from kvstore import ByteRange, Client, Namespace, client_config
from kvstore.layout import opaque_layout
from kvstore.tools.node_process import NodeProcess

PAGE_MIB = (16, 64)
WIRES = ("shm", "bulk")
CALLS = 8  # of a turn
RANGE_NBYTES = 1 << 20
RAM_NBYTES = 512 << 20
PAGES_NBYTES = 3 * RAM_NBYTES
FLAGS = (
    "--ram-bytes",
    str(RAM_NBYTES),
    "--extent-bytes",
    "64MiB",
    "--scrub-bytes-per-s",
    "0",
    "--log-level",
    "WARNING",
)
BARE = "bare range"


class Pages:
    """Pages of one size on a node, over one wire."""

    def __init__(self, address: str, wire: str, page_nbytes: int) -> None:
        self._client = Client(client_config(address=address, wire=wire, timeout_s=60.0))
        self._namespace = Namespace(model="benchmark", layout=opaque_layout(page_nbytes))
        self._page_nbytes = page_nbytes
        self._hashes: list[bytes] = []
        self._page, self._range = bytearray(page_nbytes), bytearray(RANGE_NBYTES)

    def put(self, count: int) -> list[bytes]:
        """Put a batch."""
        data = os.urandom(self._page_nbytes)
        hashes = [secrets.token_bytes(32) for _ in range(count)]
        for prefix_hash in hashes:
            self._client.put(self._namespace, [prefix_hash], [data])
            self._client.flush()
        return hashes

    def know(self, hashes: list[bytes]) -> None:
        """Set the pages to read."""
        self._hashes = hashes

    def _on_disk_only(self) -> bytes:
        stats = zip(self._hashes, self._client.stat(self._namespace, self._hashes), strict=True)
        return random.choice(
            [prefix_hash for prefix_hash, stat in stats if stat.on_disk and not stat.in_ram]
        )

    def page(self) -> Samples:
        """Time gets of whole pages."""
        return {
            "call": [
                timed(functools.partial(self._get, self._on_disk_only())) for _ in range(CALLS)
            ]
        }

    def range(self) -> Samples:
        """Time gets of ranges."""
        return {
            "call": [
                timed(functools.partial(self._get_range, self._on_disk_only()))
                for _ in range(CALLS)
            ]
        }

    def _get(self, prefix_hash: bytes) -> None:
        assert self._client.get(self._namespace, [prefix_hash], [self._page]) == [True]

    def _get_range(self, prefix_hash: bytes) -> None:
        offset = random.randrange(self._page_nbytes // RANGE_NBYTES) * RANGE_NBYTES
        part = ByteRange(offset, RANGE_NBYTES)
        assert self._client.get_ranges(self._namespace, [prefix_hash], [part], [self._range]) == [
            True
        ]

    def close(self) -> None:
        """Stop everything that was started."""
        self._client.close()


def bare(paths: list[Path], memory: mmap.mmap, direct: bool) -> Samples:
    """Time bare reads of ranges."""
    samples = []
    for path in random.choices(paths, k=CALLS):
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        offset = random.randrange(os.fstat(fd).st_size // RANGE_NBYTES) * RANGE_NBYTES
        samples.append(timed(functools.partial(os.preadv, fd, [memory], offset)))
        os.close(fd)
    return {"call": samples}


def size_rows(
    directory: Path, page_nbytes: int, count: int, tick: Callable[[], None]
) -> list[dict[str, Any]]:
    """Return the rows of one size."""
    data = ("--data-dir", str(directory), "--disk-bytes", str(2 * PAGES_NBYTES))
    with NodeProcess(*FLAGS, *data) as node, mmap.mmap(-1, RANGE_NBYTES) as memory:
        pages = {wire: Pages(node.address, wire, page_nbytes) for wire in WIRES}
        hashes = pages[WIRES[0]].put(PAGES_NBYTES // page_nbytes)
        paths = [path for path in (directory / "extents").iterdir() if path.stat().st_size]
        contenders: dict[str, Callable[[], Samples]] = {
            BARE: functools.partial(bare, paths, memory, direct_works(directory))
        }
        for wire in WIRES:
            pages[wire].know(hashes)
            contenders |= {f"range, {wire}": pages[wire].range, f"page, {wire}": pages[wire].page}
        samples = rounds(contenders, count, 1, tick)
        for each in pages.values():
            each.close()
    limit_s = median(samples[BARE]["call"])
    return [
        {
            "page MiB": page_nbytes >> 20,
            "what": name,
            "p50 ms": round(median(found["call"]) * 1e3, 2),
            "p90 ms": round(percentile(found["call"], 90) * 1e3, 2),
            "p50 to bare": round(median(found["call"]) / limit_s, 1),
        }
        for name, found in samples.items()
    ]


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    add_dir(options)
    options.add_argument(
        "--page-mib", type=int, nargs="+", default=PAGE_MIB, help="page sizes (%(default)s)"
    )
    options.add_argument(
        "--rounds", type=int, default=10, help="turns of each contender (%(default)s)"
    )
    args = options.parse_args(argv)
    report = Report("A range of 1 MiB of a page on disk", "python benchmarks/disk_ranges.py")
    with workplace(args.dir, 3 * PAGES_NBYTES) as directory:
        report.notes.append(
            f"{file_system(directory)}; one caller, random pages that are not in RAM"
        )
        with progress(len(args.page_mib) * (args.rounds + 1)) as tick:
            for mib in args.page_mib:
                report.rows += size_rows(directory / str(mib), mib << 20, args.rounds, tick)
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
