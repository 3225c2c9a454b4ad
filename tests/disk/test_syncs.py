"""Syncs of a new data directory, and of files whose last sync failed."""

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_nodes import FaultyLayer

from node.disk.encryption import DiskLocation
from node.disk.extents import ExtentFiles, FileLayer, Slot
from node.disk.io_process import ProcessStorage
from node.memory.arena import Arena


def test_new_directory_is_synced_by_the_node_that_creates_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node syncs the directory it creates: the I/O process, started later, syncs only its own
    files.
    """
    synced, sync = list[str](), FileLayer.sync_directory

    def noted(layer: FileLayer, path: Path) -> None:
        synced.append(os.path.relpath(path, tmp_path))
        sync(layer, path)

    monkeypatch.setattr(FileLayer, "sync_directory", noted)
    arena = Arena(1 << 20)
    ProcessStorage(tmp_path / "new" / "data", 2 << 20, 64 << 10, arena.fd).close()
    arena.close()
    assert synced == ["new", "."]


def test_next_sync_covers_a_failed_one(tmp_path: Path, layer: FaultyLayer) -> None:
    """Regression: the sync after a failed one synced no file and succeeded."""
    memory = memoryview(mmap.mmap(-1, 8192))
    view: Callable[[int, int], memoryview] = lambda offset, nbytes: memory[offset : offset + nbytes]  # noqa: E731
    files = ExtentFiles(tmp_path / "extents", 64 << 10, 2, view, layer)
    files.write_all([Slot(0, 4096, DiskLocation(0, None))])
    layer.fail["sync"] = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        files.sync()
    layer.heal()
    before = layer.calls["sync"]
    files.sync()
    assert layer.calls["sync"] == before + 1
    files.close()
