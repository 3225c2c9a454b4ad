"""A FUSE file system that mirrors a directory and can stall operations (Debian's python3-fuse).

    /usr/bin/python3 stalling_fs.py MOUNTPOINT DIRECTORY CONTROL

The file CONTROL lists operations (read, write, fsync, rename, create, open, ...) or "all". Calls of
these wait until the name is removed. A process in such a call cannot be killed, as with a file
server that is down.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import fuse

fuse.fuse_python_api = (0, 2)
fuse.feature_assert("has_init")
MOUNTPOINT, DIRECTORY, CONTROL = sys.argv[1:4]
STALLED = Path(CONTROL + ".stalled")


def pass_by(operation: str) -> None:
    while {operation, "all"} & set(Path(CONTROL).read_text().split()):
        STALLED.touch()
        time.sleep(0.01)


def inside(path: str) -> str:
    return DIRECTORY + path


class StallingFs(fuse.Fuse):  # type: ignore[misc]
    """The file system; each call has a thread, so a stalled call blocks no other."""

    def getattr(self, path: str) -> Any:
        return os.lstat(inside(path))

    def readdir(self, path: str, offset: int) -> Any:
        for entry in [".", "..", *os.listdir(inside(path))]:
            yield fuse.Direntry(entry)

    def mkdir(self, path: str, mode: int) -> None:
        pass_by("mkdir")
        os.mkdir(inside(path), mode)

    def unlink(self, path: str) -> None:
        pass_by("unlink")
        os.unlink(inside(path))

    def rmdir(self, path: str) -> None:
        os.rmdir(inside(path))

    def rename(self, old: str, new: str) -> None:
        pass_by("rename")
        os.rename(inside(old), inside(new))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(inside(path), mode)

    def truncate(self, path: str, nbytes: int) -> None:
        os.truncate(inside(path), nbytes)

    def utime(self, path: str, times: Any) -> None:
        os.utime(inside(path), times)

    def statfs(self) -> Any:
        return os.statvfs(DIRECTORY)

    def open(self, path: str, flags: int) -> Any:
        pass_by("open")
        return File(os.open(inside(path), flags & ~os.O_DIRECT & ~os.O_APPEND))

    def create(self, path: str, flags: int, mode: int) -> Any:
        pass_by("create")
        return File(os.open(inside(path), flags & ~os.O_DIRECT & ~os.O_APPEND | os.O_CREAT, mode))

    def read(self, path: str, nbytes: int, offset: int, file: "File") -> Any:
        pass_by("read")
        return os.pread(file.fd, nbytes, offset)

    def write(self, path: str, data: bytes, offset: int, file: "File") -> int:
        pass_by("write")
        return os.pwrite(file.fd, data, offset)

    def fsync(self, path: str, data_only: int, file: "File") -> None:
        pass_by("fsync")
        os.fsync(file.fd)

    def ftruncate(self, path: str, nbytes: int, file: "File") -> None:
        os.ftruncate(file.fd, nbytes)

    def fgetattr(self, path: str, file: "File | None" = None) -> Any:
        return os.lstat(inside(path)) if file is None else os.fstat(file.fd)

    def flush(self, path: str, file: "File") -> None:
        pass

    def release(self, path: str, flags: int, file: "File") -> None:
        os.close(file.fd)


class File:
    def __init__(self, fd: int) -> None:
        self.fd = fd


def main() -> None:
    # Writes are passed on immediately, so that a stall blocks the node's call and not the kernel's
    # write-back.
    server = StallingFs()
    server.multithreaded = True
    server.parse([MOUNTPOINT, "-f", "-o", "big_writes,max_read=131072"])
    server.main()


if __name__ == "__main__":
    main()
