"""Records of which one goes when room is needed: of one tenant that has a quota, or of all who have none.

Of each slot size in order of use, and which size has the oldest. Pure; not thread-safe, the disk tier's lock guards it.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from node.ram.ages import Ages
from node.ram.aside import Aside


@dataclass
class _Ends:
    """Both ends of the list of one slot size, and the busy records that were met at its old end."""

    oldest: int = 0
    newest: int = 0
    count: int = 0  # those aside included
    aside: Aside[int] = field(default_factory=Aside)


class Links:
    """Of all records, whatever pool they are in: in which one, and which is the next older and newer one there. They
    grow with the records. `used_s` is the records' own."""

    def __init__(self, used_s: "array[int]", may_go: Callable[[int], bool]) -> None:
        self.used_s = used_s
        self.may_go = may_go
        self.older = array("I", [0])
        self.newer = array("I", [0])
        self.pool = array("H", [0])
        self.left = 0  # records that may be looked at still

    @property
    def arrays(self) -> tuple["array[int]", ...]:
        return self.older, self.newer, self.pool

    def look(self) -> bool:
        self.left -= 1
        return self.left >= 0


class RecordPool:
    """`number` names it in `links`."""

    def __init__(self, number: int, links: Links) -> None:
        self.number = number
        self._links = links
        self._ends: dict[int, _Ends] = {}
        self._ages = Ages(self._oldest_s, lambda: links.left <= 0)

    @property
    def count(self) -> int:
        return sum(ends.count for ends in self._ends.values())

    # ---- a record's life -----------------------------------------------------------------

    def begin(self, size: int, records: Sequence[int]) -> None:
        """All records of a slot size that has none yet, the oldest first."""
        oldest, newest = records[0], records[-1]
        self._ends[size] = _Ends(oldest, newest, len(records))
        self._ages.add(size, self._links.used_s[oldest])
        older, newer, pool = self._links.older, self._links.newer, self._links.pool
        older[oldest] = newer[newest] = 0
        pool[newest] = self.number
        for one, following in pairwise(records):
            newer[one] = following
            older[following] = one
            pool[one] = self.number

    def push_newest(self, record: int, size: int) -> None:
        ends, links = self._ends_of(size), self._links
        links.pool[record] = self.number
        links.older[record], links.newer[record] = ends.newest, 0
        if ends.newest:
            links.newer[ends.newest] = record
        else:
            ends.oldest = record
        ends.newest = record
        ends.count += 1
        if size not in self._ages:
            self._ages.add(size, links.used_s[record])

    def push_oldest(self, record: int, size: int) -> None:
        ends, links = self._ends_of(size), self._links
        links.pool[record] = self.number
        links.older[record], links.newer[record] = 0, ends.oldest
        if ends.oldest:
            links.older[ends.oldest] = record
        else:
            ends.newest = record
        ends.oldest = record
        ends.count += 1
        self._ages.add(size, links.used_s[record])

    def _ends_of(self, size: int) -> _Ends:
        ends = self._ends.get(size)
        if ends is None:
            ends = self._ends[size] = _Ends()
        return ends

    def withdraw(self, record: int, size: int) -> None:
        ends = self._ends[size]
        if not ends.aside.discard(record):
            self._take_out(ends, record)
        ends.count -= 1
        if not ends.count:
            del self._ends[size]
            self._ages.discard(size)

    def _take_out(self, ends: _Ends, record: int) -> None:
        older, newer = self._links.older[record], self._links.newer[record]
        if older:
            self._links.newer[older] = newer
        else:
            ends.oldest = newer
        if newer:
            self._links.older[newer] = older
        else:
            ends.newest = older

    def give_back(self, record: int, size: int) -> None:
        """It is not busy any more."""
        if size in self._ends and self._ends[size].aside.give_back(record):
            self._ages.add(size, self._links.used_s[record])

    # ---- who is oldest -------------------------------------------------------------------

    def oldest(self, size: int) -> int:
        """0: none of this size may go, or enough were looked at."""
        ends, links = self._ends.get(size), self._links
        if ends is None:
            return 0
        record = ends.aside.oldest(links.may_go, links.look)
        while record is None and ends.oldest and links.left > 0:
            first = ends.oldest
            if links.may_go(first):
                return first
            links.look()
            self._take_out(ends, first)
            ends.aside.put(first)
        return record or 0

    def _oldest_s(self, size: int) -> int | None:
        record = self.oldest(size)
        return self._links.used_s[record] if record else None

    def older_sizes(self, than_s: int | None, but: int, count: int) -> list[int]:
        """Other slot sizes whose oldest record is older (than None: any), that with the oldest first."""
        return self._ages.older(than_s, but, count)

    def eldest(self, size: int, count: int) -> Iterator[int]:
        """Some of the oldest records of a size."""
        record = self.oldest(size)
        for _ in range(count):
            if not record:
                return
            yield record
            ends = self._ends[size]
            record = ends.oldest if record in ends.aside else self._links.newer[record]

    # ---- tell ----------------------------------------------------------------------------

    def records(self) -> Iterator[int]:
        """Those aside, then those of every size, oldest first within a size."""
        for ends in self._ends.values():
            yield from ends.aside
            record = ends.oldest
            while record:
                following = self._links.newer[record]
                yield record
                record = following
