"""What a near node's lookups found, and the get that follows them: it asks the owners once."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fleet import NUMBERS, owned, tell, view_of
from known_pages import Pages
from local_nodes import ClusterClient

from kvstore.cluster.calls import look_up
from kvstore.cluster.view import View
from node.cluster import remote_pages
from node.cluster.remote_pages import KnownPages
from node.server import Node

DIGEST = bytes(32)
VIEW = View("near", 1, (), 1)


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of keys of each lookup of one member by another."""
    made = list[int]()

    def counted(link: Any, namespace: Any, keys: Sequence[bytes], *more: Any) -> list[int]:
        made.append(len(keys))
        return look_up(link, namespace, keys, *more)

    monkeypatch.setattr(remote_pages, "look_up", counted)
    return made


@pytest.fixture
def long_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nodes remember for as long as a busy machine may take."""
    monkeypatch.setattr(remote_pages, "KNOWN_S", 1e6)


@pytest.mark.usefixtures("long_memory")
def test_get_after_a_lookup_looks_nothing_up(
    cluster: list[Node], far: ClusterClient, near: ClusterClient, pages: Pages, lookups: list[int]
) -> None:
    keys, client = pages.keys(*NUMBERS), near(cluster)
    theirs = len(keys) - len(owned(view_of(cluster), pages, keys, "n0"))
    pages.put(far(cluster), keys)
    assert client.lookup(pages.namespace, keys).prefix_pages == len(keys)
    assert sum(lookups) == theirs
    assert pages.get(client, keys) == [True] * len(keys)
    assert sum(lookups) == theirs


@pytest.mark.usefixtures("long_memory")
def test_get_of_what_is_gone_since_the_lookup_is_a_miss_and_then_asks_anew(
    cluster: list[Node], far: ClusterClient, near: ClusterClient, pages: Pages, lookups: list[int]
) -> None:
    keys, client, putter = pages.keys(*NUMBERS), near(cluster), far(cluster)
    pages.put(putter, keys)
    assert client.lookup(pages.namespace, keys).prefix_pages == len(keys)
    for node in cluster[1:]:
        node.tier.remove(pages.namespace.digest, keys)
    mine = owned(view_of(cluster), pages, keys, "n0")
    expected = [key in mine for key in keys]
    assert pages.get(client, keys) == expected
    before = sum(lookups)
    pages.put(putter, keys)
    assert pages.get(client, keys) == [True] * len(keys)
    assert sum(lookups) > before


@pytest.mark.usefixtures("long_memory")
def test_get_after_a_lookup_asks_the_other_replica_of_a_lost_member(
    cluster: list[Node], far: ClusterClient, near: ClusterClient, pages: Pages
) -> None:
    tell(cluster, view_of(cluster, number=2, replicas=2))
    keys, client = pages.keys(*NUMBERS), near(cluster)
    pages.put(far(cluster), keys)
    for node in cluster:
        assert node.peers.replicator.wait_empty(60.0)
    assert client.lookup(pages.namespace, keys).prefix_pages == len(keys)
    cluster[1].tier.remove(pages.namespace.digest, keys)
    assert pages.get(client, keys) == [True] * len(keys)


@pytest.mark.usefixtures("long_memory")
def test_lookup_during_which_the_view_changes_is_not_remembered(
    cluster: list[Node],
    far: ClusterClient,
    near: ClusterClient,
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a get asked owners of the view before, which may have what was replaced."""
    view, keys, client = view_of(cluster), pages.keys(*NUMBERS), near(cluster)
    pages.put(far(cluster), keys)
    lookups = list[int]()

    def changing(link: Any, namespace: Any, keys: Sequence[bytes], *more: Any) -> list[int]:
        found = look_up(link, namespace, keys, *more)
        if not lookups:
            tell(cluster, replace(view, number=2))
        lookups.append(len(keys))
        return found

    monkeypatch.setattr(remote_pages, "look_up", changing)
    assert client.lookup(pages.namespace, keys).prefix_pages == len(keys)
    before = sum(lookups)
    assert pages.get(client, keys) == [True] * len(keys)
    assert sum(lookups) == 2 * before


def test_each_answer_is_used_once_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    known = KnownPages()
    known.note(VIEW, DIGEST, {b"a": "n1", b"b": "n2"})
    assert known.take(VIEW, DIGEST, [b"a", b"c"]) == ["n1", ""]
    assert known.take(VIEW, DIGEST, [b"a"]) == [""]
    assert known.take(VIEW, bytes(31), [b"b"]) == [""]
    now_s += 1.5
    known.note(VIEW, DIGEST, {b"d": "n1"})
    assert known.take(VIEW, DIGEST, [b"b"]) == ["n2"]
    known.note(VIEW, DIGEST, {b"e": "n1"})
    assert known.take(replace(VIEW, number=2), DIGEST, [b"d", b"e"]) == ["", ""]
    assert known.take(VIEW, DIGEST, [b"d", b"e"]) == ["", ""]
    known.note(VIEW, DIGEST, {b"f": "n1"})
    now_s += 2.5
    assert known.take(VIEW, DIGEST, [b"f"]) == [""]


@pytest.mark.usefixtures("long_memory")
def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_pages, "KNOWN_MAX", 10)
    known = KnownPages()
    for number in range(100):
        known.note(VIEW, DIGEST, {b"%d" % number: "n1"})
    found = known.take(VIEW, DIGEST, [b"%d" % number for number in range(100)])
    assert 10 <= found.count("n1") <= 22
    assert found[-10:] == ["n1"] * 10
