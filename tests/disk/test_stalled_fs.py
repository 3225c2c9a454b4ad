"""A data directory on a stalled file system, such as NFS without its server: RAM serves and calls
end in time.

The hangs of test_hangs.py block Python only. Here the kernel blocks every thread that touches the
files, even those of RocksDB, and no signal ends the wait. Needs root, /dev/fuse, and python3-fuse
for /usr/bin/python3 (Debian).
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_nodes import Pages
from planted import SMALL, flags
from waiting import wait_until

from kvstore import Client, ClientConfig, DeadlineExceeded, Exhausted
from kvstore.tools.node_process import NodeProcess

PYTHON, SCRIPT = "/usr/bin/python3", Path(__file__).parents[1] / "helpers" / "stalling_fs.py"
CALL_S, LATE_S, STOP_S = 3.0, 5.0, 40.0
# A stopping node waits `flush_s` for its writes before it waits for its I/O process to end
SETTINGS = {**SMALL, "flush_s": 2.0}


def has_fuse() -> bool:
    if (
        not os.access("/dev/fuse", os.R_OK | os.W_OK)
        or not os.access(PYTHON, os.X_OK)
        or os.geteuid()
    ):
        return False
    return (
        subprocess.run([PYTHON, "-c", "import fuse"], capture_output=True, check=False).returncode
        == 0
    )


pytestmark = pytest.mark.skipif(
    not has_fuse(), reason="needs root, /dev/fuse and Debian's python3-fuse"
)


class Mount:
    """A mounted file system with the directory `path`.

    `stall("write fsync")` blocks such calls until `clear`.
    """

    def __init__(self, folder: Path) -> None:
        self.point, self._control = folder / "mount", folder / "control"
        self.path = self.point / "data"
        self._control.touch()
        (folder / "directory").mkdir()
        self.point.mkdir()
        command = [
            PYTHON,
            str(SCRIPT),
            str(self.point),
            str(folder / "directory"),
            str(self._control),
        ]
        self.server = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(lambda: os.path.ismount(self.point) or self.server.poll() is not None, 20.0)
        if self.server.poll() is not None:
            pytest.skip("this system allows no mounts")

    def stall(self, operations: str) -> None:
        whole = self._control.with_suffix(".new")
        whole.write_text(operations)
        whole.rename(self._control)

    def clear(self) -> None:
        self.stall("")

    def is_stalled(self) -> bool:
        return self._control.with_name("control.stalled").exists()

    def close(self) -> None:
        self.clear()
        subprocess.run(["umount", "--lazy", str(self.point)], check=False, capture_output=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.server.wait(60.0)
        self.server.kill()
        self.server.wait()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    mount = Mount(tmp_path)
    try:
        yield mount
    finally:
        mount.close()


@pytest.fixture
def process(mount: Mount) -> Iterator[NodeProcess]:
    process = NodeProcess(*flags(SETTINGS), "--data-dir", str(mount.path))
    try:
        yield process
    finally:
        mount.clear()
        if process.running:
            process.stop(STOP_S)


@pytest.fixture
def client(process: NodeProcess) -> Iterator[Client]:
    config = ClientConfig(process.address, wire="bulk", timeout_s=20.0, connect_timeout_s=20.0)
    with Client(config) as client:
        yield client


def command_of(mount: Mount) -> list[str]:
    ports = ("--host", "127.0.0.1", "--port", "0", "--bulk-port", "0", "--metrics-port", "0")
    return [
        sys.executable,
        "-m",
        "node.main",
        *ports,
        *flags(SETTINGS),
        "--data-dir",
        str(mount.path),
    ]


def health(process: NodeProcess) -> int:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{process.metrics_port}/health", timeout=20.0
    ) as answer:
        return int(answer.status)


@pytest.mark.parametrize(
    "operations",
    [
        pytest.param("write fsync rename create unlink open mkdir", marks=pytest.mark.long),
        pytest.param("fsync", marks=pytest.mark.long),
        pytest.param("write", marks=pytest.mark.long),
    ],
)
def test_node_on_a_stalled_file_system_serves_from_ram_and_stops(
    process: NodeProcess, mount: Mount, client: Client, pages: Pages, operations: str
) -> None:
    pages.put(client, pages.keys(*range(4)), durable=True)
    mount.stall(operations)
    pages.put(client, pages.keys(5))
    hasty = Client(ClientConfig(process.address, wire="bulk", timeout_s=CALL_S))
    with hasty:
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises((DeadlineExceeded, Exhausted)):
                pages.put(hasty, pages.keys(6), durable=True)
            assert time.monotonic() - began < CALL_S + LATE_S
    wait_until(mount.is_stalled, 20.0)
    assert pages.get(client, pages.keys(*range(4), 5)) == [True] * 5
    assert health(process) == 200
    began = time.monotonic()
    process.stop(STOP_S)
    assert time.monotonic() - began < STOP_S


def test_reads_of_a_stalled_file_system_are_misses_until_it_works(
    process: NodeProcess, mount: Mount, client: Client, pages: Pages
) -> None:
    on_disk, in_ram = pages.keys(*range(4)), pages.keys(*range(200, 204))
    pages.put(client, on_disk, durable=True)
    for number in range(4, 130):  # more than RAM holds
        pages.put(client, pages.keys(number), durable=True)
    pages.put(client, in_ram)
    mount.stall("read")
    began = time.monotonic()
    with (
        Client(ClientConfig(process.address, wire="bulk", timeout_s=CALL_S)) as first,
        pytest.raises(DeadlineExceeded),
    ):
        pages.get(first, on_disk)  # the caller of a hanging read waits for it
    assert time.monotonic() - began < CALL_S + LATE_S
    assert mount.is_stalled()
    assert pages.get(client, on_disk) == [False] * 4
    assert pages.get(client, in_ram) == [True] * 4
    assert health(process) == 200
    mount.clear()
    wait_until(lambda: pages.get(client, on_disk) == [True] * 4, 60.0)


def test_signal_ends_a_start_on_a_stalled_file_system(mount: Mount) -> None:
    """A signal ends a start on a stalled file system even if its I/O process can not be killed."""
    NodeProcess(*flags(SETTINGS), "--data-dir", str(mount.path)).stop(STOP_S)
    mount.stall("write fsync")
    command = command_of(mount)
    starting = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(mount.is_stalled, 30.0)
    starting.send_signal(signal.SIGTERM)
    try:
        starting.wait(STOP_S)
    finally:
        mount.clear()
        starting.kill()
        starting.wait()


def test_start_on_a_dead_file_system_reports_the_error(mount: Mount) -> None:
    """Regression: the error of closing the lock hid the first error."""
    mount.stall("create")
    command = command_of(mount)
    starting = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_until(mount.is_stalled, 30.0)
    mount.server.kill()
    _, output = starting.communicate(timeout=STOP_S)
    assert starting.returncode == 2
    assert "can not be used" in output
    assert "Traceback" not in output
