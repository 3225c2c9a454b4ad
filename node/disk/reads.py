"""Reads from disk that are under way, and whether one of them hangs.

Nobody can end a read that hangs, and whoever began it waits for it. Others need not begin one: as long as it hangs,
what is on disk only is not there, and is computed anew, which is sooner done. A large page is read in pieces, each with
its own time, and what is done with them here, hashing say, is no time of the disk.
"""

import contextlib
import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterator

from kvstore.checksum import LEAF_SUM_NBYTES, Leaves, cuts, leaf, leaves
from kvstore.layout import slot_nbytes
from node.disk.directory import PageFiles
from node.disk.seal import Place
from node.ram.parts import Parts

log = logging.getLogger(__name__)

HANGS_S = 2.0  # a read of a piece takes milliseconds, and on a disk with much to do tenths of a second
PIECE_NBYTES = 4 << 20  # at once into a slot: larger ones are hardly faster
VERIFIED_NBYTES = 1 << 20  # at once beside the arena: all the memory that a verify takes


class Read:
    """A use of a record, whose page is read piece by piece."""

    def __init__(self, begin: Callable[["Read"], None], end: Callable[["Read"], None]) -> None:
        self._begin = begin
        self._end = end

    def page(self, files: PageFiles, place: Place, slot: memoryview, page_nbytes: int) -> bytes:
        """Fills the slot; the leaves of the page, none if it can not be there. Raises OSError."""
        return leaves(slot[:page_nbytes]) if self._pieces(files, place, 0, slot) else b""

    def parts(self, files: PageFiles, place: Place, slot: memoryview, parts: Parts, known: bytes) -> bytes:
        """Fills the slot with parts of a page. The leaves of the page, those of other parts as they are `known`."""
        at, found = 0, bytearray(known)
        for start, end in parts.runs:
            if not self._pieces(files, place, start, slot[at : at + end - start]):
                return b""
            at += end - start
        for number in parts.numbers:
            start, end = cuts(parts.page_nbytes)[number]
            at = parts.place(start)
            part = slot[at : at + end - start]
            found[LEAF_SUM_NBYTES * number : LEAF_SUM_NBYTES * (number + 1)] = leaf(part)
        return bytes(found)

    def leaves(self, files: PageFiles, place: Place, page_nbytes: int) -> bytes:
        """The same of a page that nobody wants but for that."""
        end, found = slot_nbytes(page_nbytes), Leaves(page_nbytes)
        memory = memoryview(mmap.mmap(-1, min(end, VERIFIED_NBYTES)))  # page-aligned, as O_DIRECT needs it
        for start in range(0, end, VERIFIED_NBYTES):
            view = memory[: end - start]
            if not self._piece(files, place, start, view):
                return b""
            found.update(view[: page_nbytes - start])
        return found.digest()

    def _pieces(self, files: PageFiles, place: Place, first: int, slot: memoryview) -> bool:
        return all(
            self._piece(files, place, first + start, slot[start : start + PIECE_NBYTES])
            for start in range(0, slot.nbytes, PIECE_NBYTES)
        )

    def _piece(self, files: PageFiles, place: Place, start: int, view: memoryview) -> bool:
        """What lies from `start` on in the page's slot, plain."""
        self._begin(self)
        found = files.read(place.offset + start, view)
        self._end(self)
        if found and place.seal is not None:
            place.seal.decrypt(start, view)
        return found


class Reads:
    """Thread-safe. `ended(record)` is called behind each."""

    def __init__(self, ended: Callable[[int], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._ended = ended
        self._clock = clock
        self._lock = threading.Lock()
        self._begun: dict[Read, float] = {}  # oldest first
        self._told: Read | None = None

    @contextlib.contextmanager
    def of(self, record: int) -> Iterator[Read]:
        this = Read(self._begin, self._end)
        self._begin(this)
        try:
            yield this
        finally:
            self._end(this)
            self._ended(record)

    def _begin(self, this: Read) -> None:
        self._end(this)
        with self._lock:
            self._begun[this] = self._clock()

    def _end(self, this: Read) -> None:
        with self._lock:
            self._begun.pop(this, None)
            if self._told is this:
                self._told = None

    @property
    def hang(self) -> bool:
        with self._lock:
            oldest = next(iter(self._begun), None)
            if oldest is None or self._clock() - self._begun[oldest] < HANGS_S:
                return False
            first, self._told = oldest is not self._told, oldest
        if first:
            log.error("a read from disk has taken %g s: until it ends, pages on disk are misses", HANGS_S)
        return True
