"""A file system that is full or smaller than the disk tier: the tier goes on with what it has."""

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from disk_nodes import FaultyLayer, Nodes, Pages

from kvstore import Client, PutOutcome
from kvstore.errors import Exhausted
from kvstore.results import DiskStatus
from node.disk import space
from node.disk.data_dir import open_rows
from node.disk.extents import FileLayer
from node.disk.reserve import RowReserve
from node.events import Kind
from node.server import Node
from node.slab import SlotAllocator

EXTENT = 64 << 10
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def serving(client: Client) -> DiskStatus:
    status = client.node_status()
    assert (status.state, status.disk.state, status.disk.reason) == ("SERVING", "SERVING", "")
    return status.disk


def look(node: Node) -> None:
    assert node.disk is not None
    with node.disk._io:
        node.disk.space.look()


def test_full_file_system_evicts_and_grows_when_it_has_space(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(*range(16)), durable=True)
    layer.fail["allocate"] = errno.EDQUOT
    for number in range(16, 48):
        pages.put(client, pages.keys(number), durable=True)
    disk = serving(client)
    assert (disk.usable_nbytes, disk.no_space_errors) == (2 * EXTENT, 1), "asked at each put"
    assert "no space" in disk.limit
    pages.drop_from_ram(node)
    assert pages.get(client, pages.keys(*range(32, 48))) == [True] * 16
    layer.heal()
    look(node)
    assert serving(client).limit, "the free space was wrong a moment ago, so it is not believed"
    client.recover()
    pages.put(client, pages.keys(*range(100, 148)), durable=True)
    for _ in range(2 * space.GROWTH):
        look(node)
    disk = serving(client)
    assert (disk.limit, disk.usable_nbytes) == ("", disk.capacity_nbytes)
    kinds = [event.kind for event in node.events.since(0, 99)]
    ours = (Kind.DISK_LIMITED.value, Kind.DISK_GREW.value)
    assert tuple(kind for kind in kinds if kind in ours) == ours


def test_file_system_smaller_than_the_disk_tier_is_named_at_the_start(
    nodes: Nodes,
    layer: FaultyLayer,
    pages: Pages,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reserve = 4 << 20
    monkeypatch.setattr(layer, "space", lambda path: (reserve + 5 * EXTENT, reserve + 6 * EXTENT))
    with caplog.at_level(logging.WARNING):
        node = nodes.start()
    assert "disk tier limited" in caplog.text
    assert "--disk-bytes" in caplog.text
    disk = serving(nodes.connect(node))
    assert (disk.usable_nbytes, disk.filesystem_nbytes) == (5 * EXTENT, reserve + 6 * EXTENT)


def test_rows_without_space_get_that_of_an_extent(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    for number in range(32):  # four extents, the first with the oldest pages
        pages.put(client, pages.keys(number), durable=True)
    write = node.disk.rows.write

    def fail_while_full(*rows: Any) -> None:
        if all(path.stat().st_size for path in extents):
            raise FULL
        write(*rows)

    extents = [path for path in (nodes.data_dir / "extents").iterdir() if path.stat().st_size]
    monkeypatch.setattr(layer, "space", lambda path: (0, 100 << 20))
    monkeypatch.setattr(node.disk.rows, "write", fail_while_full)
    assert pages.put(client, pages.keys(99), durable=True) == [PutOutcome.STORED]
    disk = serving(client)
    assert (len(extents), disk.usable_nbytes) == (4, 3 * EXTENT)
    pages.drop_from_ram(node)
    assert pages.get(client, pages.keys(*range(32), 99)).count(True) >= 24
    assert serving(client).pages_corrupt == 0


def test_sync_without_space_forgets_what_it_did_not_cover(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1), durable=True)
    layer.fail["sync"] = errno.ENOSPC
    with pytest.raises(Exhausted, match="file system is full"):
        pages.put(client, pages.keys(2), durable=True)
    serving(client)
    assert pages.on_disk(node, pages.keys(1, 2)) == [True, False]
    layer.heal()
    assert pages.put(client, pages.keys(2, 3), durable=True)[1] == PutOutcome.STORED
    node = nodes.restart(node)
    assert pages.get(nodes.connect(node), pages.keys(1, 2, 3)) == [True] * 3


def test_recover_without_space_fails_and_keeps_the_disk_serving(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    client = nodes.connect(nodes.start())
    pages.put(client, pages.keys(1), durable=True)
    layer.fail["write"] = errno.ENOSPC
    with pytest.raises(Exhausted, match="No space"):
        client.recover()
    serving(client)
    layer.heal()
    client.recover()


def test_reopened_rows_keep_all_pages(kept: Node, pages: Pages) -> None:
    """A replaced I/O process keeps pages that were not synced, too."""
    with kept.disk._io:
        for number in (1, 2):
            assert kept.disk.space._reopen_rows(), number
    assert kept.disk.stop_reason == ""
    assert kept.disk.check() == []


def test_rows_on_a_full_file_system_open_after_an_extent_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "extents").mkdir()
    for number in range(3):
        (tmp_path / "extents" / f"{number:06d}").write_bytes(bytes(8192))
    failures = [FULL, FULL]

    def open_once() -> str:
        if failures:
            raise failures.pop()
        return "rows"

    reserve = RowReserve(tmp_path / "reserve", 4096, FileLayer())
    reserve.keep(4096)
    rows: object = open_rows(tmp_path, open_once, reserve.release)  # type: ignore[arg-type]
    assert rows == "rows"
    assert reserve.missing_nbytes == 4096
    sizes = [path.stat().st_size for path in sorted((tmp_path / "extents").iterdir())]
    assert sizes == [8192, 8192, 0], "the reserve is used before any extent is emptied"


def test_withheld_extents_give_no_slots() -> None:
    slots = SlotAllocator(4 * EXTENT, EXTENT)
    assert slots.withhold(3)
    assert slots.withhold(2)
    offsets = slots.allocate_all(EXTENT, [1, 2, 3])
    assert sorted(offsets) == [0, EXTENT]
    assert not slots.withhold(0), "it is in use"
    assert (slots.usable_nbytes, slots.check()) == (2 * EXTENT, [])
    slots.supply(2)
    assert slots.allocate(EXTENT, 4) == 2 * EXTENT
