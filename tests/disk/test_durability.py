"""What an acknowledgement of a durable put or a flush is worth when the disk fails in between."""

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvstore import PutOutcome
from kvstore.errors import ConfigError, Exhausted
from node.config import NodeConfig
from node.disk.rows import page_key

STORED = PutOutcome.STORED


def test_a_tier_that_works_again_at_once_does_not_acknowledge_what_it_lost(
    nodes: Any, layer: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if an operator's recover came between the failed write and the look at the tier's state."""
    node = nodes.start()
    client = nodes.connect(node)
    monkeypatch.setattr(node.disk, "poison", lambda reason: None)
    layer.fail["sync"] = errno.EIO
    with pytest.raises(Exhausted, match="before the pages were safe"):
        pages.put(client, pages.keys(1), durable=True)


def test_pages_of_a_failed_sync_count_as_stored_only_after_another(nodes: Any, layer: Any, pages: Any) -> None:
    """A second fsync may succeed although the first one lost the bytes."""
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


def test_pages_removed_since_the_last_sync_are_no_trouble_to_recover(nodes: Any, pages: Any, layer: Any) -> None:
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


class Trail:
    """The order in which a layer wrote and synced: what the rule of an acknowledgement is about."""

    def __init__(self, layer: Any) -> None:
        self.calls: list[str] = []
        for name in ("write", "sync"):
            call = getattr(layer, name)
            setattr(layer, name, lambda *args, call=call, name=name: (self.calls.append(name), call(*args))[1])

    def assert_synced(self) -> None:
        """A sync began after the last write ended."""
        assert self.calls[-1:] == ["sync"], f"the last calls were {self.calls[-4:]}"


@pytest.fixture
def without_idle_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.disk.writer.IDLE_S", 30.0)


def write_between(node: Any, monkeypatch: pytest.MonkeyPatch, digest: bytes, keys: list[bytes]) -> None:
    """Another client's flush writes these pages, and has not synced them, right behind the next barrier."""
    durability = node.service.durability
    barrier, done = durability._barrier, []

    def barrier_then_write(end: float) -> None:
        barrier(end)
        if not done:
            done.append(True)
            assert not node.tier.offer(digest, keys)
            wait_until(lambda: node.disk.present(digest, keys) == [True] * len(keys))

    monkeypatch.setattr(durability, "_barrier", barrier_then_write)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        threading.Event().wait(0.005)


def put_in_ram_only(node: Any, pages: Any, client: Any, keys: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(node.disk.writer, "offer", lambda pages, urgent: 0)
        pages.put(client, keys)
    assert pages.on_disk(node, keys) == [False] * len(keys)


@pytest.mark.usefixtures("without_idle_syncs")
def test_a_durable_put_is_not_acknowledged_for_a_page_that_another_wrote_behind_its_barrier(
    nodes: Any, layer: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    put_in_ram_only(node, pages, client, pages.keys(1, 2), monkeypatch)
    write_between(node, monkeypatch, pages.digest, pages.keys(1, 2))
    trail = Trail(layer)
    assert pages.put(client, pages.keys(1, 2), durable=True) == [PutOutcome.EXISTS] * 2
    trail.assert_synced()
    assert node.disk.safe(pages.digest, pages.keys(1, 2)) == [True, True]


@pytest.mark.usefixtures("without_idle_syncs")
@pytest.mark.parametrize("still_in_ram", [True, False])
def test_a_flush_does_not_return_for_a_page_that_another_wrote_behind_its_barrier(
    nodes: Any, layer: Any, pages: Any, monkeypatch: pytest.MonkeyPatch, still_in_ram: bool
) -> None:
    """Also if RAM has evicted the page by the time the flush looks for what is left."""
    node = nodes.start()
    client = nodes.connect(node)
    put_in_ram_only(node, pages, client, pages.keys(1, 2), monkeypatch)
    write_between(node, monkeypatch, pages.digest, pages.keys(1, 2))
    unsaved = node.service.durability._inventory.unsaved

    def evict_first(*args: Any) -> Any:
        if not still_in_ram:
            wait_until(lambda: node.tier.held_count == 0)
            pages.drop_from_ram(node)
        return unsaved(*args)

    monkeypatch.setattr(node.service.durability._inventory, "unsaved", evict_first)
    trail = Trail(layer)
    client.flush()
    trail.assert_synced()
    assert node.disk.safe(pages.digest, pages.keys(1, 2)) == [True, True]


def test_a_durable_put_of_a_page_that_ram_lost_before_it_was_on_disk_is_not_acknowledged(
    nodes: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue was full, and RAM needed the slot."""
    node = nodes.start()
    client = nodes.connect(node)
    monkeypatch.setattr(node.disk.writer, "offer", lambda pages, urgent: 0)
    commit = node.tier.commit

    def commit_and_evict(*args: Any) -> Any:
        stored = commit(*args)
        pages.drop_from_ram(node)
        return stored

    monkeypatch.setattr(node.tier, "commit", commit_and_evict)
    with pytest.raises(Exhausted, match="1 pages are not on disk.*went meanwhile"):
        pages.put(client, pages.keys(1), durable=True)


@pytest.mark.usefixtures("without_idle_syncs")
def test_what_an_earlier_run_left_is_synced_before_it_is_acknowledged(nodes: Any, layer: Any, pages: Any) -> None:
    """That run may have been killed before it synced; nobody can tell from its rows."""
    node = nodes.start()
    pages.put(nodes.connect(node), pages.keys(1, 2), durable=True)
    node = nodes.restart(node)
    client = nodes.connect(node)
    trail = Trail(layer)
    assert pages.put(client, pages.keys(1), durable=True) == [PutOutcome.EXISTS]
    assert trail.calls == ["sync"]
    trail.calls.clear()
    assert pages.put(client, pages.keys(2), durable=True) == [PutOutcome.EXISTS]
    assert trail.calls == [], "once is enough"


@pytest.mark.usefixtures("without_idle_syncs")
def test_a_sync_does_not_return_before_another_that_took_its_work_has_ended(
    nodes: Any, layer: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recover and the writer, say: the first takes the list of what is to be synced."""
    node = nodes.start()
    begun, go_on, sync = threading.Event(), threading.Event(), layer.sync

    def slow_sync(fd: int) -> None:
        begun.set()
        assert go_on.wait(20.0)
        sync(fd)

    pages.put(nodes.connect(node), pages.keys(1))
    wait_until(lambda: pages.on_disk(node, pages.keys(1)) == [True])
    monkeypatch.setattr(layer, "sync", slow_sync)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(node.disk.sync)
        assert begun.wait(10.0)
        second = pool.submit(node.disk.sync)
        threading.Event().wait(0.2)
        too_early = second.done() and not first.done()
        go_on.set()
        first.result(10.0)
        second.result(10.0)
    assert not too_early


def test_a_sync_that_works_after_one_that_failed_makes_nothing_safe_until_a_recover(
    nodes: Any, layer: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if nobody has noticed yet that the tier is to be stopped."""
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1), durable=True)
    with monkeypatch.context() as patch:
        patch.setattr(node.disk, "poison", lambda reason: None)
        layer.fail["sync"] = errno.EIO
        with pytest.raises(Exhausted):
            pages.put(client, pages.keys(2), durable=True)
        layer.heal()
        node.disk.sync()
    assert node.disk.safe(pages.digest, pages.keys(1, 2)) == [True, False]
    with pytest.raises(Exhausted):
        pages.put(client, pages.keys(2), durable=True)
    client.recover()
    assert pages.put(client, pages.keys(2), durable=True) == [PutOutcome.EXISTS]
    assert node.disk.safe(pages.digest, pages.keys(1, 2)) == [True, True]


def test_recover_waits_for_the_store_that_is_under_way(
    nodes: Any, layer: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a failed sync of one would be what the other believes in. A disk that hangs is told, not waited for."""
    node = nodes.start()
    client = nodes.connect(node)
    layer.writing.clear()
    pages.put(client, pages.keys(1))
    assert layer.waiting.acquire(timeout=10.0)
    monkeypatch.setattr("node.disk.tier.RECOVER_WAIT_S", 0.1)
    with pytest.raises(Exhausted, match=r"has not returned for 0\.1 s"):
        nodes.connect(node).recover()
    layer.writing.set()
    client.flush()
    client.recover()


@pytest.mark.usefixtures("without_idle_syncs")
def test_a_removal_is_synced_by_the_flush_behind_it(nodes: Any, pages: Any) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1), durable=True)
    assert not node.disk.sync_pending
    client.remove(pages.namespace, pages.keys(1))
    client.flush()
    assert not node.disk.sync_pending
    assert list(node.disk.rows.pages()) == []


def test_an_idle_writer_syncs_a_removal(nodes: Any, pages: Any) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1), durable=True)
    synced: list[bool] = []
    sync = node.disk.rows.sync
    node.disk.rows.sync = lambda: (synced.append(True), sync())
    client.remove(pages.namespace, pages.keys(1))
    wait_until(lambda: bool(synced))


def test_an_idle_writer_syncs_what_it_wrote(nodes: Any, layer: Any, pages: Any) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1, 2))
    end = time.monotonic() + 10.0
    while not (pages.on_disk(node, pages.keys(1, 2)) == [True] * 2 and not node.disk.sync_pending):
        assert time.monotonic() < end, "nothing was synced"
        threading.Event().wait(0.01)
    assert layer.calls["sync"] >= 1


