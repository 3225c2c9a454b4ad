"""Ranges of pages whose leaves are a sector each."""

from typing import Any

from kvstore import ByteRange, Client

LEAF = 4096
PAGE = 50_001  # twelve leaves, of which the last is longer by 849 bytes; 13 sectors


def ask(client: Client, pages: Any, keys: list[bytes], *ranges: tuple[int, int]) -> list[bool]:
    """Compares every byte of every hit."""
    buffers = [bytearray(sum(nbytes for _, nbytes in ranges)) for _ in keys]
    hits = client.get_ranges(pages.namespace, keys, [ByteRange(*part) for part in ranges], buffers)
    for key, hit, buffer in zip(keys, hits, buffers, strict=True):
        content = pages.content(key)
        wanted = b"".join(content[offset : offset + nbytes] for offset, nbytes in ranges)
        assert not hit or buffer == wanted, f"wrong bytes of {key.hex()}: {ranges}"
    return hits
