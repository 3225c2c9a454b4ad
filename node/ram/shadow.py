"""Small caches of keys without pages, that tell what each policy would have kept. Pure."""

from collections.abc import Sequence

from node.ram.habits import END, GO, MERITS, Habits, Merits


class Oldest:
    """LRU, of so many pages. Small, so that it costs little to look for the first entry of a dict. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._keys: dict[int, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._keys)

    def run(self, keys: Sequence[int]) -> int:
        """How many leading ones are here."""
        return _run(keys, self._keys)

    def use(self, keys: Sequence[int]) -> None:
        """All of them are here now, tail first, or were and have gone."""
        here = self._keys
        for key in reversed(keys):
            here.pop(key, None)
            here[key] = None
        self.shrink()

    def keep(self, chosen: int) -> None:
        """Only every second key from now on: those with this bit clear."""
        self._keys = {key: None for key in self._keys if not key & chosen}

    def shrink(self) -> None:
        """To its capacity."""
        while len(self._keys) > self.capacity:
            del self._keys[next(iter(self._keys))]


class LeastWorth:
    """The same, where the page goes that is worth least by these habits."""

    def __init__(self, capacity: int, habits: Habits) -> None:
        self.capacity = capacity
        self._habits = habits
        self._merits: dict[int, int] = {}
        self._ticks: list[dict[int, int]] = [{} for _ in range(MERITS)]  # by merit, the oldest first
        self._going = (GO, -1)  # merit and tick of what goes next, as long as there is any

    def __len__(self) -> int:
        return len(self._merits)

    def run(self, keys: Sequence[int]) -> int:
        """How many leading ones are here."""
        return _run(keys, self._merits)

    def use(self, keys: Sequence[int], of: Merits, end: int) -> None:
        """All of them are here now, tail first, or were and have gone. `end`: the last page of the chain."""
        merits, ticks, tick = self._merits, self._ticks, self._habits.tick
        new = of.new
        if len(merits) + len(keys) > self.capacity:
            new = newcomers(self._habits, new, self._least()[0])
        for key in reversed(keys):
            was = merits.get(key)
            if was is not None:
                del ticks[was][key]
                here = was if key == end else max(of.here, was)
            else:
                here = min(new, END) if key == end else new
            ticks[here][key] = tick
            merits[key] = here
        self.shrink()

    def keep(self, chosen: int) -> None:
        """Only every second key from now on: those with this bit clear."""
        for key in [key for key in self._merits if key & chosen]:
            del self._ticks[self._merits.pop(key)][key]

    def shrink(self) -> None:
        """To its capacity."""
        while len(self._merits) > self.capacity:
            self._drop()

    def _drop(self) -> None:
        merit, tick = self._going
        key, used = next(iter(self._ticks[merit].items()), (0, -2))
        if used != tick or (merit != GO and self._ticks[GO]):
            merit = GO if self._ticks[GO] else self._least()[1]
            key, used = next(iter(self._ticks[merit].items()))
            self._going = (merit, used)
        del self._ticks[merit][key], self._merits[key]

    def _least(self) -> tuple[float, int]:
        """What the page that is worth least is worth, and its merit, but for those that go first anyway."""
        worth = self._habits.worth
        oldest = ((merit, next(iter(ticks.values()))) for merit, ticks in enumerate(self._ticks) if ticks and merit)
        return min(((worth(merit, tick), merit) for merit, tick in oldest), default=(0.0, GO))


def newcomers(habits: Habits, merit: int, least: float) -> int:
    """The merit of new pages where the page that would go for them is worth `least`."""
    return GO if habits.worth(merit, habits.tick) < least else merit


def _run(keys: Sequence[int], here: dict[int, int] | dict[int, None]) -> int:
    count = 0
    for key in keys:
        if key not in here:
            break
        count += 1
    return count
