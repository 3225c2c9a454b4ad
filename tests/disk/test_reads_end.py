"""Every read of a page from disk releases the page's record, however the read ends.

A record that stays in use is never evicted, and its slot never becomes free.
"""

import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from disk_nodes import FaultyLayer, Nodes, Pages


def test_verify_and_scrub_release_their_records(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1, 2), durable=True)
    assert client.verify(pages.namespace, pages.keys(1, 2)).intact == 2
    assert client.scrub().intact == 2
    assert not node.disk.records._busy


def test_hanging_scrub_marks_the_disk_as_hanging(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scrub in a hanging read marks the disk as hanging, so that gets do not wait behind it."""
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1), durable=True)
    monkeypatch.setattr("node.disk.reads.HANGS_S", 0.2)
    layer.reading.clear()
    with ThreadPoolExecutor(1) as pool:
        scrubbing = pool.submit(client.scrub)
        assert layer.waiting.acquire(timeout=60.0)
        time.sleep(0.3)
        hangs = node.disk.reading.hang
        layer.reading.set()
        scrubbing.result(60.0)
    assert hangs


def test_read_without_room_in_ram_releases_its_record(
    nodes: Nodes, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes.start()
    client, keys = nodes.connect(node), pages.keys(1)
    pages.put(client, keys, durable=True)
    pages.drop_from_ram(node)

    def makes_none(*_: Any) -> Generator[None, None, bool]:
        yield from ()
        return False

    with monkeypatch.context() as patch:
        patch.setattr(node.tier.promotion, "_place", lambda *_: [])
        patch.setattr(node.tier.eviction, "make_room", makes_none)
        assert pages.get(client, keys) == [False]
    assert not node.disk.records._busy
    assert pages.get(client, keys) == [True]
