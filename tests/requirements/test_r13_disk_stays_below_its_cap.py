"""R13: RAM and disk stay below hard caps under long traffic of mixed sizes; a failing write stops
neither the node nor its writer thread."""

import hashlib
import itertools
import os
import random
from pathlib import Path

import pytest
from known_pages import Pages
from local_nodes import Connect, StartNode

from kvstore import PutOutcome

MIB = 1 << 20
SETTINGS = {
    "ram_nbytes": 2 * MIB,
    "extent_nbytes": 256 << 10,
    "disk_nbytes": 8 * MIB,
    "disk_extent_nbytes": 512 << 10,
    "scrub_nbytes_per_s": 0,
    "log_level": "ERROR",
}


def keys(chain: Pages, *numbers: int) -> list[bytes]:
    return [hashlib.sha256(f"{chain.nbytes} {number}".encode()).digest() for number in numbers]


def used_nbytes(directory: Path) -> int:
    """Return the bytes of allocated blocks, as `du` does, less one metadata block per file."""
    return sum(max(0, os.stat(path).st_blocks * 512 - 4096) for path in directory.iterdir())


def test_r13_long_traffic_of_mixed_sizes_stays_below_both_caps(
    tmp_path: Path, start_node: StartNode, connect: Connect
) -> None:
    """RAM and disk stay below their caps while four times the disk's capacity is written.

    The test's clock advances a second per reading, as the disk's LRU has a resolution of 1 s.
    """
    node = start_node(data_dir=str(tmp_path), **SETTINGS)
    seconds = itertools.count(2_000_000_000)
    node.disk._clock_s = lambda: next(seconds)
    client = connect(node, timeout_s=20.0)
    rng = random.Random(13)
    chains = [Pages(f"{nbytes} bytes", nbytes) for nbytes in (4096, 10_000, 65_536, 200_000)]
    status = client.node_status()
    while status.disk.nbytes_written < 32 * MIB:
        chain = rng.choice(chains)
        start = rng.randrange(2000)
        wanted = keys(chain, *range(start, start + max(1, (512 << 10) // chain.nbytes)))
        assert PutOutcome.FULL not in chain.put(client, wanted)
        client.pin(chain.namespace, wanted[:1], 0.001)
        chain.get(client, keys(chain, *range(rng.randrange(2000), 2000))[:4])
        if rng.random() < 0.3:
            client.flush()
        status = client.node_status()
        assert status.ram.used_nbytes <= status.ram.capacity_nbytes == 2 * MIB
        assert status.disk.used_nbytes <= status.disk.capacity_nbytes == 8 * MIB
        assert status.disk.queue_nbytes <= status.disk.queue_nbytes_max
        assert used_nbytes(tmp_path / "extents") <= 8 * MIB
    assert status.disk.pages_evicted > 0
    assert status.disk.pages_corrupt == 0
    assert status.state == "SERVING"
    rows_nbytes = used_nbytes(tmp_path / "rows")
    assert rows_nbytes < 8 * MIB, "rows of evicted pages were not deleted"


def test_r13_failed_write_stops_neither_the_writer_nor_eviction(
    tmp_path: Path, start_node: StartNode, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start_node(data_dir=str(tmp_path), **SETTINGS)
    client = connect(node)
    chain = Pages("chain", 65_536)

    def fail(*_: object) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(node.disk.files, "write_all", fail)
        for start in range(0, 64, 8):  # twice what RAM holds, so it must evict
            assert PutOutcome.FULL not in chain.put(client, keys(chain, *range(start, start + 8)))
        patch.undo()
    client.recover()
    wanted = keys(chain, *range(100, 108))
    assert chain.put(client, wanted) == [PutOutcome.STORED] * 8
    client.flush()
    assert [stat.on_disk for stat in client.stat(chain.namespace, wanted)] == [True] * 8
