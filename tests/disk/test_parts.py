"""Ranges of pages that are on disk only: the leaves that are read, and the returned bytes."""

import os
from typing import Any

import pytest
from disk_nodes import Nodes, Pages
from ranged import LEAF, PAGE, ask

from kvstore import PutOutcome, checksum
from node.server import Node

WIRES = ["shm", "bulk", "grpc"]


def read_log(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that gets (offset, nbytes) of each read from now on."""
    assert node.disk is not None
    files, log = node.disk.files, list[tuple[int, int]]()
    read = files.read

    def logged(offset: int, view: memoryview) -> bool:
        log.append((offset, view.nbytes))
        return read(offset, view)

    monkeypatch.setattr(files, "read", logged)
    return log


def place_of(node: Node, pages: Pages, key: bytes) -> int:
    assert node.disk is not None
    return node.disk.records.offset(node.disk._find(pages.digest, key))


def damage(nodes: Nodes, place: int) -> None:
    with (nodes.data_dir / "extents" / f"{place // (64 << 10):06d}").open("r+b") as file:
        file.seek(place % (64 << 10))
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())


RANGES = {
    "the first byte": [(0, 1)],
    "the last byte": [(PAGE - 1, 1)],
    "one leaf": [(LEAF, LEAF)],
    "across a border": [(2 * LEAF - 1, 2)],
    "within the last": [(11 * LEAF + 10, 100)],
    "into the last": [(11 * LEAF - 10, PAGE - 11 * LEAF + 10)],
    "apart and backwards": [(PAGE - 7, 7), (5 * LEAF + 1, 3), (6 * LEAF - 1, 1), (3, 5000)],
}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
def test_range_reads_only_its_leaves(
    node: Node,
    nodes: Nodes,
    large: Pages,
    stored: list[bytes],
    ranges: Any,
    wire: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, log = nodes.connect(node, wire), read_log(node, monkeypatch)
    assert ask(client, large, [*stored, *large.keys(3)], *ranges) == [True, True, False]
    touched = {
        sector
        for offset, nbytes in ranges
        for number in checksum.parts_of(PAGE, [(offset, nbytes)])
        for sector in range(number, 13 if number == 11 else number + 1)
    }
    for key in stored:
        place = place_of(node, large, key)
        read = [
            sector
            for offset, nbytes in log
            for sector in range((offset - place) // LEAF, (offset + nbytes - place) // LEAF)
            if place <= offset < place + PAGE
        ]
        assert sorted(read) == sorted(touched)
    status = client.node_status()
    assert (status.disk.pages_read, status.disk.pages_read_in_part) == (0, 2)
    assert status.disk.nbytes_read == 2 * LEAF * len(touched)
    assert (status.totals.pages_got, status.totals.pages_get_missed) == (2, 1)
    assert [(page.in_ram, page.on_disk) for page in client.stat(large.namespace, stored)] == [
        (False, True)
    ] * 2


@pytest.mark.parametrize("wire", WIRES)
def test_range_requested_twice_is_read_once(
    node: Node,
    nodes: Nodes,
    large: Pages,
    stored: list[bytes],
    wire: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, log = nodes.connect(node, wire), read_log(node, monkeypatch)
    assert ask(client, large, [*stored, *stored, stored[0]], (LEAF, 10)) == [True] * 5
    assert len(log) == 2


@pytest.mark.parametrize("wire", WIRES)
def test_range_of_nearly_a_whole_page_loads_the_page_into_ram(
    node: Node, nodes: Nodes, large: Pages, stored: list[bytes], wire: str
) -> None:
    client = nodes.connect(node, wire)
    assert ask(client, large, stored, (0, PAGE - LEAF)) == [True, True]
    assert ask(client, large, stored, (1, 1)) == [True, True]
    status = client.node_status()
    assert (status.disk.pages_read, status.disk.pages_read_in_part, status.ram.page_count) == (
        2,
        0,
        2,
    )


@pytest.mark.parametrize("wire", WIRES)
def test_damaged_leaf_is_a_miss_for_ranges_that_touch_it(
    node: Node, nodes: Nodes, large: Pages, stored: list[bytes], wire: str
) -> None:
    client = nodes.connect(node, wire)
    damage(nodes, place_of(node, large, stored[0]) + 5 * LEAF + 77)
    assert ask(client, large, stored, (4 * LEAF, LEAF)) == [True, True]
    assert ask(client, large, stored, (6 * LEAF, 1), (0, 1)) == [True, True]
    assert client.node_status().disk.pages_corrupt == 0
    assert ask(client, large, stored, (6 * LEAF - 1, 1)) == [False, True]
    assert client.node_status().disk.pages_corrupt == 1
    assert client.lookup(large.namespace, stored).present == (False, True)
    assert large.put(client, stored[:1], durable=True) == [PutOutcome.STORED]
    large.drop_from_ram(node)
    assert ask(client, large, stored, (6 * LEAF - 1, 1)) == [True, True]


def test_leaf_checksums_survive_a_restart(
    nodes: Nodes, node: Node, large: Pages, stored: list[bytes]
) -> None:
    client = nodes.connect(nodes.restart(node))
    assert ask(client, large, stored, (LEAF - 1, 2)) == [True, True]
    assert client.node_status().disk.pages_read_in_part == 2


def test_page_written_again_after_a_load_has_leaf_checksums(
    nodes: Nodes, node: Node, large: Pages, stored: list[bytes]
) -> None:
    client = nodes.connect(node)
    assert large.get(client, stored) == [True, True]
    assert node.disk is not None
    node.disk.remove(large.digest, stored)
    client.flush()
    large.drop_from_ram(node)
    assert ask(client, large, stored, (LEAF - 1, 2)) == [True, True]
    assert client.node_status().disk.pages_read_in_part == 2
