"""A few power losses; `make test-power` makes thousands."""

import os
import subprocess
import sys
from pathlib import Path

HARNESS = Path(__file__).parents[1] / "helpers" / "power.py"


def test_a_power_loss_at_any_moment_loses_nothing_that_was_acknowledged(seed: int) -> None:
    """And nothing that is found is wrong, and nothing that was removed and flushed is back."""
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
