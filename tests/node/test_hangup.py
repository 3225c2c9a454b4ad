"""SIGHUP, which a closing terminal sends to a node: the node drains, or goes on under nohup."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from known_pages import Pages

from kvstore import Client, ClientConfig
from kvstore.tools.node_process import NodeProcess

FLAGS = ("--ram-bytes", "4MiB", "--disk-bytes", "64MiB", "--disk-extent-bytes", "4MiB")
PAGE = 4096


def put(address: str, pages: Pages) -> None:
    with Client(ClientConfig(address=address, timeout_s=20.0)) as client:
        pages.put(client, pages.keys(*range(8)))


def assert_kept(flags: tuple[str, ...], pages: Pages) -> None:
    """Start a node on the same directory, read the pages back, and compare them."""
    with (
        NodeProcess(*flags) as again,
        Client(ClientConfig(address=again.address, timeout_s=20.0)) as client,
    ):
        assert pages.get(client, pages.keys(*range(8))) == [True] * 8


def to_process(pid: int) -> None:
    os.kill(pid, signal.SIGHUP)


def to_group_twice(pid: int) -> None:
    """Send SIGHUP twice to the process group, as a shell and then its terminal do.

    The disk's process gets it, too.
    """
    os.killpg(pid, signal.SIGHUP)
    os.killpg(pid, signal.SIGHUP)


@pytest.mark.parametrize("hang_up", [to_process, to_group_twice])
def test_sighup_writes_all_pages_and_ends_with_status_0(
    hang_up: Callable[[int], None], tmp_path: Path
) -> None:
    pages, flags = Pages("hangup", PAGE), (*FLAGS, "--data-dir", str(tmp_path / "data"))
    process = NodeProcess(*flags, inside=("setsid",))
    try:
        put(process.address, pages)
        hang_up(process.pid)
        assert process._process.wait(30.0) == 0
        assert "SIGHUP: the node stops" in process.log_text
    finally:
        process.kill()
    assert_kept(flags, pages)


def test_node_drains_when_its_terminal_closes(tmp_path: Path) -> None:
    """The kernel sends SIGHUP to all processes of the terminal; writing to it fails afterwards."""
    pages, flags = Pages("hangup", PAGE), (*FLAGS, "--data-dir", str(tmp_path / "data"))
    ports = ("--host", "127.0.0.1", "--port", "0", "--bulk-port", "0", "--metrics-port", "0")
    ours, terminal = pty.openpty()
    command = ["setsid", "--ctty", sys.executable, "-m", "node.main", *ports, *flags]
    with subprocess.Popen(
        command, stdin=terminal, stdout=subprocess.PIPE, stderr=terminal, text=True
    ) as process:
        os.close(terminal)
        assert process.stdout is not None
        put(process.stdout.readline().split("grpc=")[1].split()[0], pages)
        os.close(ours)
        assert process.wait(30.0) == 0
    assert_kept(flags, pages)


def test_sighup_under_nohup_is_ignored() -> None:
    pages = Pages("hangup", PAGE)
    process = NodeProcess(*FLAGS[:2], inside=("nohup",))
    try:
        put(process.address, pages)
        os.kill(process.pid, signal.SIGHUP)
        with Client(ClientConfig(address=process.address, timeout_s=20.0)) as client:
            assert pages.get(client, pages.keys(*range(8))) == [True] * 8
        assert process.stop() == 0
        assert "SIGTERM: the node stops" in process.log_text
    finally:
        process.kill()


def test_sigterm_and_sighup_together_are_one_stop(tmp_path: Path) -> None:
    """systemd sends both with SendSIGHUP=yes. The lower number comes first; the other must not
    kill.
    """
    pages, flags = Pages("hangup", PAGE), (*FLAGS, "--data-dir", str(tmp_path / "data"))
    process = NodeProcess(*flags)
    try:
        put(process.address, pages)
        process.pause()
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGHUP)
        process.resume()
        assert process._process.wait(30.0) == 0
        assert "SIGHUP, SIGTERM: the node stops" in process.log_text
    finally:
        process.kill()
    assert_kept(flags, pages)
