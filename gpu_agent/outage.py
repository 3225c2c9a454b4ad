"""An outage of the store in the log: a line when it begins and one when it ends, not one per request, and not one
per outage of a store that fails and answers by turns."""

import logging
import threading
import time
from collections.abc import Callable

from kvstore.errors import DeadlineExceeded, Exhausted, KVStoreError, ProtocolError, Unavailable
from kvstore.tracing import NamesRequest

log = logging.getLogger(__name__)
log.addFilter(NamesRequest())

# A node that answers, but refuses, may take the next request: such lines come this seldom. So do outages.
REFUSALS_S = 10.0
OUTAGES_S = 10.0


class Outage:
    """Thread-safe. `report` takes what each request met, None for an answer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._error: KVStoreError | None = None
        self._refusals_at = 0.0
        self._said = False  # that there is an outage
        self._outages = 0  # since it was said
        self._outages_at = 0.0  # when it may be said again

    @property
    def error(self) -> KVStoreError | None:
        """Why the last request got no answer; None if it got one, be it a refusal."""
        return self._error

    def report(self, error: KVStoreError | None) -> None:
        if error is None and self._error is None:  # unlocked on purpose: the common case
            return
        if error is not None and not isinstance(error, Unavailable | DeadlineExceeded | ProtocolError):
            self._refused(error)
            if isinstance(error, Exhausted):  # of the node's or our own limits: no word about an outage
                return
            error = None
        with self._lock:
            self._outages += error is not None and self._error is None
            self._error = error
            if error is None:
                ended, self._said = self._said, False
                began = 0
            else:
                ended, began = False, self._begun()
        if began:
            others = f" ({began - 1} more since the last such line)" if began > 1 else ""
            log.warning("the store failed, the engine recomputes until it is back%s: %s", others, error)
        elif ended:
            log.warning("the store answers again")

    def _begun(self) -> int:
        """How many outages there were with this one, if that is to be said now."""
        now = self._clock()
        if self._said or now < self._outages_at:
            return 0
        self._said, self._outages_at = True, now + OUTAGES_S
        outages, self._outages = self._outages, 0
        return outages

    def _refused(self, error: KVStoreError) -> None:
        with self._lock:
            now = self._clock()
            quiet = now < self._refusals_at
            if not quiet:
                self._refusals_at = now + REFUSALS_S
        if not quiet:
            log.warning("the store refused a request: %s", error)
