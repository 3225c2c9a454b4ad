"""R15: zero-hit causes are visible: hits and misses per reason and per namespace."""

from dataclasses import fields

import pytest
from known_pages import Pages
from local_nodes import Connect, StartNode

from kvstore import Client
from kvstore.results import Counters
from node.auth.access import Caller
from node.server import Node


def counters(client: Client, chain: Pages) -> Counters:
    """Return the counters of one namespace, from NodeStatus."""
    (info,) = [
        info for info in client.node_status().namespaces if info.digest == chain.namespace.digest
    ]
    assert info.namespace.model == chain.namespace.model
    return info.counters


def miss(client: Client, chain: Pages, keys: list[bytes]) -> dict[str, int]:
    """Return what one lookup adds to the miss counters, by reason."""
    before = counters(client, chain)
    client.lookup(chain.namespace, keys)
    after = counters(client, chain)
    names = [field.name for field in fields(Counters) if field.name.startswith("miss_")]
    added = {
        name.removeprefix("miss_"): getattr(after, name) - getattr(before, name) for name in names
    }
    return {reason: count for reason, count in added.items() if count}


@pytest.fixture
def node(start_node: StartNode) -> Node:
    return start_node(ram_nbytes=64 << 10, extent_nbytes=64 << 10)  # 16 pages


@pytest.fixture
def client(node: Node, connect: Connect, chain: Pages) -> Client:
    client: Client = connect(node)
    client.open(chain.namespace)
    return client


def test_r15_unknown_page_counts_as_absent(client: Client, chain: Pages) -> None:
    assert miss(client, chain, chain.keys(1, 2, 3)) == {"absent": 3}


def test_r15_evicted_page_counts_as_evicted(client: Client, chain: Pages) -> None:
    chain.put(client, chain.keys(*range(16)))
    chain.put(client, chain.keys(100, 101))
    assert miss(client, chain, chain.keys(*range(16))) == {"evicted": 2}
    assert counters(client, chain).pages_evicted == 2


def test_r15_removed_page_counts_as_removed(client: Client, chain: Pages) -> None:
    chain.put(client, chain.keys(1))
    client.remove(chain.namespace, chain.keys(1))
    assert miss(client, chain, chain.keys(1)) == {"removed": 1}


def test_r15_page_being_written_counts_as_writing(node: Node, client: Client, chain: Pages) -> None:
    with node.sessions.open(Caller("test")) as session:
        session.reserve(chain.namespace.digest, chain.keys(1), chain.nbytes)
        assert miss(client, chain, chain.keys(1)) == {"writing": 1}
    assert miss(client, chain, chain.keys(1)) == {"absent": 1}
    assert counters(client, chain).pages_put_aborted == 1


def test_r15_corrupt_page_counts_as_corrupt(node: Node, client: Client, chain: Pages) -> None:
    chain.put(client, chain.keys(1))
    node.arena.view(0, node.arena.nbytes)[:] = bytes(node.arena.nbytes)
    assert client.verify(chain.namespace, chain.keys(1)) == (0, 1, 0)
    assert miss(client, chain, chain.keys(1)) == {"corrupt": 1}


def test_r15_page_stored_again_is_a_hit(client: Client, chain: Pages) -> None:
    chain.put(client, chain.keys(1))
    client.remove(chain.namespace, chain.keys(1))
    chain.put(client, chain.keys(1))
    assert miss(client, chain, chain.keys(1)) == {}


def test_r15_totals_are_the_sums_of_namespace_counters(client: Client, chain: Pages) -> None:
    other = Pages("other")
    chain.put(client, chain.keys(0, 1, 3))
    other.put(client, other.keys(0))
    client.lookup(chain.namespace, chain.keys(0, 1, 2, 3))
    client.lookup(other.namespace, other.keys(5, 0))
    chain.get(client, chain.keys(0, 9))
    ours, theirs, totals = (
        counters(client, chain),
        counters(client, other),
        client.node_status().totals,
    )
    assert (ours.pages_asked, ours.prefix_hits, ours.pages_hit, ours.miss_absent) == (4, 2, 3, 1)
    assert (theirs.pages_asked, theirs.prefix_hits, theirs.pages_hit, theirs.miss_absent) == (
        2,
        0,
        1,
        1,
    )
    assert (ours.pages_put, ours.nbytes_put, ours.pages_got, ours.pages_get_missed) == (
        3,
        3 * 4096,
        1,
        1,
    )
    for field in fields(Counters):
        assert getattr(totals, field.name) == getattr(ours, field.name) + getattr(
            theirs, field.name
        )


@pytest.mark.parametrize("outcome", ["exists", "full", "busy"])
def test_r15_pages_not_stored_are_counted_by_reason(
    node: Node, client: Client, chain: Pages, outcome: str
) -> None:
    if outcome == "exists":
        chain.put(client, chain.keys(1))
        chain.put(client, chain.keys(1))
        assert counters(client, chain).pages_put_exists == 1
    elif outcome == "full":
        chain.put(client, chain.keys(*range(16)))
        client.pin(chain.namespace, chain.keys(*range(1, 9)), 60.0)
        held = node.tier.acquire(chain.namespace.digest, chain.keys(*range(9, 16)), False, 0).pages
        chain.put(client, chain.keys(0, 100, 101))
        assert counters(client, chain).pages_put_full == 2
        node.tier.release([page for page in held if page is not None])
    else:
        with node.sessions.open(Caller("test")) as session:
            session.reserve(chain.namespace.digest, chain.keys(1), chain.nbytes)
            chain.put(client, chain.keys(1))
        assert counters(client, chain).pages_put_busy == 1


def test_r15_totals_keep_the_counters_of_a_closed_namespace(
    start_node: StartNode, connect: Connect, chain: Pages
) -> None:
    client = connect(start_node(namespaces_max=1))
    client.lookup(chain.namespace, chain.keys(1, 2, 3))
    client.open(Pages("next").namespace)
    status = client.node_status()
    assert len(status.namespaces) == 1
    assert status.totals.miss_absent == 3
