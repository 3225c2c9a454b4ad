"""Faults of the I/O process: RAM still serves, no wrong byte is served, nothing is left behind.

Faults are planted as `planted.py` says. For a disk that hangs for ever see `test_hangs.py`.
"""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from disk_nodes import Pages
from planted import PORTS, SMALL, Fault, children, flags, io_process_of, is_running
from waiting import wait_until

from kvstore import Client, ClientConfig, Keep, PutOutcome
from kvstore.errors import ConfigError, Exhausted
from kvstore.tools.node_process import NodeProcess
from node.config import NodeConfig
from node.disk.data_dir import DataDir
from node.disk.io_process import OWED_MAX
from node.memory.arena import Arena
from node.server import Node

STORED, EXISTS = PutOutcome.STORED, PutOutcome.EXISTS
# The longest a get and a put in RAM may take while the disk hangs: far less than a call that waits
# for the disk, far more than on a machine that is busy with other tests.
RAM_S_MAX = 5.0


@pytest.fixture
def client(kept: Node) -> Iterator[Client]:
    with Client(
        ClientConfig(address=f"127.0.0.1:{kept.grpc.port}", wire="bulk", timeout_s=20.0)
    ) as client:
        yield client


def reason(client: Client) -> str:
    """Wait until the disk tier has stopped; return the reason."""
    wait_until(lambda: bool(client.node_status().disk.reason))
    return client.node_status().disk.reason


@pytest.fixture
def start(tmp_path: Path, fault: Fault) -> Iterator[Callable[[], NodeProcess]]:
    """Yield a function that starts a node process on the test's one directory."""
    started: list[NodeProcess] = []

    def begin() -> NodeProcess:
        started.append(NodeProcess(*flags(SMALL), "--data-dir", str(tmp_path / "data")))
        return started[-1]

    yield begin
    for process in started:
        if process.running:
            process.stop()


def connect(process: NodeProcess) -> Client:
    return Client(ClientConfig(address=process.address, wire="bulk", timeout_s=20.0))


def longest_in_ram(client: Client, pages: Pages) -> float:
    """Return the longest time, in seconds, of a get and a put, repeated until the queue is full."""
    longest = 0.0
    for number in range(10_000, 10_060):
        begun = time.monotonic()
        assert pages.get(client, pages.keys(1)) == [True]
        assert pages.put(client, pages.keys(number)) == [STORED]
        longest = max(longest, time.monotonic() - begun)
    disk = client.node_status().disk
    assert disk.queue_nbytes > disk.queue_nbytes_max - pages.nbytes
    return longest


# ---- a disk that hangs ---------------------------------------------------------------------


def test_stalled_write_of_rows_does_not_slow_ram(
    client: Client, fault: Fault, pages: Pages
) -> None:
    assert pages.put(client, pages.keys(1), durable=True) == [STORED]
    fault.plant("rows", "hang")
    pages.put(client, pages.keys(2))
    wait_until(fault.hangs)
    assert longest_in_ram(client, pages) < RAM_S_MAX
    fault.clear()
    assert client.flush() > 2


