"""Pages whose bytes are derived from their keys."""

from collections.abc import Sequence
from typing import Any

from kvstore import Client, Namespace, PutOutcome, opaque_layout
from kvstore.results import Keep
from kvstore.tools.trace import page_content
from node.memory.inventory import Inventory
from node.server import Node


class Pages:
    """Pages of one namespace whose bytes are derived from their keys."""

    def __init__(self, name: str, page_nbytes: int = 4096, **fields: Any) -> None:
        self.namespace = Namespace(model=name, layout=opaque_layout(page_nbytes), **fields)
        self.nbytes = page_nbytes

    def key(self, number: int) -> bytes:
        return number.to_bytes(32, "big")

    def keys(self, *numbers: int) -> list[bytes]:
        return [self.key(number) for number in numbers]

    def content(self, key: bytes) -> bytes:
        return page_content(self.namespace.digest, key, self.nbytes)

    def put(self, client: Client, keys: Sequence[bytes], **keep: Any) -> list[PutOutcome]:
        return client.put(self.namespace, keys, [self.content(key) for key in keys], Keep(**keep))

    def get(self, client: Client, keys: Sequence[bytes], prefix: bool = False) -> list[bool]:
        """Get pages and compare every byte of every hit."""
        buffers = [bytearray(self.nbytes) for _ in keys]
        hits = client.get(self.namespace, keys, buffers, prefix)
        for key, hit, buffer in zip(keys, hits, buffers, strict=True):
            assert not hit or buffer == self.content(key), f"wrong bytes under {key.hex()}"
        return hits

    def flip(self, node: Node, key: bytes) -> None:
        """Flip a bit of the page's first byte in RAM."""
        with Inventory(node.tier).inspected(self.namespace.digest, key) as page:
            assert page is not None
            node.arena.view(page.offset, 1)[0] ^= 1
