"""Why a page is not here any more: remembered for a while, so that a miss can be explained."""

# Pages remembered, in two generations of this many; about 80 bytes each, so 10 MB when full.
GENERATION_COUNT_MAX = 65_536


class Ghosts:
    """Reasons by key, newest generation first. A hash collision only mislabels a counter."""

    def __init__(self, count_max: int = GENERATION_COUNT_MAX) -> None:
        self._count_max = count_max
        self._new: dict[int, str] = {}
        self._old: dict[int, str] = {}

    def remember(self, digest: bytes, prefix_hash: bytes, reason: str) -> None:
        """`reason`: 'evicted', 'removed' or 'corrupt'."""
        if len(self._new) >= self._count_max:
            self._new, self._old = {}, self._new
        self._new[hash((digest, prefix_hash))] = reason

    def reason(self, digest: bytes, prefix_hash: bytes) -> str:
        """'absent' for a page that was never here or left too long ago."""
        key = hash((digest, prefix_hash))
        return self._new.get(key) or self._old.get(key) or "absent"
