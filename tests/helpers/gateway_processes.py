"""Find the processes of a node's gateways."""

from pathlib import Path

import pytest


def gateways(pid: int, module: str = "node.gateway.main") -> list[int]:
    """Return the process ids of the node's gateways, or of its other processes by their module."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    if not children.exists():
        pytest.skip("this kernel does not list the children of a process")
    every = {
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in _words(task / "children")
    }
    return [
        child for child in sorted(every) if module.encode() in _read(Path(f"/proc/{child}/cmdline"))
    ]


def _words(path: Path) -> list[str]:
    return _read(path).decode().split()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has exited
        return b""


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    stat = _read(Path(f"/proc/{pid}/stat")).decode()
    return bool(stat) and stat.rpartition(")")[2].split()[0] != "Z"
