"""Nodes with a separate I/O process, and faults that a test injects into it.

The processes of a node import a `sitecustomize` module, which wraps the disk's calls. A file tells
it what to do at which call.
"""

import contextlib
from pathlib import Path
from typing import Any

from node.disk.io_process import ProcessStorage
from node.server import Node

SMALL: dict[str, Any] = {
    **{
        "ram_nbytes": 1 << 20,
        "extent_nbytes": 64 << 10,
        "disk_nbytes": 2 << 20,
        "disk_extent_nbytes": 64 << 10,
    },
    **{"scrub_nbytes_per_s": 0, "flush_s": 10.0, "drain_s": 0.3, "log_level": "ERROR"},
}
PORTS: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "bulk_port": 0, "metrics_port": 0}

PLANT = """
import ctypes, os, signal, sys, time, rocksdict

FAULT = os.open({path!r}, os.O_RDWR)

def at(phase):
    line = os.pread(FAULT, 99, 0)
    wanted, _, action = line.decode().strip().rpartition(" ")
    if wanted != phase:
        return
    if action == "kill":
        os.pwrite(FAULT, bytes(99), 0)  # once
        os.kill(os.getpid(), signal.SIGKILL)
    if action in ("hang", "wait"):
        hang(line) if action == "hang" else wait(line)
    else:
        ctypes.PyDLL(None).usleep(int(action))

def hang(line):
    "Keep the GIL until the fault is cleared, as the binding does when the disk hangs."
    os.pwrite(FAULT, b"hangs", 99)
    libc, now = ctypes.PyDLL(None), ctypes.create_string_buffer(99)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600.0)
    while libc.pread(FAULT, now, 99, 0) == 99 and now.raw == line:
        libc.usleep(5000)
    sys.setswitchinterval(interval)

def wait(line):
    "Wait without the GIL, like a read that hangs: other threads run."
    os.pwrite(FAULT, b"hangs", 99)
    while os.pread(FAULT, 99, 0) == line:
        time.sleep(0.005)

def wrap(owner, name, phase):
    real = getattr(owner, name)
    def call(*args, **named):
        at(phase)
        result = real(*args, **named)
        at("after " + phase)
        return result
    setattr(owner, name, call)

wrap(rocksdict.Rdict, "write", "rows")
wrap(rocksdict.Rdict, "flush_wal", "sync rows")
wrap(os, "pwritev", "pages")
wrap(os, "fdatasync", "sync pages")
wrap(os, "fsync", "begin")
wrap(os, "preadv", "read")
wrap(os, "replace", "small file")
wrap(rocksdict.Rdict, "items", "scan")
"""


class Fault:
    """A fault of the disks of all current and future processes of the node."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "fault"
        self._path.touch()
        self.sitecustomize = directory / "plant"
        self.sitecustomize.mkdir()
        (self.sitecustomize / "sitecustomize.py").write_text(PLANT.format(path=str(self._path)))

    def plant(self, phase: str, action: str) -> None:
        """Set the action at a phase of the disk's work.

        `action`: "kill"; "hang" or "wait" until the fault is cleared; or a delay in microseconds.
        """
        with open(self._path, "r+b", buffering=0) as file:
            file.write(f"{phase} {action}".ljust(99).encode())

    def hangs(self) -> bool:
        """Return whether a call has reached a "hang" or "wait"."""
        return self._path.stat().st_size > 99

    def clear(self) -> None:
        self.plant("", "")


def io_process_of(node: Node) -> int:
    assert node.disk is not None
    directory = node.disk.directory
    assert isinstance(directory, ProcessStorage)
    return directory.process.pid


def flags(settings: dict[str, Any]) -> list[str]:
    return [
        f"--{name.replace('nbytes', 'bytes').replace('_', '-')}={value}"
        for name, value in settings.items()
    ]


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(path.parent.name))
    return found


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
