"""Log refusals, and acts of administrators.

Each is a line of JSON, in a file of its own or in the node's log:

    {"time": "2026-11-23T04:00:00Z", "what": "refused", "op": "remove", "who": "ci",
     "peer": "10.0.0.7", "why": "..."}

The lines per second are limited; further ones are counted, and the next line reports the number
(`omitted`). Of a request, a line has only the first 8 digits of its namespace.
"""

import contextlib
import datetime
import hashlib
import json
import logging
import logging.handlers
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from kvstore.errors import ConfigError
from kvstore.keys import short
from kvstore.log_rate import OWN_RATE
from kvstore.tracing import current
from node.auth.quotas import Bucket

log = logging.getLogger(__name__)
NAME = "kvstore.audit"
LINES_PER_S = 10.0
LINES_AT_ONCE = 100.0
WHY_LENGTH_MAX = 300


class _Lines:
    """Lines of one kind.

    `omitted`: since the last line that was written.
    """

    def __init__(self, now_s: float) -> None:
        self.bucket = Bucket(LINES_AT_ONCE, now_s)
        self.omitted = 0


class Audit:
    """The audit log. Thread-safe.

    Refusals and acts have separate limits: a flood of refusals hides no act.
    """

    def __init__(self, path: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """Open the audit log. Raises ConfigError if it cannot be written.

        It may be rotated: after the file was moved away, a new one is begun.
        """
        self._lock = threading.Lock()
        self._clock = clock
        self._lines = {what: _Lines(clock()) for what in ("refused", "act")}
        self._log = logging.getLogger(NAME)
        self.refused_count = 0  # since the start, logged or not
        self._handler: _File | None = None
        if path:
            try:
                self._handler = _File(path)
            except OSError as error:
                raise ConfigError(
                    f"audit_log={path} can not be written: {error.strerror}"
                ) from error

    def refused(self, op: str, peer: str, who: str, why: str, request: Any = None) -> None:
        """Record a refused request."""
        self.refused_count += 1
        self._write(
            "refused", op=op, who=who, peer=peer, **_about(request), why=why[:WHY_LENGTH_MAX]
        )

    def acted(self, op: str, peer: str, who: str, request: Any) -> None:
        """Record an act of administration."""
        self._write("act", op=op, who=who, peer=peer, **_about(request))

    def _write(self, what: str, **facts: str) -> None:
        with self._lock:
            lines = self._lines[what]
            if not lines.bucket.take(LINES_PER_S, LINES_AT_ONCE, self._clock()):
                lines.omitted += 1
                return
            omitted, lines.omitted = lines.omitted, 0
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": now.replace("+00:00", "Z"), "what": what, **facts}
        if trace := current():
            line["request"] = trace.request_id
        if omitted:
            line["omitted"] = omitted
        record = self._log.makeRecord(
            NAME, logging.INFO, __file__, 0, json.dumps(line), (), None, extra=OWN_RATE
        )
        if self._handler is not None:
            self._handler.handle(record)
        else:
            self._log.handle(record)

    def reopen(self) -> str:
        """Open the file again, after a rotation; return why that failed, or an empty text."""
        return self._handler.reopen() if self._handler is not None else ""

    def close(self) -> None:
        """Close the log file."""
        if self._handler is not None:
            self._handler.close()


def _about(request: Any) -> dict[str, str]:
    digest, tenant = getattr(request, "namespace", b""), getattr(request, "tenant", "")
    about = {"namespace": short(digest)} if isinstance(digest, bytes) and digest else {}
    if content := getattr(request, "content", b""):  # identities
        mode = "check" if request.check else "force" if request.force else "push"
        about |= {"identities": hashlib.sha256(content).hexdigest()[:12], "mode": mode}
    return about | ({"tenant": str(tenant)[:64]} if tenant else {})


class _File(logging.handlers.WatchedFileHandler):
    """Write to a file without ever failing a request or a stop.

    A full disk, a missing directory or a pipe without a reader costs lines and is reported once.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path, encoding="utf-8")
        self._failed = False

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=_at_once)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a failed write is tried once more
            super().close()

    def reopen(self) -> str:
        self.acquire()
        try:
            opened = self._open()
        except OSError as error:
            return f"audit_log={self.baseFilename} can not be written: {error.strerror}"
        else:
            if self.stream is not None:  # it is after a failed rotation
                with contextlib.suppress(OSError):
                    self.stream.close()
            self.stream, self._failed = opened, False
            self._statstream()
            return ""
        finally:
            self.release()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # a moved file can not be begun again
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not self._failed:
            log.exception("the audit log can not be written; lines are lost")
        self._failed = True


def _at_once(path: str, flags: int) -> int:
    """Open for appending without waiting for the reader of a pipe.

    A new file is readable by its owner only.
    """
    return os.open(path, flags | os.O_NONBLOCK, 0o600)
