"""What `import kvstore` offers, and what it does not load before it is wanted."""

import subprocess
import sys

import pytest

import kvstore


def loaded_by(statement: str) -> set[str]:
    """Top-level packages that are loaded after it in a new process."""
    script = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


def test_every_name_that_is_offered_is_there() -> None:
    for name in kvstore.__all__:
        assert getattr(kvstore, name).__module__.startswith("kvstore.")
    assert set(kvstore.__all__) <= set(dir(kvstore))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kvstore' has no attribute 'Cleint'"):
        kvstore.Cleint  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError):
        from kvstore import Cleint  # type: ignore[attr-defined]  # noqa: F401


def test_a_io_process_starts_without_grpc() -> None:
    """It takes half of the time; a node waits for it at its start."""
    assert not {"grpc", "google", "asyncio"} & loaded_by("import node.disk.io_worker")
    assert {"grpc", "google"} <= loaded_by("import node.server"), "the measure itself"
