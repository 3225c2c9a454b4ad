"""A disk hangs while an I/O process starts, recovers or stops: every wait has a limit."""

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
from planted import PORTS, SMALL, Fault, children, flags, io_process_of
from waiting import wait_until

from kvstore import Client, ClientConfig, PutOutcome
from kvstore.errors import ConfigError, DeadlineExceeded, Exhausted
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from kvstore.tools.node_process import NodeProcess
from node.config import NodeConfig
from node.disk.io_process import IoChannel, ProcessStorage, Timeouts
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


@pytest.mark.parametrize("phase", ["begin", "sync pages", "sync rows"])
def test_a_recover_on_a_disk_that_still_hangs_fails_and_may_be_tried_again(
    kept: Node,
    client: Client,
    fault: Fault,
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
) -> None:
    """In the start of the new I/O process, its trial, and the sync behind that.

    It waited for ever, and no other could be tried.
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
        ) as hasty:  # the node answers later than that, and lives
            with pytest.raises(Exhausted, match="the disk hangs"):
                hasty.recover()
            hasty.node_status(timeout_s=20.0)
    fault.clear()
    client.recover()
    pages.drop_from_ram(kept)
    assert pages.get(client, pages.keys(1)) == [True]


@pytest.mark.parametrize("phase", ["begin", "sync pages"])
def test_a_node_stops_while_a_recover_waits_for_a_disk_that_hangs(
    fault: Fault, pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """The stop waited for the recover, and that for the new I/O process, in spite of a signal."""
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


def recover(node: Node) -> None:
    assert node.disk is not None
    with pytest.raises(OSError, match=r"the node stops|ended by SIGKILL"):
        node.disk.recover()


def test_a_start_on_a_disk_that_hangs_ends_after_a_time_and_says_why(
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


def test_rows_that_do_not_come_at_the_start_leave_a_ram_node(
    fault: Fault, pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine an I/O process needs two to begin
    monkeypatch.setattr("node.disk.io_process.START_S", 4.0)
    fault.plant("scan", "hang")
    node = Node(NodeConfig(**PORTS, **SMALL, data_dir=str(tmp_path / "data")))
    node.start()
    with Client(ClientConfig(address=f"127.0.0.1:{node.grpc.port}")) as client:
        assert (
            client.node_status().disk.reason
            == "the rows can not be read: the disk hangs: no answer in 4 s"
        )
        pages.put(client, pages.keys(1))
        assert pages.get(client, pages.keys(1)) == [True]
    fault.clear()
    node.stop()


@pytest.mark.parametrize("phase", ["begin", "scan"])
def test_a_signal_ends_a_start_that_waits_for_a_disk_that_hangs(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    monkeypatch.setattr("node.disk.io_process.END_S", 0.5)
    others = set(children(os.getpid()))
    fault.plant(phase, "hang")

    def end_if_hangs() -> None:
        """As a signal that came by then."""
        if fault.hangs():
            raise SystemExit(0)

    with pytest.raises(SystemExit):
        Node(NodeConfig(**PORTS, **SMALL, data_dir=str(tmp_path / "data")), end_if_hangs)
    assert set(children(os.getpid())) <= others


def test_a_scrub_that_hangs_in_a_read_does_not_hold_up_a_stop(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.disk.scrub.STOP_S", 0.2)
    # The first round may come before the page
    monkeypatch.setattr("node.disk.scrub.ROUND_PAUSE_S", 0.05)
    node = nodes.start(scrub_nbytes_per_s=1 << 30)
    pages.put(nodes.connect(node), pages.keys(1), durable=True)
    layer.reading.clear()
    assert layer.waiting.acquire(timeout=10.0)
    begun = time.monotonic()
    node.scrubber.stop()
    assert time.monotonic() - begun < 20.0


def test_a_writer_that_hangs_is_waited_for_once(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    """For its flush and for its thread, each as long as for both."""
    node = nodes.start(flush_s=1.0)
    client = nodes.connect(node)
    layer.writing.clear()
    pages.put(client, pages.keys(1))
    assert layer.waiting.acquire(timeout=10.0)
    begun = time.monotonic()
    assert not node.disk.writer.stop(4.0)
    assert time.monotonic() - begun < 7.0


@pytest.mark.parametrize("wire", ["bulk", "grpc"])
def test_a_signal_ends_a_node_in_which_a_read_hangs(
    fault: Fault, pages: Pages, tmp_path: Path, wire: str
) -> None:
    """Python waits at its end for the threads of pools, which gRPC's calls are in."""
    arguments = [*flags(SMALL), "--data-dir", str(tmp_path / "data")]
    process = NodeProcess(*arguments)
    with Client(ClientConfig(address=process.address)) as client:
        pages.put(client, pages.keys(1), durable=True)
    assert process.stop() == 0
    process = NodeProcess(*arguments)
    fault.plant("read", "wait")
    with Client(ClientConfig(address=process.address, wire=wire, timeout_s=2.0)) as client:
        with pytest.raises(DeadlineExceeded):
            pages.get(client, pages.keys(1))
        assert fault.hangs()
        assert process.stop(10.0) == 0


