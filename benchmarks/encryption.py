"""What encryption costs the disk tier: encrypted beside plain beside bare direct file I/O, and the cipher alone.

    limit       as in disk.py: threads that read and write the same sizes in files, `O_DIRECT` where it works
    plain       the node's disk tier and its keeper, as in disk.py
    encrypted   the same with a key: pages are encrypted by the keeper, and deciphered where they are read
    cipher      AES-256-XTS by itself, in units of a MiB or of a page that is smaller, in memory

Sustained writing into a full store, which ends with all on the medium, and reading in random order, each page verified.
The contenders take turns of 256 MiB. GB/s: 10^9 page bytes in the median turn, and in the slowest and the fastest.
Aim: encrypted at least 0.8 of plain.

    python benchmarks/encryption.py [--dir DIR] [--page-kib 64 1024 4096] [--gib 1.5] [--json]
"""

import functools
import mmap
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from disk import TURN_NBYTES, BareFiles, Page, Pages, Store, Tier, read_turn, write_turns
from measure import Report, Samples, median, parser, progress, rounds
from workplace import add_dir, direct_works, file_system, workplace

from node.disk.seal import UNIT_NBYTES, Seal
from node.disk.vault import Locked
from node.ram.arena import Arena

PAGE_KIB = (64, 1024, 4096)
THREADS = (1, 2)
SPACE_FACTOR = 4
AIM = 0.8
CIPHER_NBYTES = 64 << 20  # of one turn of the cipher alone
PLAIN, ENCRYPTED = "plain", "encrypted"


def size_rows(directory: Path, arena: Arena, page_nbytes: int, nbytes: int, tick: Callable[[], None]) -> list[Any]:
    pages = Pages(arena, page_nbytes)
    count, capacity = nbytes // TURN_NBYTES, nbytes // page_nbytes
    fill: list[tuple[list[Page], list[Page]]] = [(pages.turn(), []) for _ in range(count)]
    more = [(pages.turn(), fill[i][0]) for i in range(count)]
    stores: dict[str, Store] = {
        "limit": BareFiles(directory / "limit", arena, capacity, page_nbytes),
        PLAIN: Tier(directory / PLAIN, arena, capacity, page_nbytes),
        ENCRYPTED: Tier(directory / ENCRYPTED, arena, capacity, page_nbytes, Locked(os.urandom(32))),
    }
    write_turns(stores, fill, tick)
    samples, _ = write_turns(stores, more, tick)
    rows = op_rows(page_nbytes, "sustained write", samples)
    there = pages.made[-capacity:]
    for threads in THREADS:
        with ThreadPoolExecutor(threads) as pool:
            reads = {
                name: functools.partial(read_turn, pool, threads, store.read, there)  # type: ignore[attr-defined]
                for name, store in stores.items()
            }
            rows += op_rows(page_nbytes, f"random read, threads: {threads}", rounds(reads, count, 1, tick))
    for store in stores.values():
        store.close()
    return rows


def op_rows(page_nbytes: int, op: str, samples: dict[str, Samples]) -> list[dict[str, Any]]:
    spent = {name: found["turn"] for name, found in samples.items()}
    return [row(page_nbytes, op, name, spent[name], TURN_NBYTES, spent.get(PLAIN)) for name in spent]


def row(
    page_nbytes: int, op: str, name: str, spent: list[float], nbytes: int, plain: list[float] | None
) -> dict[str, Any]:
    ratio = median(plain) / median(spent) if plain and name == ENCRYPTED else None
    return {
        "page KiB": page_nbytes >> 10,
        "operation": op,
        "contender": name,
        "GB/s": round(nbytes / median(spent) / 1e9, 2),
        "slowest": round(nbytes / max(spent) / 1e9, 2),
        "fastest": round(nbytes / min(spent) / 1e9, 2),
        "of plain": None if ratio is None else round(ratio, 2),
        f"aim {AIM}": None if ratio is None else "met" if ratio >= AIM else "missed",
    }


def cipher_rows(page_nbytes: int, count: int) -> list[dict[str, Any]]:
    """Encrypting from one place to another, as the keeper does, and deciphering in place, as a reader does."""
    unit = min(page_nbytes, UNIT_NBYTES)
    seal = Seal(0, os.urandom(64), os.urandom(8))

    def encrypt(source: memoryview, target: memoryview) -> None:
        seal.encrypt(0, source, target)

    def decipher(source: memoryview, target: memoryview) -> None:
        seal.decrypt(0, target)

    def work(call: Callable[[memoryview, memoryview], None], turns: int) -> None:
        source, target = memoryview(mmap.mmap(-1, unit)), memoryview(mmap.mmap(-1, unit))
        for _ in range(turns):
            call(source, target)

    rows = []
    for name, call in (("encrypt", encrypt), ("decipher", decipher)):
        for threads in THREADS:
            spent = []
            turns = CIPHER_NBYTES // unit
            with ThreadPoolExecutor(threads) as pool:
                for _ in range(count + 1):
                    start = time.perf_counter()
                    list(pool.map(work, [call] * threads, [turns] * threads))
                    spent.append(time.perf_counter() - start)
            done = threads * turns * unit
            rows.append(row(page_nbytes, f"{name}, threads: {threads}", "cipher", spent[1:], done, None))
    return rows


def main(argv: list[str]) -> None:
    options = parser(__doc__)
    add_dir(options)
    options.add_argument("--page-kib", type=int, nargs="+", default=PAGE_KIB, help="page sizes (%(default)s)")
    options.add_argument("--gib", type=float, default=1.5, help="data of each store (%(default)s)")
    args = options.parse_args(argv)
    nbytes = max(5, int(args.gib * (1 << 30)) // TURN_NBYTES) * TURN_NBYTES
    report = Report(
        f"Encryption of the disk tier, {nbytes / (1 << 30):g} GiB a store", "python benchmarks/encryption.py"
    )
    arena = Arena(TURN_NBYTES)
    for start in range(0, TURN_NBYTES, 1 << 20):
        arena.view(start, 1 << 20)[:] = os.urandom(1 << 20)
    count = nbytes // TURN_NBYTES
    with workplace(args.dir, SPACE_FACTOR * nbytes) as base:
        direct = "O_DIRECT" if direct_works(base) else "the page cache: O_DIRECT does not work here"
        report.notes.append(f"{file_system(base)}, {direct}; medians and range of {count} turns; random bytes")
        with progress(len(args.page_kib) * (2 * count + len(THREADS) * (count + 1))) as tick:
            for kib in args.page_kib:
                report.rows += cipher_rows(kib << 10, count)
                with workplace(base) as directory:
                    report.rows += size_rows(directory, arena, kib << 10, nbytes, tick)
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
