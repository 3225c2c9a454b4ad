"""Syncs of a new data directory, and of files whose last sync failed."""

import errno
import mmap
import os
import shutil
from pathlib import Path

import pytest
from disk_nodes import FaultyLayer

from node.disk.encryption import DiskLocation
from node.disk.extents import ExtentFiles, FileLayer, Slot
from node.disk.index import SyncTracker
from node.disk.io_process import ProcessStorage
from node.memory.arena import Arena


def extent_files(path: Path, layer: FileLayer) -> ExtentFiles:
    """Return two extents of 64 KiB, and an arena of 8 KiB."""
    memory = memoryview(mmap.mmap(-1, 8192))

    def view(offset: int, nbytes: int) -> memoryview:
        return memory[offset : offset + nbytes]

    return ExtentFiles(path / "extents", 64 << 10, 2, view, layer)


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
    files = extent_files(tmp_path, layer)
    files.write_all([Slot(0, 4096, DiskLocation(0, None))])
    layer.fail["sync"] = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        files.sync()
    layer.heal()
    before = layer.calls["sync"]
    files.sync()
    assert layer.calls["sync"] == before + 1
    files.close()


def test_sync_that_works_after_a_failed_one_makes_no_page_safe() -> None:
    """The second sync may succeed although the first one lost the bytes."""
    tracker = SyncTracker()
    tracker.end_sync(tracker.begin_sync())
    tracker.wrote([7], [])
    tracker.fail_sync()
    tracker.end_sync(tracker.begin_sync())
    assert not tracker.is_safe(7)
    assert list(tracker.begin_anew()[0]) == [7]


def test_trial_refuses_a_disk_that_returns_other_bytes(tmp_path: Path, layer: FaultyLayer) -> None:
    files = extent_files(tmp_path, layer)
    files.trial()
    layer.flip = True
    with pytest.raises(OSError, match="read back"):
        files.trial()
    files.close()


@pytest.mark.parametrize("made_anew", [False, True])
def test_sync_and_trial_fail_in_a_removed_directory(
    tmp_path: Path, layer: FaultyLayer, made_anew: bool
) -> None:
    """Regression: durable puts succeeded after the data directory was removed."""
    files = extent_files(tmp_path, layer)
    files.write_all([Slot(0, 4096, DiskLocation(0, None))])
    files.sync()
    shutil.rmtree(tmp_path / "extents")
    if made_anew:
        (tmp_path / "extents").mkdir()
    for fails in (files.sync, files.trial):
        with pytest.raises(OSError, match=r"No such file|replaced"):
            fails()
    files.close()
