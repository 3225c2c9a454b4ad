"""Which hits are taken: those that are worth their load, and none while loads hang."""

import logging

from gpu_agent.blocks.worth import Worth
from kvstore.breaker import PAUSE_PER_COST, CircuitBreaker
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.log_rate import LogRate

log = logging.getLogger(__name__)
log.addFilter(LogRate())

# Where lookups are answered and loads are not, each request would wait for one. A load that fails sooner met a page
# that is gone.
HUNG_S = 1.0
PAUSE_S_MAX = 60.0


class Hits:
    """Not thread-safe. Without `worth` a hit is taken though computing were faster."""

    def __init__(self, worth: Worth | None) -> None:
        self._worth = worth
        self._hangs = CircuitBreaker("loads", PAUSE_S_MAX, chance=lambda: 0.0)
        self._hung = 0  # loads since one ended well
        self._away = 0  # ranks that can load nothing now

    def takes(self, start: int, end: int, alone: bool, granted: bool) -> bool:
        """Whether to load these tokens of a prompt; `granted`: so it was for fewer or more tokens of this request."""
        if self._away or (self._worth and not self._worth.takes(start, end, alone)):
            return False
        return granted or self._loads_end()

    def begins(self, step: int, now: float, prompts: list[tuple[int, int]], short: bool) -> None:
        """See `Worth.begins`."""
        if self._worth:
            self._worth.begins(step, now, prompts, short)

    def ended(self, step: int, now: float, away: int) -> None:
        """See `Worth.ended`; `away`: so many ranks can load nothing, for their agents' process is not there."""
        self._away = away
        if self._worth:
            self._worth.ended(step, now)

    def loaded(self, loads: int, tokens: int, began_at: float, now: float) -> None:
        """So many ended well, which is seen now; the first of them was ordered at `began_at`."""
        self.succeeded()
        if self._worth:
            self._worth.loaded(loads, tokens, began_at, now)

    def succeeded(self) -> None:
        """A load ended well."""
        self._hung = 0
        self._hangs.success()

    def failed(self, seconds: float) -> None:
        """A load brought less than ordered, after so long. For as long hits are none, twice as long after the next."""
        if seconds >= HUNG_S:
            self._hung += 1
            pause_s = min(PAUSE_S_MAX, seconds * 2 ** min(self._hung - 1, 10))
            self._hangs.failure(DeadlineExceeded(f"after {seconds:.1f} s"), pause_s / PAUSE_PER_COST)
            log.warning("a load was given up after %.1f s; while loads hang, hits are computed", seconds)

    def _loads_end(self) -> bool:
        """Whether the last load did not hang; now and then one request tries."""
        try:
            self._hangs.enter()
        except Unavailable:
            return False
        return True
