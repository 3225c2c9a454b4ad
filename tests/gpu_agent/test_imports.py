"""Which packages are imported by a process beside an engine."""

import subprocess
import sys
from pathlib import Path

import gpu_agent


def loaded(code: str) -> set[str]:
    """Return the packages that are loaded after `code` in a new process."""
    script = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_scheduler_import_needs_no_torch(tmp_path: Path) -> None:
    """An engine's start waits for this import."""
    code = "import gpu_agent.worker.__main__, gpu_agent.worker.lookup_worker"
    assert not {"torch", "cupy", "numpy"} & loaded(code)
    # The check notices torch, here a mock of it, which takes no seconds to import
    mock = "import sys, unittest.mock; sys.modules[__name__] = unittest.mock.MagicMock()"
    (tmp_path / "torch.py").write_text(mock)
    first = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    assert "torch" in loaded(f"{first}\nfrom gpu_agent import KVPool")


def test_all_names_are_importable() -> None:
    for name in gpu_agent.__all__:
        assert getattr(gpu_agent, name) is not None
    assert set(gpu_agent.__all__) <= set(dir(gpu_agent))
    assert not hasattr(gpu_agent, "Nothing")
