"""The chains that requests used: of each one where it ended, until others take its place. Pure: keys are any integers.

    keys     of the page before the last, which a later request of the same conversation has, too: the last was not full
    ticks    when it was used
    notes    | pages, 16 bits | merit, 7 | asked, 1 | of the last page's key, 8 |       0: no chain

Arrays, in which each chain has two places to be: 16 bytes for each chain, with no objects, and the older goes.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

TICKS = (1 << 32) - 1  # they begin anew then
PAGES_MAX = (1 << 16) - 1
ASKED = 1 << 8


class Chain(NamedTuple):
    """As it was used last. `common_count`: leading pages of it that it was found by. `asked`: somebody looked for it
    since. `has_end`: its last page is among them."""

    place: int
    common_count: int
    page_count: int
    merit: int
    tick: int
    asked: bool
    has_end: bool


class Chains:
    """So many, in twos. Not thread-safe."""

    def __init__(self, count: int) -> None:
        self._clear(count)

    def _clear(self, count: int) -> None:
        self._twos = max(1, count // 2)
        self._keys = array("q", bytes(16 * self._twos))
        self._ticks = array("I", bytes(8 * self._twos))
        self._notes = array("I", bytes(8 * self._twos))

    def __len__(self) -> int:
        """That there is room for."""
        return 2 * self._twos

    def resize(self, count: int, tick: int) -> None:
        """Room for more or fewer; it is `tick` now."""
        was = zip(self._keys, self._ticks, self._notes, strict=True)
        self._clear(count)
        for key, used, note in was:
            if note:
                place = self._place(key, tick)
                self._keys[place], self._ticks[place], self._notes[place] = key, used, note

    def find(self, keys: Sequence[int]) -> Chain | None:
        """That which ended deepest in this one."""
        known, twos = self._keys, self._twos
        at = len(keys)
        for key in reversed(keys):
            at -= 1
            place = key % twos * 2
            if known[place] == key or known[place := place + 1] == key:
                note = self._notes[place]
                if note:
                    return self._chain(place, note, keys, at)
        return None

    def _chain(self, place: int, note: int, keys: Sequence[int], at: int) -> Chain:
        page_count = note >> 16
        more = page_count > at + 1
        has_end = not more or (at + 1 < len(keys) and keys[at + 1] & 0xFF == note & 0xFF)
        common_count = at + 1 + (more and has_end)
        return Chain(place, common_count, page_count, note >> 9 & 0x7F, self._ticks[place], bool(note & ASKED), has_end)

    def ask(self, place: int) -> None:
        self._notes[place] |= ASKED

    def forget(self, place: int) -> None:
        self._notes[place] = 0

    def remember(self, keys: Sequence[int], at: int, merit: int, tick: int) -> None:
        """It ends there."""
        place = self._place(keys[at], tick)
        self._keys[place] = keys[at]
        self._ticks[place] = tick & TICKS
        self._notes[place] = min(len(keys), PAGES_MAX) << 16 | merit << 9 | keys[-1] & 0xFF

    def _place(self, key: int, tick: int) -> int:
        first = key % self._twos * 2
        notes, ticks, keys = self._notes, self._ticks, self._keys
        for place in (first, first + 1):
            if not notes[place] or keys[place] == key:
                return place
        return first + ((tick - ticks[first] & TICKS) < (tick - ticks[first + 1] & TICKS))
