"""SIGHUP, from a service manager or a closing terminal: the node reads its files again."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_processes import gateways
from known_pages import Pages
from local_nodes import StartNode
from waiting import PATIENT, wait_until

import kvstore
from kvstore import Client, ClientConfig, Unauthenticated
from kvstore.security.identities import new_token, token_line
from kvstore.tools.node_process import NodeProcess
from node.main import Reload
from node.systemd import Notifier

FLAGS = ("--ram-bytes", "4MiB")
PAGE = 4096


def put(address: str, pages: Pages, *numbers: int) -> None:
    with Client(ClientConfig(address=address, **PATIENT)) as client:
        pages.put(client, pages.keys(*numbers))


def assert_kept(address: str, pages: Pages, *numbers: int) -> None:
    with Client(ClientConfig(address=address, **PATIENT)) as client:
        assert pages.get(client, pages.keys(*numbers)) == [True] * len(numbers)


class Service:
    """A node as a service: a configuration file, and a socket for its notifications."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.identities, self.config = folder / "identities", folder / "node.toml"
        self.audit = folder / "audit.log"
        self.token = new_token("team-a")
        self.identities.write_text(token_line("ci", self.token, tenant="team-a", role="write"))
        self.configure("info")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "notify"))
        self._socket.settimeout(20.0)
        monkeypatch.setenv("NOTIFY_SOCKET", str(folder / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "400000")
        monkeypatch.setenv("KVSTORE_NODE_RAM_BYTE", "1")
        self.node = NodeProcess("-c", str(self.config), inside=("setsid",))

    def configure(self, level: str, *lines: str) -> None:
        text = f'identities = "{self.identities}"\naudit-log = "{self.audit}"\n'
        text += '[memory]\nram-bytes = "32 MiB"\n[disk]\ndisk-bytes = "64MiB"\n'
        text += f'data-dir = "{self.audit.parent}/data"\n'
        text += f'[observability]\nlog-level = "{level}"\n'
        self.config.write_text(text + "\n".join(lines))
        self.config.chmod(0o640)

    def notified(self, start: str) -> dict[str, str]:
        """Return the fields of the next message that begins with `start`."""
        while True:
            text = self._socket.recv(4096).decode()
            if text.startswith(start):
                return dict(line.split("=", 1) for line in text.splitlines())

    def hang_up(self) -> str:
        """Send SIGHUP to all processes of the node; return the status after the reload."""
        os.killpg(self.node.pid, signal.SIGHUP)
        assert int(self.notified("RELOADING=1")["MONOTONIC_USEC"]) > 0
        return self.notified("READY=1")["STATUS"]

    def close(self) -> None:
        self.node.kill()
        self._socket.close()


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    made = Service(tmp_path, monkeypatch)
    yield made
    made.close()


def test_service_reloads_its_files_and_reports_its_state(service: Service) -> None:
    status, log = service.notified("READY=1")["STATUS"], service.node.log_text
    assert status.startswith("listens on 127.0.0.1 (gRPC ")
    assert f"{status}\n" in log
    assert "only this host can connect: for others, set --host" in status
    assert "RAM_BYTE sets nothing; did you mean KVSTORE_NODE_RAM_BYTES?" in log
    service.notified("WATCHDOG=1")

    other = new_token("team-a")
    service.identities.write_text(token_line("cd", other, tenant="team-a", role="write"))
    service.configure("debug", "[limits]", "sessions-max = 9")
    service.audit.rename(f"{service.audit}.1")
    (disk,) = gateways(service.node.pid, "node.disk.io_worker")
    assert service.hang_up() == "SIGHUP: reloaded log level DEBUG, identities, audit log"
    assert service.audit.exists()
    assert "node.toml: restart the node to apply sessions-max" in service.node.log_text
    pages, address = Pages("hangup", PAGE, tenant="team-a"), service.node.address
    with Client(ClientConfig(address, token=other, **PATIENT)) as client:
        pages.put(client, pages.keys(0))
        assert not sum(end.count for end in client.node_status().gateway_ends)
    gone = Client(ClientConfig(address, token=service.token, **PATIENT))
    with gone, pytest.raises(Unauthenticated):
        gone.node_status()

    service.identities.chmod(0o666)
    service.config.write_text("log-levle = 'info'")
    failed = service.hang_up()
    assert failed.startswith("SIGHUP: reloaded audit log; failed, and unchanged: log level: ")
    assert "unknown setting log-levle; did you mean log-level?" in failed
    assert "is open to others (mode 0666)" in failed
    assert f": {failed}\n" in service.node.log_text
    with Client(ClientConfig(address, token=other, **PATIENT)) as client:
        assert pages.get(client, pages.keys(0)) == [True]
    assert json.loads(service.audit.read_text().splitlines()[-1])["what"] == "refused"

    assert gateways(service.node.pid, "node.disk.io_worker") == [disk]
    (gateway,) = gateways(service.node.pid)
    os.kill(gateway, signal.SIGKILL)
    wait_until(lambda: {gateway} != {*gateways(service.node.pid)} != set())
    (gateway,) = gateways(service.node.pid)
    assert b"\0--log-level\0DEBUG\0" in Path(f"/proc/{gateway}/cmdline").read_bytes()

    service.node._process.send_signal(signal.SIGTERM)
    assert service.notified("STOPPING=1") == {"STOPPING": "1", "STATUS": "draining"}
    os.kill(service.node.pid, signal.SIGHUP)  # nor does it cut a drain short
    assert service.node._process.wait(30.0) == 0


def test_node_serves_after_its_terminal_was_closed() -> None:
    """The kernel sends SIGHUP to all processes of the terminal; writing to it fails afterwards."""
    pages = Pages("hangup", PAGE)
    ports = ("--host", "127.0.0.1", "--port", "0", "--bulk-port", "0", "--metrics-port", "0")
    ours, terminal = pty.openpty()
    command = ["setsid", "--ctty", sys.executable, "-m", "node.main", *ports, *FLAGS]
    with subprocess.Popen(
        command, stdin=terminal, stdout=subprocess.PIPE, stderr=terminal, text=True
    ) as process:
        try:
            os.close(terminal)
            assert process.stdout is not None
            address = process.stdout.readline().split("grpc=")[1].split()[0]
            put(address, pages, 0, 1)
            os.close(ours)
            put(address, pages, 2)
            assert_kept(address, pages, 0, 1, 2)
            process.terminate()
            assert process.wait(30.0) == 0
        finally:
            process.kill()


def test_sigterm_and_sighup_together_are_one_stop(tmp_path: Path) -> None:
    """systemd sends both with SendSIGHUP=yes. The second one must not cut the drain short.

    nohup, which ignores SIGHUP, makes no difference.
    """
    pages = Pages("hangup", PAGE)
    flags = (*FLAGS, "--data-dir", str(tmp_path / "data"), "--disk-bytes", "64MiB")
    process = NodeProcess(*flags, inside=("nohup",))
    try:
        put(process.address, pages, *range(8))
        os.kill(process.pid, signal.SIGHUP)
        wait_until(lambda: "SIGHUP: reloaded nothing" in process.log_text)
        process.pause()
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGHUP)
        process.resume()
        assert process._process.wait(30.0) == 0
        assert "SIGHUP, SIGTERM: the node stops" in process.log_text
    finally:
        process.kill()
    with NodeProcess(*flags) as again:
        assert_kept(again.address, pages, *range(8))


