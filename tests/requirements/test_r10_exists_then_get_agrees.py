"""R10: "exists" then "get" agrees, or get returns a clean shorter prefix."""

import random
import threading

from known_pages import Pages
from local_nodes import Connect, StartNode

TURNS = 80


def test_r10_lookup_and_get_agree_without_changes_in_between(
    start_node: StartNode, connect: Connect, chain: Pages, wire: str
) -> None:
    client = connect(start_node(), wire)
    keys = chain.keys(*range(10))
    chain.put(client, [key for position, key in enumerate(keys) if position not in (3, 7)])
    present = client.lookup(chain.namespace, keys)
    assert present.prefix_pages == 3
    assert chain.get(client, keys) == list(present.present)
    assert chain.get(client, keys, prefix=True) == [True] * 3 + [False] * 7


def test_r10_get_after_eviction_is_a_shorter_prefix(
    start_node: StartNode, connect: Connect, chain: Pages, wire: str
) -> None:
    """A prefix get returns hits up to some page and misses from there on, despite eviction.

    Chains of 16 pages compete for 64 slots, so a get may find less than the lookup before it.
    """
    node = start_node(ram_nbytes=256 << 10, extent_nbytes=64 << 10)
    client = connect(node, wire)
    stop = threading.Event()

    def write() -> None:
        rng = random.Random(6)
        while not stop.is_set():
            start = 16 * rng.randrange(8)
            chain.put(client, chain.keys(*range(start, start + 16)))

    thread = threading.Thread(target=write)
    thread.start()
    disagreed = 0
    try:
        for turn in range(TURNS):
            start = 16 * (turn % 8)
            keys = chain.keys(*range(start, start + 16))
            found_before = client.lookup(chain.namespace, keys).prefix_pages
            hits = chain.get(client, keys, prefix=True)
            length = hits.index(False) if False in hits else 16
            assert hits == [True] * length + [False] * (16 - length)
            disagreed += length < found_before
    finally:
        stop.set()
        thread.join()
    assert client.node_status().totals.pages_evicted > 64
    print(f"{disagreed} of {TURNS} reads found less than the lookup before them")


def test_r10_touched_pages_are_evicted_later(
    start_node: StartNode, connect: Connect, chain: Pages, wire: str
) -> None:
    client = connect(start_node(ram_nbytes=64 << 10, extent_nbytes=64 << 10), wire)
    old, new = chain.keys(*range(8)), chain.keys(*range(8, 16))
    chain.put(client, old)
    chain.put(client, new)
    assert client.lookup(chain.namespace, old, touch=True).prefix_pages == 8
    chain.put(client, chain.keys(*range(100, 108)))
    assert chain.get(client, old) == [True] * 8
    assert chain.get(client, new) == [False] * 8
