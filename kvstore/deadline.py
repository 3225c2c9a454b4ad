"""Carry the deadline of a call through everything that it does."""

import time

from kvstore.errors import DeadlineExceeded


class Deadline:
    """A deadline `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def sooner(self, seconds: float) -> "Deadline":
        """Return the deadline of a part of the call: `seconds` from now, or this one if sooner."""
        return Deadline(min(seconds, self.remaining()))

    @property
    def passed(self) -> bool:
        """Return whether the deadline has passed."""
        return time.monotonic() >= self._end

    def left(self) -> float:
        """Return the seconds left, zero or less if the deadline has passed."""
        return self._end - time.monotonic()

    def remaining(self) -> float:
        """Return the seconds left, more than zero. Raises DeadlineExceeded if there are none."""
        left = self.left()
        if left <= 0:
            raise DeadlineExceeded(f"the deadline of {self.seconds:g} s passed")
        return left
