"""Page checksums: xxh3_128 seeded with the page's key.

Made where a page is made and checked where it is used, so one checksum covers wire, RAM and disk.
The seed binds the bytes to their key: an intact page under the wrong key does not match either.
"""

from collections.abc import Iterable

import xxhash

from kvstore.buffers import HELD_NBYTES_MAX

CHECKSUM_NBYTES = 16

# Hashing right behind a copy of this many bytes finds them in the cache: measured at 256 KiB,
# receiving and hashing a 1 MiB page costs no more than receiving it (docs/decisions/0003).
CHUNK_NBYTES = 256 * 1024


def key_seed(namespace_digest: bytes, prefix_hash: bytes) -> int:
    """Seed of a page's checksum: xxh3_64 of its key."""
    return xxhash.xxh3_64_intdigest(namespace_digest + prefix_hash)


def checksum(data: memoryview | bytes, seed: int) -> bytes:
    """16 bytes, big-endian as xxHash's canonical form.

    In one call only while that is short: before 4.0 the package's one-shot digests keep the GIL however long they
    take (5 ms delays in an engine), an object's `update` gives it up in every version that we allow.
    """
    if len(data) <= HELD_NBYTES_MAX:
        return xxhash.xxh3_128_digest(data, seed)
    return joined_checksum((data,), seed)


def joined_checksum(parts: Iterable[memoryview | bytes], seed: int) -> bytes:
    """`checksum` of the parts' concatenation, which is not made."""
    hasher = running_checksum(seed)
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def running_checksum(seed: int) -> "xxhash.xxh3_128":
    """Object with `update(chunk)` and `digest()`; equals `checksum` of the chunks' concatenation."""
    return xxhash.xxh3_128(seed=seed)


def row_checksum(data: bytes) -> bytes:
    """8 bytes: xxh3_64 of a row in the disk tier's database."""
    return xxhash.xxh3_64_digest(data)
