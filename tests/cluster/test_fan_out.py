"""The time that routing takes before any member is asked."""

import time

import pytest

from kvstore import ClientConfig, DeadlineExceeded, Namespace, opaque_layout
from kvstore.cluster.fan_out import FanOut
from kvstore.cluster.view import MEMBERS_MAX, Member, View
from kvstore.deadline import Deadline

LATE_S = 0.25


def test_routing_many_keys_to_many_members_ends_at_the_deadline() -> None:
    members = tuple(Member(f"n{i}", f"10.0.{i >> 8}.{i & 255}:7440") for i in range(MEMBERS_MAX))
    namespace = Namespace(model="m", revision="r", layout=opaque_layout(4096))
    keys = [number.to_bytes(32, "big") for number in range(4096)]
    fan_out = FanOut(ClientConfig())
    fan_out.nodes._view = View("fleet", 1, members, 2)
    began = time.thread_time()
    with pytest.raises(DeadlineExceeded):
        fan_out.route(
            lambda indices, link, limit: [True],
            namespace,
            keys,
            Deadline(0.2),
            lambda one: False,
            False,
        )
    assert time.thread_time() - began < 0.2 + LATE_S  # without a deadline it takes seconds
    fan_out.close()
