"""Notifications to a supervisor, and its watchdog."""

import os
import socket
import threading
from collections.abc import Iterator
from typing import NoReturn

import pytest
from local_nodes import StartNode
from waiting import wait_until

from kvstore.config import Supervisor, supervisor
from node.main import Reload
from node.systemd import Notifier, Watchdog, http_answers


@pytest.fixture
def systemd() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0kvstore-test-{os.getpid()}")
        sock.settimeout(10.0)
        yield sock


def test_states_are_lines_of_one_datagram(systemd: socket.socket) -> None:
    Notifier("@" + systemd.getsockname()[1:].decode()).send(READY=1, STATUS="serves:\nall")
    assert systemd.recv(4096) == b"READY=1\nSTATUS=serves: all"
    Notifier("").send(READY=1)


def test_long_start_asks_for_more_time_now_and_then(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    notifier = Notifier("@" + systemd.getsockname()[1:].decode())
    notifier.starting()
    monkeypatch.setattr("node.systemd.START_STEP_S", 0.0)
    notifier.starting()
    assert systemd.recv(4096) == b"EXTEND_TIMEOUT_USEC=60000000\nSTATUS=starting"


def test_supervisor_that_is_away_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    Notifier("/nowhere/notify").send(READY=1)
    assert "NOTIFY_SOCKET does not take READY" in caplog.text


def test_reload_that_fails_is_ended(
    systemd: socket.socket, start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd waits for READY=1 after RELOADING=1, and would kill the node."""
    node = start_node()

    def fail() -> NoReturn:
        raise RuntimeError("no threads left")

    monkeypatch.setattr(node, "reload", fail)
    notifier = Notifier("@" + systemd.getsockname()[1:].decode())
    Reload(node, {"config": ""}, notifier).begin()
    assert systemd.recv(4096).startswith(b"RELOADING=1\n")
    status = b"SIGHUP: reloaded nothing; failed, and unchanged: files: RuntimeError"
    assert systemd.recv(4096).startswith(b"READY=1\nSTATUS=" + status)


def test_node_whose_ram_tier_or_acceptor_hangs_does_not_answer(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, locked, done = start_node(), threading.Event(), threading.Event()

    def hold() -> None:
        with node.tier.lock:
            locked.set()
            done.wait(60.0)

    assert node.answers(20.0)
    thread = threading.Thread(target=hold)
    thread.start()
    assert locked.wait(60.0)
    assert not node.answers(0.05)
    done.set()
    thread.join()
    monkeypatch.setattr(type(node.bulk), "accepts", False)
    assert not node.answers(20.0)


def test_watchdog_is_fed_only_while_the_node_answers(systemd: socket.socket) -> None:
    good, asked = threading.Event(), threading.Semaphore(0)

    def answers(seconds: float) -> bool:
        asked.release()
        return good.is_set()

    watchdog = Watchdog(Notifier("@" + systemd.getsockname()[1:].decode()), 0.04, answers)
    assert asked.acquire(timeout=60.0)
    assert asked.acquire(timeout=60.0)
    systemd.setblocking(False)
    with pytest.raises(BlockingIOError):
        systemd.recv(4096)
    systemd.settimeout(10.0)
    good.set()
    assert systemd.recv(4096) == b"WATCHDOG=1"
    watchdog.stop()
    wait_until(lambda: not watchdog._thread.is_alive())


def test_watchdog_outlives_a_check_that_raises(
    systemd: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = iter([OSError(24, "no descriptors")])

    def answers(seconds: float) -> bool:
        for error in outcomes:
            raise error
        return True

    watchdog = Watchdog(Notifier("@" + systemd.getsockname()[1:].decode()), 0.04, answers)
    assert systemd.recv(4096) == b"WATCHDOG=1"
    assert "no descriptors" in caplog.text
    watchdog.stop()
    wait_until(lambda: not watchdog._thread.is_alive())


@pytest.mark.parametrize("answer", [b"HTTP/1.1 503 not serving\r\n\r\n", b"", b"no HTTP\r\n\r\n"])
def test_any_reaction_of_the_http_port_is_an_answer(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.send(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert http_answers("0.0.0.0", port, False, 10.0)
        thread.join()


def test_silent_or_closed_http_port_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not http_answers("127.0.0.1", port, False, 0.05)
    assert not http_answers("127.0.0.1", port, False, 5.0)


def test_watchdog_of_another_process_is_none() -> None:
    own = {"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "2500000", "WATCHDOG_PID": str(os.getpid())}
    assert supervisor(own) == Supervisor("@n", 2.5)
    assert supervisor({**own, "WATCHDOG_PID": "1"}) == Supervisor("@n", 0.0)
    assert supervisor({}) == Supervisor("", 0.0)
