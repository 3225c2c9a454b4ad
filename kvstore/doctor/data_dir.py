"""Check a data directory on its node's host: `python -m kvstore.doctor.data_dir PATH`.

The test file has no name, so that nothing is left behind. Run it as the node's user.
"""

import errno
import mmap
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore.doctor.checks import Finding, fail, ok, print_findings, skipped, warn

MIB = 1 << 20
GIB = 1 << 30
WRITTEN_NBYTES, STEP_NBYTES = 32 * MIB, MIB
WRITTEN_S = 2.0  # seconds of writing; a slow disk gets fewer bytes
SYNCS, SYNC_NBYTES = 8, 4096
SLOW_NBYTES_PER_S, SLOW_SYNC_S = 100e6, 0.05
ROOM_NBYTES = GIB
USABLE_SHARE = 0.95  # share of the free space for --disk-bytes: rows and their log come on top
INODES_FEW = 10_000
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "virtiofs")
NO_DISK = ("tmpfs", "ramfs", "overlay")
LOCAL = "put --data-dir on ext4 or xfs on a local disk"


def findings(path: Path, mounts: str = "") -> Iterator[Finding]:
    """Yield findings on a data directory. `mounts` is the text of /proc/self/mounts."""
    where = path
    try:
        while not where.exists() and where != where.parent:
            where = where.parent
    except PermissionError:
        text = f"user {os.geteuid()} may not look into {where.parent}, or a folder above it"
        yield fail("data directory", text, "run this as the node's user, or as root")
        return
    yield permission(path, where)
    yield file_system(where.resolve(), mounts or Path("/proc/self/mounts").read_text())
    yield free_space(where)
    try:
        fd, direct = _opened(where)
    except OSError as error:
        yield skipped("O_DIRECT", f"no file can be created there: {error.strerror}")
        return
    try:
        yield _direct_io(direct)
        if _free_nbytes(where) < ROOM_NBYTES:
            yield skipped(
                "speed",
                "not measured: that needs space, and a node there may need all that is left",
            )
        else:
            yield speed(fd)
    finally:
        os.close(fd)


def permission(path: Path, where: Path) -> Finding:
    """Check access to the directory, or to its parent if it does not exist yet."""
    if not where.is_dir():
        return fail("data directory", f"{where} is no directory", "name another --data-dir")
    user = f"user {os.geteuid()}"
    if not os.access(where, os.W_OK | os.X_OK):
        remedy = f"run this as the node's user, or give it the directory: chown USER {where}"
        return fail(
            "data directory",
            f"{user} may not write in {where}, which is of user {where.stat().st_uid}",
            remedy,
        )
    if where != path:
        return ok(
            "data directory", f"{path} is not there yet; a node of {user} makes it in {where}"
        )
    return ok("data directory", f"{path}, of user {where.stat().st_uid}; {user} may write there")


def file_system(where: Path, mounts: str) -> Finding:
    """Check the kind of file system."""
    kind, device, point = "unknown", "?", ""
    for line in mounts.splitlines():
        device_, mounted, kind_ = (_unescaped(field) for field in line.split()[:3])
        inside = where == Path(mounted) or Path(mounted) in where.parents
        if inside and len(mounted) >= len(point):
            kind, device, point = kind_, device_, mounted
    text = f"{kind} on {device}, at {point or '?'}"
    if kind in REMOTE or kind.startswith("fuse"):
        return warn(
            "file system",
            f"{text}: not of this host",
            f"{LOCAL}: reads wait for the network, and may hang",
        )
    if kind in NO_DISK:
        return warn(
            "file system", text, f"{LOCAL}: this one is memory, or of a container and gone with it"
        )
    return ok("file system", text)


def free_space(where: Path) -> Finding:
    """Check the free space."""
    about = os.statvfs(where)
    free, whole = _free_nbytes(where), about.f_blocks * about.f_frsize
    text = (
        f"{free / GIB:,.1f} of {whole / GIB:,.1f} GiB free: --disk-bytes up to "
        f"{USABLE_SHARE * free / GIB:,.1f}GiB"
    )
    if free < ROOM_NBYTES:
        return fail(
            "room",
            text,
            "free some, or name another --data-dir: a node there stores few pages",
        )
    if about.f_files and about.f_favail < INODES_FEW:
        return warn("room", f"{text}, but only {about.f_favail:,} files", "free some inodes")
    return ok("room", text)


def _free_nbytes(where: Path) -> int:
    about = os.statvfs(where)
    return about.f_bavail * about.f_frsize


def speed(fd: int) -> Finding:
    """Measure the disk roughly: some MiB written and read, and a few syncs."""
    page = mmap.mmap(-1, STEP_NBYTES)  # page-aligned, as O_DIRECT needs it
    page[:] = os.urandom(STEP_NBYTES)
    began, written = time.monotonic(), 0
    while written < WRITTEN_NBYTES and time.monotonic() - began < WRITTEN_S:
        written += os.pwrite(fd, page, written)
    os.fdatasync(fd)
    writing = written / (time.monotonic() - began)
    began, read = time.monotonic(), 0
    while read < written and time.monotonic() - began < WRITTEN_S:
        got = os.preadv(fd, [page], read)
        read += got or written
    reading = read / (time.monotonic() - began)
    syncs = [_sync(fd, number) for number in range(SYNCS)]
    sync_s = statistics.median(syncs)
    text = (
        f"{writing / 1e6:,.0f} MB/s written, {reading / 1e6:,.0f} read, one thread; a sync "
        f"{1000 * sync_s:.1f} ms ({1000 * min(syncs):.1f} to {1000 * max(syncs):.1f})"
    )
    if writing < SLOW_NBYTES_PER_S or sync_s > SLOW_SYNC_S:
        remedy = (
            "pages may stay in RAM only, and durable puts may wait: use a faster or less busy disk"
        )
        return warn("speed", text, remedy)
    return ok("speed", text)


def _sync(fd: int, number: int) -> float:
    page = mmap.mmap(-1, SYNC_NBYTES)
    began = time.monotonic()
    os.pwrite(fd, page, number * SYNC_NBYTES)
    os.fdatasync(fd)
    return time.monotonic() - began


def _opened(where: Path) -> tuple[int, OSError | None]:
    """Open an unnamed file; return also why O_DIRECT is refused, or None."""
    fd, path = tempfile.mkstemp(prefix=".kvstore-doctor-", dir=where)
    try:
        direct = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        return fd, error
    finally:
        os.unlink(path)
    os.close(fd)
    return direct, None


def _direct_io(error: OSError | None) -> Finding:
    if error is None:
        return ok("O_DIRECT", "works")
    if error.errno == errno.EINVAL:
        remedy = f"{LOCAL}: without it pages go through the page cache, and take memory from others"
        return warn("O_DIRECT", "this file system has none", remedy)
    return fail("O_DIRECT", f"a file can not be opened with it: {error.strerror}", LOCAL)


def _unescaped(field: str) -> str:
    r"""Decode blanks as /proc writes them: \040."""
    return re.sub(r"\\([0-7]{3})", lambda digits: chr(int(digits[1], 8)), field)


if __name__ == "__main__":
    print_findings(findings(Path(sys.argv[1])))
