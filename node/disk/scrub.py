"""Verify pages on disk, on demand and slowly in the background."""

import threading
from collections.abc import Callable
from typing import NamedTuple

from kvstore.errors import Exhausted
from node.disk.rows import parse_page_row
from node.disk.tier import DiskTier

STEP_S = 0.25  # interval of the background scrub
STOP_S = 2.0  # for its current read; a thread that waits for a disk is left behind
ROUND_PAUSE_S = 60.0  # a round over an empty or small disk ends at once


class ScrubResult(NamedTuple):
    """Pages verified, bytes read, and the cursor to go on from; empty at the end."""

    intact: int
    damaged: int
    nbytes: int
    next_cursor: bytes


def scrub(
    disk: DiskTier, cursor: bytes, nbytes_max: int, enough: Callable[[], bool] = lambda: False
) -> ScrubResult:
    """Read and verify pages on disk in key order from `cursor` on; drop damaged ones.

    It ends after `nbytes_max` bytes, or when `enough` returns True. Raises OSError if the tier is
    stopped, Exhausted if the disk hangs.
    """
    intact = damaged = nbytes = 0
    for key, value in disk.rows.pages(cursor or b"P"):
        if nbytes >= nbytes_max or enough():
            return ScrubResult(intact, damaged, nbytes, key)
        row = parse_page_row(key, value)
        borrowed = disk.reading.borrow(row) if row is not None else None
        if row is None or borrowed is None:
            continue
        try:
            good = disk.reading.verify(borrowed)
        except OSError:
            _raise_if_stopped(disk)  # with the tier's reason, if it has one
            raise
        intact, damaged, nbytes = intact + good, damaged + (not good), nbytes + row.slot_nbytes
    _raise_if_stopped(disk)
    return ScrubResult(intact, damaged, nbytes, b"")


def _raise_if_stopped(disk: DiskTier) -> None:
    if disk.stop_reason:
        raise OSError(disk.stop_reason)


class Scrubber:
    """Verify the disk tier in the background, round after round, at a bounded rate."""

    def __init__(self, disk: DiskTier, nbytes_per_s: int) -> None:
        self._disk = disk
        self._nbytes_per_s = nbytes_per_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scrub", daemon=True)

    def start(self) -> None:
        """Start the thread, if there is a rate."""
        if self._nbytes_per_s:
            self._thread.start()

    def _run(self) -> None:
        cursor, pause_s = b"", STEP_S
        while not self._stop.wait(pause_s):
            try:
                result = scrub(self._disk, cursor, int(self._nbytes_per_s * STEP_S))
            except (OSError, MemoryError) as error:
                self._disk.on_error("scrubbing", error)
                result = None
            except Exhausted:  # the disk hangs, which is no damage of its pages
                result = None
            cursor = result.next_cursor if result else b""
            pause_s = (
                max(STEP_S, result.nbytes / self._nbytes_per_s)
                if cursor and result
                else ROUND_PAUSE_S
            )

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
