"""What one request costs its tenant's rate of bytes: what it moves, or what the node reads and hashes for it."""

from collections.abc import Callable


def _nothing(nbytes: int) -> None:
    """Nobody is charged."""


class Charge:
    """Of one request. Charges the larger of two sums: page bytes moved, and page bytes worked on (read from disk,
    fetched from another member, hashed). A whole page is read once and moved once, so a plain get costs its bytes.

    What is worked on is charged before the work: a request that then fails, or that has very short ranges, is no
    cheaper. `take` is the tenant's rate, and may get into debt.
    """

    __slots__ = ("_charged", "_moved", "_take", "_worked")

    def __init__(self, take: Callable[[int], None] = _nothing) -> None:
        self._take = take
        self._moved = self._worked = self._charged = 0

    def works(self, nbytes: int) -> None:
        self._worked += nbytes
        self._settle()

    def moves(self, nbytes: int) -> None:
        self._moved += nbytes
        self._settle()

    def _settle(self) -> None:
        more = max(self._moved, self._worked) - self._charged
        if more > 0:
            self._charged += more
            self._take(more)


NO_CHARGE = Charge()
