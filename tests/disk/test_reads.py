"""A read from disk that hangs delays its own caller only."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from disk_nodes import FaultyLayer, Nodes, Pages
from waiting import wait_until

from kvstore import DeadlineExceeded, Exhausted, Unavailable
from kvstore.checksum import leaves
from node.auth.access import Caller
from node.disk.encryption import DiskLocation
from node.disk.reads import HANGS_S, Reads


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_oldest_read_decides_whether_reads_hang() -> None:
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


def test_hanging_read_makes_disk_pages_misses_and_keeps_ram(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
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
    assert layer.waiting.acquire(timeout=60.0)
    time.sleep(0.25)
    assert client.lookup(pages.namespace, [*on_disk, *in_ram]).present == (False, False, True)
    assert pages.get(client, [on_disk[1], *in_ram]) == [False, True]
    assert [page.prefix_hash for page in client.list_pages(pages.namespace)] == sorted(
        [*on_disk, *in_ram]
    )
    assert [stat.on_disk for stat in client.stat(pages.namespace, on_disk)] == [True, True]
    # The pages are on disk, so a durable put of them has nothing to wait for
    assert node.disk.safe(pages.digest, on_disk) == [
        True,
        True,
    ]
    layer.reading.set()
    first.join(60.0)
    assert pages.get(client, on_disk) == [True, True]


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
def test_read_after_a_timed_out_one_is_served_soon(
    nodes: Nodes,
    layer: FaultyLayer,
    pages: Pages,
    wire: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a read timed out on a hanging disk, the client soon reads from the node again.

    The node shows that it is alive, so the circuit breaker does not pause for long.
    """
    monkeypatch.setattr("kvstore.transports.channel.PAUSE_PER_COST", 1000)
    monkeypatch.setattr("kvstore.transports.channel.LIVES_S", 20.0)
    node = nodes.start()
    client = nodes.connect(node, wire, backoff_s_max=600.0)
    pages.put(client, pages.keys(1), durable=True)
    pages.drop_from_ram(node)
    pages.put(client, pages.keys(2))
    layer.reading.clear()
    with pytest.raises(DeadlineExceeded):
        client.get(pages.namespace, pages.keys(1), [bytearray(pages.nbytes)], timeout_s=1.0)

    def is_served() -> bool:
        try:
            return pages.get(client, pages.keys(2)) == [True]
        except Unavailable:
            return False

    wait_until(is_served)
    layer.reading.set()


class Slow:
    """Files of zeros whose reads take `s_per_mib` seconds of the clock for each MiB."""

    def __init__(self, clock: Clock, s_per_mib: float) -> None:
        self.clock, self.s_per_mib = clock, s_per_mib
        self.hung: list[bool] = []
        self.read_nbytes: list[int] = []

    def read(self, offset: int, view: memoryview) -> bool:
        assert offset % 4096 == view.nbytes % 4096 == 0
        self.clock.now += self.s_per_mib * view.nbytes / (1 << 20)
        self.hung.append(self.reads.hang)
        self.read_nbytes.append(view.nbytes)
        return True

    reads: Reads