# ---- those who wait for it, and leave ------------------------------------------------------


def test_flushes_that_gave_up_leave_nothing_behind_and_cost_no_sync(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each left a barrier in the queue for as long as the disk hung, and then had its own sync.

    Also with pages in between.
    """
    monkeypatch.setattr("node.disk.writer.IDLE_S", 30.0)
    node = nodes.start()
    client = nodes.connect(node)
    layer.writing.clear()
    pages.put(client, pages.keys(0))
    assert layer.waiting.acquire(timeout=10.0)
    for number in range(1, 9):
        pages.put(client, pages.keys(number))
        for _ in range(50):
            assert not node.disk.writer.flush(0.0001)
    assert len(node.disk.writer._queue) == 8 + 8
    synced, sync = [], node.disk.sync
    monkeypatch.setattr(node.disk, "sync", lambda: (synced.append(1), sync()))
    layer.writing.set()
    assert client.flush() == 9
    assert len(synced) <= 2, "one barrier for what was queued, and one behind it"


@pytest.fixture
def hung(nodes: Nodes, layer: FaultyLayer, pages: Pages) -> Node:
    """A node with page 1 on a disk that hangs now, and of four threads for gRPC."""
    node: Node = nodes.start(flush_s=20.0, grpc_threads=4)
    client = nodes.connect(node)
    pages.put(client, pages.keys(1), durable=True)
    layer.writing.clear()
    pages.put(client, pages.keys(2))
    assert layer.waiting.acquire(timeout=10.0)
    return node


@pytest.fixture
def stub(hung: Node) -> Iterator[KVStoreStub]:
    with grpc.insecure_channel(f"127.0.0.1:{hung.grpc.port}") as channel:
        yield KVStoreStub(channel)


def durable_put(pages: Pages) -> Iterator[pb.PutFrame]:
    """Of what is stored already: it has no more to do than to wait."""
    begin = pb.PutRequest(
        namespace=pages.digest, prefix_hashes=pages.keys(1), page_nbytes=pages.nbytes, durable=True
    )
    return iter([pb.PutFrame(begin=begin)])


def test_cancelled_caller_does_not_wait_for_the_disk(
    hung: Node, stub: KVStoreStub, pages: Pages
) -> None:
    """They held the places of gRPC's transfers, and of flushes, for flush_s."""
    transfers, flushes = hung.grpc.calls.transfers, hung.service._long_calls["flush"]
    calls = [
        stub.Put(durable_put(pages), timeout=30.0),
        stub.Flush.future(pb.FlushRequest(), timeout=30.0),
    ]
    wait_until(lambda: transfers.used == flushes.used == 1)
    for call in calls:
        call.cancel()
    wait_until(lambda: transfers.used == flushes.used == 0, 5.0)


def test_durable_puts_leave_transfers_to_others_while_the_disk_hangs(
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


def test_reader_of_a_stopped_io_process_gets_its_end() -> None:
    """It was told of a bad file descriptor."""
    ours, theirs = socket.socketpair()
    talk = IoChannel(ours, lambda: "its I/O process was ended")
    talk.close()
    with theirs, pytest.raises(OSError, match="its I/O process was ended"):
        talk.unasked(Timeouts(1.0, lambda: None))
