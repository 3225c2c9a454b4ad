"""R5: any flipped, truncated or swapped byte is a miss, never data; the page is dropped and can be
stored again.
"""

import random
from typing import Any

import pytest
from known_pages import Pages
from local_nodes import Connect, StartNode

from kvstore import ByteRange
from node.memory.inventory import Inventory
from node.memory.page import Page
from node.server import Node


@pytest.fixture(scope="module")
def node(start_node: StartNode) -> Node:
    """Return a node with room for the four pages of each test here."""
    return start_node()


def page_of(node: Node, chain: Pages, key: bytes) -> Page:
    """Return the page's record, which has the offset of its bytes in the arena."""
    with Inventory(node.tier).inspected(chain.namespace.digest, key) as page:
        assert page is not None
        return page


def flip_one(node: Node, chain: Pages, keys: list[bytes]) -> None:
    view = node.arena.view(page_of(node, chain, keys[1]).offset, chain.nbytes)
    view[random.randrange(chain.nbytes)] ^= 1 << random.randrange(8)


def flip_last(node: Node, chain: Pages, keys: list[bytes]) -> None:
    node.arena.view(page_of(node, chain, keys[1]).offset, chain.nbytes)[-1] ^= 1


def truncate(node: Node, chain: Pages, keys: list[bytes]) -> None:
    """Zero the second half of the page, as after a write that ended early."""
    view = node.arena.view(page_of(node, chain, keys[1]).offset, chain.nbytes)
    view[chain.nbytes // 2 :] = bytes(chain.nbytes - chain.nbytes // 2)


def shift(node: Node, chain: Pages, keys: list[bytes]) -> None:
    view = node.arena.view(page_of(node, chain, keys[1]).offset, chain.nbytes)
    view[:] = bytes(view[1:]) + b"\0"


def replace(node: Node, chain: Pages, keys: list[bytes]) -> None:
    """Replace a page by the bytes and checksum of another one: intact, but the wrong page."""
    page, other = page_of(node, chain, keys[1]), page_of(node, chain, keys[2])
    node.arena.copy(other.offset, page.offset, chain.nbytes)
    page.checksum = other.checksum


DAMAGES = [flip_one, flip_last, truncate, shift, replace]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("read", ["get", "get_ranges", "verify"])
def test_r05_damaged_page_is_a_miss_and_is_dropped(
    node: Node, connect: Connect, chain: Pages, wire: str, damage: Any, read: str
) -> None:
    client = connect(node, wire)
    keys = chain.keys(*range(4))
    chain.put(client, keys)
    damage(node, chain, keys)
    if read == "get":
        assert chain.get(client, keys) == [True, False, True, True]
        assert client.stats.corrupt_pages == 1
    elif read == "get_ranges":
        buffers = [bytearray(1) for _ in keys]
        (part,) = chain.namespace.layout.layer_ranges(0)
        first_byte = [type(part)(0, 1)]  # a miss although the requested byte is intact
        assert client.get_ranges(chain.namespace, keys, first_byte, buffers) == [
            True,
            False,
            True,
            True,
        ]
    else:
        assert client.verify(chain.namespace, keys) == (3, 1, 0)
    assert client.lookup(chain.namespace, keys).present == (True, False, True, True)
    (counters,) = [info.counters for space, info in client.namespaces() if space == chain.namespace]
    assert counters.miss_corrupt == 1
    assert [outcome.name for outcome in chain.put(client, keys)] == [
        "EXISTS",
        "STORED",
        "EXISTS",
        "EXISTS",
    ]
    assert chain.get(client, keys) == [True] * 4


def test_r05_swapped_pages_are_misses(
    node: Node, connect: Connect, chain: Pages, wire: str
) -> None:
    client = connect(node, wire)
    keys = chain.keys(0, 1, 2)
    chain.put(client, keys)
    first, second = page_of(node, chain, keys[0]), page_of(node, chain, keys[1])
    views = [node.arena.view(page.offset, chain.nbytes) for page in (first, second)]
    views[0][:], views[1][:] = bytes(views[1]), bytes(views[0])
    first.checksum, second.checksum = second.checksum, first.checksum
    assert chain.get(client, keys) == [False, False, True]
    assert client.lookup(chain.namespace, keys).present == (False, False, True)


def test_r05_prefix_ends_at_a_damaged_page(
    node: Node, connect: Connect, chain: Pages, wire: str
) -> None:
    client = connect(node, wire)
    keys = chain.keys(*range(4))
    chain.put(client, keys)
    flip_one(node, chain, keys)
    assert chain.get(client, keys, prefix=True) == [True, False, False, False]


def ranged(client: Any, chain: Pages, keys: list[bytes], offset: int) -> list[bool]:
    """Get 100 bytes of each page, compare those of the hits, and return the hits."""
    buffers = [bytearray(100) for _ in keys]
    hits: list[bool] = client.get_ranges(chain.namespace, keys, [ByteRange(offset, 100)], buffers)
    expected = [chain.content(key)[offset : offset + 100] for key in keys]
    assert all(
        buffer == wanted for buffer, wanted, hit in zip(buffers, expected, hits, strict=True) if hit
    )
    return hits


@pytest.mark.usefixtures("small_leaves")
def test_r05_range_is_checked_by_the_parts_it_touches(
    node: Node, connect: Connect, chain: Pages, wire: str
) -> None:
    client, keys = connect(node, wire), chain.keys(*range(4))
    chain.put(client, keys)
    assert len(page_of(node, chain, keys[1]).leaves) == 8 * (chain.nbytes // 256) > 8
    node.arena.view(page_of(node, chain, keys[1]).offset, chain.nbytes)[300] ^= 1
    assert ranged(client, chain, keys, 0) == [True] * 4  # the damaged part is not read
    # From an intact part into the damaged one
    assert ranged(client, chain, keys, 200) == [
        True,
        False,
        True,
        True,
    ]
    assert client.lookup(chain.namespace, keys).present == (True, False, True, True)


@pytest.mark.usefixtures("small_leaves")
def test_r05_leaves_of_another_page_are_noticed(
    node: Node, connect: Connect, chain: Pages, wire: str
) -> None:
    client, keys = connect(node, wire), chain.keys(*range(4))
    chain.put(client, keys)
    replace(node, chain, keys)
    page, other = page_of(node, chain, keys[1]), page_of(node, chain, keys[2])
    page.leaves = other.leaves
    assert ranged(client, chain, keys, 0) == [True, False, True, True]
