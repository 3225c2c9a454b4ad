"""An outage of the store in the log: a line when it begins and one when it ends, not one per request."""

import logging
import threading
import time

from kvstore.errors import DeadlineExceeded, KVStoreError, ProtocolError, Unavailable

log = logging.getLogger(__name__)

# A node that answers, but refuses, may take the next request: such lines come this seldom.
REFUSALS_S = 10.0


class Outage:
    """Thread-safe. `report` takes what each request met, None for an answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: KVStoreError | None = None
        self._refusals_at = 0.0

    @property
    def error(self) -> KVStoreError | None:
        """Why the last request got no answer; None if it got one, be it a refusal."""
        return self._error

    def report(self, error: KVStoreError | None) -> None:
        if error is None and self._error is None:  # unlocked on purpose: the common case
            return
        if error is not None and not isinstance(error, Unavailable | DeadlineExceeded | ProtocolError):
            self._refused(error)
            error = None
        with self._lock:
            before, self._error = self._error, error
        if before is None and error is not None:
            log.warning("the store failed, the engine recomputes until it is back: %s", error)
        elif before is not None and error is None:
            log.warning("the store answers again")

    def _refused(self, error: KVStoreError) -> None:
        with self._lock:
            now = time.monotonic()
            quiet = now < self._refusals_at
            if not quiet:
                self._refusals_at = now + REFUSALS_S
        if not quiet:
            log.warning("the store refused a request: %s", error)
