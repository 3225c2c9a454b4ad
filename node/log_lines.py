"""How a node's log is written: lines of text, or an object of JSON each; both say which request they are about."""

import datetime
import json
import logging
from typing import Any

from kvstore.tracing import current

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def formatter(form: str) -> logging.Formatter:
    """`form`: text or json."""
    return JsonLines() if form == "json" else TextLines(_TEXT)


class TextLines(logging.Formatter):
    """The request behind the message, before a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        trace = current()
        line = super().formatMessage(record)
        return line if trace is None else f"{line} [request {trace.request_id}]"


class JsonLines(logging.Formatter):
    """`time` (UTC), `level`, `logger`, `message`; `request` and `span` of a line that is about a request, in hex as in
    OpenTelemetry; `error` is a traceback."""

    def format(self, record: logging.LogRecord) -> str:
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
