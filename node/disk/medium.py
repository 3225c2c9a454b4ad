"""What of the pages on disk is on the medium, and so survives power loss.

The rule: what a sync covers is what was written before it began. Each batch of rows gets the next
number; a sync takes the last number when it begins, and what it took is safe when it ends. What an
earlier run left has number 0 and is as unsafe as the rest until the first sync: that run may have
been killed, and its last writes may be in the memory of the host or of the device.

After a sync that failed nobody can say what is on the medium, and a second one may succeed without
it. So from then on nothing becomes safe until what was written since the last one that worked is
forgotten. (What an earlier run left stays: a restart would trust it as much.)
"""

from collections import deque
from collections.abc import Iterable


class Medium:
    """Of records by number. Pure; not thread-safe, the disk tier's lock guards it."""

    def __init__(self) -> None:
        self._written = 0  # number of the last batch
        self._synced = -1  # batches up to this one are safe; -1: not even what an earlier run left
        self._unsafe: dict[int, int] = {}  # record -> its batch, in the order of batches
        # A batch, and the keys of pages' rows that were deleted with it: never looked at one by one.
        self._gone: deque[tuple[int, list[bytes]]] = deque()
        self.failed = False

    @property
    def unsafe_count(self) -> int:
        """Records of this run that are not safe, or were not when they were forgotten."""
        return len(self._unsafe)

    @property
    def pending(self) -> bool:
        """Whether there is anything that a sync would make safe, be it only that rows are gone."""
        return self._synced < self._written

    def wrote(self, records: Iterable[int], gone: list[bytes]) -> None:
        """The bytes and rows of these are written, and rows with these keys are gone."""
        self._written += 1
        if gone:
            self._gone.append((self._written, gone))
        for record in records:
            self._unsafe.pop(record, None)
            self._unsafe[record] = self._written

    def is_safe(self, record: int) -> bool:
        return self._synced >= 0 and record not in self._unsafe

    def begin_sync(self) -> int:
        return self._written

    def end_sync(self, mark: int) -> list[list[bytes]]:
        """The sync that took `mark` when it began has worked. Returns keys that need not be kept any more: they may be
        millions, to be freed without the lock."""
        if self.failed:
            return []
        self._synced = mark
        self._unsafe = {record: batch for record, batch in self._unsafe.items() if batch > mark}
        safe = []
        while self._gone and self._gone[0][0] <= mark:
            safe.append(self._gone.popleft()[1])
        return safe

    def fail_sync(self) -> None:
        self.failed = True

    def begin_anew(self) -> tuple[list[int], list[list[bytes]]]:
        """After syncs that failed: the records to forget, and the keys of rows to delete once more, in blocks. What is
        written from now on is new."""
        if not self.failed:
            return [], []
        doubtful, self._unsafe, self.failed = list(self._unsafe), {}, False
        gone = [keys for _, keys in self._gone]
        self._gone.clear()
        return doubtful, gone
