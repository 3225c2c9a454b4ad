"""Name pages: the namespace says who may share them, the prefix hash which tokens they hold.

    key = namespace digest (16 bytes) || prefix hash (16..64 bytes)

    h[i] = SHA-256(h[i-1] || u32le tokens of page i),  h[-1] = empty

A prefix hash names the page *and everything before it*, so equal hashes mean equal prefixes.
Engines that hash their own blocks pass their digests; ours equal SGLang's (hicache hash of a page).
Byte-exact definitions: docs/FORMAT.md, "Keys".
"""

import hashlib
import math
import re
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple

from kvstore.errors import InvalidRequest, UnknownNamespace
from kvstore.layout import PageLayout
from kvstore.page_hmac import hmac_nbytes

NAMESPACE_DIGEST_NBYTES = 16
REMOVAL_NBYTES = 16  # bytes of the id of a namespace's removal within a cluster
PREFIX_HASH_NBYTES_MIN = 16  # shorter digests collide within a large fleet's lifetime
PREFIX_HASH_NBYTES_MAX = 64
_LEGAL_NBYTES = frozenset(range(PREFIX_HASH_NBYTES_MIN, PREFIX_HASH_NBYTES_MAX + 1))
TEXT_NBYTES_MAX = 1024  # bytes of each text field of a namespace
_U32_MAX = 2**32 - 1
_PART = re.compile(r"([0-9a-f]{16})\.(\d{1,4})/([1-9]\d{0,3})(?::([1-9]\d{0,5}))?\Z")
_KEY_ID = re.compile(r"([0-9a-f]{16})?\Z")


