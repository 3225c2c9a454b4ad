"""A page counts as safe when a sync began after its last write, whichever call wrote or synced it.

`test_power_short.py` cuts the power at random; here is one test for each way to break the rule.
"""

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from disk_nodes import FaultyLayer, Nodes, Pages

from kvstore import PutOutcome
from kvstore.errors import Exhausted
from node.disk.durability import Wait
from node.memory.page import Page


class Trail:
    """The order of the writes and syncs of a file layer."""

    def __init__(self, layer: FaultyLayer) -> None:
        self.calls: list[str] = []
        for name in ("write", "sync"):
            call = getattr(layer, name)
            setattr(
                layer,
                name,
                lambda *args, call=call, name=name: (self.calls.append(name), call(*args))[1],
            )

    def assert_synced(self) -> None:
        """Check that a sync came after the last write."""
        assert self.calls[-1:] == ["sync"], f"the last calls were {self.calls[-4:]}"


@pytest.fixture
def without_idle_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.disk.writer.IDLE_S", 30.0)


def write_between(
    node: Any, monkeypatch: pytest.MonkeyPatch, digest: bytes, keys: list[bytes]
) -> None:
    """Let another client's flush write these pages, unsynced, right after the next barrier."""
    durability = node.service.durability
    barrier, done = durability._barrier, []

    def barrier_then_write(wait: Wait) -> None:
        barrier(wait)
        if not done:
            done.append(True)
            assert not node.tier.offer(digest, keys)
            wait_until(lambda: node.disk.present(digest, keys) == [True] * len(keys))

    monkeypatch.setattr(durability, "_barrier", barrier_then_write)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end, "the condition was not met in 10 s"
        threading.Event().wait(0.005)