def test_suspended_io_process_does_not_slow_ram(
    kept: Node, client: Client, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended I/O process does not slow calls in RAM, and list and scrub fail in time.

    The disk tier is slow, not stopped: it goes on when the process does.
    """
    assert pages.put(client, pages.keys(1), durable=True) == [STORED]
    os.kill(io_process_of(kept), signal.SIGSTOP)
    assert longest_in_ram(client, pages) < RAM_S_MAX
    monkeypatch.setattr("node.disk.io_process.QUESTION_S", 0.2)
    for _ in range(2 * OWED_MAX):  # unanswered questions do not pile up
        with pytest.raises(Exhausted, match="has not answered"):
            list(client.list_pages(pages.namespace))
        monkeypatch.setattr("node.disk.io_process.QUESTION_S", 0.01)
    with pytest.raises(Exhausted, match="has not answered"):
        client.scrub()
    assert client.node_status().state == "SERVING"
    monkeypatch.setattr("node.disk.io_process.QUESTION_S", 10.0)
    os.kill(io_process_of(kept), signal.SIGCONT)
    count = client.flush()
    assert count > 2
    assert len(list(client.list_pages(pages.namespace))) == client.scrub().intact == count


@pytest.mark.long
def test_calls_that_wait_for_a_hanging_disk_leave_the_breaker_closed(
    kept: Node, client: Client, pages: Pages
) -> None:
    """The node answers a call that waits for the disk before the caller's timeout.

    Regression: a timed-out durable put opened the circuit breaker, and for four times as long the
    client could read no page, not even from RAM.
    """
    assert pages.put(client, pages.keys(1), durable=True) == [STORED]
    os.kill(io_process_of(kept), signal.SIGSTOP)
    with pytest.raises(Exhausted, match="not durable in the time"):
        client.put(
            pages.namespace, pages.keys(2), [bytes(pages.nbytes)], Keep(durable=True), timeout_s=6.0
        )
    assert pages.get(client, pages.keys(1)) == [True]
    with pytest.raises(Exhausted, match="not durable in the time"):
        client.flush(timeout_s=6.0)
    assert pages.get(client, pages.keys(1)) == [True]
    os.kill(io_process_of(kept), signal.SIGCONT)


def test_node_without_free_descriptors_uses_its_disk(
    start: Callable[[], NodeProcess], pages: Pages
) -> None:
    """A node at its limit of descriptors still uses its disk: it opens all extents at the start."""
    process = start()
    with connect(process) as client:
        pages.put(client, pages.keys(0), durable=True)
        opened = len(os.listdir(f"/proc/{process.pid}/fd"))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (opened, opened + 100))
        for first in range(0, 200, 20):  # RAM has room for 128
            pages.put(client, pages.keys(*range(first, first + 20)), durable=True)
        assert pages.get(client, pages.keys(*range(20))) == [True] * 20
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (opened + 100, opened + 100))
        status = client.node_status()
        assert (status.state, status.disk.page_count, status.disk.pages_read) == (
            "SERVING",
            200,
            20,
        )


# ---- an I/O process that is killed ---------------------------------------------------------------


def test_killed_io_process_loses_no_durable_page(
    kept: Node, client: Client, fault: Fault, pages: Pages
) -> None:
    """An I/O process killed in any phase of a write loses no durable page.

    The phases: while it writes pages, before and after their rows, in a sync.
    """
    assert pages.put(client, pages.keys(0), durable=True) == [STORED]
    phases = ("pages", "rows", "after rows", "sync pages", "after sync rows")
    for number, phase in enumerate(phases, 1):
        io_process = io_process_of(kept)
        fault.plant(phase, "kill")
        with pytest.raises(Exhausted, match=r"not durable|stopped"):
            pages.put(client, pages.keys(number), durable=True)
        assert f"({io_process}) ended by SIGKILL" in reason(client), phase
        assert pages.get(client, pages.keys(number)) == [True], "RAM still serves"
        assert pages.get(client, pages.keys(number + 100)) == [False]
        client.recover()
        assert io_process_of(kept) != io_process
        assert client.node_status().state == "SERVING"
        assert client.flush() == number + 1
        pages.drop_from_ram(kept)
        assert pages.get(client, pages.keys(*range(number + 1))) == [True] * (number + 1), phase


def test_killed_idle_io_process_is_noticed_and_recovers_on_its_directory_only(
    kept: Node, client: Client, pages: Pages, tmp_path: Path
) -> None:
    """The node notices that its idle I/O process was killed, and recovers only on its directory.

    It keeps the index of the old directory and would overwrite pages of another one.
    """
    pages.put(client, pages.keys(1), durable=True)
    os.kill(io_process_of(kept), signal.SIGKILL)
    assert "ended by SIGKILL" in reason(client)
    assert client.node_status().state == "DEGRADED"
    assert pages.get(client, pages.keys(1)) == [True]
    (tmp_path / "data").rename(tmp_path / "old")
    with pytest.raises(Exhausted, match="replaced by another directory"):
        client.recover()
    assert client.node_status().state == "DEGRADED"
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "old").rename(tmp_path / "data")
    client.recover()
    pages.drop_from_ram(kept)
    assert pages.get(client, pages.keys(1)) == [True]


# ---- a node that ends ----------------------------------------------------------------------


def test_io_process_ends_with_its_node_and_the_next_one_waits(
    start: Callable[[], NodeProcess], pages: Pages
) -> None:
    process = start()
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(process.pid)}
    (io_process,) = (pid for pid, command in commands.items() if b"node.disk.io_worker" in command)
    with connect(process) as client:
        pages.put(client, pages.keys(1), durable=True)
    os.kill(io_process, signal.SIGSTOP)
    process.kill()
    with ThreadPoolExecutor(1) as pool:
        successor = pool.submit(start)
        time.sleep(1.0)
        assert not successor.done(), "two I/O processes on one directory"
        os.kill(io_process, signal.SIGCONT)
        with connect(successor.result(60.0)) as client:
            assert pages.get(client, pages.keys(1)) == [True]
    assert not is_running(io_process)


def test_node_stops_in_time_on_a_hanging_disk_and_kills_its_io_process(
    fault: Fault, pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wait in ("io_process.QUESTION_S", "tier.RECOVER_WAIT_S"):
        monkeypatch.setattr(f"node.disk.{wait}", 60.0)
    monkeypatch.setattr("node.disk.io_process.END_S", 0.2)
    node = Node(NodeConfig(**PORTS, **SMALL | {"flush_s": 0.2}, data_dir=str(tmp_path / "data")))
    node.start()
    io_process = io_process_of(node)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(6))
        patience: dict[str, Any] = {"timeout_s": 60.0, "connect_timeout_s": 20.0}
        configs = [
            ClientConfig(f"127.0.0.1:{node.grpc.port}", wire=wire, **patience)
            for wire in ("shm", "bulk", "grpc")
        ]
        clients = [stack.enter_context(Client(config)) for config in configs]
        for client in clients:
            pages.put(client, pages.keys(1))
        clients[0].flush(60.0)  # a list of a namespace without rows would not wait for the disk
        os.kill(io_process, signal.SIGSTOP)
        pages.put(clients[0], pages.keys(2))  # the writer hangs with it
        pool.submit(clients[0].recover, 60.0)
        for client in clients[1:]:
            pool.submit(lambda client=client: list(client.list_pages(pages.namespace)))
        calls = node.service._long_calls
        wait_until(lambda: calls["recover"].used == 1 and calls["list"].used == 2, 30.0)
        begun = time.monotonic()
        node.stop()
        took_s = time.monotonic() - begun
    assert took_s < 30.0, "the stop waited for calls of the disk, which may take 60 s"
    assert not is_running(io_process)


def test_held_lock_of_a_directory_is_an_error_after_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.disk.data_dir.LOCK_WAIT_S", 0.1)
    arena = Arena(1 << 20)
    first = DataDir(tmp_path, 1 << 20, 1 << 16, arena.fd)
    with pytest.raises(ConfigError, match="its I/O process still waits for the disk"):
        DataDir(tmp_path, 1 << 20, 1 << 16, arena.fd)
    first.close()
    DataDir(tmp_path, 1 << 20, 1 << 16, arena.fd).close()
    arena.close()


def test_signal_to_the_process_group_ends_the_node_after_its_writes(
    fault: Fault, pages: Pages, tmp_path: Path
) -> None:
    """A signal to the process group, as of Ctrl-C, ends the node after all pages are written."""
    command = [
        sys.executable,
        "-m",
        "node.main",
        *flags(PORTS | SMALL),
        "--data-dir",
        str(tmp_path / "data"),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split("grpc=")[1].split()[0]
        with Client(ClientConfig(address=address, wire="bulk", timeout_s=20.0)) as client:
            fault.plant("pages", "100000")
            pages.put(client, pages.keys(*range(4)))
            os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60.0) == 0
    arena = Arena(1 << 20)
    directory = DataDir(tmp_path / "data", 2 << 20, 64 << 10, arena.fd)
    assert len(list(directory.rows.pages())) == 4
    directory.close()
    arena.close()