@dataclass(frozen=True)
class Namespace:
    """Everything that decides whether two pools' bytes are interchangeable.

    Two namespaces that differ in any field have different digests and never share pages. `salt`
    covers what no other field does: LoRA, cache salt, static quantisation scales, the engine's own
    layout version. `epoch` is raised after a weight update under the same name. `key_id` names the
    key that signs the pages (`kvstore.page_hmac.PageKeys.key_id`); empty: they are not signed.

    `part` tells a feed which of an engine's namespaces belong together (`part_of`). It is no part
    of the identity.
    """

    model: str
    layout: PageLayout
    tenant: str = "default"
    revision: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    salt: str = ""
    epoch: int = field(default=0)
    key_id: str = ""
    part: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("tenant", "model"):
            if not getattr(self, name):
                raise InvalidRequest(f"namespace: {name} must not be empty")
        for name in ("tenant", "model", "revision", "salt", "part"):
            if len(getattr(self, name).encode()) > TEXT_NBYTES_MAX:
                raise InvalidRequest(f"namespace: {name} is longer than {TEXT_NBYTES_MAX} bytes")
        for axis in ("tp", "pp", "cp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size <= 1 << 16:
                raise InvalidRequest(
                    f"namespace: {axis}_rank {rank} is not in 0..{axis}_size-1 ({axis}_size is "
                    f"{size})"
                )
        if not 0 <= self.epoch < 1 << 64:
            raise InvalidRequest(f"namespace: epoch {self.epoch} is not in 0..2^64-1")
        if not _KEY_ID.match(self.key_id):
            raise InvalidRequest(
                f"namespace: key_id {self.key_id[:32]!r} is not 16 hex digits, nor empty"
            )

    @property
    def stored_nbytes(self) -> int:
        """Return the bytes of a stored page: its content and, in a keyed namespace, its HMACs."""
        nbytes = self.layout.page_nbytes
        return nbytes + hmac_nbytes(nbytes) if self.key_id else nbytes

    @cached_property
    def digest(self) -> bytes:
        """Return the 16-byte digest that names this namespace.

        It is the start of SHA-256 over all fields in alphabetical order, without `key_id` if that
        is empty.
        """
        sha = hashlib.sha256(b"kvstore-namespace-1\0")
        left_out = {"part"} if self.key_id else {"part", "key_id"}
        for name in sorted({f.name for f in fields(self)} - left_out):
            value = getattr(self, name)
            data = value.fingerprint if isinstance(value, PageLayout) else str(value).encode()
            sha.update(
                struct.pack("<I", len(name)) + name.encode() + struct.pack("<I", len(data)) + data
            )
        return sha.digest()[:NAMESPACE_DIGEST_NBYTES]


class BlockPart(NamedTuple):
    """Describe what a namespace has of the blocks of one engine's KV.

    A block is complete when all ranks of all groups have a page of its hash. `id` names the KV, and
    is equal for all parts of it.
    """

    id: bytes
    group: int
    groups: int
    rank: int
    ranks: int  # of this group


def part_of(common: str, group: int, groups: int, ranks: int = 0) -> str:
    """Return a namespace's `part`: which of an engine's cache groups it has.

    `ranks`: namespaces of this group, if there are not as many as ranks.

    `common`: text that is equal for the groups and ranks of this KV only.
    """
    return f"{hashlib.sha256(common.encode()).hexdigest()[:16]}.{group}/{groups}" + (
        f":{ranks}" if ranks else ""
    )


def block_part(value: Namespace) -> BlockPart:
    """Return which part of which KV a namespace has.

    Namespaces without `part` that differ in their ranks only are one KV.
    """
    sizes = (value.tp_size, value.pp_size, value.cp_size)
    match = _PART.match(value.part)
    group, groups = (int(match[2]), int(match[3])) if match else (0, 1)
    own = [match[1].encode()] if match else [value.salt.encode(), value.layout.fingerprint]
    own += [] if match else [str(size).encode() for size in sizes]
    names = (value.tenant, value.model, value.revision, str(value.epoch), value.key_id)
    sha = hashlib.sha256(b"kvstore-blocks-1\0")
    for data in (*(name.encode() for name in names), *own):
        sha.update(struct.pack("<I", len(data)) + data)
    rank = (value.tp_rank * value.pp_size + value.pp_rank) * value.cp_size + value.cp_rank
    ranks = int(match[4]) if match and match[4] else math.prod(sizes)
    return BlockPart(sha.digest()[:NAMESPACE_DIGEST_NBYTES], group, groups, rank, ranks)


def shown(digest: bytes) -> str:
    """Format a namespace digest for an error message; an invalid one may have megabytes."""
    if len(digest) > NAMESPACE_DIGEST_NBYTES:
        return f"of {len(digest)} bytes, where a digest has {NAMESPACE_DIGEST_NBYTES},"
    return digest.hex() or "(empty)"


def short(digest: bytes) -> str:
    """Shorten a prefix hash or digest for logs.

    It is enough to find the entry, and too little to request the page or to confirm a prompt.
    """
    return digest[:4].hex()


def check_removal(name: bytes) -> None:
    """Raise InvalidRequest unless a removal's id has the right length.

    All members keep the id for a month.
    """
    if len(name) not in (0, REMOVAL_NBYTES):
        raise InvalidRequest(
            f"the name of a removal has {len(name)} bytes; send {REMOVAL_NBYTES} random ones, or "
            "none"
        )


def unknown(digest: bytes) -> UnknownNamespace:
    """Return the error for a namespace that a node lacks or that the caller may not see."""
    return UnknownNamespace(f"namespace {shown(digest)} is not open here; send OpenNamespace first")


def prefix_hashes(tokens: Iterable[int], page_tokens: int, parent: bytes = b"") -> list[bytes]:
    """Return the prefix hashes of the full pages of `tokens`; a last partial page has none.

    `tokens`: ids in 0..2^32-1. `parent`: the hash of the page before the first token, empty at the
    start of a prompt. Raises InvalidRequest for an id out of range.
    """
    if page_tokens < 1:
        raise InvalidRequest(f"page_tokens {page_tokens} must be at least 1")
    words = _u32le(tokens)
    step = 4 * page_tokens
    hashes = []
    for start in range(0, len(words) - step + 1, step):
        parent = hashlib.sha256(parent + words[start : start + step]).digest()
        hashes.append(parent)
    return hashes


def _u32le(tokens: Iterable[int]) -> bytes:
    ids = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if isinstance(ids, (bytes, bytearray)):
        ids = list(ids)  # each byte is an id; `array` would take them as raw memory
    try:
        words = array("I", ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest(f"token ids must be integers in 0..{_U32_MAX}: {error}") from error
    assert words.itemsize == 4
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def check_prefix_hashes(hashes: Sequence[bytes], count_max: int, distinct: bool) -> None:
    """Raise InvalidRequest unless there are 1..count_max hashes of legal length.

    With `distinct`, a repeated hash is refused, too.
    """
    if not hashes:
        raise InvalidRequest("the batch holds no key; send at least one prefix hash")
    if len(hashes) > count_max:
        raise InvalidRequest(
            f"the batch holds {len(hashes)} keys, at most {count_max} (batch_keys_max)"
        )
    if not _LEGAL_NBYTES.issuperset(map(len, hashes)):
        wrong = next(nbytes for nbytes in map(len, hashes) if nbytes not in _LEGAL_NBYTES)
        raise InvalidRequest(
            f"a prefix hash has {wrong} bytes; allowed are {PREFIX_HASH_NBYTES_MIN} to "
            f"{PREFIX_HASH_NBYTES_MAX}"
        )
    if distinct and len(set(hashes)) != len(hashes):
        raise InvalidRequest("the batch names a prefix hash twice; send each key once")
