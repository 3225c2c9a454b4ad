"""R23, chains longer than the node: put in several batches, they keep their beginning."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client, ClientConfig, Namespace, opaque_layout, prefix_hashes
from kvstore.measure.content import page_content
from kvstore.measure.node_process import NodeProcess

PAGE = 4096
SLOTS = 64


@pytest.fixture
def node() -> Iterator[NodeProcess]:
    flags = ("--ram-bytes", str(SLOTS * PAGE), "--extent-bytes", str(SLOTS * PAGE))
    with NodeProcess(*flags, "--batch-bytes-max", str(SLOTS * PAGE), "--batch-keys-max", "8") as node:
        yield node


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
@pytest.mark.parametrize("count", [50, 64, 72, 100])
def test_r23_a_chain_in_batches_keeps_its_head(node: NodeProcess, wire: str, count: int, tmp_path: Path) -> None:
    space = Namespace("long", opaque_layout(PAGE), salt=f"{wire}{count}")
    hashes = prefix_hashes(range(count), 1)
    with Client(ClientConfig(address=node.address, wire=wire)) as client:
        client.put(space, hashes, [page_content(space.digest, key, PAGE) for key in hashes])
        found = client.lookup(space, hashes).prefix_pages
        assert found >= min(count, SLOTS - 8), f"only {found} leading pages of {count} are left in {SLOTS} slots"
        buffers = [bytearray(PAGE) for _ in range(found)]
        assert all(client.get(space, hashes[:found], buffers, prefix=True))
        assert all(bytes(b) == page_content(space.digest, k, PAGE) for b, k in zip(buffers, hashes, strict=False))
