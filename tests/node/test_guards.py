"""Limits and checks that no other test exercises, each on its smallest part."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.cluster.view import MEMBERS_MAX, Member
from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import Exhausted
from kvstore.pb import kvstore_pb2 as pb
from node.cluster.etcd import Entry, KeysAtRevision
from node.cluster.rebalance import Missing, Rebalance
from node.cluster.registry_state import Registered, RegistryState
from node.memory.page import PutStatus
from node.serving.service import NEAR_S_MAX, _near_deadline
from node.serving.session import Sessions

KEY, DIGEST = b"k" * 32, b"d" * 16


class FakeTier:
    """A RAM tier with one free slot that records what becomes of it."""

    def __init__(self) -> None:
        self.ended: list[tuple[Any, ...]] = []

    def namespace(self, digest: bytes) -> Any:
        return SimpleNamespace(page_nbytes=4096, value=None)

    def clock_s(self) -> int:
        return 1000

    def reserve(self, *_: object) -> Any:
        page = SimpleNamespace(leaves=b"", offset=0)
        return SimpleNamespace(pages=[page], verdicts=[PutStatus.WRITE])

    def commit(self, reservation: Any, checksums: Any, ttl_s: int) -> None:
        self.ended.append(("commit", ttl_s))

    def abort(self, reservation: Any) -> None:
        self.ended.append(("abort",))


@pytest.mark.parametrize(("ttl_ms", "end"), [(500, ("abort",)), (5000, ("commit", 5))])
def test_page_that_expires_during_a_rebalance_is_not_committed(
    ttl_ms: int, end: tuple[Any, ...]
) -> None:
    """A page that is committed with a time to live of 0 s never expires."""
    rebalance, tier = Rebalance.__new__(Rebalance), FakeTier()
    rebalance._tier = cast(Any, tier)
    arrived = SimpleNamespace(leaves=b"x" * 8, checksum=b"c" * 16, ttl_ms=ttl_ms)
    rebalance._get = lambda *_: cast(Any, [arrived])  # type: ignore[method-assign]
    hits = rebalance._fetch_all([KEY], Missing(0, "n2", DIGEST, KEY, 1, 0))
    assert (hits, tier.ended) == ([end[0] == "commit"], [end])


def test_hold_that_the_tenants_quota_refuses_is_given_back_to_the_process() -> None:
    class FullTenants:
        def hold(self, tenant: str, nbytes: int) -> None:
            raise Exhausted("the quota is used up")

    tier = SimpleNamespace(slots=SimpleNamespace(region_nbytes=1 << 30))
    sessions = Sessions(cast(Any, tier), 16, 1 << 20, cast(Any, FullTenants()))
    session = SimpleNamespace(peer="peer", tenant="tenant")
    for _ in range(3):
        with pytest.raises(Exhausted, match="used up"):
            sessions.hold(cast(Any, session), 1 << 20)
        assert sessions.held.used == 0


@pytest.mark.parametrize(
    ("wait_ms", "seconds"), [(600_000, NEAR_S_MAX), (0, NEAR_S_MAX), (100, 0.1)]
)
def test_near_call_waits_for_members_at_most_for_its_limit(wait_ms: int, seconds: float) -> None:
    assert _near_deadline(pb.GetRequest(wait_ms=wait_ms)).seconds == seconds


def test_member_over_the_limit_stays_outside_the_view() -> None:
    state = RegistryState("fleet")
    entries = {state.config_key: Entry(b'{"replicas": 1, "base": 0}', 1, 0)}
    for number in range(MEMBERS_MAX + 1):
        member = Member(f"n{number}", f"h{number}:7440")
        value = Registered(member, PROTOCOL_VERSION, "", f"{number:032x}").value()
        entries[state.member_key(f"n{number}")] = Entry(value, 2 + number, 0)
    state.reset(KeysAtRevision(5000, entries))
    view = state.view()
    assert view is not None
    assert len(view.members) == MEMBERS_MAX
    assert [line.partition(" is ")[2] for line in state.apart] == [
        f"one too many: a cluster has at most {MEMBERS_MAX} members"
    ]
