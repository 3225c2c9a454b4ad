"""Circuit breaker: a node that failed is left alone for a while, so that it costs a caller at most
one deadline and not one per call.

    closed --failure--> open for `pause` --time--> half open: one call may try
      ^                                               |            |
      +------------------- success -------------------+   failure: open again, pause doubled
"""

import random
import threading
import time
from collections.abc import Callable

from kvstore.errors import Unavailable

PAUSE_S_MIN = 0.1
PAUSE_PER_COST = 4
PAUSE_JITTER = 0.25


class CircuitBreaker:
    """Thread-safe. The clock is an argument so that tests need not wait."""

    def __init__(
        self,
        name: str,
        pause_s_max: float,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`chance`: 0 to 1, by which a pause is shorter, so that many clients do not come back at once."""
        self._name = name
        self._pause_s_max = pause_s_max
        self._clock = clock
        self._chance = chance
        self._lock = threading.Lock()
        self._failures = 0
        self._open_until = 0.0
        self._trying = False
        self._cause = ""
        self._cost_s = 0.0

    @property
    def failing(self) -> bool:
        """Whether the last that was heard is a failure."""
        return self._failures > 0

    def enter(self) -> None:
        """Call before trying. Raises Unavailable at once while the breaker is open."""
        with self._lock:
            if self._failures == 0:
                return
            wait_s = self._open_until - self._clock()
            if wait_s > 0:
                raise Unavailable(
                    f"{self._name} failed {self._failures} times, next try in {wait_s:.1f} s; last: {self._cause}"
                )
            # This caller tries; the others stay out until it reports or the pause is over again.
            self._open_until = self._clock() + self._pause_s()
            self._trying = True

    def success(self) -> None:
        if self._failures:  # unlocked on purpose: only a call that saw a failure pays for the lock
            with self._lock:
                self._failures = 0
                self._trying = False

    def failure(self, cause: Exception, cost_s: float = 0.0) -> None:
        """`cost_s`: how long the caller had waited for it."""
        with self._lock:
            # Calls that were under way when it opened tell of the same outage: it counts once.
            if self._failures and not self._trying and self._clock() < self._open_until:
                return
            self._trying = False
            self._failures += 1
            self._cause = str(cause)
            self._cost_s = cost_s
            self._open_until = self._clock() + self._pause_s()

    def _pause_s(self) -> float:
        doubled = PAUSE_S_MIN * (1 << min(self._failures - 1, 16))
        longest = min(self._pause_s_max, max(doubled, PAUSE_PER_COST * self._cost_s))
        return longest * (1 - PAUSE_JITTER * self._chance())
