"""Stopping a process for real: after SIGSTOP its threads run on until each has noticed."""

import os
import signal
import time
from pathlib import Path


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    for task in Path(f"/proc/{pid}/task").iterdir():
        while (task / "stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)
