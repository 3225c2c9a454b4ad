"""LMCache's own tests of an L2 adapter, run on our adapters."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.tools.node_process import NodeProcess

HERE = Path(__file__).parent
SUITE = "tests/v1/distributed"
# LMCache's tests of behavior that our adapters rely on; they fail if a new version changes it.
GUARDS = (
    f"{SUITE}/test_native_connector_l2_adapter.py",
    f"{SUITE}/test_l2_adapter_base.py",
    f"{SUITE}/test_l2_adapter_factory.py",
    f"{SUITE}/test_fault_inject_l2_adapter.py",
    "tests/v1/multiprocess/test_token_hasher.py",
)
CAPACITY = {"max_capacity_gb": 0.001}
PEAK_MIB_MAX = 2048  # for one run; with LMCache's session-wide allocator it was 6,200


def run_suite(folder: Path, environment: dict[str, str], *arguments: str) -> str:
    shutil.copy(HERE / "upstream_memory.py", folder)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "upstream_memory",
        *arguments,
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    peak = re.search(r"^peak memory: (\d+) MiB$", done.stdout, re.MULTILINE)
    assert peak is not None, done.stdout[-1000:]
    assert int(peak[1]) < PEAK_MIB_MAX
    return done.stdout


def test_contract_suite_passes(
    form: str,
    upstream: Path,
    spec: Callable[..., dict[str, Any]],
    environment: dict[str, str],
    shared_node: NodeProcess,
) -> None:
    """Run all tests but the one of the mock's own timing.

    The suite expects a capacity to be set.
    """
    shutil.copy(HERE / "upstream_adapter.py", upstream / SUITE / "test_kvstore_adapter.py")
    adapter = spec(form, shared_node.address)
    (adapter if form == "native_plugin" else adapter["adapter_params"]).update(CAPACITY)
    output = run_suite(
        upstream,
        environment | {"KVSTORE_TEST_FORM": form, "KVSTORE_TEST_SPEC": json.dumps(adapter)},
        f"{SUITE}/test_kvstore_adapter.py",
        "--deselect",
        f"{SUITE}/test_kvstore_adapter.py::TestBandwidthSimulation::test_store_completion_is_delayed_by_bandwidth",
    )
    counted = re.search(r"(\d+) passed(, 1 deselected)?", output)
    assert counted is not None
    assert counted[1] == "43", output[-500:]


@pytest.mark.parametrize("path", GUARDS, ids=lambda path: Path(path).stem)
def test_lmcache_behavior_is_unchanged(
    path: str, upstream: Path, environment: dict[str, str]
) -> None:
    assert " passed" in run_suite(upstream, environment, path)
