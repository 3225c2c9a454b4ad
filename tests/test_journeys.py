"""Tests that benchmarks/journeys.py records both the client's and the node's side of a call."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.long
def test_put_journey_has_files_and_frames_of_client_and_node() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "journeys.py"), "--only", "put", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120.0)
    found = json.loads(done.stdout)["put"]
    assert {name.partition("/")[0] for name in found["files"]} == {"kvstore", "node"}
    assert all((ROOT / name).is_file() and "/pb/" not in name for name in found["files"])
    assert len(found["stack"]) > 5
    assert {frame.partition(" ")[0] for frame in found["stack"]} <= set(found["files"])
