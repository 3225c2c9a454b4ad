"""Keys of rows that are to be deleted, in blocks: millions may be gone at once, after a start or with a namespace.

Nothing here takes longer the more there are. Pure; not thread-safe, the disk tier's lock guards it.
"""

from collections.abc import Iterable

BLOCK_KEYS = 1 << 14  # as many as one order to the keeper has


class Gone:
    def __init__(self) -> None:
        self._full: list[list[bytes]] = []
        self._last: list[bytes] = []
        self.count = 0

    def add(self, key: bytes) -> None:
        self._last.append(key)
        self.count += 1
        if len(self._last) >= BLOCK_KEYS:
            self._full.append(self._last)
            self._last = []

    def take(self) -> list[bytes]:
        """Some BLOCK_KEYS of them, in no order; empty if none are left."""
        if self._full:
            block = self._full.pop()
        else:
            block, self._last = self._last, []
        self.count -= len(block)
        return block

    def give_back(self, blocks: Iterable[list[bytes]]) -> None:
        """What was taken once; nobody else may have it."""
        for block in blocks:
            self._full.append(block)
            self.count += len(block)
