"""`lmcache bench l2` with verification and with LMCache's fault injection, and its smoke test."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.tools.node_process import NodeProcess

SETTINGS = (
    "--num-keys",
    "16",
    "--in-flight",
    "2",
    "--rounds",
    "2",
    "--data-size-kb",
    "512",
    "--lookup-max-hit-rate",
    "1",
)
KEYS = 2 * 16 * 2  # rounds, keys per round, requests in flight
# The module of the smoke test, which moved in LMCache 0.5.7.
SMOKE_TEST = (
    "lmcache.v1.basic_check"
    if importlib.util.find_spec("lmcache.v1.basic_check")
    else "lmcache.inprocess.v1.basic_check"
)


def bench(
    lmcache: Any, folder: Path, adapter: dict[str, Any], *settings: str
) -> dict[str, dict[str, Any]]:
    """Return what the bench measured, per operation."""
    report = folder / "report.json"
    command = ["bench", "l2", "--l2-adapter", json.dumps(adapter), *SETTINGS, *settings]
    done = lmcache(*command, "--format", "json", "--output", str(report))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    metrics = json.loads(report.read_text())["metrics"]
    return {value["operation"]: value for name, value in metrics.items() if name.startswith("op_")}


def test_bench_verifies_every_key(
    form: str,
    spec: Callable[..., dict[str, Any]],
    lmcache: Any,
    shared_node: NodeProcess,
    tmp_path: Path,
) -> None:
    found = bench(lmcache, tmp_path, spec(form, shared_node.address), "--no-skip-verify")
    assert {
        name: (value["total_success"], value["rounds_timed_out"]) for name, value in found.items()
    } == dict.fromkeys(("Store", "Lookup", "Load"), (KEYS, 0))


def test_injected_faults_fail_only_their_loads(
    form: str,
    spec: Callable[..., dict[str, Any]],
    lmcache: Any,
    shared_node: NodeProcess,
    tmp_path: Path,
) -> None:
    faulty = {
        "type": "fault_inject",
        "rate": 0.3,
        "seed": 7,
        "inner": spec(form, shared_node.address),
    }
    found = bench(lmcache, tmp_path, faulty)
    assert found["Store"]["total_success"] == found["Lookup"]["total_success"] == KEYS
    assert 0.4 * KEYS < found["Load"]["total_success"] < KEYS
    assert all(value["rounds_timed_out"] == 0 for value in found.values())


def test_lmcache_smoke_test_passes(
    form: str,
    spec: Callable[..., dict[str, Any]],
    shared_node: NodeProcess,
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    adapter = json.dumps(spec(form, shared_node.address))
    command = [
        sys.executable,
        "-m",
        SMOKE_TEST,
        "--mode",
        "test_l2_adapter",
        "--l2-adapter",
        adapter,
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Validation (content): 5/5" in done.stdout + done.stderr
