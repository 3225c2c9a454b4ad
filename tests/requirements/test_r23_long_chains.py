"""R23: chains put in several batches, even longer than the node's RAM, keep their beginning."""

import pytest
from local_nodes import Connect, StartNode

from kvstore import Namespace, opaque_layout, prefix_hashes
from kvstore.tools.trace import page_content
from node.server import Node

PAGE = 4096
SLOTS = 64


@pytest.fixture(scope="module")
def node(start_node: StartNode) -> Node:
    """Return a node with SLOTS slots, which each test leaves empty."""
    nbytes = SLOTS * PAGE
    return start_node(
        ram_nbytes=nbytes, extent_nbytes=nbytes, batch_nbytes_max=nbytes, batch_keys_max=8
    )


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
@pytest.mark.parametrize("count", [50, 64, 72, 100])
def test_r23_chain_put_in_batches_keeps_its_head(
    node: Node, connect: Connect, wire: str, count: int
) -> None:
    space = Namespace("long", opaque_layout(PAGE), salt=f"{wire}{count}")
    hashes = prefix_hashes(range(count), 1)
    client = connect(node, wire)
    client.put(space, hashes, [page_content(space.digest, key, PAGE) for key in hashes])
    found = client.lookup(space, hashes).prefix_pages
    assert found >= min(count, SLOTS - 8), (
        f"only {found} leading pages of {count} are left in {SLOTS} slots"
    )
    buffers = [bytearray(PAGE) for _ in range(found)]
    assert all(client.get(space, hashes[:found], buffers, prefix=True))
    assert all(
        bytes(b) == page_content(space.digest, k, PAGE)
        for b, k in zip(buffers, hashes, strict=False)
    )
    client.remove_namespace(space)
    assert node.tier.visible_count == 0