def test_signals_during_a_reload_that_hangs_start_no_threads(
    start_node: StartNode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "config")  # as `-c <(...)` of a shell; it is not read again
    node, hangs, begun = start_node(), threading.Event(), threading.Semaphore(0)

    def read() -> dict[str, str]:
        begun.release()
        assert hangs.wait(60.0)
        return {}

    node.reload = read  # type: ignore[method-assign]
    reload = Reload(node, {"config": str(tmp_path / "config")}, Notifier(""))
    reload.begin()
    assert begun.acquire(timeout=60.0)
    for _ in range(100):
        reload.begin()
    assert sum(thread.name == "reload" for thread in threading.enumerate()) == 1
    hangs.set()
    assert begun.acquire(timeout=60.0)  # files may have changed after they were read
    wait_until(lambda: caplog.text.count("config is no file that can be read again") == 2)
    reload.begin()
    assert begun.acquire(timeout=60.0)


EARLY = """
import os, runpy, signal, sys

class AtImport:
    def find_spec(self, name, *others):
        if name == "node.main":
            os.kill(os.getpid(), signal.SIGHUP)

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # even under nohup
sys.meta_path.insert(0, AtImport())
sys.argv = ["kvstore-node", "--version"]
runpy.run_module("node", run_name="__main__")
"""


def test_hangup_during_the_imports_ends_no_start() -> None:
    ran = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, f"{kvstore.__version__}\n")
