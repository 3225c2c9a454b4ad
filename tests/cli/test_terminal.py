"""Commands on a terminal: keys of `kvstore top`, a resize, settings afterwards; progress bars."""

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

from kvstore import Namespace
from kvstore.tools.node_process import NodeProcess

PATIENT_S = 60.0
LEAVES_SCREEN, SHOWS_CURSOR, ERASES_LINE = b"\x1b[?1049l", b"\x1b[?25h", b"\x1b[2K"


class Terminal:
    """A running command and its terminal."""

    def __init__(self, *arguments: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(24, 80)
        self.before = termios.tcgetattr(self.master)
        self.output = b""
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", *arguments],
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
        """Wait for its end, and return its exit code."""
        end = time.monotonic() + PATIENT_S
        while time.monotonic() < end:
            if select.select([self.master], [], [], 0.1)[0]:
                self.output += os.read(self.master, 1 << 16)
            elif self.process.poll() is not None:
                break
        assert b"Traceback" not in self.output
        return self.process.wait(PATIENT_S)

    def is_restored(self) -> bool:
        """Return whether the terminal is as it was before the command."""
        left = self.output.rindex(LEAVES_SCREEN)
        shown = SHOWS_CURSOR in self.output[left - 200 :]
        return shown and bool(termios.tcgetattr(self.master) == self.before)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def top(shared_node: NodeProcess) -> Iterator[Terminal]:
    top = Terminal("top", "--interval", "0.1", "-a", shared_node.address, "--timeout", "30")
    yield top
    top.close()


def test_keys_change_the_view_and_q_ends_it(top: Terminal) -> None:
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
    assert top.is_restored()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_signal_restores_the_terminal(top: Terminal, number: signal.Signals, code: int) -> None:
    top.shows("s sort")
    top.process.send_signal(number)
    assert top.ends() == code
    assert top.is_restored()


def test_bar_is_erased_before_a_table_is_printed(
    shared_node: NodeProcess, space: Namespace, hashes: list[bytes]
) -> None:
    at = ("-a", shared_node.address, "--timeout", "30")
    get = Terminal("get", "-m", space.model, hashes[0].hex(), "--decode", *at)
    assert get.ends() == 0
    get.close()
    bars, _, table = get.output.partition(b"page " + hashes[0].hex().encode())
    assert b"decoding 1 of 1" in bars
    assert bars.endswith(ERASES_LINE)
    assert b"decoding" not in table
