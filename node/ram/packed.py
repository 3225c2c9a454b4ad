"""What slots of one size keep from others when they lie together: the blocks that they need. Pure; the disk's too."""

from node.slots import SlotAllocator


class Packed:
    """`count` slots of one size, as they would lie in as few blocks as can be."""

    __slots__ = ("block_nbytes", "count", "per_block")

    def __init__(self, slots: SlotAllocator, slot_nbytes: int) -> None:
        self.block_nbytes = slots.unit_nbytes << slots.level(slot_nbytes)
        self.per_block = max(1, self.block_nbytes // slot_nbytes)
        self.count = 0

    def need(self, count: int) -> int:
        """Bytes of the blocks that so many take."""
        return -(-count // self.per_block) * self.block_nbytes
