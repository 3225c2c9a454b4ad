"""A read from disk that hangs costs its own caller, and nobody else."""

import threading
import time
from typing import Any

import pytest

from kvstore import DeadlineExceeded, Unavailable
from node.disk.reads import HANGS_S, Reads


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_oldest_read_tells() -> None:
    clock, ended = Clock(), list[int]()
    reads = Reads(ended.append, clock)
    assert not reads.hang
    with reads.of(7):
        clock.now += HANGS_S / 2
        with reads.of(8):
            assert not reads.hang
            clock.now += HANGS_S / 2
            assert reads.hang
        assert reads.hang
    assert not reads.hang
    assert ended == [8, 7]
    with pytest.raises(OSError, match="broken"), reads.of(9):
        raise OSError("broken")
    assert not reads.hang
    assert ended == [8, 7, 9]


def test_while_one_hangs_pages_on_disk_are_misses_and_those_in_ram_are_there(
    nodes: Any, layer: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.disk.reads.HANGS_S", 0.2)
    node = nodes.start()
    client = nodes.connect(node)
    on_disk, in_ram = pages.keys(1, 2), pages.keys(3)
    pages.put(client, on_disk, durable=True)
    pages.drop_from_ram(node)
    pages.put(client, in_ram)
    layer.reading.clear()
    first = threading.Thread(target=pages.get, args=(client, on_disk[:1]))
    first.start()
    assert layer.waiting.acquire(timeout=10.0)
    time.sleep(0.25)
    assert client.lookup(pages.namespace, [*on_disk, *in_ram]).present == (False, False, True)
    assert pages.get(client, [on_disk[1], *in_ram]) == [False, True]
    assert [page.prefix_hash for page in client.list_pages(pages.namespace)] == sorted([*on_disk, *in_ram])
    assert [stat.on_disk for stat in client.stat(pages.namespace, on_disk)] == [True, True]
    assert node.disk.safe(pages.digest, on_disk) == [True, True]  # a durable put of theirs has nothing to wait for
    layer.reading.set()
    first.join(10.0)
    assert pages.get(client, on_disk) == [True, True]


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
def test_who_gave_up_on_it_is_served_again_at_once(nodes: Any, layer: Any, pages: Any, wire: str) -> None:
    """The node says that it lives: the client does not leave it alone for four times what the disk cost."""
    node = nodes.start()
    client = nodes.connect(node, timeout_s=1.0, connect_timeout_s=1.0, wire=wire)
    pages.put(client, pages.keys(1), durable=True)
    pages.drop_from_ram(node)
    pages.put(client, pages.keys(2))
    layer.reading.clear()
    with pytest.raises(DeadlineExceeded):
        pages.get(client, pages.keys(1))
    end = time.monotonic() + 3.0  # its pause would be 4 s
    while True:
        try:
            assert pages.get(client, pages.keys(2)) == [True]
            break
        except Unavailable:
            assert time.monotonic() < end, "the node is still left alone"
            time.sleep(0.02)
    layer.reading.set()
