"""Make a benchmark's directory on a real disk, and remove it at the end."""

import argparse
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TMPFS = frozenset(("tmpfs", "ramfs", "devtmpfs"))


def add_dir(options: argparse.ArgumentParser) -> None:
    """Add the option --dir."""
    options.add_argument(
        "--dir", type=Path, default=Path("."), help="write under this directory (%(default)s)"
    )


@contextlib.contextmanager
def workplace(directory: Path, needed_nbytes: int = 0) -> Iterator[Path]:
    """Make a directory on a real disk with `needed_nbytes` free.

    Ends the benchmark with a message if that is memory instead of a disk, or less is free.
    """
    kind = file_system(directory)
    if kind in TMPFS:
        raise SystemExit(
            f"{directory} is in memory ({kind}); name a directory on a disk with --dir"
        )
    free = shutil.disk_usage(directory).free
    if free < needed_nbytes:
        raise SystemExit(
            f"{directory} has {free >> 20} MiB free, {needed_nbytes >> 20} are needed; see --dir, "
            "--help"
        )
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=directory) as name:
        yield Path(name)


def file_system(directory: Path) -> str:
    """Return the kind of file system: 'ext4', 'xfs', 'overlay', ..."""
    resolved = directory.resolve()
    found, kind = -1, "?"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        mount, mounted_kind = line.split()[1:3]
        point = Path(mount.encode().decode("unicode_escape"))  # blanks are written as \040
        if resolved.is_relative_to(point) and len(point.parts) >= found:
            found, kind = len(point.parts), mounted_kind
    return kind


def direct_works(directory: Path) -> bool:
    """Return whether the file system takes `O_DIRECT`."""
    try:
        os.close(os.open(directory / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def written_nbytes(pid: int) -> int:
    """Return the bytes that a process has sent to storage, without the journal."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("write_bytes:"):
            return int(line.split()[1])
    return 0


def private_nbytes(pid: int) -> int:
    """Return a process's resident bytes outside shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, also of those that have ended."""
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3), which Python does not have
