"""The feed of a cluster, merged from its members' feeds."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from fleet import view_of
from known_pages import Pages
from local_nodes import ClusterClient, Connect
from replayed import Caller
from told_blocks import ToldBlocks

from kvstore import Client, InvalidRequest
from kvstore.cluster import feed as module
from kvstore.cluster.merged_feed import Change, MergedFeed, asked_members
from kvstore.cluster.view import Member, State, View
from kvstore.pb import kvstore_pb2 as pb
from node.server import Node

IDLE_S = 0.2
NUMBERS = range(24)
OF_N2 = ((5, State.SERVING), (6, None))


def ranks(name: str) -> list[Pages]:
    return [Pages(name, tp_rank=rank, tp_size=2) for rank in range(2)]


def listed(client: Client, parts: Sequence[Pages]) -> set[bytes]:
    found = [{page.prefix_hash for page in client.list_pages(part.namespace)} for part in parts]
    return found[0] & found[1]


def become(nodes: Sequence[Node], number: int, replicas: int = 1, **states: State | None) -> None:
    view = view_of(nodes, replicas, number, None, **states)
    for place, node in enumerate(nodes):
        if f"n{place}" in view.by_id:
            node.membership.become(view, f"n{place}")


def test_one_feed_of_all_members(cluster: list[Node], far: ClusterClient) -> None:
    """Ranks of a block lie at different members; replicas count once."""
    become(cluster, 5, replicas=2)
    parts, client = ranks("a fleet"), far(cluster)
    told = ToldBlocks(client.feed(idle_s=IDLE_S))
    told.until_kind("ready")
    for part in parts:
        part.put(client, part.keys(*NUMBERS), ack="all")
    space = parts[0].namespace
    told.until(lambda: told.of(space) == {*parts[0].keys(*NUMBERS)})
    client.remove(parts[1].namespace, parts[1].keys(*range(5)))
    told.until(lambda: told.of(space) == {*parts[0].keys(*range(5, 24))})
    assert told.of(space) == listed(client, parts)
    # A reader that comes later is told the same
    later = ToldBlocks(far(cluster).feed(idle_s=IDLE_S))
    later.until_kind("ready")
    assert later.of(space) == told.of(space)


def test_change_of_the_view_tells_all_anew(cluster: list[Node], far: ClusterClient) -> None:
    become(cluster, 5)
    parts, client = ranks("a changing fleet"), far(cluster)
    for part in parts:
        part.put(client, part.keys(*NUMBERS))
    told = ToldBlocks(client.feed(idle_s=IDLE_S))
    told.until_kind("ready")
    space, everything = parts[0].namespace, {*parts[0].keys(*NUMBERS)}
    assert told.of(space) == everything
    become(cluster, 6, n2=None)
    client.remove(parts[0].namespace, parts[0].keys(99))  # its reply tells of the new view
    told.until(lambda: told.kinds.count("reset") == 2)
    told.until_kind("ready")
    before, after = (view_of(cluster, 1, number, None, n2=state) for number, state in OF_N2)
    left = {
        key
        for key in everything
        for digests in [[part.namespace.digest for part in parts]]
        if all(
            before.owners.owners(digest, [key]) == after.owners.owners(digest, [key])
            for digest in digests
        )
    }
    assert told.of(space) == left
    assert 0 < len(left) < len(everything)


def test_pages_of_a_member_that_is_gone_are_removed(
    cluster: list[Node], far: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(cluster, 5)
    monkeypatch.setattr(module, "AWAY_S", 0.2)
    parts, client = ranks("a fleet with a loss"), far(cluster)
    for part in parts:
        part.put(client, part.keys(*NUMBERS))
    told = ToldBlocks(client.feed(idle_s=IDLE_S))
    told.until_kind("ready")
    space, everything = parts[0].namespace, {*parts[0].keys(*NUMBERS)}
    assert told.of(space) == everything
    monkeypatch.setattr(cluster[2].service, "draining", True)
    told.until(lambda: told.of(space) != everything)
    assert "away" in told.kinds
    monkeypatch.setattr(cluster[2].service, "draining", False)
    told.until(lambda: told.of(space) == everything)
    assert told.kinds.count("reset") == 1


def test_member_tells_single_namespaces_only(cluster: list[Node], connect: Connect) -> None:
    become(cluster, 5)
    feed = cluster[0].service.feed
    with pytest.raises(InvalidRequest, match="merge"):
        feed.poll(pb.FeedRequest(), Caller(), lambda model: True)
    assert feed.poll(pb.FeedRequest(member=True), Caller(), lambda model: True).head.begin


# ---- merging, without nodes ------------------------------------------------------------------


A, B, KV, KEY = b"A" * 16, b"B" * 16, b"kv" * 8, b"k" * 32


class Merging:
    """One member, and what the merged feed has told of it."""

    def __init__(self) -> None:
        self.feed = MergedFeed()
        self.feed.set_view(View("fleet", 1, (Member("n0", "h:1"),)))
        self.stored: dict[bytes, set[bytes]] = {}
        self.take(begin=True)

    def take(
        self, about: pb.FeedModel | None = None, removed: bool = False, begin: bool = False
    ) -> None:
        reply = pb.FeedReply(begin=begin)
        if about is not None:
            reply.models.append(about)
            reply.changes.add(model=about.id, removed=removed, prefix_hashes=[KEY])
        for change in self.feed.take("n0", reply):
            keys = self.stored.setdefault(change.model.id, set())
            (keys.difference_update if change.removed else keys.update)(change.prefix_hashes)

    def now(self) -> list[bytes]:
        return [model for model, keys in self.stored.items() if keys]


def part(digest: bytes, blocks: bytes = KV, **place: Any) -> pb.FeedModel:
    return pb.FeedModel(id=digest, blocks=blocks, **{"groups": 1, "ranks": 1, **place})


def test_namespace_that_belongs_to_other_blocks_later_leaves_its_own() -> None:
    merging = Merging()
    merging.take(part(A, A))
    assert merging.now() == [A]
    merging.take(part(A, groups=2))
    assert merging.now() == []
    merging.take(part(A, A))  # a member whose row is older
    assert merging.now() == []
    merging.take(part(B, group=1, groups=2))
    assert merging.now() == [KV]


def test_blocks_that_need_more_now_are_removed() -> None:
    merging = Merging()
    merging.take(part(A))
    assert merging.now() == [KV]
    merging.take(part(B, rank=1, ranks=3))
    assert merging.now() == []


def test_millions_of_ranks_cost_nothing() -> None:
    merging = Merging()
    merging.take(part(A, groups=2**31, ranks=2**31))
    assert merging.now() == []


def test_namespaces_without_pages_are_forgotten() -> None:
    merging = Merging()
    merging.take(part(A))
    merging.take(part(A), removed=True)
    assert merging.now() == []
    assert not merging.feed._spaces
    assert not merging.feed._blocks
    merging.take(part(A))
    assert merging.now() == [KV]
    merging.feed.forget("n0")
    assert not merging.feed._spaces


# ---- a model of the merged feed --------------------------------------------------------------

KEYS = [bytes([number]) * 32 for number in range(8)]
NAMES = ["n0", "n1", "n2"]
About = dict[str, Any]
PLACES: dict[bytes, About] = {
    bytes([number]) * 16: {"blocks": name * 16, "group": group, "rank": rank, **counts}
    for number, (name, group, rank, counts) in enumerate(
        [
            *((b"r", 0, rank, {"groups": 1, "ranks": 2}) for rank in range(2)),
            *((b"g", group, 0, {"groups": 2, "ranks": 1}) for group in range(2)),
            *((b"s", 0, 0, {"groups": 1, "ranks": 1}) for _ in range(2)),
        ]
    )
}
ALONE: About = {"group": 0, "rank": 0, "groups": 1, "ranks": 1}


class Members:
    """Random replies of members, what they have told, and what a reader of the merged feed has."""

    def __init__(self, seed: int) -> None:
        self.rng, self.feed, self.number = random.Random(seed), MergedFeed(), 0
        self.has: dict[tuple[str, bytes], set[bytes]] = {}
        self.fresh: dict[str, dict[bytes, set[bytes]]] = {}
        self.about: dict[bytes, About] = {}
        self.told: dict[bytes, set[bytes]] = {}
        self.change_view()

    def change_view(self) -> None:
        self.number += 1
        states = [State.SERVING] * 6 + [State.JOINING, State.DRAINING]
        others = [
            Member(name, f"{name}:1", state=self.rng.choice(states))
            for name in NAMES[1:]
            if self.rng.random() < 0.8
        ]
        members = (Member("n0", "n0:1"), *others)
        self.view = View("fleet", self.number, members, self.rng.randint(1, 2))
        for name in NAMES:
            if name not in self.view.by_id:
                self.lose(name)
        if self.feed.set_view(self.view):
            self.told = {}
            self.replay(self.feed.all())

    def lose(self, name: str) -> None:
        self.has = {place: keys for place, keys in self.has.items() if place[0] != name}
        self.fresh.pop(name, None)

    def forget(self) -> None:
        name = self.rng.choice([*self.view.by_id])
        self.lose(name)
        self.replay(self.feed.forget(name))

    def reply(self) -> None:
        name, reply = self.rng.choice([*self.view.by_id]), pb.FeedReply()
        if self.rng.random() < 0.15:
            reply.begin, self.fresh[name] = True, {}
        fresh = self.fresh.get(name)
        reply.snapshot = fresh is not None and self.rng.random() < 0.7
        for digest in self.rng.sample([*PLACES], self.rng.randint(0, 3)):
            keys, there = self.rng.sample(KEYS, 3), self.has.setdefault((name, digest), set())
            removed = fresh is None and self.rng.random() < 0.5
            (there.difference_update if removed else there.update)(keys)
            if fresh is not None:
                fresh.setdefault(digest, set()).update(keys)
            reply.changes.add(model=digest, removed=removed, prefix_hashes=keys)
            reply.models.append(self.describe(digest))
        if fresh is not None and not reply.snapshot:
            self.lose(name)
            self.has |= {(name, digest): keys for digest, keys in fresh.items()}
        self.replay(self.feed.take(name, reply))

    def describe(self, digest: bytes) -> pb.FeedModel:
        """Describe a namespace, perhaps as a member whose row does not know its part yet."""
        about = PLACES[digest] if self.rng.random() < 0.9 else {**ALONE, "blocks": digest}
        now = self.about.get(digest, about)
        if (about["groups"], about["ranks"]) >= (now["groups"], now["ranks"]):
            self.about[digest] = about
        return pb.FeedModel(id=digest, **about)

    def replay(self, changes: Iterable[Change]) -> None:
        for change in changes:
            keys, some = self.told.setdefault(change.model.id, set()), set(change.prefix_hashes)
            assert keys & some == (some if change.removed else set()), "told twice"
            (keys.difference_update if change.removed else keys.update)(some)

    def is_there(self, digest: bytes, key: bytes) -> bool:
        (asked,) = asked_members(self.view, digest, [key])
        return any(key in self.has.get((name, digest), ()) for name in asked)

    def stored(self) -> dict[bytes, set[bytes]]:
        """Return which blocks are stored, looked up one by one."""
        there = {digest for (_, digest), keys in self.has.items() if keys}
        self.about = {digest: about for digest, about in self.about.items() if digest in there}
        found: dict[bytes, set[bytes]] = {}
        for name in {about["blocks"] for about in self.about.values()}:
            own = {d: about for d, about in self.about.items() if about["blocks"] == name}
            groups = range(max(about["groups"] for about in own.values()))
            wanted = {
                (group, rank)
                for group in groups
                for rank in range(max([1, *_ranks(own.values(), group)]))
            }
            for key in KEYS:
                parts = {(a["group"], a["rank"]) for d, a in own.items() if self.is_there(d, key)}
                if wanted <= parts:
                    found.setdefault(name, set()).add(key)
        return found


def _ranks(abouts: Any, group: int) -> list[int]:
    return [about["ranks"] for about in abouts if about["group"] == group]


@pytest.mark.parametrize("seed", range(3))
def test_merged_feed_equals_a_model(seed: int) -> None:
    members = Members(seed)
    for _ in range(150):
        members.rng.choices((members.reply, members.change_view, members.forget), (20, 2, 1))[0]()
        told = {model: keys for model, keys in members.told.items() if keys}
        assert told == members.stored()
    for name in NAMES:
        members.feed.forget(name)
    assert not members.feed._spaces
    assert not members.feed._blocks
