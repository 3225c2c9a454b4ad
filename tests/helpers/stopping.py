"""Stop a process and wait until all its threads have stopped: after SIGSTOP they run on a while."""

import os
import signal
import time
from pathlib import Path


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    for task in Path(f"/proc/{pid}/task").iterdir():
        while (task / "stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)