def test_a_failed_durable_put_leaves_the_clients_link_and_its_hits_alone(nodes: Any, layer: Any, pages: Any) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(*range(4)))
    layer.fail["write"] = errno.EIO
    for number in range(20, 30):
        with pytest.raises(Exhausted):
            pages.put(client, pages.keys(number), durable=True)
        assert pages.get(client, pages.keys(*range(4), number)) == [True] * 5
    assert node.sessions.count <= 2


def test_every_part_of_a_large_durable_put_must_be_safe(nodes: Any, layer: Any, pages: Any) -> None:
    """A put that the client sends in parts fails if a later part does."""
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


def test_a_read_that_breaks_in_an_unforeseen_way_makes_nobody_wait(
    nodes: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
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
        with pytest.raises(Exception):  # noqa: B017, PT011 -- whatever the edge makes of it
            pages.get(nodes.connect(node), keys)
    assert pages.get(client, keys) == [True] * 4
    assert node.tier.writing_count == 0


def test_other_namespaces_are_served_while_a_large_one_is_removed(
    nodes: Any, pages: Any, make_pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes in pieces; what is stored in it meanwhile may stay."""
    monkeypatch.setattr("node.disk.tier.FORGET_RECORDS", 3)
    node = nodes.start()
    client = nodes.connect(node)
    other = make_pages("another model")
    pages.put(client, pages.keys(*range(20)), durable=True)
    other.put(client, other.keys(*range(20)), durable=True)
    with ThreadPoolExecutor(1) as pool:
        removal = pool.submit(client.remove_namespace, pages.namespace)
        assert other.get(nodes.connect(node), other.keys(*range(20))) == [True] * 20
        assert removal.result(10.0) >= 20
    assert pages.on_disk(node, pages.keys(*range(20))) == [False] * 20
    assert other.on_disk(node, other.keys(*range(20))) == [True] * 20


def test_a_page_removed_while_it_is_written_is_gone_when_flush_returns(
    nodes: Any, layer: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    first, second = pages.keys(1, 2)
    layer.writing.clear()
    pages.put(client, [first])
    assert layer.waiting.acquire(timeout=10.0)
    pages.put(client, [second])
    write = layer.write

    def write_and_remove(fd: int, view: memoryview, offset: int) -> int:
        if bytes(view) == pages.content(second):
            assert node.tier.remove(pages.digest, [second]) == [True]
        return int(write(fd, view, offset))

    monkeypatch.setattr(layer, "write", write_and_remove)
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(client.flush)
        end = time.monotonic() + 10.0
        while len(node.disk.writer._queue) < 2:  # so that page and barrier are one batch
            assert time.monotonic() < end
            threading.Event().wait(0.005)
        layer.writing.set()
        assert flushed.result(10.0) == 1
    assert [key for key, _ in node.disk.rows.pages()] == [page_key(1, first)]


def test_a_disk_that_is_full_and_hangs_does_not_make_the_list_of_waiting_pages_grow(
    nodes: Any, layer: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.disk.writer.LATER_PAGES", 16)
    node = nodes.start()
    client = nodes.connect(node)
    for start in range(0, 256, 64):
        pages.put(client, pages.keys(*range(start, start + 64)), durable=True)
    assert not node.disk.has_room(pages.nbytes)
    layer.writing.clear()
    for start in range(1000, 3000, 50):
        pages.put(client, pages.keys(*range(start, start + 50)))
    assert 0 < len(node.disk.writer._later) <= 2 * 128 + 16 + 50
    layer.writing.set()
    client.flush()


def test_a_queue_larger_than_ram_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="disk_queue_nbytes"):
        NodeConfig(ram_nbytes=1 << 20, extent_nbytes=1 << 16, disk_queue_nbytes=2 << 20, data_dir=str(tmp_path))
