"""What LMCache's own hash covers, as docs/identity.md states."""

from types import SimpleNamespace

import torch
from lmcache.integration.vllm.utils import apply_mm_hashes_to_token_ids
from lmcache.v1.multiprocess.token_hasher import TokenHasher

CHUNK = 16


def chunks(identifier: str) -> list[bytes]:
    """Return the hashes of a prompt of four chunks, the second an image with this identifier."""
    tokens = torch.arange(4 * CHUNK)
    apply_mm_hashes_to_token_ids(
        tokens, [identifier], [SimpleNamespace(offset=CHUNK, length=CHUNK)]
    )
    return list(TokenHasher(CHUNK).compute_chunk_hashes(tokens.tolist()))


def test_chunk_hash_covers_image_identifier() -> None:
    """The identifier is vLLM's content hash, unless vLLM runs without both of its caches."""
    one, two = chunks("ab" * 32), chunks("cd" * 32)
    assert one == chunks("ab" * 32)
    assert one[0] == two[0]
    assert not set(one[1:]) & set(two[1:])
