"""The whole prefix hash of every record: 16 to 64 bytes each, in blocks of one width.

    block b    BLOCK_COUNT places of `width` bytes: the hashes of records b x BLOCK_COUNT ...
    lengths    one byte a record: what of its place is hash

Engines choose the length of their hashes, and one engine has one length, so a block is as wide as
its longest hash and no wider. Whole, because hashes of which a part is equal are different pages.
"""

from array import array

BLOCK_COUNT = 4096
_WIDTH_STEP = 8


class Hashes:
    """Not thread-safe; the disk tier's lock guards it."""

    def __init__(self) -> None:
        self._blocks: list[bytearray] = []
        self._lengths = array("B")

    @property
    def nbytes(self) -> int:
        return len(self._lengths) + sum(map(len, self._blocks))

    def __getitem__(self, record: int) -> bytes:
        block = self._blocks[record // BLOCK_COUNT]
        start = record % BLOCK_COUNT * (len(block) // BLOCK_COUNT)
        return bytes(block[start : start + self._lengths[record]])

    def matches(self, record: int, prefix_hash: bytes) -> bool:
        block = self._blocks[record // BLOCK_COUNT]
        start = record % BLOCK_COUNT * (len(block) // BLOCK_COUNT)
        return block[start : start + self._lengths[record]] == prefix_hash

    def __setitem__(self, record: int, prefix_hash: bytes) -> None:
        number, place = divmod(record, BLOCK_COUNT)
        while number >= len(self._blocks):
            self._blocks.append(bytearray())
            self._lengths.frombytes(bytes(BLOCK_COUNT))
        width, length = len(self._blocks[number]) // BLOCK_COUNT, len(prefix_hash)
        if width < length:
            width = -(-length // _WIDTH_STEP) * _WIDTH_STEP
            self._blocks[number] = _widened(self._blocks[number], width)
        self._blocks[number][place * width : place * width + length] = prefix_hash
        self._lengths[record] = length


def _widened(block: bytearray, width: int) -> bytearray:
    """The same hashes in wider places, column by column: at most 64 copies, whatever the block holds."""
    wider = bytearray(BLOCK_COUNT * width)
    was = len(block) // BLOCK_COUNT
    for column in range(was):
        wider[column::width] = block[column::was]
    return wider
