"""Measure how long the RAM tier's lock is held at most, with few and with many pages.

The longest hold of each operation in CPU time of its thread, which other processes do not lengthen;
garbage collection runs as in a node. The median over runs. No hold may grow with the pages, except
when a Python dict doubles, which `reserve` in a tier that is not full meets.

    python benchmarks/locks.py [--pages 16384 262144] [--runs 3] [--json]
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence

from measure import Report, median, parser, progress

from kvstore import Namespace
from kvstore.layout import opaque_layout
from node.memory.page import Namespaces
from node.memory.removal import remove_namespace
from node.memory.tier import RamTier
from node.process import SeldomCollections
from node.slab import SlotAllocator

PAGE_NBYTES = 4096
EXTENT_NBYTES = 16 << 20
BATCH = 4096


class TimedLock:
    """A lock that records the longest CPU time that one thread held it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.longest_s = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._start = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.longest_s = max(self.longest_s, time.thread_time() - self._start)
        self._lock.release()


class Box:
    """A tier without bytes, full of pages of 4 KiB."""

    def __init__(self, pages: int, full: bool = True) -> None:
        self.now_ms = 1
        self.slots = SlotAllocator(pages * PAGE_NBYTES, EXTENT_NBYTES)
        self.tier = RamTier(
            Namespaces(64, EXTENT_NBYTES),
            self.slots,
            lambda *_: None,
            lambda *_: None,
            lambda: self.now_ms,
        )
        self.digest = self.open(PAGE_NBYTES)
        self.keys = [number.to_bytes(32, "big") for number in range(pages)]
        self.new = [b"n" + number.to_bytes(31, "big") for number in range(BATCH)]
        if full:
            self.fill(self.keys)

    def open(self, page_nbytes: int) -> bytes:
        """Open a namespace."""
        namespace = Namespace(model=f"pages of {page_nbytes}", layout=opaque_layout(page_nbytes))
        self.tier.open_namespace(namespace, namespace.digest)
        return namespace.digest

    def fill(self, keys: Sequence[bytes]) -> None:
        """Store pages."""
        for start in range(0, len(keys), BATCH):
            self.now_ms += 1
            reservation = self.tier.reserve(self.digest, keys[start : start + BATCH], PAGE_NBYTES)
            self.tier.commit(reservation, [bytes(16)] * len(reservation.pages))

    def longest_s(self, work: Callable[[], object]) -> float:
        """Return the longest time that the lock was held during some work."""
        lock = self.tier.lock = TimedLock()  # type: ignore[assignment]
        work()
        return lock.longest_s


def fill(pages: int) -> float:
    """Measure puts into an empty tier."""
    box = Box(pages, full=False)
    return box.longest_s(lambda: box.fill(box.keys))


def reserve(pages: int) -> float:
    """Measure a reservation in a full tier."""
    box = Box(pages)
    return box.longest_s(lambda: box.tier.reserve(box.digest, box.new, PAGE_NBYTES))


def reserve_held(pages: int) -> float:
    """Measure a reservation with most pages held."""
    box = Box(pages)
    for start in range(0, pages * 3 // 4, BATCH):  # the oldest
        held = box.tier.live_all(box.tier.namespace(box.digest), box.keys[start : start + BATCH])
        box.tier.hold_all([page for page in held if page is not None])
    return box.longest_s(lambda: box.tier.reserve(box.digest, box.new, PAGE_NBYTES))


def reserve_large(pages: int) -> float:
    """Measure a reservation of large pages."""
    box = Box(pages)
    large = box.open(EXTENT_NBYTES)
    return box.longest_s(lambda: box.tier.reserve(large, box.new[:1], EXTENT_NBYTES))


def reserve_pins_end(pages: int) -> float:
    """Measure a reservation when many pins end."""
    box = Box(pages)
    for start in range(0, pages // 2, BATCH):
        box.tier.pin(box.digest, box.keys[start : start + BATCH], 1000)
    box.now_ms += 2000
    return box.longest_s(lambda: box.tier.reserve(box.digest, box.new, PAGE_NBYTES))


def remove(pages: int) -> float:
    """Measure the removal of pages."""
    box = Box(pages)
    return box.longest_s(lambda: box.tier.remove(box.digest, box.keys))


def remove_all(pages: int) -> float:
    """Measure the removal of a namespace."""
    box = Box(pages)
    return box.longest_s(lambda: remove_namespace(box.tier, box.digest))


WORK = {
    f"filling an empty tier, {BATCH} pages a call": fill,
    f"reserving {BATCH} pages in a full tier": reserve,
    "the same, 3/4 of the pages held, the oldest": reserve_held,
    "the same, the pins of half of the pages have just ended": reserve_pins_end,
    "reserving a page of 16 MiB in a full tier": reserve_large,
    "removing all pages in one call": remove,
    "removing the namespace": remove_all,
}


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument(
        "--pages", type=int, nargs="+", default=[16_384, 262_144], help="(%(default)s)"
    )
    options.add_argument("--runs", type=int, default=3, help="(%(default)s)")
    args = options.parse_args(argv)
    report = Report(
        "Longest hold of the RAM tier's lock, ms of CPU time",
        f"python benchmarks/locks.py {' '.join(argv)}",
    )
    SeldomCollections()
    with progress(len(WORK) * len(args.pages) * args.runs) as tick:
        for name, work in WORK.items():
            row: dict[str, object] = {"operation": name}
            for pages in args.pages:
                held_ms = []
                for _ in range(args.runs):
                    held_ms.append(1000 * work(pages))
                    tick()
                row[f"{pages} pages"] = (
                    f"{median(held_ms):.1f} ({min(held_ms):.1f}–{max(held_ms):.1f})"
                )
            report.rows.append(row)
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
