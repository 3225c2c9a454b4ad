"""`kvstore top` on a terminal: keys, a resize, and the terminal's settings afterwards."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.tools.node_process import NodeProcess

PATIENT_S = 60.0
LEAVES_SCREEN, SHOWS_CURSOR = b"\x1b[?1049l", b"\x1b[?25h"


class Top:
    """A running `kvstore top` and its terminal."""

    def __init__(self, *arguments: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(24, 80)
        self.before = termios.tcgetattr(self.master)
        self.output = b""
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", "top", "--interval", "0.1", *arguments],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
            env={**environment, "TERM": "xterm"},
        )

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def shows(self, text: str) -> None:
        """Wait until a text is written from now on."""
        self._read(lambda new: text.encode() in new)

    def _read(self, enough: Any) -> None:
        start, end = len(self.output), time.monotonic() + PATIENT_S
        while not enough(self.output[start:]):
            assert time.monotonic() < end, self.output[start:][-3000:].decode(errors="replace")
            if select.select([self.master], [], [], 0.1)[0]:
                self.output += os.read(self.master, 1 << 16)

    def ends(self) -> int:
        """Wait for its end; check that the terminal is as it was."""
        end = time.monotonic() + PATIENT_S
        while time.monotonic() < end:
            if select.select([self.master], [], [], 0.1)[0]:
                self.output += os.read(self.master, 1 << 16)
            elif self.process.poll() is not None:
                break
        code = self.process.wait(PATIENT_S)
        left = self.output.rindex(LEAVES_SCREEN)
        assert SHOWS_CURSOR in self.output[left - 200 :]
        assert b"Traceback" not in self.output
        return code


@pytest.fixture
def top(shared_node: NodeProcess) -> Iterator[Top]:
    top = Top("-a", shared_node.address, "--timeout", "30")
    yield top
    if top.process.poll() is None:
        top.process.kill()
        top.process.wait()
    os.close(top.master)
    os.close(top.slave)


def test_keys_change_the_view_and_q_ends_it(top: Top) -> None:
    top.shows("s sort")
    assert not termios.tcgetattr(top.master)[3] & (termios.ECHO | termios.ICANON)
    top.press("s")
    top.shows("sorted by NAMESPACE")
    top.press("/no such\r")
    top.shows("filter 'no such'")
    top.press("p")
    top.shows("PAUSED")
    top.press("?")
    top.shows("this help; any key leaves it")
    top.press("x\x1b[B")
    top.shows("PAUSED")
    top.resize(24, 40)
    top.process.send_signal(signal.SIGWINCH)
    top.shows("PAUSED")
    top.press("q")
    assert top.ends() == 0
    assert termios.tcgetattr(top.master) == top.before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_signal_restores_the_terminal(top: Top, number: signal.Signals, code: int) -> None:
    top.shows("s sort")
    top.process.send_signal(number)
    assert top.ends() == code
    assert termios.tcgetattr(top.master) == top.before
