"""Gets of byte ranges, from pages whose leaves are one sector each."""

from typing import Any

from kvstore import ByteRange, Client

LEAF = 4096
PAGE = 50_001  # twelve leaves, the last one longer by 849 bytes; 13 sectors


def ask(client: Client, pages: Any, keys: list[bytes], *ranges: tuple[int, int]) -> list[bool]:
    """Get ranges of pages and compare every byte of every hit."""
    buffers = [bytearray(sum(nbytes for _, nbytes in ranges)) for _ in keys]
    hits = client.get_ranges(pages.namespace, keys, [ByteRange(*part) for part in ranges], buffers)
    for key, hit, buffer in zip(keys, hits, buffers, strict=True):
        content = pages.content(key)
        wanted = b"".join(content[offset : offset + nbytes] for offset, nbytes in ranges)
        assert not hit or buffer == wanted, f"wrong bytes of {key.hex()}: {ranges}"
    return hits
