"""A malicious node that changes pages in RAM and makes all checksums match."""

from collections.abc import Callable
from typing import Any

from kvstore import Client, ClientConfig
from kvstore.checksum import leaves, root, stored_leaves
from kvstore.page_hmac import page_keys
from node.memory.inventory import Inventory
from node.server import Node

SECRET = "0f" * 32
OTHER = "1e" * 32


def key_id(secret: str = SECRET) -> str:
    keys = page_keys(ClientConfig(page_key=secret))
    assert keys is not None
    return keys.key_id


def stored(node: Node, pages: Any, key: bytes) -> bytes:
    """Return the stored bytes of a page and its seal."""
    with Inventory(node.tier).inspected(pages.namespace.digest, key) as page:
        assert page is not None
        return bytes(node.arena.view(page.offset, pages.namespace.stored_nbytes))


def forge(node: Node, pages: Any, key: bytes, change: Callable[[bytearray], None]) -> None:
    """Apply `change` to the stored bytes of a page and its seal, and update the checksums."""
    with Inventory(node.tier).inspected(pages.namespace.digest, key) as page:
        assert page is not None
        view = node.arena.view(page.offset, pages.namespace.stored_nbytes)
        data = bytearray(view)
        change(data)
        assert len(data) == view.nbytes
        view[:] = data
        of_leaves = leaves(view)
        page.leaves, page.checksum = (
            stored_leaves(of_leaves),
            root(of_leaves, page.namespace.seed(key)),
        )


def become(data: bytes) -> Callable[[bytearray], None]:
    def change(there: bytearray) -> None:
        there[:] = data

    return change


def pretender(client: Client) -> Client:
    """Make a client with another secret announce the id of this one; return the client.

    This is what a writer without the key can do.
    """
    keys = client._page_keys
    assert keys is not None
    keys.key_id = key_id()
    return client