@pytest.mark.parametrize("nbytes", [1, 4096, (1 << 20) + 1, (9 << 20) - 4097, 70 << 20])
@pytest.mark.parametrize("verified", [False, True])
def test_slow_read_of_a_large_page_does_not_count_as_hanging(nbytes: int, verified: bool) -> None:
    """Regression: a page of any size had to be read in 2 s; 70 MiB take 28 s here."""
    clock = Clock()
    reads = Reads(lambda record: None, clock)
    files: Any = Slow(clock, 0.4)
    files.reads = reads
    end = -(-nbytes // 4096) * 4096
    with reads.of(1) as read:
        if verified:
            found = read.leaves(files, DiskLocation(8192, None), nbytes)
        else:
            found = read.page(files, DiskLocation(8192, None), memoryview(bytearray(end)), nbytes)
        # Work after the last read does not count as a hanging disk
        clock.now += HANGS_S + 1.0
        assert not reads.hang
    assert found == leaves(bytes(nbytes))
    assert not any(files.hung)
    assert sum(files.read_nbytes) == end
    if verified:
        assert max(files.read_nbytes) <= 1 << 20, "a verify uses more than 1 MiB of memory"


def test_hanging_piece_of_a_large_page_counts_as_hanging() -> None:
    clock = Clock()
    files: Any = Slow(clock, HANGS_S / 4)
    files.reads = Reads(lambda record: None, clock)
    with files.reads.of(1) as read:
        read.page(files, DiskLocation(0, None), memoryview(bytearray(9 << 20)), 9 << 20)
    assert files.hung == [True, True, False]


@pytest.mark.usefixtures("small_leaves")
def test_verify_of_a_page_in_pieces_covers_its_last_byte(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.disk.reads.VERIFIED_NBYTES", 8192)
    monkeypatch.setattr("node.disk.reads.PIECE_NBYTES", 8192)
    node = nodes.start()
    client = nodes.connect(node)
    pages = Pages("large", 50_001)
    keys = pages.keys(1, 2)
    pages.put(client, keys, durable=True)
    assert client.verify(pages.namespace, keys) == (2, 0, 0)
    pages.drop_from_ram(node)
    assert pages.get(client, keys) == [True, True]
    pages.drop_from_ram(node)
    offset = node.disk.records.offset(node.disk._find(pages.digest, keys[0]))
    path = nodes.data_dir / "extents" / f"{offset // (64 << 10):06d}"
    with path.open("r+b") as file:
        file.seek(offset % (64 << 10) + 50_000)
        (last,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([last ^ 1]))
        os.fsync(file.fileno())
    assert client.verify(pages.namespace, keys) == (1, 1, 0)
    assert pages.get(client, keys) == [False, True]


@pytest.fixture
def hanging(nodes: Nodes, layer: FaultyLayer, pages: Pages) -> Iterator[tuple[Any, Any]]:
    """Yield (node, key) while the read of page 1, named by the key, hangs.

    Page 2 is on disk, page 3 in RAM.
    """
    node = nodes.start(grpc_threads=8)  # six transfers, four from disk, two of those for one peer
    client = nodes.connect(node, timeout_s=60.0)
    pages.put(client, pages.keys(1, 2), durable=True)
    pages.drop_from_ram(node)
    pages.put(client, pages.keys(3))
    layer.reading.clear()
    first = threading.Thread(target=pages.get, args=(client, pages.keys(1)))
    first.start()
    assert layer.waiting.acquire(timeout=60.0)
    yield node, pages.keys(1)[0]
    layer.reading.set()
    first.join(60.0)


def wait_for(
    node: Any, digest: bytes, keys: list[bytes], gone: Any = lambda: False
) -> tuple[list[bool], float]:
    began = time.monotonic()
    with node.sessions.open(Caller("another", gone)) as session:
        hits = [page is not None for page in session.acquire(digest, keys, False, 1)]
    return hits, time.monotonic() - began


def test_wait_for_loads_of_others_has_one_deadline(
    hanging: tuple[Any, Any], pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the wait was 10 s per key, even for duplicates."""
    monkeypatch.setattr("node.disk.reads.HANGS_S", 3600.0)
    monkeypatch.setattr("node.memory.promotion.LOAD_S_MAX", 1.0)
    hits, took_s = wait_for(hanging[0], pages.digest, [hanging[1]] * 20)
    assert hits == [False] * 20
    assert took_s < 10.0


def test_waiter_for_another_load_ends_when_cancelled_or_disk_hangs(
    hanging: tuple[Any, Any], pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.memory.promotion.LOAD_S_MAX", 30.0)
    with monkeypatch.context() as patch:
        patch.setattr("node.disk.reads.HANGS_S", 3600.0)
        hits, took_s = wait_for(hanging[0], pages.digest, [hanging[1]], lambda: True)
        assert hits == [False]
        assert took_s < 15.0
    monkeypatch.setattr("node.disk.reads.HANGS_S", 0.1)
    hits, took_s = wait_for(hanging[0], pages.digest, [hanging[1]])
    assert hits == [False]
    assert took_s < 15.0


@pytest.mark.long
def test_gets_from_a_hanging_disk_leave_transfers_free(
    hanging: tuple[Any, Any], nodes: Nodes, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: gets from a hanging disk held all transfers of their peer, even if cancelled."""
    monkeypatch.setattr("node.disk.reads.HANGS_S", 3600.0)
    node, client = hanging[0], nodes.connect(hanging[0], "grpc", timeout_s=20.0)
    hasty = [nodes.connect(node, "grpc", timeout_s=20.0) for _ in range(3)]
    threads = [
        threading.Thread(target=lambda c=c: suppressed(lambda: pages.get(c, pages.keys(1))))
        for c in hasty
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60.0
    while node.grpc.calls.loads.used < 2 and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(Exhausted, match="gRPC gets from disk: 2 of"):
        pages.get(client, pages.keys(2))
    assert pages.get(client, pages.keys(3)) == [True]
    for thread in threads:
        thread.join(30.0)


def suppressed(call: Any) -> None:
    with contextlib.suppress(Exhausted, DeadlineExceeded, Unavailable):
        call()
