"""Limit log lines per place in the code, so that a client cannot fill a node's disk.

Nor can a damaged node fill an engine's log.
"""

import logging
import time
from collections.abc import Callable

LINES = 20  # lines of one statement
WINDOW_S = 10.0  # per so many seconds
OWN_RATE = {"own_rate": True}  # `extra` for records that their maker limits already


class LogRate(logging.Filter):
    """A filter for a handler or a logger.

    It counts the suppressed lines; the next line that passes reports the number.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[
            tuple[str, int], tuple[float, int]
        ] = {}  # by statement: start of its window, lines in it

    def filter(self, record: logging.LogRecord) -> bool:
        """Let the first lines of each place in the code pass, per time window; count the others."""
        if getattr(record, "own_rate", False):
            return True
        kind, now = (record.pathname, record.lineno), self._clock()
        began, count = self._kinds.get(kind, (now, 0))
        if now - began >= WINDOW_S:
            if count > LINES:
                record.msg, record.args = (
                    f"{record.getMessage()} (and {count - LINES} more like this before)",
                    None,
                )
            began, count = now, 0
        self._kinds[kind] = began, count + 1
        return count < LINES
