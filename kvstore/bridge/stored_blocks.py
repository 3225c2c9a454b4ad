"""Keep the set of blocks that routers know as stored. Pure.

The feed may repeat changes, and has each KV of a model's name by itself: engines of another
revision or with other settings. Routers get one stream, in which a block is stored once, as long
as one KV has it.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

Sized = dict[int, list[bytes]]  # hashes by the tokens of a block


class _Kv:
    """A KV that has blocks."""

    def __init__(self, bit: int, block_tokens: int) -> None:
        self.bit = bit
        self.block_tokens = block_tokens
        self.blocks = 0


class StoredBlocks:
    """The blocks of one stream; some 120 bytes for each. One thread."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}  # of each hash, the KVs that have it, one bit each
        self._kvs: dict[bytes, _Kv] = {}  # a salt per request makes many, one after the other

    def __len__(self) -> int:
        return len(self._holders)

    def reset(self) -> None:
        """Forget all."""
        self._holders, self._kvs = {}, {}

    def stored(self, kv: bytes, block_tokens: int, hashes: Iterable[bytes]) -> list[bytes]:
        """Take blocks that a KV has; return those that no KV had before."""
        holder, new = self._kvs.get(kv) or _Kv(self._free_bit(), block_tokens), []
        for key in dict.fromkeys(hashes):
            known = self._holders.get(key, 0)
            self._holders[key] = known | holder.bit
            holder.blocks += not known & holder.bit
            if not known:
                new.append(key)
        if holder.blocks:
            self._kvs[kv] = holder
        return new

    def removed(self, kv: bytes, hashes: Iterable[bytes]) -> list[bytes]:
        """Take blocks that a KV has no longer; return those that none has any more."""
        holder, gone = self._kvs.get(kv), list[bytes]()
        if holder is None:
            return gone
        for key in dict.fromkeys(hashes):
            known = self._holders.get(key, 0)
            if not known & holder.bit:
                continue
            holder.blocks -= 1
            if known & ~holder.bit:
                self._holders[key] = known & ~holder.bit
            else:
                del self._holders[key]
                gone.append(key)
        if not holder.blocks:
            del self._kvs[kv]
        return gone

    def newest(self, most: int, at_once: int) -> Iterator[tuple[int, Sequence[bytes]]]:
        """Yield the tokens of a block and so many hashes, of the newest blocks, oldest first."""
        tokens_of = {kv.bit: kv.block_tokens for kv in self._kvs.values()}
        by_tokens: Sized = {}
        oldest = max(0, len(self._holders) - most)
        for key, bits in itertools.islice(self._holders.items(), oldest, None):
            by_tokens.setdefault(tokens_of[bits & -bits], []).append(key)
        for tokens, hashes in by_tokens.items():
            for start in range(0, len(hashes), at_once):
                yield tokens, hashes[start : start + at_once]

    def _free_bit(self) -> int:
        used = 0
        for kv in self._kvs.values():
            used |= kv.bit
        return ~used & (used + 1)
