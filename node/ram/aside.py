"""Those that were met where the next one to go is looked for, and may not go now: each is stepped over once.

    aside (in use)        returned            oldest -> ... -> newest
      1  3  4               2  5                 what has its place there still

Whoever looks for the oldest puts what is in use aside, with a number. When its use ends it is returned:
older than all that kept their places, and among its like in the order of their numbers. So the order stays
exact, however many are in use.
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Aside(Generic[T]):
    """Not thread-safe."""

    __slots__ = ("_number", "_numbers", "_returned")

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}  # negative once returned
        self._returned: list[tuple[int, T]] = []  # heap; one that has left is out of date
        self._number = 0

    def __contains__(self, thing: T) -> bool:
        return thing in self._numbers

    def __iter__(self) -> Iterator[T]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def put(self, thing: T) -> None:
        """The oldest of all may not go now."""
        self._number += 1
        self._numbers[thing] = self._number

    def give_back(self, thing: T) -> bool:
        """It may go again. False if it was not put aside."""
        number = self._numbers.get(thing, 0)
        if number <= 0:
            return False
        self._numbers[thing] = -number
        heapq.heappush(self._returned, (number, thing))
        return True

    def discard(self, thing: T) -> bool:
        """It has a place elsewhere, or is gone. False if it was not put aside."""
        return self._numbers.pop(thing, None) is not None

    def oldest(self, may_go: Callable[[T], bool], looked_at: Callable[[], bool]) -> T | None:
        """The oldest that was returned and still may go. Asks `looked_at` before each that it drops whether
        to go on."""
        while self._returned:
            number, thing = self._returned[0]
            is_here = self._numbers.get(thing) == -number
            if is_here and may_go(thing):
                return thing
            if not looked_at():
                return None
            if is_here:
                self._numbers[thing] = number
            heapq.heappop(self._returned)
        return None

    def check(self, may_go: Callable[[T], bool]) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        returned = {(-number, thing) for number, thing in self._returned}
        wrong = []
        for thing, number in self._numbers.items():
            if (number < 0) != ((number, thing) in returned) or (number > 0 and may_go(thing)):
                wrong.append(f"{thing} is aside, may go, and is not returned")
        return wrong
