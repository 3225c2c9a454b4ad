"""Disk faults of every kind: no wrong byte is served, RAM still serves, the status has the reason,
and `recover` brings the tier back.
"""

import errno
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from disk_nodes import FaultyLayer, Nodes, Pages

from kvstore import Client, PutOutcome
from kvstore.errors import Exhausted
from kvstore.layout import ByteRange
from node.server import Node

STORED, EXISTS = PutOutcome.STORED, PutOutcome.EXISTS


def assert_degraded(client: Client, reason: str) -> None:
    status = client.node_status()
    assert (status.state, status.disk.state) == ("DEGRADED", "POISONED")
    assert reason in status.disk.reason


def assert_serving(client: Client) -> None:
    status = client.node_status()
    assert (status.state, status.disk.state, status.disk.reason) == ("SERVING", "SERVING", "")


# ---- transfers that do less than they should -----------------------------------------------


def test_short_writes_and_reads_are_continued(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(*range(4))
    layer.short = True
    assert pages.put(client, keys, durable=True) == [STORED] * 4
    pages.drop_from_ram(node)
    assert pages.get(client, keys) == [True] * 4
    assert_serving(client)


def test_write_of_zero_bytes_is_an_error(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    monkeypatch.setattr(layer, "write", lambda fd, view, offset: 0)
    with pytest.raises(Exhausted):
        pages.put(client, pages.keys(1), durable=True)
    assert_degraded(client, "nothing was written")


def test_truncated_extent_yields_misses(nodes: Nodes, pages: Pages) -> None:
    """A truncated and a missing extent file yield misses, as after a crash that lost them."""
    node = nodes.start()
    keys = pages.keys(*range(12))
    pages.put(nodes.connect(node), keys, durable=True)
    nodes.stop(node)
    extents = [
        path for path in sorted((nodes.data_dir / "extents").iterdir()) if path.stat().st_size
    ]
    assert len(extents) == 2
    os.truncate(extents[0], 8192)
    extents[1].unlink()
    node = nodes.start()
    client = nodes.connect(node)
    hits = pages.get(client, keys)
    assert hits.count(True) == 1, "the page before the cut"
    assert client.node_status().disk.pages_corrupt == 7, "rows of an empty extent are no damage"
    assert_serving(client)
    assert pages.put(client, keys, durable=True).count(STORED) == 11
    pages.drop_from_ram(node)
    assert all(pages.get(client, keys))


# ---- errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "code"), [("write", errno.EIO), ("sync", errno.EIO), ("allocate", errno.EROFS)]
)
def test_failing_disk_keeps_pages_in_ram_and_recovers(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, operation: str, code: int
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(*range(4))
    layer.fail[operation] = code
    with pytest.raises(Exhausted, match=r"visible but not durable|stopped"):
        pages.put(client, keys, durable=True)
    assert_degraded(client, os.strerror(code))
    assert pages.get(client, keys) == [True] * 4, "visible in RAM"
    assert pages.put(client, pages.keys(*range(8))) == [EXISTS] * 4 + [STORED] * 4, (
        "RAM still serves"
    )
    layer.heal()
    client.recover()
    assert_serving(client)
    assert client.flush() == 8
    pages.drop_from_ram(node)
    assert pages.get(client, pages.keys(*range(8))) == [True] * 8


@pytest.mark.parametrize("operation", ["write", "sync", "read"])
def test_recover_fails_while_the_disk_still_fails(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, operation: str
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    node.disk.stop_after_error("broken by the test")
    layer.fail[operation] = errno.EIO
    with pytest.raises(Exhausted, match="still fails"):
        client.recover()
    assert_degraded(client, "broken by the test")
    layer.heal()
    client.recover()
    assert_serving(client)
    assert pages.put(client, pages.keys(1), durable=True) == [STORED]


def test_read_error_is_a_miss_until_recover(nodes: Nodes, layer: FaultyLayer, pages: Pages) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(*range(4))
    pages.put(client, keys, durable=True)
    pages.drop_from_ram(node)
    layer.fail["read"] = errno.EIO
    assert pages.get(client, keys) == [False] * 4
    assert_degraded(client, "reading failed")
    assert client.lookup(pages.namespace, keys).prefix_pages == 0
    assert list(client.list_pages(pages.namespace)) == []
    assert client.node_status().disk.pages_corrupt == 0
    layer.heal()
    client.recover()
    assert pages.get(client, keys) == [True] * 4


def test_page_removed_while_the_disk_is_stopped_stays_removed(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(*range(4))
    pages.put(client, keys, durable=True)
    node.disk.stop_after_error("broken by the test")
    client.remove(pages.namespace, keys[:2])
    client.recover()
    assert client.lookup(pages.namespace, keys).present == (False, False, True, True)
    node = nodes.restart(node)
    assert nodes.connect(node).lookup(pages.namespace, keys).present == (False, False, True, True)


def test_failed_write_of_rows_stops_the_tier_and_frees_the_slots(
    nodes: Nodes, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes.start()
    client = nodes.connect(node)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "rows: broken")

    with monkeypatch.context() as patch:
        patch.setattr(node.disk.rows, "write", fail)
        with pytest.raises(Exhausted):
            pages.put(client, pages.keys(1, 2), durable=True)
    assert_degraded(client, "rows: broken")
    assert node.disk.records.slots.used_nbytes == 0
    client.recover()
    assert client.flush() == 2
    node = nodes.restart(node)
    assert pages.get(nodes.connect(node), pages.keys(1, 2)) == [True] * 2


def test_rows_logged_by_a_failed_write_do_not_outlive_their_slots(
    nodes: Nodes, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are in the log although their write failed do not survive their slots.

    Otherwise they would claim the slot of a newer page after a restart.
    """
    node = nodes.start(disk_nbytes=1 << 20)
    client = nodes.connect(node)
    write = node.disk.rows.write

    def fail_late(*args: Any) -> None:
        write(*args)
        raise OSError(errno.EIO, "rows: the log could not be synced")

    lost, kept = pages.keys(*range(8)), pages.keys(*range(8, 16))
    monkeypatch.setattr(node.disk.rows, "write", fail_late)
    with pytest.raises(Exhausted):
        pages.put(client, lost, durable=True)
    monkeypatch.undo()
    client.remove(pages.namespace, lost)
    client.recover()
    assert pages.put(client, kept, durable=True) == [STORED] * 8
    node.disk.stop_after_error("so that the stop does not tidy up")
    node = nodes.restart(node)
    assert pages.get(nodes.connect(node), lost + kept) == [False] * 8 + [True] * 8


def test_unreadable_rows_at_start_leave_a_ram_node_until_a_restart(
    nodes: Nodes, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes.start()
    pages.put(nodes.connect(node), pages.keys(1), durable=True)
    nodes.stop(node)
    with monkeypatch.context() as patch:
        patch.setattr("node.disk.rows.Rows.pages", fail_to_iterate)
        node = nodes.start()
        client = nodes.connect(node)
        assert_degraded(client, "the rows can not be read")
        assert pages.put(client, pages.keys(2)) == [STORED]
        with pytest.raises(Exhausted, match="restart"):
            client.recover()
    node = nodes.restart(node)
    assert pages.get(nodes.connect(node), pages.keys(1)) == [True]


def fail_to_iterate(*_: object) -> Any:
    raise OSError(errno.EIO, "rows: corrupted block")


# ---- wrong bytes ---------------------------------------------------------------------------


def tear(layer: FaultyLayer) -> None:
    layer.torn = True


def flip(layer: FaultyLayer) -> None:
    layer.flip = True


@pytest.mark.parametrize("damage", [tear, flip])
@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
def test_damaged_page_is_dropped_by_a_read(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, damage: Callable[[Any], None], wire: str
) -> None:
    node = nodes.start()
    client = nodes.connect(node, wire)
    keys = pages.keys(*range(3))
    if damage is tear:
        damage(layer)
    pages.put(client, keys, durable=True)
    pages.drop_from_ram(node)
    if damage is flip:
        damage(layer)
    assert pages.get(client, keys) == [False] * 3
    assert client.stats.corrupt_pages == 0, "the node noticed, not the client"
    status = client.node_status()
    assert (status.disk.pages_corrupt, status.disk.page_count, status.state) == (3, 0, "SERVING")
    assert (status.totals.pages_got, status.totals.nbytes_got, status.totals.pages_get_missed) == (
        0,
        0,
        3,
    )
    layer.heal()
    assert pages.get(client, keys) == [False] * 3
    assert pages.put(client, keys, durable=True) == [STORED] * 3
    pages.drop_from_ram(node)
    assert pages.get(client, keys) == [True] * 3


def test_ranged_read_of_a_damaged_page_is_a_miss(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    """A ranged read is a miss even if the damage is in another sector than the range."""
    node = nodes.start()
    client = nodes.connect(node)
    (key,) = pages.keys(1)
    pages.put(client, [key], durable=True)
    pages.drop_from_ram(node)
    with open(nodes.data_dir / "extents" / "000000", "r+b") as file:
        file.write(b"?")
    assert client.get_ranges(pages.namespace, [key], [ByteRange(5000, 10)], [bytearray(10)]) == [
        False
    ]
    assert client.node_status().disk.pages_corrupt == 1


def test_verify_drops_a_page_damaged_on_disk(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(1, 2)
    pages.put(client, keys, durable=True)
    pages.drop_from_ram(node)
    layer.flip = True
    assert client.verify(pages.namespace, keys) == (0, 2, 0)
    assert client.verify(pages.namespace, keys) == (0, 0, 2)
    status = client.node_status()
    assert (status.totals.pages_got, status.disk.pages_corrupt) == (0, 2)


def test_scrub_finds_damage_and_resumes_at_its_cursor(nodes: Nodes, pages: Pages) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    keys = pages.keys(*range(8))
    pages.put(client, keys, durable=True)
    with open(nodes.data_dir / "extents" / "000000", "r+b") as file:
        file.seek(3 * 8192 + 77)
        (byte,) = file.read(1)
        file.seek(3 * 8192 + 77)
        file.write(bytes([byte ^ 4]))
    cursor, replies = b"", []
    while not replies or cursor:
        replies.append(client.scrub(cursor, 3 * 8192))
        cursor = replies[-1].next_cursor
    assert [reply.nbytes for reply in replies] == [3 * 8192, 3 * 8192, 2 * 8192]
    assert (sum(reply.intact for reply in replies), sum(reply.damaged for reply in replies)) == (
        7,
        1,
    )
    disk = client.node_status().disk
    assert (disk.pages_corrupt, disk.pages_scrubbed, disk.page_count) == (1, 8, 7)
    pages.drop_from_ram(node)
    assert pages.get(client, keys).count(False) == 1
    assert client.scrub().damaged == 0


def test_scrub_of_a_failing_disk_is_an_error(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1, 2), durable=True)
    layer.fail["read"] = errno.EIO
    for _ in range(2):  # the second time the tier has stopped already
        with pytest.raises(Exhausted, match="reading failed"):
            nodes.connect(node).scrub()
    assert_degraded(client, "reading failed")
    layer.heal()
    client.recover()
    assert client.scrub().intact == 2


# ---- slow ----------------------------------------------------------------------------------


def test_pages_beyond_the_disk_queue_stay_in_ram_and_are_counted(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start(disk_queue_nbytes=64 << 10)
    client = nodes.connect(node)
    layer.writing.clear()
    pages.put(client, pages.keys(0))
    assert layer.waiting.acquire(timeout=60.0)
    keys = pages.keys(*range(40))
    assert pages.put(client, keys) == [EXISTS] + [STORED] * 39
    status = client.node_status()
    assert status.disk.queue_nbytes == status.disk.queue_nbytes_max == 64 << 10
    assert status.disk.pages_refused == 40 - 8
    assert pages.get(client, keys) == [True] * 40, "RAM does not wait for the disk"
    layer.writing.set()
    assert client.flush() == 40, "flush did not retry the refused pages"


def test_durable_put_to_a_hanging_disk_ends_by_the_flush_deadline(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start(flush_s=0.3)
    client = nodes.connect(node)
    layer.writing.clear()
    with pytest.raises(Exhausted, match="not durable"):
        pages.put(client, pages.keys(1), durable=True)
    assert pages.get(client, pages.keys(1)) == [True]
    layer.writing.set()
    client.flush()
    assert pages.on_disk(node, pages.keys(1)) == [True]


def test_ram_serves_while_a_read_from_disk_hangs(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1), durable=True)
    pages.drop_from_ram(node)
    pages.put(client, pages.keys(2))
    layer.reading.clear()
    slow = in_thread(lambda: pages.get(client, pages.keys(1)))
    assert layer.waiting.acquire(timeout=60.0)
    assert pages.get(client, pages.keys(2)) == [True]
    assert pages.put(client, pages.keys(3)) == [STORED]
    assert client.lookup(pages.namespace, pages.keys(1, 2)).present == (True, True)
    layer.reading.set()
    assert slow() == [True]


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start `call` in a thread; return a function that waits for its result."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()

    def wait() -> Any:
        thread.join(60.0)
        assert not thread.is_alive()
        return result[0]

    return wait


def test_unforeseen_error_of_the_writer_leaks_no_slot(
    nodes: Nodes, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    node: Node = nodes.start()
    client = nodes.connect(node)

    def fail(*_: object) -> None:
        raise ValueError("unforeseen")

    assert node.disk is not None
    with monkeypatch.context() as patch:
        patch.setattr(node.disk.rows, "write", fail)
        with pytest.raises(Exhausted):
            pages.put(client, pages.keys(1), durable=True)
    assert_degraded(client, "unforeseen")
    assert node.disk.records.slots.used_nbytes == 0
    client.recover()
    assert client.flush() == 1