def put_in_ram_only(
    node: Any, pages: Pages, client: Any, keys: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(node.disk.writer, "offer", lambda pages, urgent: 0)
        pages.put(client, keys)
    assert pages.on_disk(node, keys) == [False] * len(keys)


@pytest.mark.usefixtures("without_idle_syncs")
def test_durable_put_waits_for_a_sync_of_pages_written_after_its_barrier(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
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
def test_flush_waits_for_a_sync_of_pages_written_after_its_barrier(
    nodes: Nodes,
    layer: FaultyLayer,
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
    still_in_ram: bool,
) -> None:
    """A flush waits for a sync of pages written after its barrier, even if RAM evicted them."""
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


def test_durable_put_fails_if_ram_evicts_the_page_before_its_write(
    nodes: Nodes, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A durable put fails if RAM evicted its page before it was written.

    This happens when the disk queue is full and RAM needs the slot.
    """
    node = nodes.start()
    client = nodes.connect(node)
    monkeypatch.setattr(node.disk.writer, "offer", lambda pages, urgent: 0)
    commit = node.tier.commit

    def commit_and_evict(*args: Any) -> Any:
        stored = commit(*args)
        pages.drop_from_ram(node)
        return stored

    monkeypatch.setattr(node.tier, "commit", commit_and_evict)
    with pytest.raises(Exhausted, match=r"1 pages are not on disk.*removed meanwhile"):
        pages.put(client, pages.keys(1), durable=True)


@pytest.mark.usefixtures("without_idle_syncs")
def test_pages_of_an_earlier_run_are_synced_before_the_ack(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    """Pages of an earlier run are synced before they are acknowledged.

    That run may have been killed before its sync, which its rows do not show.
    """
    node = nodes.start()
    pages.put(nodes.connect(node), pages.keys(1, 2), durable=True)
    node = nodes.restart(node)
    client = nodes.connect(node)
    assert node.disk.safe(pages.digest, pages.keys(1, 2)) == [False, False]
    trail = Trail(layer)
    assert pages.put(client, pages.keys(1), durable=True) == [PutOutcome.EXISTS]
    assert trail.calls == ["sync"]
    trail.calls.clear()
    assert pages.put(client, pages.keys(2), durable=True) == [PutOutcome.EXISTS]
    assert trail.calls == [], "safe pages were synced again"


@pytest.mark.usefixtures("without_idle_syncs")
def test_busy_writer_syncs_without_idle_time(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.disk.tier.SYNC_PAGES", 4)
    node = nodes.start()
    before = layer.calls["sync"]
    pages.put(nodes.connect(node), pages.keys(*range(10)))
    wait_until(lambda: layer.calls["sync"] > before)


@pytest.mark.usefixtures("without_idle_syncs")
def test_sync_waits_for_a_concurrent_sync(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second sync waits for the first one, which has taken the list of files to sync.

    A recover and the writer may sync at the same time.
    """
    node = nodes.start()
    begun, go_on, sync = threading.Event(), threading.Event(), layer.sync

    def slow_sync(fd: int) -> None:
        begun.set()
        assert go_on.wait(60.0)
        sync(fd)

    pages.put(nodes.connect(node), pages.keys(1))
    wait_until(lambda: pages.on_disk(node, pages.keys(1)) == [True])
    monkeypatch.setattr(layer, "sync", slow_sync)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(node.disk.sync)
        assert begun.wait(60.0)
        second = pool.submit(node.disk.sync)
        threading.Event().wait(0.2)
        too_early = second.done() and not first.done()
        go_on.set()
        first.result(60.0)
        second.result(60.0)
    assert not too_early


def test_sync_after_a_failed_one_makes_no_page_safe_until_recover(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed sync, a successful one makes no page safe until a recover.

    This holds even before the tier is stopped.
    """
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1), durable=True)
    with monkeypatch.context() as patch:
        patch.setattr(node.disk, "stop_after_error", lambda reason: None)
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


def test_recover_waits_for_a_running_store(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recover waits for a running store for a limited time, and fails if the disk hangs.

    Otherwise one of the two could rely on a sync of the other that failed.
    """
    node = nodes.start()
    client = nodes.connect(node)
    layer.writing.clear()
    pages.put(client, pages.keys(1))
    assert layer.waiting.acquire(timeout=60.0)
    monkeypatch.setattr("node.disk.tier.RECOVER_WAIT_S", 0.1)
    with pytest.raises(Exhausted, match=r"has not returned for 0\.1 s"):
        nodes.connect(node).recover()
    layer.writing.set()
    client.flush()
    client.recover()


@pytest.mark.usefixtures("without_idle_syncs")
def test_flush_syncs_an_earlier_removal(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1), durable=True)
    assert not node.disk.sync_pending
    client.remove(pages.namespace, pages.keys(1))
    client.flush()
    assert not node.disk.sync_pending
    assert list(node.disk.rows.pages()) == []


def test_idle_writer_syncs_a_removal(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1), durable=True)
    synced: list[bool] = []
    sync = node.disk.rows.sync
    node.disk.rows.sync = lambda: (synced.append(True), sync())
    client.remove(pages.namespace, pages.keys(1))
    wait_until(lambda: bool(synced))


def test_unsynced_removal_is_repeated_after_recover(
    nodes: Nodes, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed sync, recover deletes the rows of removed pages once more.

    The failed sync may have lost the deletions, and a later sync does not repeat them: after a
    power loss, the pages would be back.
    """
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(*range(4))
    pages.put(client, keys, durable=True)
    deleted: list[bytes] = []
    write = node.disk.rows.write

    def watched(namespaces: Any, rows: Any, gone: Any) -> None:
        gone = list(gone)
        write(namespaces, rows, gone)
        deleted.extend(gone)

    def broken() -> None:
        raise OSError(errno.EIO, "rows: broken by the test")

    monkeypatch.setattr(node.disk.rows, "write", watched)
    with monkeypatch.context() as patch:
        patch.setattr(node.disk.rows, "sync", broken)
        client.remove(pages.namespace, keys[:2])
        with pytest.raises(Exhausted):
            client.flush()
    first = sorted(deleted)
    assert [key[3:] for key in first] == sorted(keys[:2])
    client.recover()
    assert client.flush() == 2
    assert sorted(deleted) == sorted(first * 2)
    client.flush()
    assert len(deleted) == 4, "a synced deletion was repeated"
    assert client.lookup(pages.namespace, keys).present == (False, False, True, True)


@pytest.mark.usefixtures("without_idle_syncs")
def test_namespace_with_a_reused_number_survives_a_failed_sync(
    nodes: Nodes, layer: FaultyLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A namespace that got the number of a removed one before a failed sync survives a restart.

    The repeated deletion of the old row must not delete the new one, which has the same key.
    """
    node = nodes.start()
    client = nodes.connect(node)
    first, second = Pages("first"), Pages("second")
    first.put(client, first.keys(1), durable=True)
    client.remove_namespace(first.namespace)
    layer.fail["sync"] = errno.EIO
    with monkeypatch.context() as patch:
        patch.setattr("node.disk.index.KEPT", 1)
        with pytest.raises(Exhausted):
            second.put(client, second.keys(1), durable=True)
    layer.heal()
    assert node.disk._index.namespace_ids.known(second.digest) == 1, "the number is used again"
    client.recover()
    client.flush()
    node = nodes.restart(node)
    assert second.get(nodes.connect(node), second.keys(1)) == [True]


@pytest.mark.usefixtures("without_idle_syncs")
def test_barrier_with_a_begun_sync_takes_no_more_waiters(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiters share the barrier at the end of the queue only until its sync begins."""
    node = nodes.start()
    client = nodes.connect(node)
    begun, go_on, sync = threading.Event(), threading.Event(), node.disk.sync
    synced: list[list[bool]] = []

    def slow_sync() -> None:
        synced.append(node.disk.present(pages.digest, pages.keys(1, 2, 3)))
        begun.set()
        assert go_on.wait(60.0)
        sync()

    monkeypatch.setattr(node.disk, "sync", slow_sync)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(pages.put, client, pages.keys(1), durable=True)
        assert begun.wait(60.0)
        others = [
            pool.submit(pages.put, client, pages.keys(number), durable=True) for number in (2, 3)
        ]
        wait_until(lambda: sum(not isinstance(item, Page) for item in node.disk.writer._queue) > 0)
        assert not any(call.done() for call in (first, *others))
        go_on.set()
        assert [call.result(60.0) for call in (first, *others)] == [[PutOutcome.STORED]] * 3
    assert synced[0] == [True, False, False]
    assert synced[-1] == [True, True, True]
    assert node.disk.safe(pages.digest, pages.keys(1, 2, 3)) == [True] * 3
