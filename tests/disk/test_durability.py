"""A durable put or a flush is acknowledged only if its pages survive a failure of the disk."""

import contextlib
import errno
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disk_nodes import FaultyLayer, Nodes, Pages

from kvstore import PutOutcome
from kvstore.errors import ConfigError, Exhausted, KVStoreError
from node.config import NodeConfig
from node.disk.durability import Durability
from node.disk.rows import page_key
from node.memory.inventory import Inventory

STORED = PutOutcome.STORED


def test_durable_put_fails_although_the_tier_recovers_at_once(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed write fails the durable put even if the tier is healthy when its state is checked.

    An operator's recover between the failed write and that check would have this effect.
    """
    node = nodes.start()
    client = nodes.connect(node)
    monkeypatch.setattr(node.disk, "stop_after_error", lambda reason: None)
    layer.fail["sync"] = errno.EIO
    with pytest.raises(Exhausted, match="before the pages were safe"):
        pages.put(client, pages.keys(1), durable=True)


def test_pages_of_a_failed_sync_are_not_on_disk_until_written_again(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    """Pages of a failed fsync are written again: a second fsync may succeed without their bytes."""
    node = nodes.start()
    client = nodes.connect(node)
    safe, unsafe = pages.keys(*range(4)), pages.keys(*range(4, 8))
    pages.put(client, safe, durable=True)
    layer.fail["sync"] = errno.EIO
    with pytest.raises(Exhausted):
        pages.put(client, unsafe, durable=True)
    layer.heal()
    client.recover()
    assert pages.on_disk(node, safe + unsafe) == [True] * 4 + [False] * 4
    assert pages.put(client, unsafe, durable=True) == [PutOutcome.EXISTS] * 4
    assert pages.on_disk(node, unsafe) == [True] * 4
    node = nodes.restart(node)
    assert pages.get(nodes.connect(node), safe + unsafe) == [True] * 8


def test_recover_handles_pages_removed_since_the_last_sync(
    nodes: Nodes, pages: Pages, layer: FaultyLayer
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(*range(6)), durable=True)
    layer.fail["sync"] = errno.EIO
    with pytest.raises(Exhausted):
        pages.put(client, pages.keys(*range(6, 10)), durable=True)
    client.remove(pages.namespace, pages.keys(5, 6, 7))
    layer.heal()
    client.recover()
    client.flush()
    assert pages.on_disk(node, pages.keys(*range(10))) == [True] * 5 + [False] * 3 + [True] * 2


def test_idle_writer_syncs_written_pages(nodes: Nodes, layer: FaultyLayer, pages: Pages) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1, 2))
    end = time.monotonic() + 60.0
    while not (pages.on_disk(node, pages.keys(1, 2)) == [True] * 2 and not node.disk.sync_pending):
        assert time.monotonic() < end, "nothing was synced"
        threading.Event().wait(0.01)
    assert layer.calls["sync"] >= 1


def test_failed_durable_put_keeps_the_connection_and_later_hits(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(*range(4)))
    layer.fail["write"] = errno.EIO
    for number in range(20, 30):
        with pytest.raises(Exhausted):
            pages.put(client, pages.keys(number), durable=True)
        assert pages.get(client, pages.keys(*range(4), number)) == [True] * 5
    assert node.sessions.count <= 2


def test_large_durable_put_fails_if_a_later_batch_fails(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    """A durable put that the client splits into batches fails if a later batch fails."""
    node = nodes.start(batch_keys_max=4)
    client = nodes.connect(node)
    written = layer.calls["write"]
    layer_write = layer.write

    def fail_later(fd: int, view: memoryview, offset: int) -> int:
        if layer.calls["write"] > written:
            layer.fail["write"] = errno.EIO
        return int(layer_write(fd, view, offset))

    layer.write = fail_later
    with pytest.raises(Exhausted):
        pages.put(client, pages.keys(*range(8)), durable=True)


def test_unforeseen_read_error_leaves_no_busy_records(
    nodes: Nodes, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(*range(4))
    pages.put(client, keys, durable=True)
    pages.drop_from_ram(node)

    def fail(*_: object) -> bool:
        raise RuntimeError("not an OSError")

    with monkeypatch.context() as patch:
        patch.setattr(node.disk.files, "read", fail)
        with pytest.raises(KVStoreError):
            pages.get(nodes.connect(node), keys)
    assert not node.disk.records._busy, "the reads queued behind it also release their records"
    assert pages.get(client, keys) == [True] * 4
    assert node.tier.writing_count == 0


def test_other_namespaces_are_served_while_a_large_one_is_removed(
    nodes: Nodes, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large namespace is removed in pieces, so that reads of others run in between."""
    monkeypatch.setattr("node.disk.index.FORGOTTEN", 3)
    node = nodes.start()
    pieces: list[int] = []
    forget_some = node.disk._index.forget_some

    def forget_counted(digest: bytes, first: int) -> tuple[int, int]:
        count, following = forget_some(digest, first)
        pieces.append(count)
        return count, following

    monkeypatch.setattr(node.disk._index, "forget_some", forget_counted)
    client = nodes.connect(node)
    other = Pages("another model")
    pages.put(client, pages.keys(*range(20)), durable=True)
    other.put(client, other.keys(*range(20)), durable=True)
    pages.drop_from_ram(node)
    with ThreadPoolExecutor(1) as pool:
        removal = pool.submit(client.remove_namespace, pages.namespace)
        assert other.get(nodes.connect(node), other.keys(*range(20))) == [True] * 20
        assert removal.result(60.0) >= 20
    assert max(pieces) == 3
    assert sum(pieces) <= 20
    assert pages.on_disk(node, pages.keys(*range(20))) == [False] * 20
    assert other.on_disk(node, other.keys(*range(20))) == [True] * 20


def test_page_removed_during_its_write_is_gone_after_flush(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    first, second = pages.keys(1, 2)
    layer.writing.clear()
    pages.put(client, [first])
    assert layer.waiting.acquire(timeout=60.0)
    pages.put(client, [second])
    write = layer.write

    def write_and_remove(fd: int, view: memoryview, offset: int) -> int:
        if bytes(view) == pages.content(second):
            assert node.tier.remove(pages.digest, [second]) == [True]
        return int(write(fd, view, offset))

    monkeypatch.setattr(layer, "write", write_and_remove)
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(client.flush)
        end = time.monotonic() + 60.0
        while len(node.disk.writer._queue) < 2:  # so that page and barrier are one batch
            assert time.monotonic() < end
            threading.Event().wait(0.005)
        layer.writing.set()
        assert flushed.result(60.0) == 1
    assert [key for key, _ in node.disk.rows.pages()] == [page_key(1, first)]


def test_deferred_pages_of_a_full_hanging_disk_are_limited(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.disk.writer.LATER_PAGES", 16)
    node = nodes.start()
    client = nodes.connect(node)
    for start in range(0, 256, 64):
        pages.put(client, pages.keys(*range(start, start + 64)), durable=True)
    assert not node.disk.has_room(node.tier.namespace(pages.namespace.digest))
    layer.writing.clear()
    for start in range(1000, 3000, 50):
        pages.put(client, pages.keys(*range(start, start + 50)))
    assert 0 < len(node.disk.writer._later) <= 2 * 128 + 16 + 50
    layer.writing.set()
    client.flush()


def test_queue_larger_than_ram_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="disk_queue_nbytes"):
        NodeConfig(
            ram_nbytes=1 << 20,
            extent_nbytes=1 << 16,
            disk_queue_nbytes=2 << 20,
            data_dir=str(tmp_path),
        )


def test_a_flush_of_a_full_disk_leaves_no_page_or_raises(nodes: Nodes) -> None:
    """Regression: a flush evicted pages that had been on disk before, with their blocks."""
    node = nodes.start(
        ram_nbytes=4 << 20, extent_nbytes=1 << 18, disk_nbytes=10 << 20, disk_extent_nbytes=1 << 18
    )
    client, random_, inventory = nodes.connect(node), random.Random(3), Inventory(node.tier)
    sizes = [Pages(f"{nbytes}", nbytes) for nbytes in (4096, 16384, 75_000)]
    flushed = 0
    for count in range(0, 1500, 3):
        some = random_.choice(sizes)
        some.put(client, some.keys(*range(count, count + 3)))
        some.get(client, some.keys(*range(count, count + 3)))
        if random_.random() < 0.5 and count > 600:
            some.get(client, some.keys(*(random_.randrange(count) for _ in range(3))))
        if count % 120 == 0:
            with contextlib.suppress(Exhausted):
                client.flush()
                flushed += 1
                assert inventory.unsaved() == []
    assert flushed > 10


def test_wait_of_a_client_is_capped_by_the_nodes_flush_time() -> None:
    durability = Durability.__new__(Durability)
    durability._flush_s = 30.0
    assert durability.begin_wait(600_000).left_s <= 30.0
    assert durability.begin_wait(2_000).left_s <= 2.0
    assert durability.begin_wait().left_s > 29.0
