"""Verify reads pages on disk outside the arena, so it needs no room in RAM and evicts no page."""

import pytest
from disk_nodes import FaultyLayer, Nodes, Pages

from kvstore import ByteRange, Exhausted
from node.memory.inventory import Inventory


def test_verify_of_more_pages_than_ram_holds_evicts_no_page(nodes: Nodes, pages: Pages) -> None:
    """Regression: verify loaded pages into RAM, and counted those without room as absent."""
    node = nodes.start(disk_nbytes=4 << 20)
    client = nodes.connect(node)
    keys = pages.keys(*range(300))
    for first in range(0, 300, 20):
        pages.put(client, keys[first : first + 20])
        client.flush()
    stored = [page.prefix_hash for page in client.stat(pages.namespace, keys) if page.on_disk]
    assert len(stored) == 300, "not all pages (8 KiB each, more than twice the RAM) are on disk"
    in_ram = {page.prefix_hash for page in client.stat(pages.namespace, keys) if page.in_ram}
    half = sorted(in_ram)[: len(in_ram) // 2]  # the most that may be pinned
    assert client.pin(pages.namespace, half, 60.0) == [True] * len(half)
    before = client.node_status().totals
    assert client.verify(pages.namespace, stored) == (len(stored), 0, 0)
    after = client.node_status().totals
    assert (after.pages_evicted, after.pages_got) == (before.pages_evicted, before.pages_got)
    assert {
        page.prefix_hash for page in client.stat(pages.namespace, keys) if page.in_ram
    } == in_ram


@pytest.mark.usefixtures("small_leaves")
def test_range_read_of_a_loaded_page_checks_only_its_parts(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    (key,) = pages.keys(1)
    pages.put(client, [key], durable=True)
    pages.drop_from_ram(node)
    assert pages.get(client, [key]) == [True]
    with Inventory(node.tier).inspected(pages.digest, key) as page:
        node.arena.view(page.offset, pages.nbytes)[-1] ^= 1
    buffer = bytearray(100)
    assert client.get_ranges(pages.namespace, [key], [ByteRange(0, 100)], [buffer]) == [True]
    assert buffer == pages.content(key)[:100]


def test_verify_drops_a_damaged_copy_on_disk(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(1, 2)
    pages.put(client, keys, durable=True)
    layer.flip = True
    assert client.verify(pages.namespace, keys) == (0, 2, 0)
    layer.flip = False
    assert pages.get(client, keys) == [True, True], "the copies in RAM were intact"
    assert not any(page.on_disk for page in client.stat(pages.namespace, keys))


def test_unreadable_page_is_not_reported_absent(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1), durable=True)
    pages.drop_from_ram(node)
    layer.fail["read"] = 5
    with pytest.raises(Exhausted, match="not verified, a page can not be read"):
        client.verify(pages.namespace, pages.keys(1))
