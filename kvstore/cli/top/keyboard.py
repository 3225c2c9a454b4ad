"""Read single keys from the terminal, and wait for them beside other events.

    keys --> stdin ------+
    a new sample --------+--> wait() --> names of the keys that were pressed
    SIGWINCH (resize) ---+

The terminal gets its former settings back at the end: also after an exception, Ctrl-C, SIGTERM and
SIGHUP.
"""

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from types import FrameType

ESCAPE, ENTER, BACKSPACE = "escape", "enter", "backspace"
_SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
}
_SINGLE = {b"\x1b": ESCAPE, b"\r": ENTER, b"\n": ENTER, b"\x7f": BACKSPACE, b"\x08": BACKSPACE}
_CHUNK_NBYTES = 256
_LFLAG, _CC = 3, 6  # places in the settings of a terminal
ENDED = 128  # plus a signal's number: the exit code of a process that ended by it


def parse_keys(data: bytes) -> list[str]:
    """Return the names of keys in bytes from a terminal; unknown sequences are dropped."""
    keys: list[str] = []
    while data:
        found = next((one for one in _SEQUENCES if data.startswith(one)), b"")
        if found:
            keys.append(_SEQUENCES[found])
        elif data[:1] == b"\x1b" and data[1:2] in (b"[", b"O"):
            found = _unknown(data)
        elif data[:1] in _SINGLE:
            found = data[:1]
            keys.append(_SINGLE[found])
        else:
            text = data.partition(b"\x1b")[0]
            end = next((i for i in range(len(text)) if text[i : i + 1] in _SINGLE), len(text))
            found = text[:end]
            keys += [key for key in found.decode(errors="ignore") if key.isprintable()]
        data = data[len(found) :]
    return keys


def _unknown(data: bytes) -> bytes:
    """Return an escape sequence that no key here has: it ends with a byte in 0x40..0x7e."""
    end = next((i for i in range(2, len(data)) if 0x40 <= data[i] <= 0x7E), len(data) - 1)
    return data[: end + 1]


class Keyboard:
    """Keys of this terminal. `wake` may be called in any thread, and by signal handlers."""

    def __init__(self) -> None:
        self._input = sys.stdin.fileno()
        self._lock = threading.RLock()  # a signal handler may run within another one
        self._closed = False
        self._awake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        os.set_blocking(self._awake, False)

    def wake(self) -> None:
        """Make `wait` return; does nothing after `close`."""
        with self._lock, contextlib.suppress(BlockingIOError):  # it is full: `wait` returns anyway
            if not self._closed:
                os.write(self._waker, b"\0")

    def wait(self, timeout_s: float | None = None) -> list[str]:
        """Wait for keys, `wake` or the time limit, and return the keys.

        Raises EOFError if the terminal is gone.
        """
        ready, _, _ = select.select([self._input, self._awake], [], [], timeout_s)
        if self._awake in ready:
            os.read(self._awake, 1 << 12)
        if self._input not in ready:
            return []
        try:
            data = os.read(self._input, _CHUNK_NBYTES)
        except OSError:
            data = b""
        if not data:
            raise EOFError
        return parse_keys(data)

    def close(self) -> None:
        """Close the pipe."""
        with self._lock:
            self._closed = True
            os.close(self._awake)
            os.close(self._waker)


@contextlib.contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Yield the keys of this terminal, without echo and line editing.

    Ctrl-C still interrupts. Ctrl-Z is ignored, because the shell would get a terminal without echo.
    SIGTERM and SIGHUP raise SystemExit meanwhile.
    """
    keys = Keyboard()
    before = termios.tcgetattr(sys.stdin)

    def resized(number: int, frame: FrameType | None) -> None:
        keys.wake()

    def ended(number: int, frame: FrameType | None) -> None:
        raise SystemExit(ENDED + number)

    wanted = {signal.SIGWINCH: resized, signal.SIGTERM: ended, signal.SIGHUP: ended}
    handlers = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        tty.setcbreak(sys.stdin)
        settings = termios.tcgetattr(sys.stdin)
        settings[_CC][termios.VSUSP] = b"\0"
        termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)
        yield keys
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        keys.close()
