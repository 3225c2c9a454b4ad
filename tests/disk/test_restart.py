"""Pages on disk after a node stopped, was interrupted or was started with other limits."""

import errno
import logging
import os
from pathlib import Path

import pytest
from disk_nodes import FaultyLayer, Nodes, Pages

from kvstore import PutOutcome
from kvstore.errors import ConfigError, Exhausted, InvalidRequest
from node.disk.data_dir import DataDir
from node.disk.extents import FileLayer
from node.disk.rows import Rows, parse_page_row
from node.memory.arena import Arena

STORED, EXISTS = PutOutcome.STORED, PutOutcome.EXISTS


# ---- start and stop ------------------------------------------------------------------------


def test_new_directory_survives_power_loss(tmp_path: Path) -> None:
    """A new data directory, its new parent and its entries are synced in an order safe for power
    loss.
    """
    synced: list[str] = []

    class Listing(FileLayer):
        def sync_directory(self, path: Path) -> None:
            synced.append(os.path.relpath(path, tmp_path))
            super().sync_directory(path)

    arena = Arena(1 << 20)
    DataDir(tmp_path / "new" / "data", 1 << 20, 1 << 16, arena.fd, layer=Listing()).close()
    arena.close()
    assert synced == ["new", ".", "new/data/extents", "new/data"]


def test_graceful_stop_writes_pages_in_ram(nodes: Nodes, layer: FaultyLayer, pages: Pages) -> None:
    node = nodes.start(disk_queue_nbytes=64 << 10)
    client = nodes.connect(node)
    layer.writing.clear()
    keys = pages.keys(*range(40))
    pages.put(client, keys)
    assert client.node_status().disk.pages_refused > 0
    node = nodes.restart(node)
    assert pages.get(nodes.connect(node), keys) == [True] * 40


@pytest.mark.parametrize("count", [3, 4])
def test_stop_checks_only_tiers_with_few_pages(
    nodes: Nodes,
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    count: int,
) -> None:
    """Regression: a stop checked every page, which took ten seconds for two million."""
    monkeypatch.setattr("node.server.CHECKED_MAX", 3, raising=False)
    node = nodes.start()
    pages.put(nodes.connect(node), pages.keys(*range(count)), durable=True)
    checked: list[str] = []
    stop = node.stop

    def watched_stop() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(node.tier, "check", lambda: checked.append("RAM") or [])
            patch.setattr(node.disk, "check", lambda: checked.append("disk") or [])
            stop()

    node.stop = watched_stop
    with caplog.at_level(logging.INFO):
        nodes.stop(node)
    assert checked == (["disk", "RAM"] if count == 3 else [])
    assert [
        f"4 pages in the {where} tier are not checked: more than 3" in caplog.messages
        for where in ("RAM", "disk")
    ] == [count == 4] * 2


