"""Set up a node's process: its log, its place in the system, and rare full garbage collections.

Log lines are text, or a JSON object each; both contain the request id. A reader of the log that
stops reading costs lines, and never holds up the node.
"""

import contextlib
import ctypes
import datetime
import gc
import json
import logging
import os
import platform
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kvstore.log_rate import LogRate
from kvstore.tracing import current

log = logging.getLogger(__name__)

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

PAUSE_SHARE = 1e-3  # most of the time that goes to full collections, unless they were rarer than
INTERVAL_S_MAX = 120.0
INTERVAL_S_MIN = 60.0
_NEVER = 1 << 30  # collections of the middle generation between two full ones


STDERR = 2
OOM_SCORE = "1000"
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # number of the system call
PIPE_NBYTES = select.PIPE_BUF  # a pipe that is writable takes so many bytes at once


def set_up_log(level: str, form: str = "text") -> None:
    """Log to stderr. `form` is text or json."""
    handler = StderrHandler()
    handler.addFilter(LogRate())
    handler.setFormatter(formatter(form))
    logging.basicConfig(level=level, handlers=[handler])


def yield_memory_first() -> None:
    """Have the kernel end this process before others when memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(OOM_SCORE)
    except OSError as error:
        log.info("the kernel may end another process before this one: %s", error)


def leave_cores() -> None:
    """Run on all cores, with memory of all of them, whatever this process inherited.

    What may not be changed, as in some containers, stays.
    """
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is not None:
        ctypes.CDLL(None).syscall(call, 0, None, 0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))


class StderrHandler(logging.Handler):
    """Write log lines to stderr without ever waiting for its reader.

    A thread that waited in a write to a full pipe would hold the lock of all threads that log.
    Lines that stderr does not take are lost; their number is told when it takes lines again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._write, self._close = _writer(STDERR)
        self._lost = 0
        self._torn = False  # the last line was written in part

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it as lost."""
        try:
            text = self.format(record)
        except (TypeError, ValueError, LookupError, AttributeError) as error:  # a wrong format
            text = f"a log line of {record.name} can not be formatted: {error!r}"
        lines = f"{text}\n".encode(errors="backslashreplace")
        if self._lost:
            lines = b"%d log lines were lost: stderr was not read\n%b" % (self._lost, lines)
        if self._torn:
            lines = b"\n" + lines
        count = self._write(lines)
        if count == len(lines):
            self._lost, self._torn = 0, False
        else:
            self._lost += 1
            self._torn |= count > 0

    def close(self) -> None:
        """Close what was opened for this handler; stderr stays open."""
        self._close()
        super().close()


def _writer(fd: int) -> tuple[Callable[[bytes], int], Callable[[], object]]:
    """Return a function that writes to `fd` without waiting, and one that ends its use.

    The first one returns the bytes written.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        connection = socket.socket(fileno=os.dup(fd))
        return _tried(lambda data: connection.send(data, socket.MSG_DONTWAIT)), connection.close
    if stat.S_ISREG(mode):
        return _tried(lambda data: os.write(fd, data)), lambda: None
    # A description of its own: O_NONBLOCK on the given one would change it for other processes
    try:
        own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # the pipe belongs to another user

        def write(data: bytes) -> int:
            poll, written = select.poll(), 0
            poll.register(fd, select.POLLOUT)
            while written < len(data) and poll.poll(0):
                written += os.write(fd, data[written : written + PIPE_NBYTES])
            return written

        return _tried(write), lambda: None
    return _tried(lambda data: os.write(own, data)), partial(os.close, own)


def _tried(write: Callable[[bytes], int]) -> Callable[[bytes], int]:
    def tried(data: bytes) -> int:
        try:
            return write(data)
        except OSError:  # full, or its reader is gone
            return 0

    return tried


def formatter(form: str) -> logging.Formatter:
    """Return the formatter of a log.

    `form` is text or json.
    """
    return JsonLines() if form == "json" else TextLines(_TEXT)


class TextLines(logging.Formatter):
    """Format log records as text, with the request id behind the message and before a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Append the request id to the line."""
        trace = current()
        line = super().formatMessage(record)
        return line if trace is None else f"{line} [request {trace.request_id}]"


class JsonLines(logging.Formatter):
    """Format log records as JSON lines.

    The fields are `time` (UTC), `level`, `logger`, `message`, `error` with a traceback, and
    `request` and `span` in hex, as in OpenTelemetry.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one JSON line."""
        at = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        trace = current()
        if trace is not None:
            line |= {"request": trace.request_id, "span": trace.span_id.hex()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class SeldomCollections:
    """Make Python's full garbage collections rare in this process, until `stop`.

    A full collection visits every page, with the GIL: 100 ms for 262,144 pages, and Python runs one
    whenever a quarter of them is new. Pages are in no cycles and are freed without it; only little
    is left for it (a closed connection and its socket, an exception and its frame), which can wait.
    Where calls fail as fast as they can it adds up, so it does not wait for long. Young objects are
    collected as usual.
    """

    def __init__(self, interval_s_min: float = INTERVAL_S_MIN) -> None:
        self._interval_s_min = interval_s_min
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
        self._stopping = threading.Event()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*self._thresholds[:2], _NEVER)
        self._thread = threading.Thread(target=self._run, name="garbage", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        interval_s = self._interval_s_min
        while not self._stopping.wait(interval_s):
            start = time.monotonic()
            gc.collect()
            pause_s = time.monotonic() - start
            interval_s = min(INTERVAL_S_MAX, max(self._interval_s_min, pause_s / PAUSE_SHARE))
            if self._trim is not None:
                # Returns freed memory to the system; other threads run meanwhile
                self._trim(ctypes.c_size_t(0))

    def stop(self) -> None:
        """End the thread and restore the thresholds."""
        self._stopping.set()
        self._thread.join()
        gc.set_threshold(*self._thresholds)
