"""Start, supervise and restart a worker process beside the engine's process.

    absent ---> starting ---> ready ---> ending ---> reaped ---> absent, for a pause that grows
                              READY      killed      its work is lost

Only `close` waits, and no thread runs beside the engine: everything happens in `poll`. The work of
the process counts as lost only after the process was reaped: until then it may read and write the
engine's memory. For the same reason an overdue process (stopped, hung) is killed.
"""

import logging
import os
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gpu_agent.worker import frames
from gpu_agent.worker.frames import UNSENT_NBYTES_MAX, EngineEnd, Kind
from kvstore import programs
from kvstore.errors import Exhausted, ProtocolError

log = logging.getLogger(__name__)

SOON_S = 5.0  # saves are staged for a process whose next start is at most this far away
STARTS_MAX = 64
LIVED_S = 60.0  # after so long, a death counts as the first again
_POLL_S = 0.01


@dataclass(frozen=True)
class WorkerTimeouts:
    """Time limits of a worker process, in seconds."""

    # An order ends by its deadline, plus the time of a call to the node that is running then.
    grace_s: float = 2.0
    # Counted from when an overdue order is first seen: the engine may have been stopped, not the
    # process.
    overdue_s: float = 2.0
    start_s: float = 60.0  # importing torch, a context of the GPU, mapping the engine's memory
    close_s: float = 5.0  # for running jobs when the engine ends, and as long for the end itself
    # after the first death; doubled with each further one, up to restart_s_max
    restart_s: float = 1.0
    restart_s_max: float = 60.0
    # A read of the socket costs an engine's step 10 us (a machine with an H200). A process without
    # work has nothing to report but its death.
    idle_s: float = 0.1
    # How late the engine may learn that blocks were read; it learns of loads at once.
    saving_s: float = 0.01


TIMEOUTS = WorkerTimeouts()


class Delegate(Protocol):
    """The user of a worker process.

    `name`: its task, for the log.
    """

    name: str

    def setup(self) -> tuple[dict[str, Any], Sequence[int]]:
        """Return facts for a new process, and descriptors that it inherits.

        Raises ConfigError.
        """

    def on_message(self, kind: Kind, body: bytes) -> None:
        """Handle a frame.

        Raises ProtocolError for one that the process may not send.
        """

    def overdue(self, now: float) -> bool:
        """Return whether an order or a lookup should have ended by now."""

    def on_exit(self) -> int:
        """End all running work, because the process is gone, and return how much it was."""


