"""Placement of keys: every process computes the same owners, in proportion to the weights.

Pages move only when they must.
"""

import collections
import json
import pathlib
import random
from collections.abc import Sequence

import pytest

from kvstore.cluster.view import SLOT_COUNT, Candidate, Placement
from kvstore.keys import NAMESPACE_DIGEST_NBYTES

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "placement.json"
NAMESPACE = bytes(range(NAMESPACE_DIGEST_NBYTES))


def equal(count: int) -> list[Candidate]:
    return [Candidate(f"node-{number}", 1.0) for number in range(count)]


def some_keys(count: int, seed: int = 1) -> list[bytes]:
    drawn = random.Random(seed)
    return [drawn.randbytes(32) for _ in range(count)]


def owners(
    candidates: Sequence[Candidate], keys: Sequence[bytes], replicas: int = 1
) -> list[tuple[str, ...]]:
    return Placement(candidates, replicas).owners(NAMESPACE, keys)


def test_golden_owners() -> None:
    """The owners match a golden file: any change would move every page of every cluster."""
    for case in json.loads(GOLDEN.read_text()):
        candidates = [Candidate(*candidate) for candidate in case["candidates"]]
        keys = [bytes.fromhex(key) for key in case["prefix_hashes"]]
        found = Placement(candidates, case["replicas"]).owners(
            bytes.fromhex(case["namespace"]), keys
        )
        assert [list(some) for some in found] == case["owners"]


def test_member_order_does_not_change_owners() -> None:
    members, keys = equal(9), some_keys(500)
    assert owners(members, keys, 3) == owners(members[::-1], keys, 3)


@pytest.mark.parametrize("weights", [(1.0,) * 8, (1.0, 2.0, 4.0)])
def test_shares_are_in_proportion_to_weights(weights: tuple[float, ...]) -> None:
    members, keys = (
        [Candidate(f"node-{i}", weight) for i, weight in enumerate(weights)],
        some_keys(40_000),
    )
    counts = collections.Counter(first for first, *_ in owners(members, keys))
    for member in members:
        expected = len(keys) * member.weight / sum(weights)
        assert abs(counts[member.id] - expected) < 6 * expected**0.5


def test_joining_member_takes_its_share_and_nothing_else_moves() -> None:
    keys, joined = some_keys(40_000), Candidate("new", 1.0)
    before, after = owners(equal(7), keys), owners([*equal(7), joined], keys)
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {("new",)}
    assert abs(len(moved) - len(keys) / 8) < 6 * (len(keys) / 8) ** 0.5


def test_pages_of_a_leaving_member_go_to_the_next_owner() -> None:
    keys, members = some_keys(5_000), equal(6)
    for old, new in zip(owners(members, keys, 2), owners(members[1:], keys, 2), strict=True):
        assert new[:1] == tuple(member for member in old if member != "node-0")[:1]
        assert len(set(new)) == 2


def test_member_with_more_weight_only_gains_pages() -> None:
    keys, members = some_keys(5_000), equal(4)
    heavier = [Candidate("node-0", 3.0), *members[1:]]
    for (old,), (new,) in zip(owners(members, keys), owners(heavier, keys), strict=True):
        assert new in (old, "node-0")


def test_replicas_are_in_different_zones() -> None:
    members = [Candidate(f"node-{i}", 1.0, "ab"[i % 2]) for i in range(8)]
    zones = {member.id: member.zone for member in members}
    for some in owners(members, some_keys(2_000), 2):
        assert len({zones[member] for member in some}) == 2
    for some in owners(members, some_keys(200), 3):  # there are only two zones
        assert len(set(some)) == 3
        assert len({zones[member] for member in some[:2]}) == 2


def test_members_without_a_zone_do_not_share_one() -> None:
    """Members without a zone count as being in different zones."""
    keys, zone = some_keys(200), {"node-0": "a", "node-1": "a"}
    mixed = [some._replace(zone=zone.get(some.id, "")) for some in equal(5)]
    for found, free in zip(owners(mixed, keys, 3), owners(equal(5), keys, 5), strict=True):
        second_of_a = [some for some in free if some in zone][1]
        assert found == tuple(some for some in free if some != second_of_a)[:3]


def test_zones_do_not_change_the_first_owner() -> None:
    keys = some_keys(1_000)
    zoned = [Candidate(f"node-{i}", 1.0, "abc"[i % 3]) for i in range(6)]
    assert [some[0] for some in owners(zoned, keys, 2)] == [
        first for (first,) in owners(equal(6), keys)
    ]


@pytest.mark.parametrize(("members", "replicas"), [(0, 1), (1, 3), (2, 3)])
def test_fewer_members_than_replicas(members: int, replicas: int) -> None:
    for some in owners(equal(members), some_keys(50), replicas):
        assert sorted(some) == [member.id for member in equal(members)]


def test_namespaces_have_independent_owners() -> None:
    """The ranks of an engine share hashes, so the parts of a page must spread over the nodes."""
    keys, placement = some_keys(1_000), Placement(equal(4), 1)
    others = placement.owners(bytes(NAMESPACE_DIGEST_NBYTES), keys)
    alike = sum(
        here == there for here, there in zip(placement.owners(NAMESPACE, keys), others, strict=True)
    )
    assert 150 < alike < 350


def test_placement_slot_is_computed_once() -> None:
    placement, keys = Placement(equal(3), 2), some_keys(100)
    first, again = placement.owners(NAMESPACE, keys), placement.owners(NAMESPACE, keys)
    assert all(here is there for here, there in zip(first, again, strict=True))
    assert SLOT_COUNT & (SLOT_COUNT - 1) == 0
