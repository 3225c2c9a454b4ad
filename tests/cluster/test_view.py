"""Cluster views: invalid ones are refused with the remedy; joining and draining members change
owners.
"""

from dataclasses import replace
from typing import Any

import pytest

from kvstore.cluster.view import (
    REPLICAS_MAX,
    WEIGHT_MAX,
    Member,
    State,
    View,
    parse_view,
    view_message,
)
from kvstore.errors import ConfigError
from kvstore.pb import kvstore_pb2 as pb

MEMBERS = tuple(Member(f"n{i}", f"host-{i}:7440", 1.0 + i, f"rack-{i % 2}") for i in range(4))
VIEW = View("fleet", 7, MEMBERS, 2)
KEYS = [bytes([number]) * 32 for number in range(200)]
NAMESPACE = bytes(16)


def in_state(number: int, state: State) -> View:
    members = list(MEMBERS)
    members[number] = replace(members[number], state=state)
    return replace(VIEW, members=tuple(members))


def test_view_is_equal_after_a_round_trip() -> None:
    view = in_state(2, State.DRAINING)
    assert parse_view(pb.View.FromString(view_message(view).SerializeToString())) == view


@pytest.mark.parametrize(
    ("wrong", "error_text"),
    [
        (
            {"members": (*MEMBERS, replace(MEMBERS[0], address="other:1"))},
            "two members of fleet have the id n0",
        ),
        (
            {"members": (*MEMBERS, replace(MEMBERS[0], id="n9"))},
            "two members of fleet have the address host-0:7440",
        ),
        ({"replicas": 0}, "replicas=0 must be in 1"),
        ({"replicas": REPLICAS_MAX + 1}, "must be in 1"),
        ({"cluster": ""}, "the cluster is called ''"),
        ({"cluster": "a/b"}, "the cluster is called 'a/b'"),
        (
            {"members": tuple(Member(f"n{i}", f"h{i}:1") for i in range(1025))},
            "1025 members are too many",
        ),
    ],
)
def test_invalid_cluster_is_refused(wrong: dict[str, Any], error_text: str) -> None:
    with pytest.raises(ConfigError, match=error_text):
        replace(VIEW, **wrong)


@pytest.mark.parametrize(
    ("wrong", "error_text"),
    [
        ({"id": "a b"}, "a member's id is called 'a b'"),
        ({"id": "x" * 65}, "use up to 64"),
        ({"zone": "ä"}, "the zone of n0"),
        ({"id": "n\udcff"}, "a member's id is called"),
        ({"address": "host:0"}, "not host:port"),
        ({"address": "host:²"}, "not host:port"),
        ({"address": "host:" + "1" * 5000}, "not host:port"),
        ({"weight": 0.0}, "weight of n0 is 0.0"),
        ({"weight": 1.001 * WEIGHT_MAX}, "it must be above 0, at most 1e\\+06"),
        ({"weight": float("nan")}, "weight of n0 is nan"),
        ({"weight": float("inf")}, "weight of n0 is inf"),
    ],
)
def test_invalid_member_is_refused(wrong: dict[str, Any], error_text: str) -> None:
    with pytest.raises(ConfigError, match=error_text):
        replace(MEMBERS[0], **wrong)


def test_unknown_member_state_is_refused() -> None:
    message = view_message(VIEW)
    message.members[1].state = 9  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="n1 is in an unknown state"):
        parse_view(message)


def test_in_a_settled_view_holders_are_owners() -> None:
    assert VIEW.settled
    assert VIEW.owners.owners(NAMESPACE, KEYS) == VIEW.holders.owners(NAMESPACE, KEYS)


def test_joining_member_owns_nothing() -> None:
    view = in_state(3, State.JOINING)
    assert not view.settled
    assert view.owners.owners(NAMESPACE, KEYS) == VIEW.owners.owners(NAMESPACE, KEYS)
    held = view.holders.owners(NAMESPACE, KEYS)
    assert held == replace(VIEW, members=MEMBERS[:3]).owners.owners(NAMESPACE, KEYS)


def test_draining_member_owns_nothing() -> None:
    view = in_state(0, State.DRAINING)
    assert not view.settled
    assert view.holders.owners(NAMESPACE, KEYS) == VIEW.owners.owners(NAMESPACE, KEYS)
    assert view.owners.owners(NAMESPACE, KEYS) == replace(VIEW, members=MEMBERS[1:]).owners.owners(
        NAMESPACE, KEYS
    )
