"""Note which pages came and went, for a feed: a ring that writers fill under the locks they hold.

    RAM tier, disk tier --> came, went --> ring --> read (one thread)

An entry says that the presence of keys may have changed, not how: the reader looks at the tiers.
Only a tier with a reader has a ring; without one, the cost is a test for None. Writers never wait
or fail: a reader finds that entries were overwritten, or that memory was short.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from node.memory.page import Page

ENTRIES = 1 << 15
KEYS = 16  # of one entry; all together some 40 MB at most, mostly the hashes

_namespace = attrgetter("namespace")


# Number of the entry, namespace, prefix hashes, and whether they came; else they went. A plain
# tuple, because a named one takes three times as long.
Change = tuple[int, bytes, Sequence[bytes], bool]


class ChangeRing:
    """The newest changes. Any number of writers, one reader.

    It needs no lock: taking a number and storing an entry are one step each of the interpreter. An
    entry whose writer was interrupted between them holds up the reader, not other writers.
    """

    def __init__(self) -> None:
        self._entries: list[Change | None] = [None] * ENTRIES
        self._numbers = itertools.count(1)
        self._next = 1  # number of the entry to read next
        self._lost = False  # an entry, for want of memory

    def came(self, pages: Iterable[Page]) -> None:
        """Note that pages became visible."""
        try:
            for space, some in itertools.groupby(pages, _namespace):
                hashes = [page.prefix_hash for page in some]
                for start in range(0, len(hashes), KEYS):
                    self._add(space.digest, hashes[start : start + KEYS], True)
        except MemoryError:
            self._lost = True

    def loaded(self, page: Page, below: Callable[[bytes, Sequence[bytes]], list[bool]]) -> None:
        """Note that a page was loaded, unless the tier that it came from still has it."""
        if not page.is_copy and not below(page.namespace.digest, [page.prefix_hash])[0]:
            self.came([page])

    def went(self, digest: bytes, prefix_hash: bytes) -> None:
        """Note that a tier has a page no longer."""
        try:
            self._add(digest, (prefix_hash,), False)
        except MemoryError:
            self._lost = True

    def _add(self, digest: bytes, prefix_hashes: Sequence[bytes], came: bool) -> None:
        number = next(self._numbers)
        self._entries[number % ENTRIES] = (number, digest, prefix_hashes, came)

    def read(self) -> list[Change] | None:
        """Return the changes since the last call; None if some were overwritten or lost."""
        found: list[Change] = []
        while not self._lost:
            entry = self._entries[self._next % ENTRIES]
            if entry is None or entry[0] < self._next:
                return found
            if entry[0] > self._next or len(found) >= ENTRIES:
                return None
            found.append(entry)
            self._next += 1
        return None
