"""Every wait for a disk that hangs while an I/O process starts, recovers or stops has a limit."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from disk_nodes import FaultyLayer, Nodes, Pages
from local_nodes import connect
from planted import PORTS, SMALL, Fault, children, flags, io_process_of
from replayed import Reader
from waiting import PATIENT, wait_until

from kvstore import Client, ClientConfig, PutOutcome
from kvstore.errors import ConfigError, DeadlineExceeded, Exhausted, Unavailable
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from kvstore.results import Events
from kvstore.tools.node_process import NodeProcess
from node.config import NodeConfig
from node.disk.io_process import IoChannel, ProcessStorage, Timeouts
from node.events import Kind
from node.memory.arena import Arena
from node.server import Node


@pytest.fixture
def client(kept: Node) -> Iterator[Client]:
    with Client(
        ClientConfig(address=f"127.0.0.1:{kept.grpc.port}", wire="bulk", timeout_s=20.0)
    ) as client:
        yield client


def kill_io_process(node: Node) -> None:
    assert node.disk is not None
    os.kill(io_process_of(node), signal.SIGKILL)
    wait_until(lambda: bool(node.disk and node.disk.stop_reason))


@pytest.mark.parametrize(
    "phase",
    [
        "sync rows",
        *(pytest.param(phase, marks=pytest.mark.long) for phase in ("begin", "sync pages")),
    ],
)
def test_recover_on_a_hanging_disk_fails_and_can_be_repeated(
    kept: Node,
    client: Client,
    fault: Fault,
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
) -> None:
    """Recover fails in time if the start of the new I/O process, its test write or a sync hangs.

    Regression: it waited for ever and blocked every other attempt.
    """
    pages.put(client, pages.keys(1), durable=True)
    kill_io_process(kept)
    fault.plant(phase, "hang")
    with monkeypatch.context() as patch:
        patch.setattr("node.disk.io_process.RECOVER_S", 2.0)
        for _ in range(2):
            with pytest.raises(Exhausted, match="the disk hangs"):
                client.recover()
            assert pages.get(client, pages.keys(1)) == [True]
        with Client(
            replace(client.config, timeout_s=0.5, connect_timeout_s=0.5)
        ) as hasty:  # recover answers later than that, and the node stays up
            wait_until(lambda: is_connected(hasty))
            with pytest.raises(Exhausted, match="the disk hangs"):
                hasty.recover()
            hasty.node_status(timeout_s=20.0)
    fault.clear()
    client.recover()
    pages.drop_from_ram(kept)
    assert pages.get(client, pages.keys(1)) == [True]


def is_connected(client: Client) -> bool:
    """Return whether a client has connected within its timeout."""
    try:
        client.node_status(timeout_s=20.0)
    except Unavailable:
        return False
    return True


@pytest.mark.parametrize("phase", ["begin", pytest.param("sync pages", marks=pytest.mark.long)])
def test_node_stops_while_a_recover_waits_for_a_hanging_disk(
    fault: Fault, pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """Regression: a stop waited for a recover that waited for ever for its new I/O process."""
    monkeypatch.setattr("node.disk.io_process.END_S", 0.5)
    others = set(children(os.getpid()))
    node = Node(NodeConfig(**PORTS, **SMALL, data_dir=str(tmp_path / "data")))
    node.start()
    kill_io_process(node)
    fault.plant(phase, "hang")
    recovering = threading.Thread(target=recover, args=(node,))
    recovering.start()
    wait_until(fault.hangs)
    begun = time.monotonic()
    node.stop()
    assert time.monotonic() - begun < 30.0
    recovering.join(30.0)
    assert not recovering.is_alive()
    assert set(children(os.getpid())) <= others


def test_hanging_write_of_the_events_delays_neither_calls_nor_a_stop(
    fault: Fault, pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the node wrote them itself, and a process in a disk call can not be killed."""
    monkeypatch.setattr("node.disk.io_process.END_S", 0.5)
    others, settings = set(children(os.getpid())), {**SMALL, "flush_s": 0.5}
    node = Node(NodeConfig(**PORTS, **settings, data_dir=str(tmp_path / "data")))
    node.start()
    fault.plant("small file", "hang")
    begun = time.monotonic()
    node.events.add(Kind.VIEW, "", "disk hangs")
    assert time.monotonic() - begun < 20.0
    wait_until(fault.hangs)
    with Client(ClientConfig(f"127.0.0.1:{node.grpc.port}", wire="bulk", **PATIENT)) as client:
        pages.put(client, pages.keys(1))
        assert pages.get(client, pages.keys(1)) == [True]
        (reply,) = client.events().values()
        assert isinstance(reply, Events)
        assert reply.events[-1].text == "disk hangs"
    begun = time.monotonic()
    node.stop()
    assert time.monotonic() - begun < 15.0
    assert set(children(os.getpid())) <= others


