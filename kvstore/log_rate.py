"""Limit log lines per place in the code, so that a stranger cannot fill a node's disk.

A damaged node cannot fill an engine's log either.
"""

import logging
import time
from collections.abc import Callable

LINES = 20  # of one statement,
WINDOW_S = 10.0  # in so long
OWN_RATE = {"own_rate": True}  # `extra` of records whose number is bounded by who makes them


class LogRate(logging.Filter):
    """For a handler, or a logger.

    Lines beyond are counted, and the next one that is let through tells how many.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[
            tuple[str, int], tuple[float, int]
        ] = {}  # by statement: when its window began, lines in it

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
