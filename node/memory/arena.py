"""Map the RAM tier's memory: one anonymous shared-memory file, divided by offsets.

A memfd is not limited by the size of /dev/shm (64 MB in a container by default) and has no name
that could outlive the process; another process on this host maps it through its descriptor. It uses
huge pages if the system gives them to shared memory on request (docs/decisions/0009).
"""

import contextlib
import fcntl
import mmap
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kvstore.buffers import advise, copy
from kvstore.errors import ConfigError

_POPULATE_STEP_NBYTES = 16 << 20  # takes 8 ms, on some virtual machines 160
# Controller in /proc/self/cgroup, folder, file: of version 2, and of version 1. Beyond this limit
# the kernel kills the node at its start, without a message.
_CGROUPS = (("", "", "memory.max"), ("memory", "memory", "memory.limit_in_bytes"))
_USED = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
_SHMEM_ENABLED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
_GIVING = re.compile(rb"\[(always|within_size|advise|force)\]")
_ZEROS = memoryview(bytes(1 << 20))
_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap names it only from Python 3.14 on


class Arena:
    """`nbytes` of shared memory.

    Any thread may use `view`; the tier decides which bytes a thread may touch.
    """

    def __init__(self, nbytes: int) -> None:
        available = available_nbytes()
        if nbytes > available:
            raise ConfigError(
                f"ram_nbytes={nbytes} is more than the {available} bytes of memory available here"
            )
        self.nbytes = nbytes
        self.fd = os.memfd_create("kvstore-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        # Clients get this descriptor. None of them may shorten the file: accessing a map behind the
        # file's end kills the accessing process.
        fcntl.fcntl(
            self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        self._map = mmap.mmap(self.fd, nbytes)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.huge_nbytes = 0  # in huge pages, as far as `populate` got
        self._memory = memoryview(self._map)

    def populate(self, pulse: Callable[[], None] = lambda: None) -> None:
        """Touch all pages now: otherwise the first puts would take twice as long.

        `pulse` is called now and then and may raise to end it.
        """
        for start in range(0, self.nbytes, _POPULATE_STEP_NBYTES):
            pulse()
            try:
                advise(
                    self._map,
                    _MADV_POPULATE_WRITE,
                    start,
                    min(_POPULATE_STEP_NBYTES, self.nbytes - start),
                )
            except OSError:
                return  # an older kernel: memory is allocated at its first use
        self.huge_nbytes = huge_nbytes(os.fstat(self.fd).st_ino)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a view of the arena."""
        return self._memory[offset : offset + nbytes]

    def views(self, offsets: Iterable[int], nbytes: int) -> list[memoryview]:
        """Return views of one size at several offsets."""
        memory = self._memory
        return [memory[offset : offset + nbytes] for offset in offsets]

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copy bytes within the arena."""
        copy(self.view(target, nbytes), self.view(source, nbytes))

    def zero(self, offset: int, nbytes: int) -> None:
        """Overwrite bytes with zeros."""
        for start in range(offset, offset + nbytes, _ZEROS.nbytes):
            piece = self.view(start, min(_ZEROS.nbytes, offset + nbytes - start))
            copy(piece, _ZEROS[: piece.nbytes])

    def close(self) -> None:
        """Unmap the arena, whose views must be gone.

        A transfer that still runs keeps the map.
        """
        self._memory.release()
        try:
            self._map.close()
        except BufferError:
            pass  # a connection's thread still holds a view; the process is about to end anyway
        os.close(self.fd)


def huge_nbytes(inode: int) -> int:
    """Return how many bytes of a file this process has mapped in huge pages.

    It is 0 if the kernel gives none or does not report them. For memory without huge pages it takes
    20 to 40 ms per GiB.
    """
    is_ours, nbytes = False, 0
    with contextlib.suppress(OSError), open(_SHMEM_ENABLED, "rb") as file:
        if not _GIVING.search(file.read()):
            return 0
    with contextlib.suppress(OSError), open("/proc/self/smaps", "rb") as file:
        for line in file:
            first, *others = line.split()
            # first line of a map: range, rights, offset, device, inode
            if not first.endswith(b":"):
                is_ours = others[3] == b"%d" % inode
            elif is_ours and first == b"ShmemPmdMapped:":
                nbytes += int(others[0]) * 1024
    return nbytes


def available_nbytes() -> int:
    """Return the memory that is available without swapping, within the limits on this process."""
    return min(_host_nbytes(), *map(_limit_nbytes, _limit_files()))


def unused_nbytes() -> int:
    """Return `available_nbytes` without what processes under the same limits use already."""
    return min(_host_nbytes(), *(_limit_nbytes(one) - _used_nbytes(one) for one in _limit_files()))


def _limit_files(process: str = "/proc/self", mounted: str = "/sys/fs/cgroup") -> Iterator[Path]:
    """Yield the files with limits of this process's control groups, and of those above them.

    A container sees its own as the topmost. A service's or a job's lies below it.
    """
    lines = _text(Path(process, "cgroup")).splitlines()
    for controller, folder, name in _CGROUPS:
        paths = [
            path
            for _, some, path in (line.split(":", 2) for line in lines)
            if controller in some.split(",")
        ]
        for path in paths or ["/"]:
            group = Path(mounted, folder, path.lstrip("/"))
            yield group / name
            for _ in Path(path).parents:
                group = group.parent
                yield group / name


def _limit_nbytes(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdigit() else sys.maxsize  # "max"


def _used_nbytes(limit: Path) -> int:
    """Return the memory that counts to a limit, without that of files, which can be taken back."""
    used = _text(limit.with_name(_USED[limit.name])).strip()
    stat = dict(line.split() for line in _text(limit.with_name("memory.stat")).splitlines())
    files = sum(
        int(stat.get(f"total_{name}", stat.get(name, 0)))  # version 1 sums up those of all below
        for name in ("inactive_file", "active_file")
    )
    return max(0, int(used or 0) - files)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # no limit, or not this version of cgroups


def _host_nbytes() -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
