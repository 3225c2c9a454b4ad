"""What a process beside an engine imports, and what it does without."""

import subprocess
import sys

import gpu_agent


def loaded(code: str) -> set[str]:
    """Packages that are loaded after `code`, in a process of its own."""
    script = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_scheduler_import_needs_no_torch() -> None:
    """An engine's start waits for it."""
    asking = "import gpu_agent.worker.__main__, gpu_agent.worker.lookup_worker"
    assert not {"torch", "cupy", "numpy"} & loaded(asking)
    assert "torch" in loaded("from gpu_agent import KVPool")


def test_all_that_is_named_can_be_had() -> None:
    for name in gpu_agent.__all__:
        assert getattr(gpu_agent, name) is not None
    assert set(gpu_agent.__all__) <= set(dir(gpu_agent))
    assert not hasattr(gpu_agent, "Nothing")
