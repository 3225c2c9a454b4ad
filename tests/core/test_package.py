"""The names that `import kvstore` offers, and the packages that it loads only when needed."""

import subprocess
import sys

import pytest

import kvstore


def loaded_by(statement: str) -> set[str]:
    """Return the top-level packages that a new process has loaded after the statement."""
    script = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


def test_every_offered_name_exists() -> None:
    for name in kvstore.__all__:
        assert getattr(kvstore, name).__module__.startswith("kvstore.")
    assert set(kvstore.__all__) <= set(dir(kvstore))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kvstore' has no attribute 'Cleint'"):
        kvstore.Cleint  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError):
        from kvstore import Cleint  # type: ignore[attr-defined]  # noqa: F401


def test_io_process_starts_without_grpc() -> None:
    """Importing gRPC takes half of the start, and a node waits for its I/O process."""
    assert not {"grpc", "google", "asyncio"} & loaded_by("import node.disk.io_worker")
    assert {"grpc", "google"} <= loaded_by("import node.server"), (
        "the check finds no packages at all"
    )