class WorkerProcess:
    """A process that works for `delegate`. Not thread-safe.

    A process that the main thread started dies with the engine even while it is stopped.
    """

    def __init__(
        self, delegate: Delegate, command: Sequence[str] = (), timeouts: WorkerTimeouts = TIMEOUTS
    ) -> None:
        self._delegate = delegate
        self._command = command
        self.timeouts = timeouts
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: EngineEnd | None = None  # None: the connection has ended
        self._started_at = 0.0
        self._looked_at = 0.0
        self._overdue_since: float | None = None  # when an overdue order was first seen
        self._deaths = 0
        self._restart_at = 0.0
        self._closed = False
        self._pid = os.getpid()
        self._failed = False  # the process of the last start never became ready
        self.ready = False
        # Start-up times; the delegate removes them
        self.startup_seconds: deque[float] = deque(maxlen=STARTS_MAX)

    @property
    def awaited(self) -> bool:
        """Return whether the process is expected to be ready soon: it is starting, or about to.

        After a failed start it is False until a start succeeds.
        """
        if self._closed or self._failed:
            return False
        return self.listens or self._restart_at <= time.monotonic() + SOON_S

    @property
    def listens(self) -> bool:
        """Return whether frames may arrive: the process is starting, or ready."""
        return self._channel is not None

    @property
    def pid(self) -> int | None:
        """Return the process id; None without a process."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start a process.

        Raises ConfigError, OSError, or InvalidRequest for a setup that is too long.
        """
        command = self._command or _command()
        facts, inherited = self._delegate.setup()
        facts |= {
            "engine": os.getpid(),
            "log_level": logging.getLogger("gpu_agent").getEffectiveLevel(),
        }
        facts["outlived"] = threading.current_thread() is threading.main_thread()
        setup = frames.facts_frame(Kind.SETUP, facts)
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *inherited),
                start_new_session=True,  # a Ctrl-C at the terminal is for the engine
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel, self.ready, self._started_at = EngineEnd(ours), False, time.monotonic()
        self._overdue_since = None
        self.tell(setup)

    def give(self, frame: bytes, unsent_nbytes_max: int = UNSENT_NBYTES_MAX) -> None:
        """Queue a frame, to be sent with others by the next `poll`.

        Raises Exhausted, and drops the frame, if too much would be unsent.
        """
        if self._channel is not None:
            self._channel.put(frame, unsent_nbytes_max)

    def tell(self, frame: bytes) -> None:
        """Send a frame now, as far as possible without waiting.

        End a process that can not take it.
        """
        if self._channel is None:
            return
        try:
            self._channel.send(frame)
        except (Exhausted, OSError) as error:
            self._end(str(error))

    def await_ready(self, timeout_s: float) -> bool:
        """Wait at the engine's start, and return whether the process is ready."""
        end = time.monotonic() + timeout_s
        while not self.ready and time.monotonic() < end:
            self.poll()
            self.pause()
        return self.ready

    def poll(self, patience_s: float = 0.0) -> None:
        """Read frames, reap a process that has ended, and start the next one.

        `patience_s`: frames may stay unread for so long after the last read. Frames to send do not
        wait.
        """
        if os.getpid() != self._pid:
            return
        now = time.monotonic()
        if self._process is None:
            if now >= self._restart_at and not self._closed:
                self._restart()
            return
        if self._channel is not None:
            if now < self._looked_at + patience_s and self.ready and not self._channel.unsent:
                return
            self._looked_at = now
            self._listen(self._channel)
        if self._channel is not None and self._stands_still(now):
            self._end("it makes no progress")
        if self._channel is None and self._process.poll() is not None:
            self._reap()

    def pause(self, timeout_s: float = _POLL_S) -> None:
        """Wait until the process may have sent something."""
        if self._channel is not None:
            self._channel.wait(timeout_s)
        else:
            time.sleep(timeout_s)

    def close(self, busy: Callable[[], bool]) -> None:
        """End the process when it is not `busy` any more, at most `close_s` from now.

        Wait until it is gone. In a child of a fork it does nothing: the process is the parent's.
        """
        if os.getpid() != self._pid:
            return
        self._closed = True
        close_s = self.timeouts.close_s
        end = time.monotonic() + close_s
        if self.ready and busy():
            self.tell(frames.close_frame(close_s))
            while self._channel is not None and busy() and time.monotonic() < end:
                self.pause()
                self.poll()
        if self._channel is not None:
            self._end("the engine ends", logging.DEBUG)
        while self._process is not None and time.monotonic() < end + close_s:
            self.pause()
            self.poll()

    # ---- in detail -------------------------------------------------------------------------

    def _listen(self, channel: EngineEnd) -> None:
        try:
            channel.flush()
            for kind, body in channel.received():
                if kind is Kind.READY:
                    self._on_ready(frames.parse_ready(body))
                else:
                    self._delegate.on_message(kind, body)
        except (OSError, ProtocolError) as error:
            self._end(str(error))

    def _on_ready(self, at: float) -> None:
        """Record that the process was ready `at` its own time.

        An idle engine may read the message that much later.
        """
        took_s = min(max(at, self._started_at), time.monotonic()) - self._started_at
        self.ready, self._failed = True, False
        self.startup_seconds.append(took_s)
        log.info(
            "the process of the %s, %s, was ready after %.1f s",
            self._delegate.name,
            self.pid,
            took_s,
        )

    def _stands_still(self, now: float) -> bool:
        """Return whether the process has made no progress for too long.

        Start-up time does not count, nor time in which the engine itself was stopped and read
        nothing: after work is first seen to be overdue, it has `overdue_s` to end.
        """
        if not self.ready:
            return now > self._started_at + self.timeouts.start_s
        if not self._delegate.overdue(now):
            self._overdue_since = None
            return False
        if self._overdue_since is None:
            self._overdue_since = now
        return now > self._overdue_since + self.timeouts.overdue_s

    def _restart(self) -> None:
        try:
            self.start()
        # Any error here would end an engine's step.
        except Exception as error:  # noqa: BLE001
            log.warning("the process of the %s can not be started: %r", self._delegate.name, error)
            self._failed = True
            self._died()

    def replace(self, why: str) -> None:
        """End the process, so that another one starts."""
        if self._channel is not None:
            self._end(why, logging.INFO)

    def _end(self, why: str, level: int = logging.WARNING) -> None:
        """Kill the process.

        `poll` reaps it once the system has ended it.
        """
        assert self._process is not None
        log.log(
            level,
            "the process of the %s, %d, is ended: %s",
            self._delegate.name,
            self._process.pid,
            why,
        )
        self._process.kill()
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def _reap(self) -> None:
        lost = self._delegate.on_exit()
        if self.ready and time.monotonic() - self._started_at > LIVED_S:
            self._deaths = 0
        self._failed = not self.ready
        self._process, self.ready = None, False
        if not self._closed:
            self._died()
            log.warning(
                "the process of the %s is gone with %d orders; the engine recomputes, the next one "
                "starts in %.1f s",
                self._delegate.name,
                lost,
                self._restart_at - time.monotonic(),
            )

    def _died(self) -> None:
        wait_s = self.timeouts.restart_s * 2 ** min(self._deaths, 10)
        self._restart_at = time.monotonic() + min(self.timeouts.restart_s_max, wait_s)
        self._deaths += 1


def _command() -> list[str]:
    """Return the command of a worker process."""
    return [*programs.python(), "-m", "gpu_agent.worker"]
