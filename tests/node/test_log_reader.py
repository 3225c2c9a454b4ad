"""The node's log goes to a pipe that nobody reads: the node serves and stops as usual."""

import fcntl
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from known_pages import Pages
from local_nodes import connect

from node import process
from node.process import StderrHandler

SMALL = ("--host", "127.0.0.1", "--port", "0", "--bulk-port", "0", "--metrics-port", "0")
PIPE_NBYTES = 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Yield the ends of a pipe of one memory page: (read, write)."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_NBYTES)
    yield read, write
    os.close(read)
    os.close(write)


def start(stderr: int, limits: str = "") -> "subprocess.Popen[str]":
    """Start a node; `limits` are arguments of `ulimit`."""
    node = shlex.join([sys.executable, "-m", "node.main", *SMALL, "--ram-bytes", "16MiB"])
    command = f"{limits and f'ulimit {limits}; '}exec {node}"
    return subprocess.Popen(
        ["bash", "-c", command], stdout=subprocess.PIPE, stderr=stderr, text=True
    )


def test_node_with_an_unread_log_serves_and_stops(pipe: tuple[int, int]) -> None:
    """Regression: a thread that logged held the log's lock for ever, and SIGTERM had no effect."""
    node = start(pipe[1])
    try:
        assert node.stdout is not None
        ready = node.stdout.readline()
        assert "ready" in ready
        port = ready.partition("bulk=")[2].split()[0]
        os.set_blocking(pipe[1], True)
        for number in range(40):  # each connection that ends with an error is a line
            with socket.create_connection(("127.0.0.1", int(port))) as peer:
                peer.sendall(b"GET / HTTP/1.1\r\n" + bytes(number))
        with connect(f"bulk://127.0.0.1:{port}") as client:
            pages = Pages("unread")
            pages.put(client, pages.keys(1, 2))
            assert pages.get(client, pages.keys(1, 2)) == [True, True]
        node.send_signal(signal.SIGTERM)
        assert node.wait(60.0) == 0
    finally:
        node.kill()
        node.communicate()


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], logging.Logger]]:
    """Yield a function that makes a logger to a descriptor."""
    made: list[logging.Logger] = []

    def make(fd: int) -> logging.Logger:
        monkeypatch.setattr(process, "STDERR", fd)
        logger = logging.Logger(f"test-{fd}")
        logger.addHandler(StderrHandler())
        made.append(logger)
        return logger

    yield make
    for logger in made:
        logger.handlers[0].close()


@pytest.mark.parametrize("reopened", [True, False])
def test_lost_lines_are_counted_when_the_pipe_is_read_again(
    pipe: tuple[int, int], logger: Any, reopened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not reopened:  # as for a pipe of another user

        def refuse(*_: object) -> int:
            raise PermissionError(13, "Permission denied")

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse)
            log = logger(pipe[1])
    else:
        log = logger(pipe[1])
    for number in range(100):
        log.warning("line %03d %s", number, "x" * 90)
    first = os.read(pipe[0], 1 << 16).decode()
    log.warning("afterwards")
    second = os.read(pipe[0], 1 << 16).decode()
    whole = [line for line in first.splitlines() if len(line) == 99]
    lost = 100 - len(whole)
    assert f"{lost} log lines were lost: stderr was not read\nafterwards\n" in second
    assert os.get_blocking(pipe[1]), "other processes share the description"


def test_line_longer_than_the_pipe_is_cut_and_the_next_one_is_whole(
    pipe: tuple[int, int], logger: Any
) -> None:
    log = logger(pipe[1])
    log.warning("%s", "y" * 10_000)
    os.read(pipe[0], 1 << 16)
    log.warning("next")
    assert os.read(pipe[0], 1 << 16).decode().splitlines()[-1] == "next"


def test_socket_and_file_take_log_lines(logger: Any, tmp_path: Any) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        logger(ours.fileno()).warning("to a socket")
        assert theirs.recv(100) == b"to a socket\n"
    with (tmp_path / "log").open("a") as file:
        log = logger(file.fileno())
        log.warning("one")
        log.warning("%d", "no number")
        log.warning("two")
    lines = (tmp_path / "log").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("one", "two")
    assert "can not be formatted" in lines[1]


def test_json_lines_stay_json(pipe: tuple[int, int], logger: Any) -> None:
    log = logger(pipe[1])
    log.handlers[0].setFormatter(process.formatter("json"))
    log.warning("größer")
    assert json.loads(os.read(pipe[0], 4096))["message"] == "größer"


@pytest.mark.parametrize("limits", ["-f 1000", pytest.param("-v 400000", marks=pytest.mark.long)])
def test_start_below_the_processes_limits_ends_with_one_line(limits: str) -> None:
    """Regression: a traceback, and status 1."""
    node = start(subprocess.PIPE, limits)
    _, stderr = node.communicate(timeout=120.0)
    assert node.returncode == 2
    assert "Traceback" not in stderr
    assert "raise its limits" in stderr.splitlines()[-1]
