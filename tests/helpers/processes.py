"""Inspect processes that a test starts or ends."""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

GONE_S = 60.0


def gone(pid: int) -> bool:
    try:
        return state(pid) in "ZX"
    except FileNotFoundError:
        return True


def state(pid: int) -> str:
    """Return the kernel's state letter of a process; T means stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def children(pid: int) -> list[int]:
    """Return the descendants of a process."""
    found = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], check=True, capture_output=True, text=True
    ).stdout
    parents = {
        int(child): int(parent) for child, parent in (line.split() for line in found.splitlines())
    }
    mine = [child for child, parent in parents.items() if parent == pid]
    return mine + [grandchild for child in mine for grandchild in children(child)]


def wait_gone(pids: Sequence[int]) -> None:
    end = time.monotonic() + GONE_S
    while not all(map(gone, pids)):
        assert time.monotonic() < end, (
            f"processes {[pid for pid in pids if not gone(pid)]} of {pids} are still running"
        )
        time.sleep(0.05)
