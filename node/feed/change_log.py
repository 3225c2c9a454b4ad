"""Keep the newest changes of the feed, so that each reader continues where it was.

    cursor = epoch (8) || sequence (8) [|| snapshot (8) || part (4)]

A reader whose next change is not kept any more gets a new snapshot: never a hole.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvstore.pb import kvstore_pb2 as pb

KEYS_MAX = 1 << 18  # of all changes that are kept: 9 MB
CHANGES_MAX = 1 << 15  # of 300 bytes each, beside their keys
CHANGE_KEYS = 1024  # of one change

_AT = struct.Struct("<8sQ")
_PART = struct.Struct("<8sI")


class Cursor(NamedTuple):
    """Tell where a reader is: behind a change, and perhaps within a snapshot."""

    epoch: bytes = b""
    sequence: int = 0
    snapshot: bytes = b""
    part: int = 0

    def packed(self) -> bytes:
        """Return its bytes."""
        at = _AT.pack(self.epoch, self.sequence)
        return at + _PART.pack(self.snapshot, self.part) if self.snapshot else at


def read_cursor(data: bytes) -> Cursor:
    """Return the cursor of these bytes; of any others, one at the start."""
    if len(data) == _AT.size:
        return Cursor(*_AT.unpack(data))
    if len(data) == _AT.size + _PART.size:
        return Cursor(*_AT.unpack_from(data), *_PART.unpack_from(data, _AT.size))
    return Cursor()


class LoggedChange(NamedTuple):
    """Blocks of a model that were stored or removed.

    `keys_before`: the keys of all changes before; `data`: a reply of this change only.
    """

    sequence: int
    model_id: bytes
    key_count: int
    keys_before: int
    data: bytes


class ChangeLog:
    """The newest changes, in the order of their sequence numbers. One thread at a time."""

    def __init__(self) -> None:
        self._changes: dict[int, LoggedChange] = {}
        self._key_count = 0  # kept
        self._logged = 0  # keys, ever
        self.first = 1  # sequence number of the oldest one that is kept
        self.last = 0

    def add(self, model_id: bytes, removed: bool, prefix_hashes: Sequence[bytes]) -> None:
        """Add changes of these keys."""
        for start in range(0, len(prefix_hashes), CHANGE_KEYS):
            some = prefix_hashes[start : start + CHANGE_KEYS]
            self.last += 1
            change = pb.FeedChange(
                model=model_id, sequence=self.last, removed=removed, prefix_hashes=some
            )
            data = pb.FeedReply(changes=[change]).SerializeToString()
            self._changes[self.last] = LoggedChange(
                self.last, model_id, len(some), self._logged, data
            )
            self._logged += len(some)
            self._key_count += len(some)
        while self._key_count > KEYS_MAX or len(self._changes) > CHANGES_MAX:
            self._key_count -= self._changes.pop(self.first).key_count
            self.first += 1

    def has_next_of(self, sequence: int) -> bool:
        """Return whether all changes after this one are kept."""
        return self.first - 1 <= sequence <= self.last

    def keys_after(self, sequence: int) -> int:
        """Return how many keys the changes after this one have. Any thread."""
        following = self._changes.get(sequence + 1)
        if following is not None:
            return self._logged - following.keys_before
        return 0 if sequence >= self.last else self._logged

    def forgets_soon(self, sequence: int) -> bool:
        """Return whether much is kept, and the change after this one is of the older half."""
        is_much = 2 * self._key_count > KEYS_MAX or 2 * len(self._changes) > CHANGES_MAX
        return is_much and 2 * sequence < self.first + self.last

    def after(self, sequence: int) -> Iterator[LoggedChange]:
        """Yield the changes after this one."""
        for number in range(sequence + 1, self.last + 1):
            yield self._changes[number]