def test_snapshot_that_waits_for_the_disk_holds_up_no_other_reader_of_the_feed(
    kept: Node, client: Client, fault: Fault, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it waited with the feed's lock."""
    monkeypatch.setattr("node.disk.io_process.QUESTION_S", 60.0)
    pages.put(client, pages.keys(1), durable=True)
    reader, late = Reader(), Reader()
    reader.catch_up(kept)
    fault.plant("scan", "hang")
    snapshot = threading.Thread(target=late.catch_up, args=(kept,))
    snapshot.start()
    wait_until(fault.hangs)
    pages.put(client, pages.keys(2))
    follow = threading.Thread(target=reader.catch_up, args=(kept,))
    follow.start()
    follow.join(30.0)
    is_told = set().union(*reader.now().values()) == {*pages.keys(1, 2)}
    assert (is_told, snapshot.is_alive()) == (True, True)
    fault.clear()
    snapshot.join(60.0)
    assert late.now() == reader.now() != {}


def recover(node: Node) -> None:
    assert node.disk is not None
    with pytest.raises(OSError, match=r"the node stops|ended by SIGKILL"):
        node.disk.recover()


def test_start_on_a_hanging_disk_fails_with_a_reason(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.disk.io_process.START_S", 1.0)
    others = set(children(os.getpid()))
    fault.plant("begin", "hang")
    arena = Arena(1 << 20)
    with pytest.raises(ConfigError, match=r"was not ready in 1 s and was killed: the disk hangs"):
        ProcessStorage(tmp_path / "data", 2 << 20, 64 << 10, arena.fd)
    assert set(children(os.getpid())) <= others
    arena.close()


@pytest.mark.long
def test_rows_that_hang_at_start_leave_a_ram_node(
    fault: Fault, pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, an I/O process needs 2 s to start
    monkeypatch.setattr("node.disk.io_process.START_S", 4.0)
    fault.plant("scan", "hang")
    node = Node(NodeConfig(**PORTS, **SMALL, data_dir=str(tmp_path / "data")))
    node.start()
    with Client(ClientConfig(address=f"127.0.0.1:{node.grpc.port}", **PATIENT)) as client:
        assert (
            client.node_status().disk.reason
            == "the rows can not be read: the disk hangs: no answer in 4 s"
        )
        pages.put(client, pages.keys(1))
        assert pages.get(client, pages.keys(1)) == [True]
    fault.clear()
    node.stop()


@pytest.mark.parametrize("phase", ["begin", "scan"])
def test_signal_ends_a_start_on_a_hanging_disk(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    monkeypatch.setattr("node.disk.io_process.END_S", 0.5)
    others = set(children(os.getpid()))
    fault.plant(phase, "hang")

    def end_if_hangs() -> None:
        """Exit as if a signal had arrived once the fault hangs."""
        if fault.hangs():
            raise SystemExit(0)

    with pytest.raises(SystemExit):
        Node(NodeConfig(**PORTS, **SMALL, data_dir=str(tmp_path / "data")), end_if_hangs)
    assert set(children(os.getpid())) <= others


def test_scrub_in_a_hanging_read_does_not_delay_a_stop(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.disk.scrub.STOP_S", 0.2)
    # The first round may run before the page is stored
    monkeypatch.setattr("node.disk.scrub.ROUND_PAUSE_S", 0.05)
    node = nodes.start(scrub_nbytes_per_s=1 << 30)
    pages.put(nodes.connect(node), pages.keys(1), durable=True)
    layer.reading.clear()
    assert layer.waiting.acquire(timeout=60.0)
    begun = time.monotonic()
    node.scrubber.stop()
    assert time.monotonic() - begun < 20.0


def test_stop_waits_once_for_a_hanging_writer(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    """Regression: a stop waited twice, for the writer's flush and for its thread."""
    node = nodes.start(flush_s=1.0)
    client = nodes.connect(node)
    layer.writing.clear()
    pages.put(client, pages.keys(1))
    assert layer.waiting.acquire(timeout=60.0)
    begun = time.monotonic()
    assert not node.disk.writer.stop(4.0)
    assert time.monotonic() - begun < 7.0


@pytest.mark.parametrize("wire", ["grpc", pytest.param("bulk", marks=pytest.mark.long)])
def test_signal_ends_a_node_with_a_hanging_read(
    fault: Fault, pages: Pages, tmp_path: Path, wire: str
) -> None:
    """A node ends on a signal although Python waits at exit for gRPC's pool threads."""
    arguments = [*flags(SMALL), "--data-dir", str(tmp_path / "data")]
    process = NodeProcess(*arguments)
    with Client(ClientConfig(address=process.address, **PATIENT)) as client:
        pages.put(client, pages.keys(1), durable=True)
    assert process.stop() == 0
    process = NodeProcess(*arguments)
    fault.plant("read", "wait")
    with connect(process.address, wire) as client:
        client.open(pages.namespace)
        with pytest.raises(DeadlineExceeded):
            client.get(pages.namespace, pages.keys(1), [bytearray(pages.nbytes)], timeout_s=2.0)
        wait_until(fault.hangs)
        assert process.stop(30.0) == 0


# ---- callers who wait for the disk, and leave ----------------------------------------------


def test_timed_out_flushes_leave_no_barriers_and_cost_no_sync(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each timed-out flush left a barrier in the queue, which cost a sync later.

    Pages are queued between the flushes.
    """
    monkeypatch.setattr("node.disk.writer.IDLE_S", 30.0)
    node = nodes.start()
    client = nodes.connect(node)
    layer.writing.clear()
    pages.put(client, pages.keys(0))
    assert layer.waiting.acquire(timeout=60.0)
    for number in range(1, 9):
        pages.put(client, pages.keys(number))
        for _ in range(50):
            assert not node.disk.writer.flush(0.0001)
    assert len(node.disk.writer._queue) == 8 + 8
    synced, sync = [], node.disk.sync
    monkeypatch.setattr(node.disk, "sync", lambda: (synced.append(1), sync()))
    layer.writing.set()
    assert client.flush() == 9
    assert len(synced) <= 2, "one barrier for the queued pages, and one for the last flush"


@pytest.fixture
def hung(nodes: Nodes, layer: FaultyLayer, pages: Pages) -> Node:
    """Return a node with four gRPC threads and page 1 on a disk that hangs now."""
    node: Node = nodes.start(flush_s=20.0, grpc_threads=4)
    client = nodes.connect(node)
    pages.put(client, pages.keys(1), durable=True)
    layer.writing.clear()
    pages.put(client, pages.keys(2))
    assert layer.waiting.acquire(timeout=60.0)
    return node


@pytest.fixture
def stub(hung: Node) -> Iterator[KVStoreStub]:
    with grpc.insecure_channel(f"127.0.0.1:{hung.grpc.port}") as channel:
        yield KVStoreStub(channel)


def durable_put(pages: Pages) -> Iterator[pb.PutFrame]:
    """Return the frames of a durable put of a stored page, which only has to wait for the disk."""
    begin = pb.PutRequest(
        namespace=pages.digest, prefix_hashes=pages.keys(1), page_nbytes=pages.nbytes, durable=True
    )
    return iter([pb.PutFrame(begin=begin)])


def test_cancelled_calls_release_their_places(hung: Node, stub: KVStoreStub, pages: Pages) -> None:
    """Regression: cancelled calls held their places among transfers and flushes for flush_s."""
    transfers, flushes = hung.grpc.calls.transfers, hung.service._long_calls["flush"]
    calls = [
        stub.Put(durable_put(pages), timeout=30.0),
        stub.Flush.future(pb.FlushRequest(), timeout=30.0),
    ]
    wait_until(lambda: transfers.used == flushes.used == 1)
    for call in calls:
        call.cancel()
    wait_until(lambda: transfers.used == flushes.used == 0, 15.0)


def test_durable_puts_leave_transfers_free_while_the_disk_hangs(
    hung: Node, stub: KVStoreStub, pages: Pages, nodes: Nodes
) -> None:
    waiting = stub.Put(durable_put(pages), timeout=30.0)
    wait_until(lambda: hung.grpc.calls.durable.used == 1)
    with pytest.raises(grpc.RpcError, match="gRPC durable puts: 1 of"):
        list(stub.Put(durable_put(pages), timeout=10.0))
    client = nodes.connect(hung, "grpc")
    assert pages.get(client, pages.keys(1)) == [True]
    assert pages.put(client, pages.keys(3)) == [PutOutcome.STORED]
    waiting.cancel()


def test_reader_of_a_stopped_io_process_gets_the_reason() -> None:
    """Regression: the reader got the error "bad file descriptor"."""
    ours, theirs = socket.socketpair()
    io_channel = IoChannel(ours, lambda: "its I/O process was ended")
    io_channel.close()
    with theirs, pytest.raises(OSError, match="its I/O process was ended"):
        io_channel.unasked(Timeouts(1.0, lambda: None))