def test_interrupted_write_leaves_its_space_free(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    """Bytes without a row leave their space free, as after a kill between the two writes."""
    node = nodes.start()
    client = nodes.connect(node)
    kept, cut = pages.keys(1, 2), pages.keys(3, 4)
    pages.put(client, kept, durable=True)
    node.disk.store = lambda batch: node.disk.stop_after_error("killed")
    pages.put(client, cut)
    node = nodes.restart(node)
    client = nodes.connect(node)
    disk = client.node_status().disk
    assert (disk.page_count, disk.used_nbytes, disk.rows_damaged) == (2, 2 * 8192, 0)
    assert pages.get(client, kept + cut) == [True, True, False, False]


def test_start_logs_dropped_rows_by_reason(
    nodes: Nodes, pages: Pages, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a start dropped most pages of a directory without a log line.

    Rows whose time to live is over are not counted as dropped.
    """
    node = nodes.start()
    keys = pages.keys(*range(9))
    pages.put(nodes.connect(node), keys[:3], durable=True)
    nodes.stop(node)
    rows = Rows(nodes.data_dir / "rows", node.disk.records.slots.extent_nbytes)
    kept = [row for pair in rows.pages() if (row := parse_page_row(*pair))]
    taken = kept[0]._replace(prefix_hash=keys[3])
    beyond = [kept[0]._replace(prefix_hash=key, offset=1 << 40) for key in keys[4:6]]
    ended = kept[0]._replace(prefix_hash=keys[6], expiry_s=1)
    stranger = kept[0]._replace(namespace=77)
    rows.write({}, [taken, *beyond, ended, stranger], [])
    rows.put([(kept[2].key, b"damaged")], [])
    rows.close()
    with caplog.at_level(logging.WARNING):
        node = nodes.start()
    (line,) = [line for line in caplog.messages if "dropped at the start" in line]
    for text in ("3 with an impossible slot", "1 of an unknown namespace", "1 damaged"):
        assert text in line
    assert node.disk.records.count == 2
    caplog.clear()
    nodes.connect(node).flush()
    with caplog.at_level(logging.WARNING):
        nodes.restart(node)
    assert "dropped" not in caplog.text


def test_smaller_disk_drops_pages_beyond_and_frees_their_files(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start(disk_nbytes=2 << 20)
    client = nodes.connect(node)
    keys = pages.keys(*range(200))
    for start in range(0, 200, 20):
        pages.put(client, keys[start : start + 20], durable=True)
    node = nodes.restart(node, disk_nbytes=1 << 20)
    client = nodes.connect(node)
    count = client.node_status().disk.page_count
    assert 0 < count <= 128
    assert pages.get(client, keys).count(True) == count
    assert sum(path.stat().st_size for path in (nodes.data_dir / "extents").iterdir()) <= 1 << 20


def test_namespace_too_large_for_smaller_extents_is_closed_until_they_grow(
    nodes: Nodes, pages: Pages
) -> None:
    node = nodes.start()
    large = Pages("large", 65_536)
    client = nodes.connect(node)
    large.put(client, large.keys(1), durable=True)
    pages.put(client, pages.keys(1), durable=True)
    node = nodes.restart(node, extent_nbytes=32 << 10)
    client = nodes.connect(node)
    assert pages.get(client, pages.keys(1)) == [True]
    with pytest.raises(InvalidRequest, match="at most 32768"):
        large.get(client, large.keys(1))
    node = nodes.restart(node)
    assert large.get(nodes.connect(node), large.keys(1)) == [True]


def test_namespaces_survive_a_restart_and_numbers_are_reused(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.disk.index.KEPT", 4)
    node = nodes.start()
    client = nodes.connect(node)
    for number in range(12):
        pages = Pages("salted", salt=str(number))
        pages.put(client, pages.keys(1), durable=True)
        if number > 1:
            client.remove_namespace(pages.namespace)
    node = nodes.restart(node)
    client = nodes.connect(node)
    for number in range(12):
        pages = Pages("salted", salt=str(number))
        assert pages.get(client, pages.keys(1)) == [number <= 1], number
    assert max(number for number, _ in node.disk.rows.namespaces()) <= 5


def test_node_with_more_ram_keeps_the_extent_size_of_its_directory(
    nodes: Nodes, pages: Pages
) -> None:
    """An existing directory keeps its extent size, although the default follows that of RAM."""
    sizes = {"disk_extent_nbytes": 0, "disk_nbytes": 128 << 20}
    node = nodes.start(**sizes)
    keys = pages.keys(*range(8))
    pages.put(nodes.connect(node), keys, durable=True)
    extent_nbytes = node.disk.records.slots.extent_nbytes
    assert extent_nbytes == 64 << 20
    node = nodes.restart(node, **sizes, ram_nbytes=128 << 20, extent_nbytes=128 << 20)
    assert node.disk.records.slots.extent_nbytes == extent_nbytes
    assert pages.get(nodes.connect(node), keys) == [True] * 8


def test_disk_smaller_than_an_extent_is_refused(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start(disk_extent_nbytes=0, disk_nbytes=64 << 20)
    pages.put(nodes.connect(node), pages.keys(1), durable=True)
    nodes.stop(node)
    with pytest.raises(
        ConfigError, match="disk_nbytes=33554432 is less than one extent of 67108864"
    ):
        nodes.start(disk_extent_nbytes=0, disk_nbytes=32 << 20)
    node = nodes.start(disk_extent_nbytes=0, disk_nbytes=64 << 20)
    assert pages.get(nodes.connect(node), pages.keys(1)) == [True]


def test_more_extents_than_the_process_may_open_are_refused(
    nodes: Nodes, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.disk.data_dir.resource.getrlimit", lambda which: (256, 512))
    with pytest.raises(
        ConfigError, match=r"32 extents on disk need 544 open files, 512 are allowed"
    ):
        nodes.start()
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr("node.disk.data_dir.resource.getrlimit", lambda which: (256, 4096))
    monkeypatch.setattr(
        "node.disk.data_dir.resource.setrlimit", lambda which, limits: raised.append(limits)
    )
    nodes.start()
    assert raised[0] == (544, 4096), "the limit is raised for extents before that for connections"


def test_failed_allocation_of_an_extent_frees_its_space(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(fd: int, nbytes: int) -> None:
        os.posix_fallocate(fd, 0, nbytes // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    node = nodes.start()
    client = nodes.connect(node)
    with monkeypatch.context() as patch:
        patch.setattr(layer, "allocate", run_out)
        with pytest.raises(Exhausted):
            pages.put(client, pages.keys(1), durable=True)
    assert {path.stat().st_blocks for path in (nodes.data_dir / "extents").iterdir()} == {0}
    client.recover()
    client.flush()
    assert pages.on_disk(node, pages.keys(1)) == [True]
