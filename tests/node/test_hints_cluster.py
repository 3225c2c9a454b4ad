"""Hints in a cluster: prefetch to the near node, the others to owners, deletes to all."""

from fleet import NUMBERS, copies, owned, view_of
from known_pages import Pages
from local_nodes import ClusterClient
from waiting import wait_until

from kvstore import Hint, HintAction, HintResult
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
