"""Range reads of pages that are on disk only, with concurrent writers, a disk that hangs, an I/O
process that ends, or a full RAM.
"""

import concurrent.futures
import functools
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from disk_nodes import FaultyLayer, Nodes, Pages, settle
from planted import Fault, io_process_of
from ranged import LEAF, PAGE, ask
from waiting import wait_until

from kvstore import ByteRange, Client, Unavailable
from kvstore.errors import Exhausted
from kvstore.pb import kvstore_pb2 as pb
from node.auth.access import Caller
from node.server import Node

WIRES = ["shm", "bulk", "grpc"]


def test_slot_on_disk_is_not_reused_during_a_range_read(
    nodes: Nodes, node: Node, layer: FaultyLayer, large: Pages, stored: list[bytes]
) -> None:
    client, other = nodes.connect(node), nodes.connect(node)
    hits: list[bool] = []
    layer.reading.clear()
    reader = threading.Thread(
        target=lambda: hits.extend(ask(client, large, stored[:1], (LEAF, LEAF)))
    )
    reader.start()
    assert layer.waiting.acquire(timeout=60.0)
    assert other.remove(large.namespace, stored) == [True, True]
    more = large.keys(*range(10, 60))  # more than the disk has room for
    for start in range(0, 50, 10):
        large.put(other, more[start : start + 10], durable=True)
    layer.reading.set()
    reader.join(60.0)
    assert hits == [True]
    assert client.lookup(large.namespace, stored).present == (False, False)


