"""A node on a file system that hangs as a whole, as with `fsfreeze`, ends and frees its ports."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from known_pages import Pages
from waiting import wait_until

from kvstore import Client, ClientConfig
from kvstore.tools.node_process import NodeProcess

FLAGS = (
    *("--ram-bytes", "8MiB", "--extent-bytes", "1MiB", "--flush-s", "2", "--drain-s", "1"),
    *("--disk-bytes", "32MiB", "--disk-extent-bytes", "4MiB"),
)
SAMPLES_S = 22.0  # until the console's history has a sample to save
STOP_S = 30.0


@pytest.fixture
def frozen(small: Path) -> Iterator[NodeProcess]:
    """Yield a node on a frozen file system."""
    node, pages = NodeProcess(*FLAGS, "--data-dir", str(small / "data")), Pages("frozen")
    with node:
        with Client(ClientConfig(node.address, timeout_s=30.0)) as client:
            pages.put(client, pages.keys(*range(8)), durable=True)
        time.sleep(SAMPLES_S)
        subprocess.run(["fsfreeze", "-f", small], check=True)
        try:
            yield node
        finally:
            subprocess.run(["fsfreeze", "-u", small], check=True)


def assert_ports_free(node: NodeProcess) -> None:
    for port in (int(node.address.rpartition(":")[2]), node.metrics_port):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))


@pytest.mark.parametrize("small", ["ext4"], indirect=True)
@pytest.mark.parametrize("killed", [False, True])
def test_node_on_a_frozen_file_system_ends(frozen: NodeProcess, killed: bool) -> None:
    """Regression: threads in writes of small files kept even a killed node alive."""
    os.kill(frozen.pid, signal.SIGTERM)
    if killed:
        time.sleep(2.0)  # for the last event, and the history
        os.kill(frozen.pid, signal.SIGKILL)
    wait_until(lambda: not frozen.running, 5.0 if killed else STOP_S)
    assert_ports_free(frozen)
