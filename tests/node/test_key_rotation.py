"""Page keys that change while engines run: old and new keys share a cluster in which members
lie.
"""

import os
import random

import pytest
from fleet import owned, tell, view_of, wait_replicated
from forging import SECRET, forge
from known_pages import Pages
from local_nodes import Connect

from kvstore.errors import KVStoreError
from kvstore.page_hmac import PageKeys
from node.server import Node

SEEDS = int(os.environ.get("SEEDS", "1"))
NEXT = "b7" * 31 + "01"
NUMBERS = range(24)
STEPS = 30


def flip(data: bytearray) -> None:
    data[random.randrange(len(data))] ^= 1


@pytest.mark.parametrize("seed", range(SEEDS))
def test_old_and_new_page_keys_give_right_bytes_or_misses(
    cluster: list[Node], connect: Connect, seed: int
) -> None:
    """Members join, leave, sweep and change bytes; pages of both keys have near copies and
    replicas.
    """
    randomly, number = random.Random(seed), 10
    random.seed(seed)
    tell(cluster, view_of(cluster, 2, number))
    pages = {
        secret: Pages("rotated", key_id=PageKeys(bytes.fromhex(secret)).key_id)
        for secret in (SECRET, NEXT)
    }
    clients = {
        secret: [
            connect(node, near=near, page_key=secret) for node in cluster for near in ("none", "n0")
        ][:4]
        for secret in pages
    }
    hits = forged = 0
    for _ in range(STEPS):
        secret = randomly.choice([SECRET, NEXT])
        some, client = pages[secret], randomly.choice(clients[secret])
        keys = some.keys(*sorted(randomly.sample(NUMBERS, 8)))
        step = randomly.random()
        if step < 0.4:
            some.put(client, keys)
        elif step < 0.8:
            hits += some.get(client, keys).count(True)
        elif step < 0.9:
            liar = randomly.randrange(len(cluster))
            view = cluster[liar].membership.view
            assert view is not None
            for key in owned(view, some, keys, f"n{liar}")[:2]:
                try:
                    forge(cluster[liar], some, key, flip)
                    forged += 1
                except (AssertionError, KVStoreError):
                    pass  # the page is not there
        else:
            number += 1
            there = cluster if len(cluster[0].membership.view.members) < 3 else cluster[:2]  # type: ignore[union-attr]
            tell(cluster, view_of(there, 2, number))
            for place in range(len(there)):
                cluster[place].peers.rebalancer._sweep.run(view_of(there, 2, number), f"n{place}")
    wait_replicated(cluster)
    assert hits
    for secret, some in pages.items():
        assert some.put(clients[secret][0], some.keys(99))
        assert some.get(clients[secret][0], some.keys(99)) == [True]
