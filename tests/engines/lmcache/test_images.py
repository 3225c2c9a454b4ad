"""What LMCache's own hash covers: claims of docs/identity.md."""

from types import SimpleNamespace

import torch
from lmcache.integration.vllm.utils import apply_mm_hashes_to_token_ids
from lmcache.v1.multiprocess.token_hasher import TokenHasher

CHUNK = 16


def chunks(identifier: str) -> list[bytes]:
    """Of a prompt of four chunks, whose second one is an image that vLLM calls so."""
    tokens = torch.arange(4 * CHUNK)
    apply_mm_hashes_to_token_ids(
        tokens, [identifier], [SimpleNamespace(offset=CHUNK, length=CHUNK)]
    )
    return list(TokenHasher(CHUNK).compute_chunk_hashes(tokens.tolist()))


def test_an_image_is_in_the_hash_by_its_identifier() -> None:
    """By vLLM's, which is a hash of its content, unless vLLM runs without both of its caches."""
    one, two = chunks("ab" * 32), chunks("cd" * 32)
    assert one == chunks("ab" * 32)
    assert one[0] == two[0]
    assert not set(one[1:]) & set(two[1:])
