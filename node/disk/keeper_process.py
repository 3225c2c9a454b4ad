"""A keeper in a child process, and talking to it."""

import contextlib
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import node
from kvstore.errors import ConfigError
from node.disk import orders
from node.disk.orders import Broken, Channel, Kind, Opened, Outcome, Task

log = logging.getLogger(__name__)

END_S = 10.0  # a node that stops waits so long for its keeper, then kills it
KILL_S = 5.0  # one that is killed and still there is in a call of the disk
PULSE_S = 0.2  # between two looks at whether to go on waiting for one that begins
OWED_MAX = 16  # answers that nobody waits for any more; beyond, they must come before more is asked


class Silent(Exception):
    """No answer in time: the disk, or the keeper, hangs."""


class Patience(NamedTuple):
    """With a keeper that begins: so long for each piece that it says. `pulse` is called meanwhile, and may raise to
    end it."""

    seconds: float
    pulse: Callable[[], None]


class KeeperProcess:
    """A running keeper. Raises ConfigError if it can not use its directory, OSError if it can not be started
    or does not begin in time."""

    def __init__(self, task: Task, patience: Patience) -> None:
        (order_end, its_order_end), (question_end, its_question_end) = socket.socketpair(), socket.socketpair()
        self.orders = Talk(order_end, self._say_gone)
        self.questions = Talk(question_end, self._say_gone)
        with contextlib.ExitStack() as undo, its_order_end, its_question_end:
            undo.callback(self._close_sockets)
            task = task._replace(orders_fd=its_order_end.fileno(), questions_fd=its_question_end.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "node.disk.keeper", *task.arguments()],
                cwd=Path(node.__file__).parent.parent,  # `-m` looks there first, wherever the node was started
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(task.orders_fd, task.questions_fd, task.arena_fd),
            )
            undo.callback(self.kill)
            its_order_end.close()  # now, or its end would not be noticed
            its_question_end.close()
            self.opened = self._begun(patience)
            undo.pop_all()

    def _begun(self, patience: Patience) -> Opened:
        try:
            return Opened.unpack(self.orders.unasked(patience))
        except Silent as error:
            raise OSError(
                f"its keeper (process {self.pid}) has not begun in {patience.seconds:g} s and is killed: the disk hangs"
            ) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def trouble(self) -> str:
        """What became of it; empty while it runs. Never waits."""
        status = self._process.poll()
        if status is None:
            return ""
        how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
        return f"its keeper (process {self.pid}) was ended {how}"

    def _say_gone(self) -> str:
        """Why its sockets closed. One that speaks in riddles is ended, too: it must not write any more."""
        self.kill()
        return self.trouble() or f"its keeper (process {self.pid}) can not be ended: the disk hangs"

    def kill(self) -> None:
        """No call of the disk follows the one it is in, and that one ends with it."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)

    def close(self) -> None:
        """Has it close the rows, and ends it. Raises OSError if it could not, or hangs."""
        end = time.monotonic() + END_S
        try:
            if not self.trouble():
                self.orders.ask(Kind.CLOSE, timeout_s=END_S)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(max(0.0, end - time.monotonic()))
        except Silent as error:
            raise OSError(f"its keeper (process {self.pid}) did not answer for {END_S:g} s and is killed") from error
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Ends it as it is."""
        self.kill()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self.orders.close()
        self.questions.close()


class Talk:
    """One socket to a keeper: an order, its answer, the next one. Thread-safe.

    Raises OSError with what the keeper met, or with what `gone` says became of it.
    """

    def __init__(self, sock: socket.socket, gone: Callable[[], str]) -> None:
        self._channel = Channel(sock)
        self._gone = gone
        self._lock = threading.Lock()
        self._number = 0
        self._heard = 0

    def ask(self, kind: Kind, body: bytes = b"", timeout_s: float | None = None) -> bytes:
        """The answer, all of it. Raises Silent if there is none in time; it will be passed over."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise Silent
        try:
            while self._number - self._heard >= OWED_MAX:
                self._recv(end)
            self._send(kind, body)
            return b"".join(self._answer(lambda: self._recv(end)))
        finally:
            self._lock.release()

    def stream(self, kind: Kind, body: bytes, patience: Patience) -> Iterator[bytes]:
        """The answer piece by piece. Raises Silent if one does not come in time."""
        with self._lock:
            self._send(kind, body)
            yield from self._answer(lambda: self._recv_patiently(patience))

    def unasked(self, patience: Patience) -> bytes:
        """What a keeper says first. Raises ConfigError if that is that it can not begin, Silent if it is nothing."""
        return b"".join(self._answer(lambda: self._recv_patiently(patience)))

    def _send(self, kind: Kind, body: bytes) -> None:
        self._number += 1
        try:
            self._channel.send(self._number, kind, body)
        except OSError as error:
            raise OSError(self._gone()) from error

    def _answer(self, recv: Callable[[], tuple[int, int, bytes]]) -> Iterator[bytes]:
        """The pieces of the answer to the last order; those to earlier ones are passed over."""
        while True:
            number, outcome, body = recv()
            if number != self._number:
                continue
            if outcome == Outcome.FAILED:
                raise orders.unpack_error(body)
            if outcome == Outcome.REFUSED:
                raise ConfigError(body.decode(errors="replace"))
            yield body
            if outcome == Outcome.DONE:
                return

    def _recv_patiently(self, patience: Patience) -> tuple[int, int, bytes]:
        end = time.monotonic() + patience.seconds
        while True:
            patience.pulse()
            now = time.monotonic()
            try:
                return self._recv(min(end, now + PULSE_S))
            except Silent:
                if now >= end:
                    raise

    def _recv(self, end: float | None) -> tuple[int, int, bytes]:
        try:
            reply = self._channel.recv(None if end is None else max(0.001, end - time.monotonic()))
            self._heard = reply[0]
            return reply
        except TimeoutError as error:
            raise Silent from error
        except (EOFError, Broken, OSError) as error:  # OSError: closed here, by a stop
            raise OSError(self._gone()) from error

    def close(self) -> None:
        self._channel.close()
