"""A small cache of keys without pages, that tells what a policy would have kept. Pure."""

from collections.abc import Sequence

from node.ram.habits import END, GO, MERITS, Habits


class Shadow:
    """Of so many pages. `habits`: the page that they say is worth least goes; None: the oldest. Small, so that it costs
    little to look for the first entry of a dict. Not thread-safe."""

    def __init__(self, capacity: int, habits: Habits | None = None) -> None:
        self.capacity = capacity
        self._habits = habits
        self._merits: dict[int, int] = {}
        self._ticks: list[dict[int, int]] = [{} for _ in range(MERITS if habits else 1)]  # by merit, the oldest first
        self._going = (0, -1)  # merit and tick of what goes next, as long as there is any

    def __len__(self) -> int:
        return len(self._merits)

    def run(self, keys: Sequence[int]) -> int:
        """How many leading ones are here."""
        count = 0
        for key in keys:
            if key not in self._merits:
                break
            count += 1
        return count

    def use(self, keys: Sequence[int], merit: int, end: int, tick: int) -> None:
        """All of them are here now, tail first, or were and have gone. `end`: the last page of the chain."""
        habits, merits, ticks = self._habits, self._merits, self._ticks
        new_merit = newcomers(habits, merit, self._least()[1]) if habits and self._is_full(len(keys)) else merit
        for key in reversed(keys):
            was = merits.get(key)
            if was is not None:
                del ticks[was][key]
            if habits is None:
                here = 0
            elif was is None:
                here = min(new_merit, END) if key == end else new_merit
            else:
                here = merit = max(merit if key != end else END, was)
            ticks[here][key] = tick
            merits[key] = here
            if len(merits) > self.capacity:
                self._drop()

    def keep(self, chosen: int) -> None:
        """Only every second key from now on: those with this bit clear."""
        for key in [key for key in self._merits if key & chosen]:
            del self._ticks[self._merits.pop(key)][key]

    def shrink(self) -> None:
        """To its capacity, which has become less."""
        while len(self._merits) > self.capacity:
            self._drop()

    def _is_full(self, more: int) -> bool:
        return len(self._merits) + more > self.capacity

    def _drop(self) -> None:
        merit, tick = self._going
        key, used = next(iter(self._ticks[merit].items()), (0, -2))
        if self._habits is not None and (used != tick or (merit != GO and self._ticks[GO])):
            merit = GO if self._ticks[GO] else self._least()[0]
            key, used = next(iter(self._ticks[merit].items()))
            self._going = (merit, used)
        del self._ticks[merit][key], self._merits[key]

    def _least(self) -> tuple[int, float]:
        """(the merit whose oldest page is worth least, what that is), but for those that go first anyway"""
        if self._habits is None:
            return 0, 0.0
        worth = self._habits.worth
        oldest = [
            (merit, next(iter(self._ticks[merit].values()))) for merit in range(END, MERITS) if self._ticks[merit]
        ]
        least, merit = min(((worth(merit, tick), merit) for merit, tick in oldest), default=(0.0, GO))
        return merit, least


def newcomers(habits: Habits, merit: int, least: float) -> int:
    """The merit of new pages where the page that would go for them is worth `least`."""
    return GO if habits.worth(merit, habits.tick) < least else merit
