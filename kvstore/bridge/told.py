"""Keep which blocks routers were told of. Pure.

The feed may repeat what it told, and tells each KV of a model's name by itself: engines of another
revision or with other settings. Routers get one stream, in which a block is stored once, as long
as one KV has it.
"""

from collections.abc import Iterable, Iterator, Sequence

Sized = dict[int, list[bytes]]  # hashes by the tokens of a block


class Told:
    """The blocks of one stream; some 120 bytes for each. One thread."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}  # of each hash, the KVs that have it, one bit each
        self._bits: dict[bytes, int] = {}
        self._tokens: dict[int, int] = {}  # of a block, by the KV's bit

    def __len__(self) -> int:
        return len(self._holders)

    def reset(self) -> None:
        """Forget all."""
        self._holders, self._bits, self._tokens = {}, {}, {}

    def stored(self, kv: bytes, block_tokens: int, hashes: Iterable[bytes]) -> list[bytes]:
        """Take blocks that a KV has; return those that no KV had before."""
        bit = self._bits.setdefault(kv, 1 << len(self._bits))
        self._tokens[bit] = block_tokens
        new = []
        for key in dict.fromkeys(hashes):
            known = self._holders.get(key, 0)
            self._holders[key] = known | bit
            if not known:
                new.append(key)
        return new

    def removed(self, kv: bytes, hashes: Iterable[bytes]) -> list[bytes]:
        """Take blocks that a KV has no longer; return those that none has any more."""
        bit, gone = self._bits.get(kv, 0), []
        for key in dict.fromkeys(hashes):
            known = self._holders.get(key, 0)
            if not known & bit:
                continue
            if known & ~bit:
                self._holders[key] = known & ~bit
            else:
                del self._holders[key]
                gone.append(key)
        return gone

    def all(self, at_once: int) -> Iterator[tuple[int, Sequence[bytes]]]:
        """Yield the tokens of a block and so many hashes, of all that is stored now."""
        by_tokens: Sized = {}
        for key, bits in self._holders.items():
            by_tokens.setdefault(self._tokens[bits & -bits], []).append(key)
        for tokens, hashes in by_tokens.items():
            for start in range(0, len(hashes), at_once):
                yield tokens, hashes[start : start + at_once]
