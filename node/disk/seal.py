"""Where a page lies on disk, and how its bytes are encrypted there.

    slot     | unit 0: 1 MiB | unit 1 | ... | what is left |       each encrypted by itself
    tweak    place of the unit on disk u64 (x 4 KiB) | first 8 bytes of the page's checksum

The least that is read of a page begins at a whole MiB of it and ends at another, or at its slot's end
(`node.ram.parts`), so every read is of whole units. The checksum is of the plain bytes and of the page's key: a slot
that is written again gets other tweaks, and what is in it tells nothing of what was there before.
"""

from typing import NamedTuple

from kvstore.checksum import LEAF_NBYTES
from kvstore.layout import SLOT_ALIGN_NBYTES
from node.disk import cipher

UNIT_NBYTES = LEAF_NBYTES
MARK_NBYTES = 8  # of a page's checksum


class Seal(NamedTuple):
    """Of a slot. `key`: of the page's namespace."""

    offset: int
    key: bytes
    mark: bytes

    def __repr__(self) -> str:
        return f"Seal({self.offset})"  # a key is in no log

    def encrypt(self, start: int, source: memoryview, target: memoryview) -> None:
        """`source`: what lies from `start` on in the slot, from a unit's begin to its end or the slot's."""
        for at in range(0, source.nbytes, UNIT_NBYTES):
            end = at + UNIT_NBYTES
            cipher.encrypt(self.key, self._tweak(start + at), source[at:end], target[at:end])

    def decrypt(self, start: int, view: memoryview) -> None:
        """The same, where it lies."""
        for at in range(0, view.nbytes, UNIT_NBYTES):
            cipher.decrypt(self.key, self._tweak(start + at), view[at : at + UNIT_NBYTES])

    def _tweak(self, start: int) -> bytes:
        assert start % UNIT_NBYTES == 0, f"{start} is within a unit"
        return ((self.offset + start) // SLOT_ALIGN_NBYTES).to_bytes(8, "little") + self.mark


class Place(NamedTuple):
    """Of a page on disk; without a seal its bytes are plain."""

    offset: int
    seal: Seal | None


def place(offset: int, key: bytes, checksum: bytes) -> Place:
    """`key`: empty if its namespace has none."""
    return Place(offset, Seal(offset, key, checksum[:MARK_NBYTES]) if key else None)
