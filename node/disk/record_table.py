"""Record numbers by a 32-bit mark: open addressing in segments of 1,024 places, of which one is split when it
is full, and no other is touched (extendible hashing, Fagin et al. 1979).

    mark:  | place in the segment, 10 bits | ... | segment, as many bits as there are segments |

So no insertion takes longer the more records there are. Pure; not thread-safe.
"""

from array import array
from collections.abc import Callable, Iterable

PLACES = 1024
FULL = PLACES * 3 // 4
PLACE_MASK = PLACES - 1
PLACE_SHIFT = 22  # of a mark's 32 bits
_DEPTH_MAX = 22  # the bits that tell places apart tell no segments apart


class Segment:
    """`places`: record numbers, 0 is none. `depth`: how many bits its records' marks have in common."""

    __slots__ = ("count", "depth", "places")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.count = 0
        self.places = array("I", bytes(4 * PLACES))


class RecordTable:
    """`mark_of(record)`: 32 bits, evenly spread. `segments` and `mask` are read by those who search:
    from `mark >> PLACE_SHIFT` in `segments[mark & mask].places` on, up to a 0."""

    def __init__(self, mark_of: Callable[[int], int]) -> None:
        self._mark_of = mark_of
        self.segments = [Segment(0)]
        self.mask = 0

    def expect(self, count: int) -> None:
        """Makes an empty table that does not split much until it has so many records."""
        depth = 0
        while FULL << depth < count:
            depth += 1
        self.segments = [Segment(depth) for _ in range(1 << depth)]
        self.mask = len(self.segments) - 1

    def fill(self, records: Iterable[int]) -> None:
        """As many insertions."""
        mark_of, put = self._mark_of, self._put
        for record in records:
            mark = mark_of(record)
            segment = self.segments[mark & self.mask]
            if segment.count < FULL:
                put(segment, mark, record)
            else:
                self.insert(record)

    def insert(self, record: int) -> None:
        """A record that is not here."""
        mark = self._mark_of(record)
        segment = self.segments[mark & self.mask]
        while segment.count >= FULL and segment.depth < _DEPTH_MAX:
            self._split(segment, mark)
            segment = self.segments[mark & self.mask]
        self._put(segment, mark, record)

    def _put(self, segment: Segment, mark: int, record: int) -> None:
        places, place = segment.places, mark >> PLACE_SHIFT
        while places[place]:
            place = (place + 1) & PLACE_MASK
        places[place] = record
        segment.count += 1

    def _split(self, full: Segment, mark: int) -> None:
        """The next bit of their marks decides which records stay together."""
        bit = 1 << full.depth
        if bit > self.mask:
            self.segments += self.segments  # every segment is found under twice as many numbers
            self.mask = len(self.segments) - 1
        halves = Segment(full.depth + 1), Segment(full.depth + 1)
        for record in full.places:
            if record:
                moved = self._mark_of(record)
                self._put(halves[moved & bit != 0], moved, record)
        for number in range(mark & (bit - 1), len(self.segments), bit):
            self.segments[number] = halves[number & bit != 0]

    def delete(self, record: int) -> None:
        """Backward shift: no tombstones, so the table never degrades."""
        mark = self._mark_of(record)
        segment = self.segments[mark & self.mask]
        places, hole = segment.places, mark >> PLACE_SHIFT
        while places[hole] != record:
            hole = (hole + 1) & PLACE_MASK
        place = (hole + 1) & PLACE_MASK
        while moved := places[place]:
            if (place - (self._mark_of(moved) >> PLACE_SHIFT)) & PLACE_MASK >= (place - hole) & PLACE_MASK:
                places[hole] = moved
                hole = place
            place = (place + 1) & PLACE_MASK
        places[hole] = 0
        segment.count -= 1

    def __contains__(self, record: int) -> bool:
        mark = self._mark_of(record)
        places, place = self.segments[mark & self.mask].places, mark >> PLACE_SHIFT
        while (found := places[place]) and found != record:
            place = (place + 1) & PLACE_MASK
        return found == record

    def check(self, count: int) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        distinct = {id(segment): segment for segment in self.segments}.values()
        wrong = [
            f"a segment has {used} records, counted {segment.count}"
            for segment in distinct
            if (used := sum(1 for record in segment.places if record)) != segment.count
        ]
        if (held := sum(segment.count for segment in distinct)) != count:
            wrong.append(f"{held} records in the table, {count} counted")
        return wrong
