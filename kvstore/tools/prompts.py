"""Query by tokens: hash a prompt as its engine does.

    sha256-chain      ours, and SGLang's: SHA-256(parent || u32le tokens)
    vllm-sha256       vLLM's default: SHA-256 of the pickled (parent, tokens, extra keys)
    vllm-sha256-cbor  its `sha256_cbor`: the same in canonical CBOR

vLLM's hashes are of plain prompts: without LoRA, images and salts, which are extra keys. Those of
`xxhash` have a secret seed.
"""

import hashlib
import pickle
import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.client import Client
from kvstore.errors import InvalidRequest
from kvstore.keys import prefix_hashes
from kvstore.results import QueryResult

VLLM_SEED = "vllm-none-hash"  # without PYTHONHASHSEED, since vLLM 0.30
HASHES = ("sha256-chain", "vllm-sha256", "vllm-sha256-cbor")
SIZES_MAX = 8  # block sizes of one model's name that are tried


class Hashing(NamedTuple):
    """Describe how an engine hashes.

    `seed`: PYTHONHASHSEED of vLLM's processes; None: they have none.
    """

    name: str = HASHES[0]
    seed: str | None = None

    def check(self) -> None:
        """Raise InvalidRequest for a name that is unknown."""
        if self.name not in HASHES:
            raise InvalidRequest(f"hash {self.name[:40]!r} is not one of {', '.join(HASHES)}")

    def of(self, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
        """Return the hashes of the full blocks of a prompt. Raises InvalidRequest."""
        self.check()
        chain = prefix_hashes(tokens, block_tokens)  # it checks the tokens, too
        if self.name == HASHES[0]:
            return chain
        is_cbor, hashes = self.name == HASHES[2], list[bytes]()
        seed = VLLM_SEED if self.seed is None else self.seed
        parent = _digest(_cbor(seed) if is_cbor else _pickled(seed))
        for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
            block = (parent, tuple(map(int, tokens[start : start + block_tokens])), None)
            parent = _digest(_cbor(block) if is_cbor else _pickled(block))
            hashes.append(parent)
        return hashes


OWN = Hashing()


def query_tokens(
    client: Client,
    model: str,
    tokens: Sequence[int],
    block_tokens: int = 0,
    hashing: Hashing = OWN,
    tenant: str = "",
) -> list[QueryResult]:
    """Return `Client.query` of the blocks of a prompt.

    `block_tokens`: tokens of a block; 0: of each KV that is stored under the model's name, at most
    of eight sizes. Raises InvalidRequest if the tokens fill no block of that size.
    """
    hashing.check()
    sizes = {block_tokens} if block_tokens else _sizes(client, model, tenant)
    found: list[QueryResult] = []
    for size in sorted(sizes):
        hashes = hashing.of(tokens, size)
        if hashes:
            results = client.query(model, hashes, tenant)
            found += [result for result in results if result.model.page_tokens == size]
        elif block_tokens:
            raise InvalidRequest(f"{len(tokens)} tokens fill no block of {size}")
    return sorted(found, key=lambda result: result.model.id)


def _sizes(client: Client, model: str, tenant: str) -> set[int]:
    spaces = [space for space, _ in client.namespaces() if space.model == model]
    if tenant:
        spaces = [space for space in spaces if space.tenant == tenant]
    return set(sorted({space.layout.page_tokens for space in spaces})[:SIZES_MAX])


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _cbor(value: object) -> bytes:
    """Encode as canonical CBOR (RFC 8949, 4.2) what a block's hash is made of."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(0, value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        return _head(3, len(value.encode())) + value.encode()
    assert isinstance(value, tuple)
    return _head(4, len(value)) + b"".join(map(_cbor, value))


def _head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major << 5 | number])
    for code, kind, most in ((24, ">B", 8), (25, ">H", 16), (26, ">I", 32)):
        if number < 1 << most:
            return bytes([major << 5 | code]) + struct.pack(kind, number)
    return bytes([major << 5 | 27]) + struct.pack(">Q", number)
