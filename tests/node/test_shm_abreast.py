"""One batch over shared memory, copied by several threads: same bytes and same answers.

No thread touches a page after the call has ended.
"""

import os
import threading
import time
from typing import Any

import pytest
from known_pages import Pages
from local_nodes import Connect, StartNode

from kvstore import ByteRange, Client, DeadlineExceeded, Namespace, PutOutcome, opaque_layout
from kvstore.transports import parallel, shm
from node.server import Node

LANES = 3


@pytest.fixture
def node(start_node: StartNode) -> Node:
    return start_node()


@pytest.fixture
def client(node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr(shm, "stream_count", lambda pages, _: max(1, min(LANES, pages)))
    return connect(node, "shm")


def meeting(monkeypatch: pytest.MonkeyPatch, name: str, first: int) -> None:
    """Make the first `first` copies wait for each other: the test fails unless they run in
    parallel.
    """
    met, copy, begun = threading.Barrier(first), getattr(shm, name), iter(range(1000))

    def together(*arguments: Any) -> bytes:
        if next(begun) < first:
            met.wait(60.0)
        found: bytes = copy(*arguments)
        return found

    monkeypatch.setattr(shm, name, together)


def test_parallel_copies_keep_bytes_and_order(
    client: Client, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = pages.keys(*range(11))
    assert pages.put(client, keys[3:5]) == [PutOutcome.STORED] * 2
    meeting(monkeypatch, "_write_page", LANES)
    meeting(monkeypatch, "_read_page", LANES)
    expected = [PutOutcome.EXISTS if 3 <= i < 5 else PutOutcome.STORED for i in range(11)]
    assert pages.put(client, keys) == expected
    client.remove(pages.namespace, [keys[0], keys[7]])
    assert pages.get(client, keys) == [i not in (0, 7) for i in range(11)]


def test_damaged_pages_and_ranges_are_found_in_any_share(
    client: Client, pages: Pages, node: Node
) -> None:
    keys = pages.keys(*range(9))
    pages.put(client, keys)
    buffers = [bytearray(7) for _ in keys]
    assert client.get_ranges(pages.namespace, keys, [ByteRange(5, 7)], buffers) == [True] * 9
    assert buffers == [pages.content(key)[5:12] for key in keys]
    for bad in (1, 5, 8):
        pages.flip(node, keys[bad])
    assert pages.get(client, keys) == [i not in (1, 5, 8) for i in range(9)]
    assert client.lookup(pages.namespace, keys).present == tuple(
        i not in (1, 5, 8) for i in range(9)
    )


@pytest.mark.parametrize("error", [DeadlineExceeded("late"), MemoryError("none left")])
def test_failed_share_fails_the_call_after_all_ended(
    client: Client, pages: Pages, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    keys, ended, write, failed = pages.keys(*range(6)), [], shm._write_page, threading.Event()

    def failing(slot: memoryview, page: tuple[memoryview, ...]) -> bytes:
        if page[0] == pages.content(keys[2]):
            failed.set()
            raise error
        failed.wait(60.0)
        time.sleep(0.05)
        found = write(slot, page)
        ended.append(page)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(shm, "_write_page", failing)
        with pytest.raises(type(error)):
            pages.put(client, keys)
        assert len(ended) == 4
    time.sleep(0.1)
    assert len(ended) == 4
    assert pages.get(client, keys) == [False] * 6
    assert pages.put(client, keys) == [PutOutcome.STORED] * 6  # the slots were released


def test_small_batches_and_machines_use_one_thread(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_nbytes = 4096
    monkeypatch.setattr(parallel, "STREAM_NBYTES_MIN", 4 * page_nbytes)
    namespace = Namespace("shm-abreast", opaque_layout(page_nbytes))
    client = connect(node, "shm")
    client.open(namespace)
    content, taken = os.urandom(page_nbytes), []
    wire = client._fan_out.nodes.only._connection.wire
    assert isinstance(wire, shm.ShmWire)
    run = wire._threads.run
    monkeypatch.setattr(wire._threads, "run", lambda calls: taken.append(len(calls)) or run(calls))
    for cores, count, expected in ((5, 8, []), (6, 7, []), (6, 8, [2, 2])):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: range(cores))
        keys = [bytes([cores, count, i]) * 16 for i in range(count)]
        taken.clear()
        assert client.put(namespace, keys, [content] * count) == [PutOutcome.STORED] * count
        buffers = [bytearray(page_nbytes) for _ in keys]
        assert client.get(namespace, keys, buffers) == [True] * count
        assert taken == expected
        assert buffers == [content] * count
        client.remove(namespace, keys)
