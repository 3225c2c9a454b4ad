"""Why a page is not here any more: remembered for a while, so that a miss can be explained."""

from collections.abc import Sequence

# Pages remembered, in two generations of this many; about 80 bytes each, so 10 MB when full.
GENERATION_COUNT_MAX = 65_536
FREED = 2  # entries of an older generation, with each page remembered


class Ghosts:
    """Reasons by key, newest generation first. A hash collision only mislabels a counter."""

    def __init__(self, count_max: int = GENERATION_COUNT_MAX) -> None:
        self._count_max = count_max
        self._new: dict[int, str] = {}
        self._old: dict[int, str] = {}
        self._gone: dict[int, str] = {}  # a generation on its way out: freed bit by bit, not at once

    def remember(self, digest: bytes, prefix_hash: bytes, reason: str) -> None:
        """`reason`: 'evicted', 'removed', 'expired' or 'corrupt'."""
        if len(self._new) >= self._count_max:
            self._new, self._old, self._gone = {}, self._new, self._old
        if self._gone:
            for _ in range(min(FREED, len(self._gone))):
                self._gone.popitem()
        self._new[hash(digest) ^ hash(prefix_hash)] = reason

    def forget(self) -> None:
        """All of them."""
        self._new, self._old, self._gone = {}, {}, {}

    def reasons(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> dict[str, int]:
        """How many of these pages are gone for which reason; 'absent' for those that were never
        here or left too long ago."""
        new, old, salt = self._new.get, self._old.get, hash(digest)
        keys = [salt ^ hash(prefix_hash) for prefix_hash in prefix_hashes]
        found = [new(key) or old(key, "absent") for key in keys]
        return {reason: found.count(reason) for reason in set(found)}
