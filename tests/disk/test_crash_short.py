"""Run a few cycles of the crash harness; `make test-crash` runs hundreds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).parents[1] / "helpers" / "crash.py"
CYCLES = 2  # the last one runs on a disk that is too small


@pytest.mark.parametrize("disk", ["plain", pytest.param("encrypted", marks=pytest.mark.long)])
def test_node_killed_under_load_keeps_durable_pages(tmp_path: Path, seed: int, disk: str) -> None:
    flags = ["--encrypted"] if disk == "encrypted" else []
    done = subprocess.run(
        [sys.executable, str(HARNESS), "--cycles", str(CYCLES), "--dir", str(tmp_path), *flags],
        env={**os.environ, "KVSTORE_SEED": str(seed)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    assert f"{CYCLES} cycles" in done.stdout
    assert " 0 durable pages checked" not in done.stdout, (
        "the load was killed before it stored anything"
    )
