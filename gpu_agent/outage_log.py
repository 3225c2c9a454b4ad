"""Log one line when the store stops serving this engine, and one when it serves again.

    served   --no answer-->           away      "the store failed, the engine recomputes ..."
    any      --unknown credential-->  refused   "the store refuses this engine, ..."
    any      --a served request-->    served    "the store answers again", or "... serves this ..."

Only a served request ends `away` and `refused`. Between two refusals the client's circuit breaker
is open, which looks like an unreachable node, so that does not end `refused`.
"""

import enum
import logging
import threading
import time
from collections.abc import Callable

from kvstore.errors import (
    ConfigError,
    DeadlineExceeded,
    Forbidden,
    KVStoreError,
    ProtocolError,
    Unauthenticated,
    Unavailable,
)
from kvstore.tracing import NamesRequest

log = logging.getLogger(__name__)
log.addFilter(NamesRequest())

# A healthy node may refuse one request and take the next: such lines are logged this seldom. So are
# outages.
REFUSALS_S = 10.0
OUTAGES_S = 10.0
_NO_ANSWER = (Unavailable, DeadlineExceeded, ProtocolError)
_NO_CREDENTIAL = (Unauthenticated, ConfigError)  # ConfigError: the token's file can not be read


class _State(enum.Enum):
    SERVED = "the store serves"
    AWAY = "the store failed, the engine recomputes until it is back"
    REFUSED = "the store refuses this engine, which recomputes until it is served"


_ENDS = {
    _State.AWAY: "the store answers again",
    _State.REFUSED: "the store serves this engine again",
}


def startup_warning(error: KVStoreError) -> str:
    """Return the warning for a store that did not serve the engine at its start."""
    if isinstance(error, _NO_ANSWER):
        return f"the store does not answer yet, the engine starts without it: {error}"
    return f"the store refuses this engine, which starts without it: {error}"


class OutageLog:
    """State of the store as this engine sees it. Thread-safe.

    `report` takes the error of each request, None for one that was served.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._state = _State.SERVED
        self._serves = False  # whether a request was served since the last outage or refusal
        self._error: KVStoreError | None = None
        self._refusals_at = 0.0
        self._said = _State.SERVED  # the state that was logged last
        self._outages = 0  # since one was logged
        self._outages_at = 0.0  # when the next may be logged

    @property
    def error(self) -> KVStoreError | None:
        """Return why requests are not served; None if the last one was, or only that one failed."""
        return self._error

    def report(self, error: KVStoreError | None) -> None:
        """Take the result of a call and log changes."""
        if error is None:
            if not self._serves:  # unlocked on purpose: the common case takes no lock
                self._served()
        elif isinstance(error, _NO_CREDENTIAL) or (
            isinstance(error, Forbidden) and not self._serves
        ):
            self._not_served(_State.REFUSED, error)
        elif isinstance(error, _NO_ANSWER):
            self._not_served(_State.AWAY, error)
        else:  # other requests may be served: this one was too large, over a quota, or not allowed
            self._refused(error)

    def _served(self) -> None:
        with self._lock:
            ended, self._said = self._said, _State.SERVED
            self._state, self._serves, self._error = _State.SERVED, True, None
        if ended is not _State.SERVED:
            log.warning(_ENDS[ended])

    def _not_served(self, state: _State, error: KVStoreError) -> None:
        with self._lock:
            self._outages += self._state is _State.SERVED
            # After a refusal the breaker is open and raises Unavailable: that is no other state.
            self._state = _State.REFUSED if self._state is _State.REFUSED else state
            self._serves, self._error = False, error
            state, began = self._state, self._begun()
        if began:
            others = f" ({began - 1} more since the last such line)" if began > 1 else ""
            log.warning("%s%s: %s", state.value, others, error)

    def _begun(self) -> int:
        """Return the number of outages, including this one, if it should be logged now; else 0."""
        now = self._clock()
        if self._said is self._state or now < self._outages_at:
            return 0
        self._said, self._outages_at = self._state, now + OUTAGES_S
        outages, self._outages = max(1, self._outages), 0
        return outages

    def _refused(self, error: KVStoreError) -> None:
        with self._lock:
            now = self._clock()
            quiet = now < self._refusals_at
            if not quiet:
                self._refusals_at = now + REFUSALS_S
        if not quiet:
            log.warning("the store refused a request: %s", error)
