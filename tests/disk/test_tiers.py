"""Both tiers together: promotion, removal, eviction, pins, time to live, listing and restart."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from disk_nodes import Clock, FaultyLayer, Nodes, Pages
from waiting import wait_until

from kvstore import PutOutcome
from kvstore.errors import Exhausted, InvalidRequest
from kvstore.layout import ByteRange
from kvstore.results import Tier

STORED, EXISTS = PutOutcome.STORED, PutOutcome.EXISTS


# ---- promotion and reads -------------------------------------------------------------------


def test_several_readers_of_one_page_on_disk_load_it_once(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(*range(3))
    pages.put(client, keys, durable=True)
    pages.drop_from_ram(node)
    layer.reading.clear()
    with ThreadPoolExecutor(6) as pool:
        reads = [pool.submit(pages.get, client, keys) for _ in range(6)]
        assert layer.waiting.acquire(timeout=60.0)
        wait_until(lambda: node.tier.held_count == 3 and node.sessions.count >= 6)
        layer.reading.set()
        assert [read.result(60.0) for read in reads] == [[True] * 3] * 6
    assert layer.calls["read"] == 3
    assert client.node_status().disk.pages_read == 3
    assert client.stat(pages.namespace, keys)[0].in_ram


def test_page_requested_twice_in_one_get_is_loaded_once(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(1, 2)
    pages.put(client, keys, durable=True)
    pages.drop_from_ram(node)
    assert pages.get(client, [*keys, *keys]) == [True] * 4
    assert layer.calls["read"] == 2


def test_page_on_disk_is_a_miss_while_ram_is_full_of_pins(nodes: Nodes, pages: Pages) -> None:
    """A get of a page on disk is a miss while pins fill RAM, not an error, and a hit afterwards."""
    node = nodes.start()
    client = nodes.connect(node)
    keys, pinned = pages.keys(*range(4)), pages.keys(*range(100, 228))
    pages.put(client, keys, durable=True)
    pages.drop_from_ram(node)
    pages.put(client, pinned, durable=True)  # 128 x 8 KiB: all of RAM
    assert all(
        client.pin(pages.namespace, pinned[:64], 1000.0)
    )  # half of RAM, the most that may be pinned
    held = [
        page
        for page in node.tier.acquire(pages.namespace.digest, pinned[64:], False, 0).pages
        if page
    ]
    assert client.lookup(pages.namespace, keys).present == (True,) * 4
    assert pages.get(client, keys) == [False] * 4
    assert client.node_status().disk.pages_corrupt == 0
    client.unpin(pages.namespace, pinned)
    assert pages.get(client, keys) == [True] * 4
    node.tier.release(held)


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
def test_range_read_of_a_page_on_disk_returns_the_ranges(
    nodes: Nodes, pages: Pages, wire: str
) -> None:
    node = nodes.start()
    client = nodes.connect(node, wire)
    keys = pages.keys(1, 2)
    pages.put(client, keys, durable=True)
    pages.drop_from_ram(node)
    buffers = [bytearray(30) for _ in range(3)]
    ranges = [ByteRange(10, 10), ByteRange(8000, 20)]
    assert client.get_ranges(pages.namespace, [*keys, *pages.keys(3)], ranges, buffers) == [
        True,
        True,
        False,
    ]
    for key, buffer in zip(keys, buffers, strict=False):
        content = pages.content(key)
        assert buffer == content[10:20] + content[8000:8020]


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
def test_lookup_tells_which_pages_are_on_disk_only(nodes: Nodes, pages: Pages, wire: str) -> None:
    node = nodes.start()
    client = nodes.connect(node, wire)
    keys = pages.keys(1, 2, 3, 4)
    pages.put(client, keys[:3], durable=True)
    found = client.lookup(pages.namespace, keys)
    assert (found.present, found.tiers) == ((True, True, True, False), b"")
    pages.drop_from_ram(node)
    assert pages.get(client, keys[1:2]) == [True]  # into RAM again
    found = client.lookup(pages.namespace, keys)
    assert (found.present, found.prefix_pages) == ((True, True, True, False), 3)
    assert found.tiers == bytes((Tier.DISK, Tier.RAM, Tier.DISK, 0))
    client.lookup(pages.namespace, keys, touch=True)  # a use is no question
    counters = client.node_status().totals
    assert (counters.pages_hit, counters.pages_hit_disk) == (6, 2)


def test_page_in_ram_with_a_time_to_live_is_not_told_as_on_disk(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(1)
    pages.put(client, keys, durable=True, ttl_s=600.0)
    assert client.lookup(pages.namespace, keys).tiers == b""
    pages.drop_from_ram(node)
    assert client.lookup(pages.namespace, keys).tiers == bytes((Tier.DISK,))


def test_get_larger_than_free_ram_reads_every_page(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start(disk_nbytes=4 << 20)
    client = nodes.connect(node)
    keys = pages.keys(*range(256))  # twice the RAM
    for start in range(0, 256, 32):
        pages.put(client, keys[start : start + 32], durable=True)
    for _ in range(2):
        assert all(pages.get(client, keys))
    assert client.node_status().disk.pages_evicted == 0


def test_pages_on_disk_only_are_in_lookup_stat_and_list(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys, others = pages.keys(*range(40)), Pages("other")
    pages.put(client, keys[:30], durable=True)
    others.put(client, keys, durable=True)
    pages.drop_from_ram(node)
    pages.put(client, keys[25:35])
    assert client.lookup(pages.namespace, keys).prefix_pages == 35
    stats = client.stat(pages.namespace, keys)
    assert [stat.present for stat in stats] == [True] * 35 + [False] * 5
    assert [(s.on_disk, s.in_ram) for s in stats[:25]] == [(True, False)] * 25
    assert all(stat.nbytes == 8192 and len(stat.checksum) == 16 for stat in stats[:35])
    wanted = sorted(keys[:35])
    assert [page.prefix_hash for page in client.list_pages(pages.namespace)] == wanted
    assert [page.prefix_hash for page in client.list_pages(pages.namespace, limit=7)] == wanted[:7]
    prefix = wanted[3][:1]
    assert [page.prefix_hash for page in client.list_pages(pages.namespace, key_prefix=prefix)] == [
        key for key in wanted if key.startswith(prefix)
    ]
    paged: list[bytes] = []
    after, rest = b"", True
    while rest:
        infos, after = node.service._inventory.list_pages(pages.digest, b"", after, 6)
        paged += [info.prefix_hash for info in infos]
        rest = bool(after)
    assert paged == wanted


def test_put_of_pages_on_disk_only_returns_exists(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(*range(4))
    pages.put(client, keys, durable=True)
    pages.drop_from_ram(node)
    assert pages.put(client, pages.keys(*range(5)), durable=True) == [EXISTS] * 4 + [STORED]
    assert client.node_status().ram.page_count == 1
    assert pages.on_disk(node, pages.keys(*range(5))) == [True] * 5


# ---- removal -------------------------------------------------------------------------------


def test_page_removed_before_or_during_its_write_stays_removed(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(*range(6))
    layer.writing.clear()
    pages.put(client, keys[:1])
    assert layer.waiting.acquire(timeout=60.0)  # the first is being written, the others wait
    pages.put(client, keys[1:])
    assert client.remove(pages.namespace, keys[:3]) == [True] * 3
    layer.writing.set()
    client.flush()
    wanted = [False] * 3 + [True] * 3
    assert pages.on_disk(node, keys) == wanted
    assert pages.get(client, keys) == wanted
    assert [page.prefix_hash for page in client.list_pages(pages.namespace)] == sorted(keys[3:])
    node = nodes.restart(node)
    assert pages.get(nodes.connect(node), keys) == wanted


def test_page_stored_again_after_its_removal_survives_a_restart(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    """A page stored again after its removal survives a restart.

    One removed page waits in the batch of the new one, the other is being written.
    """
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(1, 2)
    layer.writing.clear()
    pages.put(client, keys[:1])
    assert layer.waiting.acquire(timeout=60.0)
    pages.put(client, keys[1:])
    for _ in range(3):
        client.remove(pages.namespace, keys)
        assert pages.put(client, keys) == [STORED] * 2
    layer.writing.set()
    assert client.flush() == 2
    node = nodes.restart(node)
    assert pages.get(nodes.connect(node), keys) == [True, True]


def test_page_removed_during_its_load_is_gone_for_later_readers(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(1)
    pages.put(client, keys, durable=True)
    pages.drop_from_ram(node)
    layer.reading.clear()
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pages.get, client, keys)
        assert layer.waiting.acquire(timeout=60.0)
        assert client.remove(pages.namespace, keys) == [True]
        assert pages.get(client, keys) == [False]
        layer.reading.set()
        read.result(60.0)  # a hit or a miss; the bytes of a hit were compared
    assert pages.get(client, keys) == [False]
    assert client.lookup(pages.namespace, keys).present == (False,)
    node = nodes.restart(node)
    assert pages.get(nodes.connect(node), keys) == [False]


def test_removing_a_namespace_frees_its_space_in_both_tiers(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    other = Pages("other", 20_000)
    keys = pages.keys(*range(20))
    pages.put(client, keys, durable=True)
    other.put(client, keys, durable=True)
    pages.drop_from_ram(node)
    pages.get(client, keys[:5])
    assert client.remove_namespace(pages.namespace) == 20
    client.flush()
    status = client.node_status()
    assert status.disk.used_nbytes == status.ram.used_nbytes == 20 * 20480
    assert pages.get(client, keys) == [False] * 20
    assert other.get(client, keys) == [True] * 20
    node = nodes.restart(node)
    client = nodes.connect(node)
    assert client.node_status().disk.page_count == 20
    assert pages.get(client, keys) == [False] * 20


# ---- eviction and pins ---------------------------------------------------------------------


def test_disk_evicts_least_recently_used_pages_and_keeps_the_rest(
    nodes: Nodes, pages: Pages
) -> None:
    node = nodes.start(disk_nbytes=1 << 20)  # 128 pages
    client = nodes.connect(node)
    keys = pages.keys(*range(160))
    for start in range(0, 128, 32):
        pages.put(client, keys[start : start + 32], durable=True)
    client.lookup(pages.namespace, keys[:16], touch=True)
    pages.put(client, keys[128:], durable=True)
    pages.drop_from_ram(node)
    wanted = [True] * 16 + [False] * 32 + [True] * 112
    assert list(client.lookup(pages.namespace, keys).present) == wanted
    disk = client.node_status().disk
    assert (disk.page_count, disk.pages_evicted, disk.used_nbytes) == (128, 32, 1 << 20)
    node = nodes.restart(node, disk_nbytes=1 << 20)
    client = nodes.connect(node)
    assert client.node_status().disk.page_count == 128
    assert pages.get(client, keys) == wanted


def test_capacity_follows_a_change_of_page_size(nodes: Nodes, pages: Pages, clock: Clock) -> None:
    node = nodes.start(disk_nbytes=1 << 20)
    clock.govern(node)
    client = nodes.connect(node)
    for start in range(0, 128, 32):
        pages.put(client, pages.keys(*range(start, start + 32)), durable=True)
    large = Pages("large", 65_536)
    clock.now_s += 1  # the time of use has a resolution of 1 s
    for number in range(16):
        assert large.put(client, large.keys(number), durable=True) == [STORED]
    large.drop_from_ram(node)
    assert large.get(client, large.keys(*range(10, 16))) == [True] * 6
    assert client.node_status().disk.used_nbytes <= 1 << 20


def test_durable_put_fails_while_pins_fill_the_disk(
    nodes: Nodes, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.disk.disk_lru.PINNED_SHARE", 1)
    node = nodes.start(disk_nbytes=1 << 20, ram_nbytes=2 << 20)
    client = nodes.connect(node)
    keys, more = pages.keys(*range(128)), pages.keys(*range(200, 208))
    pages.put(client, keys, durable=True)
    assert all(client.pin(pages.namespace, keys, 1000.0))
    with pytest.raises(Exhausted, match="8 pages are not on disk"):
        pages.put(client, more, durable=True)
    assert pages.get(client, more) == [True] * 8, "the pages are not visible in RAM"
    with pytest.raises(Exhausted, match="8 pages are not on disk"):
        client.flush()
    pages.drop_from_ram(node)
    assert pages.get(client, keys) == [True] * 128
    client.unpin(pages.namespace, keys)
    assert pages.put(client, more, durable=True) == [STORED] * 8
    assert pages.on_disk(node, more) == [True] * 8


def test_pins_keep_at_most_half_of_the_disk(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start(disk_nbytes=1 << 20, ram_nbytes=4 << 20)
    client = nodes.connect(node)
    keys = pages.keys(*range(128))
    pages.put(client, keys, durable=True)
    assert all(client.pin(pages.namespace, keys[:64], 1000.0))
    with pytest.raises(Exhausted, match="half of disk_nbytes"):
        client.pin(pages.namespace, keys[60:80], 1000.0)
    assert [stat.pin_ttl_ms > 0 for stat in client.stat(pages.namespace, keys[:80])] == [
        True
    ] * 64 + [False] * 16
    assert all(client.pin(pages.namespace, keys[:64], 2000.0)), (
        "a pin of pinned pages was not extended"
    )
    assert all(client.unpin(pages.namespace, keys[:32]))
    client.remove(pages.namespace, keys[32:64])
    assert node.disk.records._order.pinned_nbytes == 0
    assert all(client.pin(pages.namespace, keys[64:], 0.001))
    assert node.disk.records.victims(1, 8192, node.disk._clock_s() + 2)
    assert node.disk.records._order.pinned_nbytes == 0, "ended pins are still counted"


def test_pin_of_a_page_on_disk_only_is_in_stat_until_unpin(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(1, 2)
    pages.put(client, keys, durable=True)
    pages.drop_from_ram(node)
    assert client.pin(pages.namespace, [*keys, *pages.keys(3)], 1000.0) == [True, True, False]
    assert [stat.pin_ttl_ms > 0 for stat in client.stat(pages.namespace, keys)] == [True, True]
    assert client.unpin(pages.namespace, keys[:1]) == [True]
    assert [stat.pin_ttl_ms > 0 for stat in client.stat(pages.namespace, keys)] == [False, True]


# ---- time to live --------------------------------------------------------------------------


def test_time_to_live_holds_in_ram_on_disk_and_after_promotion(
    nodes: Nodes, pages: Pages, clock: Clock
) -> None:
    node = nodes.start()
    clock.govern(node)
    client = nodes.connect(node)
    mortal, eternal = pages.keys(*range(3)), pages.keys(*range(3, 6))
    pages.put(client, mortal, durable=True, ttl_s=10)
    pages.put(client, eternal, durable=True)
    pages.drop_from_ram(node)
    assert pages.get(client, mortal[:2]) == [True] * 2  # these two are in RAM again
    clock.now_s += 9
    assert pages.get(client, mortal[:1]) == [True]
    assert [stat.ttl_ms for stat in client.stat(pages.namespace, mortal + eternal[:1])] == [
        1000
    ] * 3 + [0]
    clock.now_s += 1
    assert pages.get(client, mortal) == [False] * 3
    assert client.lookup(pages.namespace, mortal + eternal).present == (False,) * 3 + (True,) * 3
    assert len(list(client.list_pages(pages.namespace))) == 3
    assert client.flush() == 3
    assert pages.put(client, mortal) == [STORED] * 3


def test_time_to_live_continues_over_a_restart(
    nodes: Nodes, pages: Pages, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(1, 2)
    pages.put(client, keys[:1], durable=True, ttl_s=100)
    pages.put(client, keys[1:], durable=True, ttl_s=1 << 33)  # more than 32 bits of seconds
    node = nodes.restart(node)
    client = nodes.connect(node)
    assert 0 < client.stat(pages.namespace, keys)[0].ttl_ms <= 100_000
    assert client.stat(pages.namespace, keys)[1].ttl_ms > 1000 * 3600 * 24 * 365
    nodes.stop(node)
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    # Start a process 2,500,000,000 s later
    monkeypatch.setattr("node.clock._EPOCH_S", since_boot_s - 2_500_000_000)
    node = nodes.start()
    client = nodes.connect(node)
    assert pages.get(client, keys[:1]) == [False]
    assert client.node_status().disk.page_count == 0


def test_node_without_a_disk_refuses_durable_puts_and_flush(nodes: Nodes, pages: Pages) -> None:
    client = nodes.connect(nodes.start(data_dir=""))
    with pytest.raises(InvalidRequest, match="--data-dir"):
        pages.put(client, pages.keys(1), durable=True)
    with pytest.raises(InvalidRequest, match="--data-dir"):
        client.flush()
    assert pages.put(client, pages.keys(1)) == [STORED]
    assert not client.node_status().disk