def test_page_replaced_during_its_row_lookup_is_a_miss(
    nodes: Nodes, node: Node, large: Pages, stored: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page replaced between the read of its bytes and of its row is a miss, not damage."""
    assert node.disk is not None
    client, other, rows = nodes.connect(node), nodes.connect(node), node.disk.rows
    page = rows.page

    def late(key: bytes) -> Any:
        if other.remove(large.namespace, stored[:1]) == [True]:
            other.put(large.namespace, stored[:1], [bytes(PAGE)])
            other.flush()
        return page(key)

    with monkeypatch.context() as patch:
        patch.setattr(rows, "page", late)
        buffer = bytearray(LEAF)
        assert client.get_ranges(large.namespace, stored[:1], [ByteRange(0, LEAF)], [buffer]) == [
            False
        ]
    large.drop_from_ram(node)
    assert client.get_ranges(large.namespace, stored[:1], [ByteRange(0, LEAF)], [buffer]) == [True]
    assert buffer == bytes(LEAF)
    assert client.node_status().disk.pages_corrupt == 0


def test_page_removed_during_its_row_lookup_is_a_miss(
    nodes: Nodes, node: Node, large: Pages, stored: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert node.disk is not None
    client, other, rows = nodes.connect(node), nodes.connect(node), node.disk.rows
    page = rows.page

    def late(key: bytes) -> Any:
        other.remove(large.namespace, stored[:1])
        other.flush()
        return page(key)

    monkeypatch.setattr(rows, "page", late)
    assert ask(client, large, stored[:1], (0, 10)) == [False]
    assert client.node_status().disk.pages_corrupt == 0


def test_range_reads_are_right_beside_puts_and_removals(
    nodes: Nodes, node: Node, large: Pages, seed: int
) -> None:
    """Reads return right bytes beside puts and removals of 40 pages.

    RAM has room for 16 of them, the disk for 32.
    """
    keys, stop, status = large.keys(*range(40)), threading.Event(), nodes.connect(node).node_status

    def worker(number: int, work: Callable[[Client, random.Random], object], wire: str) -> None:
        client, rng = nodes.connect(node, wire), random.Random(seed + number)
        while not stop.is_set():
            work(client, rng)

    def put(client: Client, rng: random.Random) -> None:
        large.put(client, rng.sample(keys, 4))

    def remove(client: Client, rng: random.Random) -> None:
        client.remove(large.namespace, rng.sample(keys, 2))

    def get(client: Client, rng: random.Random) -> None:
        large.get(client, rng.sample(keys, 2))

    def read(client: Client, rng: random.Random) -> None:
        offset = rng.randrange(PAGE)
        ask(
            client,
            large,
            rng.choices(keys, k=4),
            (offset, rng.randint(1, min(9000, PAGE - offset))),
        )

    works = [(put, "bulk"), (remove, "bulk"), (get, "bulk"), *((read, wire) for wire in WIRES)]
    with concurrent.futures.ThreadPoolExecutor(len(works)) as pool:
        workers = [pool.submit(worker, number, *work) for number, work in enumerate(works)]
        stop.wait(2.0)
        try:  # a busy machine needs longer
            wait_until(
                lambda: (
                    status().disk.pages_read_in_part > 0 or any(ended.done() for ended in workers)
                )
            )
        finally:
            stop.set()
    for ended in workers:
        ended.result()
    disk = status().disk
    assert disk.pages_read_in_part > 0
    assert disk.pages_corrupt == 0


def wait_for_hang(node: Node) -> None:
    assert node.disk is not None
    end = time.monotonic() + 60.0
    while not node.disk.reading.hang:
        assert time.monotonic() < end, "no read hangs"
        time.sleep(0.01)


# ---- limits ------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
def test_ranges_of_many_pages_evict_nearly_nothing(nodes: Nodes, large: Pages, wire: str) -> None:
    """Ranges of twice as many pages as RAM holds are read, and evict at most two pages from RAM."""
    node = nodes.start(batch_nbytes_max=1 << 20)
    client, keys = nodes.connect(node), large.keys(*range(32))
    for start in range(0, 32, 8):
        large.put(client, keys[start : start + 8], durable=True)
    before = client.node_status().ram.page_count
    with node.sessions.open(Caller("test")) as session:
        parts_client = nodes.connect(node, wire)
        for start in range(0, 32, 8):
            assert ask(parts_client, large, keys[start : start + 8], (LEAF, 1)) == [True] * 8
        assert not session.held
    assert client.node_status().ram.page_count >= before - 2


def test_slots_of_parts_are_free_after_the_read(
    node: Node, nodes: Nodes, large: Pages, stored: list[bytes]
) -> None:
    client = nodes.connect(node)
    placed, used = node.tier.eviction.placed_nbytes, node.tier.slots.used_nbytes
    for _ in range(10):
        assert ask(client, large, stored, (LEAF, 1)) == [True, True]
    settle(node)
    assert (node.tier.eviction.placed_nbytes, node.tier.slots.used_nbytes) == (placed, used)


def test_session_keeps_its_parts_until_it_ends(
    node: Node, nodes: Nodes, large: Pages, stored: list[bytes]
) -> None:
    client = nodes.connect(node, "shm")
    used = node.tier.slots.used_nbytes
    with node.sessions.open(Caller("test"), maps_arena=True) as session:
        request = large_request(large, stored)
        _, reply, _ = node.service.begin_get(session, request)
        assert list(reply.hits) == [True, True]
        assert len(reply.offsets) == 4
        assert node.tier.slots.used_nbytes == used + 4 * LEAF
        assert ask(client, large, stored, (3 * LEAF, 9)) == [True, True]
        for number, (key, part) in enumerate(itertools.product(stored, request.ranges)):
            place, content = reply.offsets[number], large.content(key)
            there = node.arena.view(place, part.nbytes)
            assert there == content[part.offset : part.offset + part.nbytes]
    settle(node)
    assert node.tier.slots.used_nbytes == used


def large_request(pages: Pages, keys: list[bytes]) -> Any:
    ranges = [pb.ByteRange(offset=9 * LEAF, nbytes=5), pb.ByteRange(offset=LEAF, nbytes=7)]
    return pb.GetRequest(namespace=pages.digest, prefix_hashes=keys, ranges=ranges)


def test_range_without_room_in_ram_is_a_miss_and_stays_on_disk(
    node: Node, nodes: Nodes, large: Pages, stored: list[bytes]
) -> None:
    others = Pages("others", 64 << 10)
    client, keys = nodes.connect(node), others.keys(*range(16))
    others.put(client, keys, durable=True)
    held = [page for page in node.tier.acquire(others.digest, keys, False, 0).pages if page]
    assert len(held) == 16, "the pages do not fill the RAM"
    assert ask(client, large, stored, (LEAF, 1)) == [False, False]
    node.tier.release(held)
    assert ask(client, large, stored, (LEAF, 1)) == [True, True]


@pytest.mark.parametrize("wire", WIRES)
def test_hanging_range_read_does_not_block_others(
    node: Node,
    nodes: Nodes,
    layer: FaultyLayer,
    large: Pages,
    stored: list[bytes],
    wire: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("node.disk.reads.HANGS_S", 0.2)
    client = nodes.connect(node, wire)
    layer.reading.clear()
    first = threading.Thread(target=functools.partial(ask, client, large, stored[:1], (LEAF, 1)))
    first.start()
    assert layer.waiting.acquire(timeout=60.0)
    wait_for_hang(node)
    assert ask(client, large, stored, (LEAF, 1)) == [False, False]
    layer.reading.set()
    first.join(60.0)
    assert ask(client, large, stored, (LEAF, 1)) == [True, True]


def test_cancelled_range_request_stops_reading(
    node: Node, layer: FaultyLayer, large: Pages, stored: list[bytes]
) -> None:
    before = layer.calls["read"]
    with node.sessions.open(Caller("test", lambda: layer.calls["read"] > before)) as session:
        with pytest.raises(Unavailable, match="the caller has left"):
            node.service.begin_get(session, large_request(large, stored))
        assert not session.held
    assert layer.calls["read"] == before + 2, "more was read than both parts of one page"
    assert node.disk is not None
    assert node.disk.present(large.digest, stored) == [True, True]


def test_hanging_row_lookup_is_a_miss_and_does_not_block_others(
    node: Node, nodes: Nodes, large: Pages, stored: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.disk.reads.HANGS_S", 0.2)
    assert node.disk is not None
    client, go_on = nodes.connect(node), threading.Event()

    def silent(key: bytes) -> Any:
        assert go_on.wait(60.0)
        raise Exhausted("the disk has not answered")

    with monkeypatch.context() as patch:
        patch.setattr(node.disk.rows, "page", silent)
        hits: list[bool] = []
        first = threading.Thread(
            target=lambda: hits.extend(ask(client, large, stored[:1], (LEAF, 1)))
        )
        first.start()
        wait_for_hang(node)
        assert client.lookup(large.namespace, stored).present == (False, False)
        go_on.set()
        first.join(60.0)
    assert hits == [False]
    assert ask(client, large, stored, (LEAF, 1)) == [True, True]


def test_failing_range_read_stops_the_disk_tier(
    node: Node, nodes: Nodes, layer: FaultyLayer, large: Pages, stored: list[bytes]
) -> None:
    client = nodes.connect(node)
    layer.fail["read"] = 5
    assert ask(client, large, stored, (LEAF, 1)) == [False, False]
    assert "reading failed" in client.node_status().disk.reason


# ---- with an I/O process -----------------------------------------------------------------------


def kept_pages(kept: Node, nodes: Nodes, pages: Pages) -> tuple[Client, list[bytes]]:
    client, keys = nodes.connect(kept), pages.keys(1, 2, 3)
    pages.put(client, keys, durable=True)
    pages.drop_from_ram(kept)
    return client, keys


def test_io_process_returns_leaf_checksums(kept: Node, nodes: Nodes, large: Pages) -> None:
    client, keys = kept_pages(kept, nodes, large)
    assert ask(client, large, [*keys, *large.keys(4)], (3 * LEAF - 1, 2)) == [
        True,
        True,
        True,
        False,
    ]
    assert client.node_status().disk.pages_read_in_part == 3
    assert kept.disk is not None
    assert kept.disk.rows.page(b"P\0\1" + bytes(32)) is None
    client.close()


def test_range_without_an_io_process_is_a_miss(kept: Node, nodes: Nodes, large: Pages) -> None:
    client, keys = kept_pages(kept, nodes, large)
    os.kill(io_process_of(kept), signal.SIGKILL)
    assert ask(client, large, keys, (LEAF, 1)) == [False] * 3
    assert "ended by SIGKILL" in client.node_status().disk.reason
    client.recover()
    assert ask(client, large, keys, (LEAF, 1)) == [True] * 3
    client.close()


def test_hanging_row_lookup_of_the_io_process_is_a_miss(
    kept: Node, nodes: Nodes, fault: Fault, large: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.disk.io_process.QUESTION_S", 0.3)
    client, keys = kept_pages(kept, nodes, large)
    fault.plant("scan", "wait")
    assert ask(client, large, keys[:1], (LEAF, 1)) == [False]
    fault.clear()
    client.close()
