"""Compute page checksums in two levels: leaves over parts of a page, and a root over the leaves.

The root is bound to the page's key.

    page      | part 0 ....... | part 1 ....... | ... | last part ........... |     see `cuts`
    leaf i    = xxh3_64 of part i, made by any thread or by a GPU
    checksum  = xxh3_128 of all leaves, seeded with the key

The checksum is computed where a page is made and verified where it is used, so one checksum covers
transport, RAM and disk. A part is verified by its leaf alone. The seed binds the bytes to their
key: an intact page under the wrong key does not match.
"""

from collections.abc import Iterable
from functools import lru_cache

import xxhash

from kvstore.buffers import HELD_NBYTES_MAX

CHECKSUM_NBYTES = 16
LEAF_SUM_NBYTES = 8
# Bytes of a part. Smaller parts would take the GIL more often, each time up to 5 ms beside a thread
# that computes.
LEAF_NBYTES = 1 << 20
LEAVES_MAX = 64  # leaves of a page; parts of larger pages are larger
hash64 = xxhash.xxh3_64_intdigest  # for short input: it keeps the GIL

# Hashing directly behind a copy of this many bytes finds them in the CPU cache: at 256 KiB,
# receiving and hashing a 1 MiB page costs no more than receiving it (docs/decisions/0003).
CHUNK_NBYTES = 256 * 1024


def leaf_nbytes(page_nbytes: int) -> int:
    """Return the bytes of each part of a page but the last."""
    return LEAF_NBYTES * max(1, -(-page_nbytes // (LEAF_NBYTES * LEAVES_MAX)))


@lru_cache(maxsize=256)
def cuts(page_nbytes: int) -> tuple[tuple[int, int], ...]:
    """Return (start, end) of each part of a page.

    The last part takes the rest: less than two parts' length, or all of a small page.
    """
    step = leaf_nbytes(page_nbytes)
    starts = range(0, max(1, page_nbytes // step) * step, step)
    return tuple((start, page_nbytes if start == starts[-1] else start + step) for start in starts)


def leaf(part: memoryview | bytes) -> bytes:
    """Hash one part of a page: 8 bytes, big-endian as xxHash's canonical form.

    Only short parts are hashed in one call. Before 4.0, the package's one-shot digests keep the GIL
    for any length (5 ms delays in an engine); an object's `update` releases it in every version
    that we allow.
    """
    if len(part) <= HELD_NBYTES_MAX:
        return xxhash.xxh3_64_digest(part)
    hasher = xxhash.xxh3_64()
    hasher.update(part)
    return hasher.digest()


def leaves(page: memoryview | bytes) -> bytes:
    """Hash all parts of a page and concatenate the leaves."""
    parts = cuts(len(page))
    return (
        leaf(page) if len(parts) == 1 else b"".join([leaf(page[start:end]) for start, end in parts])
    )


def parts_of(page_nbytes: int, ranges: Iterable[tuple[int, int]]) -> set[int]:
    """Return the indices of the parts that a page's (offset, nbytes) ranges lie in."""
    last, step = len(cuts(page_nbytes)) - 1, leaf_nbytes(page_nbytes)
    found = set[int]()
    for offset, nbytes in ranges:
        found.update(range(min(offset // step, last), min((offset + nbytes - 1) // step, last) + 1))
    return found


def hashed_nbytes(page_nbytes: int, ranges: Iterable[tuple[int, int]]) -> int:
    """Return how many bytes of a page must be hashed to verify its ranges."""
    parts = cuts(page_nbytes)
    return sum(parts[i][1] - parts[i][0] for i in parts_of(page_nbytes, ranges))


def parts_match(page: memoryview, of_leaves: bytes, ranges: Iterable[tuple[int, int]]) -> bool:
    """Verify the parts that the ranges lie in against their leaves; no other part is read."""
    parts = cuts(len(page))
    return all(
        leaf(page[slice(*parts[i])]) == of_leaves[LEAF_SUM_NBYTES * i : LEAF_SUM_NBYTES * (i + 1)]
        for i in parts_of(len(page), ranges)
    )


class Leaves:
    """Compute the leaves of a page that arrives in segments: `update(piece)`, then `digest()`."""

    def __init__(self, page_nbytes: int) -> None:
        self._cuts = cuts(page_nbytes)
        self._made: list[bytes] = []
        self._hasher = xxhash.xxh3_64()
        self._left = self._cuts[0][1]

    def update(self, piece: memoryview) -> None:
        """Hash the next bytes of the page."""
        while len(piece) > self._left:
            self._hasher.update(piece[: self._left])
            piece = piece[self._left :]
            start, end = self._next()
            self._left = end - start
        self._hasher.update(piece)
        self._left -= len(piece)

    def _next(self) -> tuple[int, int]:
        self._made.append(self._hasher.digest())
        self._hasher.reset()
        return self._cuts[len(self._made)]

    def digest(self) -> bytes:
        """Return the leaves of the whole page; all of its bytes must have been given."""
        made = [*self._made, self._hasher.digest()]
        assert (self._left, len(made)) == (0, len(self._cuts)), "bytes are missing"
        return b"".join(made)


def stored_leaves(of_leaves: bytes) -> bytes:
    """Return the leaves to store beside the checksum: none if there is only one."""
    return of_leaves if len(of_leaves) > LEAF_SUM_NBYTES else b""


def key_seed(namespace_digest: bytes, prefix_hash: bytes) -> int:
    """Seed of a page's checksum: xxh3_64 of its key."""
    return hash64(namespace_digest + prefix_hash)


def root(of_leaves: bytes, seed: int) -> bytes:
    """Return the 16-byte checksum, big-endian, of the page that has these leaves."""
    return xxhash.xxh3_128_digest(of_leaves, seed)


def roots(
    of_leaves: Iterable[bytes], namespace_digest: bytes, prefix_hashes: Iterable[bytes]
) -> list[bytes]:
    """Return the `root` of each page's leaves, seeded with its key."""
    checksum_of = xxhash.xxh3_128_digest
    return [
        checksum_of(some, hash64(namespace_digest + prefix_hash))
        for some, prefix_hash in zip(of_leaves, prefix_hashes, strict=True)
    ]


def checksum(data: memoryview | bytes, seed: int) -> bytes:
    """Return the checksum of a page, or of parts of one that travel together."""
    return root(leaves(data), seed)


def joined_leaves(parts: Iterable[memoryview], nbytes: int) -> bytes:
    """Return the leaves of the parts' concatenation, `nbytes` bytes long, without building it."""
    running = Leaves(nbytes)
    for part in parts:
        running.update(part)
    return running.digest()


def joined_checksum(parts: Iterable[memoryview], nbytes: int, seed: int) -> bytes:
    """Return the checksum of the parts' concatenation without building it."""
    return root(joined_leaves(parts, nbytes), seed)


def running_digest() -> "xxhash.xxh3_128":
    """Return an object with `update(bytes)` and `digest()` for data that is no page.

    Namespaces use it for weights and scales.
    """
    return xxhash.xxh3_128()


def row_checksum(data: bytes) -> bytes:
    """Return the 8-byte xxh3_64 of a row in the disk tier's database."""
    return xxhash.xxh3_64_digest(data)
