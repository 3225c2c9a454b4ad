"""R13: RAM stays below a hard cap with LRU eviction, and the process does not grow."""

import random

from known_pages import Pages
from local_nodes import Connect, StartNode

from kvstore import PutOutcome
from kvstore.tools.node_process import NodeProcess

MIB = 1 << 20


def test_r13_long_traffic_of_mixed_sizes_stays_within_the_arena(
    start_node: StartNode, connect: Connect
) -> None:
    """Used slots never exceed the capacity while ten times as much is put, in all sizes."""
    node = start_node(ram_nbytes=2 * MIB, extent_nbytes=256 << 10)
    client = connect(node)
    rng = random.Random(13)
    chains = [Pages(f"{nbytes} bytes", nbytes) for nbytes in (4096, 10_000, 65_536, 200_000)]
    moved_nbytes = 0
    while moved_nbytes < 20 * MIB:
        chain = rng.choice(chains)
        start = rng.randrange(1000)
        count = max(1, (128 << 10) // chain.nbytes)
        keys = chain.keys(*range(start, start + count))
        assert PutOutcome.FULL not in chain.put(client, keys)
        assert chain.get(client, keys[:1]) == [True]
        moved_nbytes += count * chain.nbytes
        status = client.node_status()
        assert status.ram.used_nbytes <= status.ram.capacity_nbytes == 2 * MIB
        assert status.ram.extent_count == 8
    assert client.node_status().totals.pages_evicted > 0


def test_r13_process_does_not_grow_with_traffic(connect: Connect) -> None:
    """The process's memory does not grow with puts, pins, sessions and misses: no memory leak."""
    with NodeProcess("--ram-bytes", "4MiB", "--extent-bytes", "1MiB") as process:
        client = connect(process.address)
        chain = Pages("traffic")

        def traffic(start: int) -> int:
            for number in range(start, start + 200):
                keys = chain.keys(*range(number * 16, number * 16 + 16))
                client.put(chain.namespace, keys, [bytes(4096)] * 16)
                client.pin(chain.namespace, keys[:2], 0.001)
                client.lookup(chain.namespace, chain.keys(*range(number, number + 64)))
            return int(client.node_status().rss_nbytes)

        first = traffic(0)
        # 3,200 more pages; the records of evicted ones take 0.25 MiB
        assert traffic(200) - first < 2 * MIB
