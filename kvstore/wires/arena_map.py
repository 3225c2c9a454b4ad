"""A node's arena in this process: mapped once, read and written in place."""

import ctypes
import fcntl
import mmap
import operator
import os
from collections.abc import Sequence

from kvstore.buffers import advise
from kvstore.errors import ProtocolError
from kvstore.sync import Event

_MADV_POPULATE_READ = 22  # Linux 5.14; mmap does not name it
# Entered into the page table by one call: about 75 us, for which a thread that maps or unmaps memory may wait.
_POPULATE_STEP_NBYTES = 1 << 20
_DEPOPULATE_STEP_NBYTES = 64 << 20


class ArenaMap:
    """`nbytes` of the node's memory, shared and writable. Thread-safe.

    There is no `close`: the map goes when the last view of it is gone, so that no thread can touch
    memory that was unmapped, and memory of a node that died stays valid, if dead, for who still reads.

    `memory`, at `address`, is all of it, for a GPU driver that must be told once which memory to expect. Offsets and
    views come from the contexts of `kvstore.wires.shm`; other bytes belong to other clients.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """`fd` stays the caller's. Raises ProtocolError if it is not an arena of `nbytes` bytes."""
        size = os.fstat(fd).st_size
        if size != nbytes or not nbytes:
            raise ProtocolError(f"the node passed an arena of {size} bytes and said that it has {nbytes}")
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ProtocolError("the node passed a file that is no arena: it can not be sealed") from error
        if not seals & fcntl.F_SEAL_SHRINK:  # reading behind the end of a file that shrank kills the reader
            raise ProtocolError("the node passed an arena that could shrink under its readers")
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        # A forked child may live on when this process is gone and its slots belong to others.
        self._map.madvise(mmap.MADV_DONTFORK)
        self.memory = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def check(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Raises ProtocolError if one of these slots lies outside the arena."""
        if max(map(operator.add, offsets, sizes), default=0) > self.nbytes:
            for offset, nbytes in zip(offsets, sizes, strict=True):
                if offset + nbytes > self.nbytes:
                    raise ProtocolError(f"a slot at {offset}+{nbytes} in an arena of {self.nbytes} bytes")

    def views(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Of slots that were checked."""
        return [self.memory[offset : offset + nbytes] for offset, nbytes in zip(offsets, sizes, strict=True)]

    def populate(self, stop: Event) -> None:
        """Enters the arena into this process's page table, until done or told to stop.

        Otherwise the first use of each 4 KiB pays for it, which makes the first pass over the arena
        three times slower (measured). 75 ms per GiB, in small steps between which others may run.
        """
        for start in range(0, self.nbytes, _POPULATE_STEP_NBYTES):
            try:
                advise(self._map, _MADV_POPULATE_READ, start, min(_POPULATE_STEP_NBYTES, self.nbytes - start))
            except OSError:
                return  # an older kernel: each page enters when it is first used
            if stop.wait(0.0001):
                return

    def depopulate(self) -> None:
        """Takes the arena out of the page table again. Bytes and views stay: who still uses one enters its page anew.

        Python unmaps with the GIL, 60 ms and more for each GiB that is entered, in whichever thread drops the last
        view; after this, next to nothing is left to do then.
        """
        for start in range(0, self.nbytes, _DEPOPULATE_STEP_NBYTES):
            advise(self._map, mmap.MADV_DONTNEED, start, min(_DEPOPULATE_STEP_NBYTES, self.nbytes - start))
