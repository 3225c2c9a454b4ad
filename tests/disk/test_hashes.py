"""Pages with similar hashes (equal first bytes, counters, prefixes of each other) stay distinct.

No page is found, dropped or refused in place of another.
"""

import time
from typing import Any

import pytest
from disk_nodes import FaultyLayer, Nodes, Pages

from kvstore import PutOutcome
from node.disk.page_table import BUCKET_MASK, BUCKET_SHIFT, PageTable

STORED, EXISTS = PutOutcome.STORED, PutOutcome.EXISTS

ALIKE = {
    "same first 8 bytes": [b"same 8 b" + bytes([i]) * 24 for i in range(8)],
    "counters": [i.to_bytes(16, "big") for i in range(8)],
    "counters from the other end": [i.to_bytes(32, "little") for i in range(8)],
    "one is the start of another": [b"0123456789abcdef" + b"\0" * (6 * i) for i in range(8)],
    "all but the last bit": [b"x" * 63 + bytes([i]) for i in range(8)],
}


@pytest.fixture(params=list(ALIKE.values()), ids=list(ALIKE))
def alike(request: pytest.FixtureRequest) -> list[bytes]:
    found: list[bytes] = request.param
    return found


def test_unknown_hash_with_a_stored_prefix_is_a_miss(
    nodes: Nodes, pages: Pages, alike: list[bytes]
) -> None:
    """A hash that was never stored is a miss although a stored one has the same start.

    Reading it neither drops the stored page nor counts as damage.
    """
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, alike[:1], durable=True)
    pages.drop_from_ram(node)
    assert client.lookup(pages.namespace, alike).present == (True, *[False] * 7)
    assert [stat.present for stat in client.stat(pages.namespace, alike)] == [True] + [False] * 7
    assert pages.get(client, alike[1:]) == [False] * 7
    assert client.pin(pages.namespace, alike, 10.0) == [True] + [False] * 7
    assert client.remove(pages.namespace, alike[1:]) == [False] * 7
    assert pages.get(client, alike[:1]) == [True]
    disk = client.node_status().disk
    assert (disk.page_count, disk.pages_corrupt) == (1, 0)


def test_put_of_a_hash_with_a_stored_prefix_is_stored(
    nodes: Nodes, pages: Pages, alike: list[bytes]
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, alike[:1], durable=True)
    pages.drop_from_ram(node)
    assert pages.put(client, alike, durable=True) == [EXISTS] + [STORED] * 7
    pages.drop_from_ram(node)
    assert pages.get(client, alike) == [True] * 8
    assert client.node_status().disk.pages_corrupt == 0


def test_hashes_with_one_prefix_are_stored_listed_scrubbed_and_restored(
    nodes: Nodes, pages: Pages, alike: list[bytes]
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    assert pages.put(client, alike, durable=True) == [STORED] * 8
    assert pages.on_disk(node, alike) == [True] * 8
    pages.drop_from_ram(node)
    assert client.scrub().intact == 8
    for _ in range(2):
        assert [page.prefix_hash for page in client.list_pages(pages.namespace)] == sorted(alike)
        infos, after = node.service._inventory.list_pages(pages.digest, b"", sorted(alike)[2], 3)
        assert [info.prefix_hash for info in infos] == sorted(alike)[3:6]
        assert after == sorted(alike)[5]
        assert pages.get(client, alike) == [True] * 8
        node = nodes.restart(node)
        client = nodes.connect(node)
    assert client.remove(pages.namespace, alike[3:4]) == [True]
    client.flush()
    node = nodes.restart(node)
    assert pages.get(nodes.connect(node), alike) == [True] * 3 + [False] + [True] * 4


def test_hashes_with_equal_marks_are_different_pages(
    alike: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages with equal marks in the table are distinguished by their full hashes."""
    monkeypatch.setattr("node.disk.page_table.hash", lambda key: 7, raising=False)
    records = PageTable(1 << 20, 1 << 16)
    stored = [records.reserve(1, key, 4096) for key in alike[:4]]
    for record in stored:
        records.publish(record, bytes(16), 5)
    assert [records.find(1, key) for key in alike] == stored + [0] * 4


def test_counters_as_hashes_need_few_probes() -> None:
    """Keys that are counters need few probes of the table each; probes are counted, not timed."""
    records = PageTable(1 << 30, 1 << 22)
    for number in range(20_000):
        records.publish(records.reserve(1, number.to_bytes(32, "big"), 4096), bytes(16), 5)
    table = records._table
    looked_at = 0
    for number in range(20_000):
        record = records.find(1, number.to_bytes(32, "big"))
        mark = records._mark[record]
        places, place = table.segments[mark & table.mask].buckets, mark >> BUCKET_SHIFT
        while places[place] != record:
            place, looked_at = (place + 1) & BUCKET_MASK, looked_at + 1
    assert looked_at < 4 * 20_000


def test_scrub_during_reuse_of_a_namespace_number_finds_no_damage(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.disk.index.KEPT", 1)
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1), durable=True)
    read = node.disk.files.read

    def read_late(*args: Any) -> Any:
        client.remove_namespace(pages.namespace)
        other = Pages("another model")
        other.put(nodes.connect(node), other.keys(1), durable=True)
        assert node.disk._index.namespace_ids.known(other.digest) == 1, "the number is used again"
        return read(*args)

    monkeypatch.setattr(node.disk.files, "read", read_late)
    assert client.scrub().damaged == 0
    assert client.node_status().disk.pages_corrupt == 0


def test_many_counters_are_stored_and_found_in_reasonable_time(nodes: Nodes) -> None:
    node = nodes.start(disk_nbytes=8 << 20)
    client = nodes.connect(node)
    pages = Pages("counters", 4096)
    keys = [number.to_bytes(16, "big") for number in range(1500)]
    began = time.monotonic()
    for start in range(0, 1500, 100):
        pages.put(client, keys[start : start + 100], durable=True)
    assert client.lookup(pages.namespace, keys).prefix_pages == 1500
    assert time.monotonic() - began < 30.0
