"""The cost of a request in its tenant's byte rate: bytes sent or received, or bytes read and hashed for it."""

from collections.abc import Callable


def _nothing(nbytes: int) -> None:
    """Charge nobody."""


class Charge:
    """Charges one request the larger of two sums: page bytes transferred, and page bytes processed.

    Processed means read from disk, fetched from another member, or hashed. A plain get reads a page once and
    sends it once, so it costs the page's bytes. Processing is charged before it is done, so a request that
    then fails, or has very short ranges, is no cheaper. `take` debits the tenant's rate, also below zero.
    """

    __slots__ = ("_charged", "_processed", "_take", "_transferred")

    def __init__(self, take: Callable[[int], None] = _nothing) -> None:
        self._take = take
        self._transferred = self._processed = self._charged = 0

    def add_processed(self, nbytes: int) -> None:
        self._processed += nbytes
        self._settle()

    def add_transferred(self, nbytes: int) -> None:
        self._transferred += nbytes
        self._settle()

    def _settle(self) -> None:
        more = max(self._transferred, self._processed) - self._charged
        if more > 0:
            self._charged += more
            self._take(more)


NO_CHARGE = Charge()
