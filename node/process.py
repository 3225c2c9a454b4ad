"""Set up a node's process: its log, and rare full garbage collections.

Log lines are text, or a JSON object each; both contain the request id.
"""

import ctypes
import datetime
import gc
import json
import logging
import threading
import time
from typing import Any

from kvstore.tracing import current

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

PAUSE_SHARE = 1e-3  # most of the time that goes to full collections, unless they were rarer than
INTERVAL_S_MAX = 120.0
INTERVAL_S_MIN = 60.0
_NEVER = 1 << 30  # collections of the middle generation between two full ones


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
