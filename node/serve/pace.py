"""How long a transfer may take."""

import time

from node.serve.limits import TRANSFER_NBYTES_PER_S_MIN


class Pace:
    """Two limits: every CHUNK_NBYTES within `stall_s`, so that who is gone is noticed, and all of it within its
    bytes at a lowest rate and `stall_s`, so that nobody keeps slots by trickling. The second one does not
    renew."""

    def __init__(self, nbytes: int, stall_s: float) -> None:
        self._stall_s = stall_s
        self.limit_s = nbytes / TRANSFER_NBYTES_PER_S_MIN + stall_s
        self._end = time.monotonic() + self.limit_s

    def next_s(self) -> float:
        """Seconds that the next CHUNK_NBYTES, or what is left, has. Raises TimeoutError."""
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"the transfer was not over after {self.limit_s:.1f} s")
        return min(self._stall_s, left_s)
