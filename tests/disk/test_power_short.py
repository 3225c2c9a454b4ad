"""Simulate a few power losses; `make test-power` simulates thousands."""

import os
import subprocess
import sys
from pathlib import Path

HARNESS = Path(__file__).parents[1] / "helpers" / "power.py"


def test_power_loss_keeps_acknowledged_pages(seed: int) -> None:
    """After a power loss, acknowledged pages exist, hits are right, and flushed removals hold."""
    done = subprocess.run(
        [sys.executable, str(HARNESS), "--runs", "2", "--images", "20", "--moments", "800"],
        env={**os.environ, "KVSTORE_SEED": str(seed)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    assert "40 power losses" in done.stdout
    assert " 0 promised pages" not in done.stdout, "nothing was acknowledged"
