"""Hints in a cluster: prefetch to the near node, the others to owners, deletes to all."""

from collections.abc import Callable

import pytest
from fleet import KB16, NUMBERS, copies, owned, plant, present, view_of
from known_pages import Pages
from local_nodes import ClusterClient, Connect
from sweeping import fleet as fleet
from sweeping import sweep
from sweeping import tell as tell
from waiting import wait_until

from kvstore import Hint, HintAction, HintResult
from kvstore.cluster.view import View
from node.server import Node


def test_prefetch_brings_a_chain_to_the_near_node(
    cluster: list[Node], far: ClusterClient, near: ClusterClient, pages: Pages
) -> None:
    keys, view = pages.keys(*NUMBERS), view_of(cluster)
    pages.put(far(cluster), keys)
    mine = owned(view, pages, keys, "n0")
    client = near(cluster)
    assert client.hint(pages.namespace, keys, Hint(HintAction.PREFETCH)) == HintResult(
        accepted=len(keys)
    )
    wait_until(lambda: copies(cluster[0])[0] == len(keys) - len(mine))
    assert pages.get(client, keys) == [True] * len(keys)


def test_chain_that_is_prefetched_in_parts_loses_its_end_first_at_its_owner(
    pair: list[Node], near: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: its owner evicted the head, without which the rest is of no use."""
    monkeypatch.setattr("node.hints.prefetch.PART_PAGES", 4)
    monkeypatch.setattr("node.hints.prefetch.IDLE_S", 0.0)
    chain, others, owner = Pages("prefetched", KB16), Pages("others", KB16), pair[1]
    keys = owned(view_of(pair), chain, chain.keys(*range(100)), "n1")[:24]
    plant(owner, chain, keys)
    client = near(pair)
    client.open(chain.namespace)
    client.hint(chain.namespace, keys, Hint(HintAction.PREFETCH))
    wait_until(lambda: not pair[0].service.hints.prefetcher._running)
    assert copies(pair[0])[0] == 24
    room = owner.tier.slots.region_nbytes // KB16
    plant(owner, others, others.keys(*range(room - 12)))
    left = present(owner, chain.namespace, keys)
    assert left == [True] * left.count(True) + [False] * left.count(False)
    assert 0 < left.count(True) < 24


def test_owners_retain_and_a_deleted_session_goes_everywhere(
    cluster: list[Node], far: ClusterClient, near: ClusterClient, pages: Pages
) -> None:
    keys, client = pages.keys(*NUMBERS), far(cluster)
    retain = Hint(HintAction.RETAIN, ttl_s=60.0, session="s", session_age_s=60.0)
    pages.put(client, keys)
    assert client.hint(pages.namespace, keys, retain) == HintResult(accepted=len(keys))
    assert sum(len(node.tier.eviction.order.kept) for node in cluster) == len(keys)
    assert pages.get(near(cluster), keys) == [True] * len(keys)
    assert copies(cluster[0])[0] > 0
    ended = client.hint(pages.namespace, (), Hint(HintAction.DELETE, session="s"))
    assert ended == HintResult(deleted=len(keys))
    assert copies(cluster[0])[0] == 0
    assert not any(client.lookup(pages.namespace, keys).present)


def test_pages_that_a_new_owner_fetched_are_older_than_a_session(
    fleet: list[Node], tell: Callable[..., View], connect: Connect, pages: Pages
) -> None:
    """Regression: a rebalanced prompt counted as stored when it came, and went with a session."""
    keys = pages.keys(*NUMBERS)
    tell(n2=None)
    pages.put(connect(fleet[0]), keys)
    stored_ms = max(node.tier.clock_ms() for node in fleet)
    wait_until(lambda: min(node.tier.clock_ms() for node in fleet) > stored_ms)
    moved = owned(tell(), pages, keys, "n2")
    assert sweep(fleet[2]).fetched == len(moved) > 0
    age_s = (fleet[2].tier.clock_ms() - stored_ms - 1) / 1000
    client = connect(fleet[0])
    client.hint(pages.namespace, keys, Hint(HintAction.NAME, session="s", session_age_s=age_s))
    assert client.hint(pages.namespace, (), Hint(HintAction.DELETE, session="s")).deleted == 0
