"""R23: a chain is evicted from its end, and lookup returns the longest prefix."""

from collections.abc import Iterator

import pytest
from known_pages import Pages
from local_nodes import Connect, StartNode

from kvstore import Client
from node.server import Node


@pytest.fixture(scope="module")
def node(start_node: StartNode) -> Node:
    """Return a node with room for 32 pages."""
    return start_node(ram_nbytes=128 << 10, extent_nbytes=128 << 10)


@pytest.fixture
def client(node: Node, connect: Connect, chain: Pages, wire: str) -> Iterator[Client]:
    """Yield a client of the empty node; remove the pages afterwards."""
    client: Client = connect(node, wire)
    assert node.tier.visible_count == 0
    yield client
    client.remove_namespace(chain.namespace)


def test_r23_chain_is_evicted_from_its_tail(client: Client, chain: Pages) -> None:
    ours = chain.keys(*range(20))
    chain.put(client, ours)
    chain.put(client, chain.keys(*range(100, 112)))
    for number in range(20):
        assert (
            client.lookup(chain.namespace, ours).present
            == (True,) * (20 - number) + (False,) * number
        )
        chain.put(client, chain.keys(200 + number))


@pytest.mark.parametrize("use", ["get", "touching lookup", "put again"])
def test_r23_reused_chain_outlives_a_newer_one(client: Client, chain: Pages, use: str) -> None:
    old, new = chain.keys(*range(16)), chain.keys(*range(100, 116))
    chain.put(client, old)
    chain.put(client, new)
    if use == "get":
        chain.get(client, old)
    elif use == "touching lookup":
        client.lookup(chain.namespace, old, touch=True)
    else:
        chain.put(client, old)
    chain.put(client, chain.keys(*range(200, 210)))
    assert client.lookup(chain.namespace, old).prefix_pages == 16
    assert client.lookup(chain.namespace, new).present == (True,) * 6 + (False,) * 10


def test_r23_shared_prefix_outlives_its_branches(client: Client, chain: Pages) -> None:
    trunk = chain.keys(*range(8))
    for branch in range(1, 20):
        chain.put(client, trunk + chain.keys(*range(branch * 100, branch * 100 + 8)))
    assert client.lookup(chain.namespace, trunk).prefix_pages == 8
    branches = [chain.keys(*range(branch * 100, branch * 100 + 8)) for branch in range(1, 20)]
    kept = [client.lookup(chain.namespace, branch).prefix_pages for branch in branches]
    assert kept == [0] * 16 + [8] * 3


@pytest.mark.parametrize(
    ("stored", "longest"),
    [
        ([], 0),
        ([1, 2, 3], 0),
        ([0], 1),
        ([0, 1, 2, 5, 6], 3),
        (list(range(10)), 10),
        ([9], 0),
        ([0, 9], 1),
    ],
)
def test_r23_longest_prefix_ends_at_the_first_missing_page(
    client: Client, chain: Pages, stored: list[int], longest: int
) -> None:
    """The prefix ends at the first missing page, though later pages exist; bisection would fail."""
    if stored:
        chain.put(client, chain.keys(*stored))
    found = client.lookup(chain.namespace, chain.keys(*range(10)))
    assert found.prefix_pages == longest
    assert found.present == tuple(number in stored for number in range(10))
