"""Calls spread over members that lack pages, fail, or are late, and their merged answers."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvstore.cluster.routing import answers_of_all, broadcast, in_parallel, try_owners
from kvstore.deadline import Deadline
from kvstore.errors import (
    DeadlineExceeded,
    Exhausted,
    InvalidRequest,
    KVStoreError,
    ProtocolError,
    Unavailable,
)

MEMBERS = "abcd"


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Make the calls one after the other in a random order; return their results or errors."""
    found: dict[int, Any] = {}
    for number in random.sample(range(len(calls)), len(calls)):
        try:
            found[number] = calls[number]()
        except KVStoreError as error:
            found[number] = error
    return [found[number] for number in range(len(calls))]


class Fleet:
    """Fake members: the pages that each has, and the error that each raises."""

    def __init__(self, **has: set[int]) -> None:
        self.has = has
        self.fails: dict[str, KVStoreError] = {}
        self.asked: list[tuple[str, list[int]]] = []
        self.limits: list[float] = []

    def ask(self, member: str, places: list[int], limit: Deadline) -> list[bool]:
        self.asked.append((member, places))
        self.limits.append(limit.seconds)
        if member in self.fails:
            raise self.fails[member]
        return [place in self.has[member] for place in places]

    def get(self, routes: Sequence[str], seconds: float = 10.0) -> list[bool]:
        ask_all = in_parallel(self.ask, together)
        return try_owners(routes, ask_all, lambda found: not found, False, Deadline(seconds))

    def remove(self, routes: Sequence[str]) -> list[bool]:
        return broadcast(
            routes,
            in_parallel(self.ask, together),
            lambda one, other: one or other,
            False,
            Deadline(10.0),
        )


def test_keys_go_to_their_first_owner_and_answers_keep_order() -> None:
    fleet = Fleet(a={0, 2}, b={1})
    assert fleet.get(["a", "b", "a", "b"]) == [True, True, True, False]
    assert sorted(fleet.asked) == [("a", [0, 2]), ("b", [1, 3])]


def test_keys_missing_at_first_owner_go_to_next() -> None:
    fleet = Fleet(a={0}, b={1}, c={2})
    assert fleet.get(["ab", "ab", "bc"]) == [True, True, True]
    assert sorted(fleet.asked) == [("a", [0, 1]), ("b", [1]), ("b", [2]), ("c", [2])]


@pytest.mark.parametrize("error", [Unavailable, DeadlineExceeded, Exhausted, ProtocolError])
def test_failing_member_is_asked_once_and_its_keys_go_to_next(
    error: type[KVStoreError],
) -> None:
    fleet = Fleet(b={0, 1}, c=set())
    fleet.fails["a"] = error("away")
    assert fleet.get(["ab", "a", "ca"]) == [True, False, False]
    assert [member for member, _ in fleet.asked].count("a") == 1


def test_call_without_any_answer_raises() -> None:
    fleet = Fleet()
    fleet.fails = {"a": Unavailable("a is away"), "b": Exhausted("b is full")}
    with pytest.raises((Unavailable, Exhausted), match=r"away|full"):
        fleet.get(["ab", "b"])


def test_invalid_request_is_raised_to_the_caller() -> None:
    fleet = Fleet(a={0})
    fleet.fails["b"] = InvalidRequest("a hash is too long")
    with pytest.raises(InvalidRequest, match="too long"):
        fleet.get(["a", "ba"])


def test_empty_call_asks_no_member() -> None:
    fleet = Fleet()
    assert fleet.get([]) == []
    assert fleet.asked == []


def test_keys_without_an_owner_are_misses() -> None:
    """A view whose members are all drained has no owners."""
    assert Fleet(a={1}).get(["", "a"]) == [False, True]


def test_owner_with_a_successor_gets_half_of_the_time() -> None:
    fleet = Fleet(a=set(), b={0})
    fleet.get(["ab"], 8.0)
    assert [round(limit) for limit in fleet.limits] == [4, 8]


def test_call_past_its_deadline_asks_no_further_member() -> None:
    fleet = Fleet(a=set(), b={0})

    def slow(member: str, places: list[int], limit: Deadline) -> list[bool]:
        while not limit.passed:
            pass
        while not whole.passed:
            pass
        return fleet.ask(member, places, limit)

    whole = Deadline(0.05)
    assert try_owners(
        ["ab"], in_parallel(slow, together), lambda found: not found, False, whole
    ) == [False]
    assert [member for member, _ in fleet.asked] == ["a"]


def test_broadcast_asks_all_owners_and_merges_answers() -> None:
    fleet = Fleet(a={0}, b={1}, c=set())
    assert fleet.remove(["ab", "bc", "ac"]) == [True, True, False]
    assert sorted(fleet.asked) == [("a", [0, 2]), ("b", [0, 1]), ("c", [1, 2])]


def test_broadcast_raises_one_failure_after_asking_all() -> None:
    fleet = Fleet(a={0}, b={0})
    fleet.fails["a"] = Unavailable("a is away")
    with pytest.raises(Unavailable, match="a is away"):
        fleet.remove(["ab"])
    assert ("b", [0]) in fleet.asked


def test_random_fleets_find_every_page_of_live_owners(seed: int) -> None:
    drawn = random.Random(seed)
    for _ in range(300):
        count = drawn.randrange(1, 12)
        fleet = Fleet(
            **{member: {p for p in range(count) if drawn.random() < 0.4} for member in MEMBERS}
        )
        fleet.fails = {member: Unavailable(member) for member in MEMBERS if drawn.random() < 0.3}
        routes = ["".join(drawn.sample(MEMBERS, drawn.randrange(1, 4))) for _ in range(count)]
        alive = {member for route in routes for member in route} - set(fleet.fails)
        wanted = [
            any(p in fleet.has[m] and m not in fleet.fails for m in route)
            for p, route in enumerate(routes)
        ]
        try:
            assert fleet.get(routes) == wanted
        except Unavailable:
            assert not any(wanted)
        asked = [(member, place) for member, places in fleet.asked for place in places]
        assert len(asked) == len(set(asked)), "a member was asked twice for a key"
        for member, places in itertools.groupby(sorted(fleet.asked)):
            assert member[0] in alive or len(list(places)) == 1


def test_call_after_its_deadline_raises() -> None:
    fleet = Fleet(a={0})
    with pytest.raises(DeadlineExceeded):
        fleet.get(["a"], seconds=0.0)
    assert not fleet.asked


def test_unreachable_owner_differs_from_a_refusing_one() -> None:
    silent, refused = Unavailable("gone"), Exhausted("its disk is stopped")
    away: dict[str, KVStoreError] = {}
    assert answers_of_all({"a": 1, "b": silent}, away) == {"a": 1}
    assert away == {"b": silent}
    with pytest.raises(Exhausted):
        answers_of_all({"a": 1, "b": silent, "c": refused}, {})
    with pytest.raises(Unavailable):  # no member succeeded
        answers_of_all({"b": silent}, {})
    with pytest.raises(Unavailable):
        answers_of_all({"a": 1, "b": silent})
