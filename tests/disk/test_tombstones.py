"""Rows of removed and expired pages are deleted in batches, without blocking other calls."""

import time
from typing import Any

import pytest
from counted_lock import CountedLock
from disk_nodes import FaultyLayer, Nodes, Pages
from waiting import OthersRun

from node.disk.rows import PageRow, page_runs

MANY = 60_000
LONGEST = 100_000  # bytecodes under one lock; a former bug took some 15 for each row


def expire(node: Any, count: int) -> list[bytes]:
    """Store `count` rows whose time to live is over, as a start finds them; return their keys."""
    rows = [
        PageRow(1, n.to_bytes(32, "big"), 4096 * n, 4096, 1, 1, 2, bytes(16)) for n in range(count)
    ]
    node.disk.rows.write({}, rows, [])
    pairs = [(row.key, row.value()) for row in rows]
    with node.disk._lock:
        for run in page_runs(pairs):
            node.disk._index.restore_pages(run, 1000)
    return [key for key, _ in pairs]


def test_many_expired_rows_are_deleted_without_a_long_lock(
    nodes: Nodes, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: rows were deleted under the lock that gets from RAM wait for, all at once."""
    node = nodes.start()
    deleted: list[list[bytes]] = []
    write = node.disk.rows.write

    def watched(namespaces: Any, rows: Any, gone: Any) -> None:
        deleted.append(list(gone))
        write(namespaces, rows, gone)

    with node.disk._io:  # so that no other thread deletes the rows
        keys = expire(node, MANY)
        monkeypatch.setattr(node.disk.rows, "write", watched)
        lock = node.disk._lock = CountedLock()
        node.disk._store([])
        node.disk._sync()
    assert node.disk.tombstone_count == 0
    assert lock.longest < LONGEST
    assert max(map(len, deleted)) <= 1 << 14
    assert sorted(key for some in deleted for key in some) == sorted(keys)
    assert list(node.disk.rows.pages()) == []


def test_page_stored_again_outlives_the_deletion_of_its_old_row(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New rows are written with the last batch of deletions, so a page stored again keeps its row.

    The new pages have the keys and slots of removed ones.
    """
    monkeypatch.setattr("node.disk.index.BLOCK_KEYS", 4)
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(*range(40))
    pages.put(client, keys, durable=True)
    batches: list[tuple[int, int]] = []
    write = node.disk.rows.write

    def watched(namespaces: Any, rows: Any, gone: Any) -> None:
        rows, gone = list(rows), list(gone)
        batches.append((len(gone), len(rows)))
        write(namespaces, rows, gone)

    monkeypatch.setattr(node.disk.rows, "write", watched)
    with node.disk._io:  # the writer waits, so that all rows are deleted at once
        assert sum(client.remove(pages.namespace, keys)) == 40
        pages.put(client, keys)
    client.flush()
    assert sum(gone for gone, _ in batches) == 40
    assert max(gone for gone, _ in batches) <= 4
    assert all(gone == 4 for gone, new in batches[:-1] if not new)
    node = nodes.restart(node)
    assert pages.get(nodes.connect(node), keys) == [True] * 40


def test_failed_deletion_is_repeated_later(
    nodes: Nodes, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the second of ten batches fails, the other nine are deleted after a recover."""
    monkeypatch.setattr("node.disk.index.BLOCK_KEYS", 4)
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(*range(40))
    pages.put(client, keys, durable=True)
    write, calls = node.disk.rows.write, []

    def failing(*batch: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(5, "broken by the test")
        write(*batch)

    monkeypatch.setattr(node.disk.rows, "write", failing)
    with node.disk._io:
        client.remove(pages.namespace, keys)
    end = time.monotonic() + 60.0
    while not node.disk.stop_reason and time.monotonic() < end:
        time.sleep(0.01)
    assert node.disk.tombstone_count == 36
    client.recover()
    client.flush()
    assert node.disk.tombstone_count == 0
    assert list(node.disk.rows.pages()) == []


# ---- removed namespaces --------------------------------------------------------------------


def test_removing_a_namespace_without_pages_looks_at_no_records(
    nodes: Nodes, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: removing an empty namespace scanned the records of all other namespaces."""
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1), durable=True)
    empty, looked_at = Pages("empty"), []
    empty.put(client, empty.keys(1), durable=True)
    client.remove(empty.namespace, empty.keys(1))
    is_published = node.disk.records.is_published
    monkeypatch.setattr(
        node.disk.records,
        "is_published",
        lambda *key: (looked_at.append(key), is_published(*key))[1],
    )
    for digest in (empty.digest, Pages("unknown").digest):
        assert node.disk.remove_namespace(digest) == 0
    assert looked_at == []
    assert node.disk.remove_namespace(pages.digest) == 1
    assert looked_at


def test_other_calls_run_while_a_namespace_is_deleted(
    nodes: Nodes, pages: Pages, others_run: OthersRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads get the lock between two pieces of a deletion.

    A thread that releases a lock and takes it again at once gets it before the waiting ones wake.
    """
    node = nodes.start()
    pages.put(nodes.connect(node), pages.keys(1), durable=True)
    monkeypatch.setattr(node.disk._index, "forget_some", lambda digest, first: (0, first + 16))
    assert node.disk.records.number_end > 32
    assert others_run(lambda: node.disk.remove_namespace(pages.digest))
