"""Console snapshots: limited to what the viewer may see, rebuilt rarely, and bounded in size."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.identities import ALL, Principal, Role
from node.console import snapshot
from node.console.snapshot import COST_FACTOR, EVERY_S, FINDINGS_S, SAMPLES, SCOPES_MAX, Snapshots

OPERATOR = Principal("operator", ALL, Role.ADMIN)
TEAMS = [Principal("one", f"team-{number}", Role.READ) for number in range(2 * SCOPES_MAX)]
NOBODY: Any = None  # the fake service below ignores the caller


class Asked:
    """A fake service whose status names the tenant of `who`.

    Each call takes `took_s` on a fake clock.
    """

    def __init__(self) -> None:
        self.now_s, self.took_s, self.count = 100.0, 0.0, 0
        self.who = OPERATOR
        self.authorizer = SimpleNamespace(access=SimpleNamespace(open=False))

    def call(self, op: str, request: Any, caller: Any) -> Any:
        if op == "events":
            return pb.EventsReply(events=[pb.Event(kind="lost"), pb.Event(kind="returned")])
        self.count += 1
        self.now_s += self.took_s
        status = pb.NodeStatusReply(state="DRAINING", uptime_ms=self.count)
        status.tenants.add(tenant=self.who.tenant)
        status.peers.apart.append(f"of {self.who.tenant}")
        return status


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    service = Asked()
    monkeypatch.setattr(
        snapshot, "time", SimpleNamespace(monotonic=lambda: service.now_s, time=lambda: 0.0)
    )
    return service


@pytest.fixture
def snapshot_for(asked: Asked) -> Any:
    history = SimpleNamespace(
        visible_to=lambda principal, most, most_of_day: {"most": most}, latencies=list
    )
    heat, slow = SimpleNamespace(hottest=list), SimpleNamespace(newest=list)
    members = SimpleNamespace(describe=lambda status: {"cluster": "fleet"})
    parts: list[Any] = [asked, history, heat, members, slow]
    snapshots = Snapshots(*parts)

    def tell(who: Principal) -> dict[str, Any]:
        asked.who = who
        values: dict[str, Any] = json.loads(snapshots.next(who, NOBODY))
        return values

    tell.__dict__["kept"] = (snapshots._made, snapshots._found)
    return tell


def test_tenant_snapshot_has_no_members_calls_or_other_tenants(
    snapshot_for: Any,
) -> None:
    operator, one, other = snapshot_for(OPERATOR), snapshot_for(TEAMS[0]), snapshot_for(TEAMS[1])
    assert (operator["cluster"], operator["slow"]) == ({"cluster": "fleet"}, [])
    assert [event["kind"] for event in operator["events"]] == ["returned", "lost"]
    assert "DRAINING" in str(operator["findings"])
    for values, team in ((one, "team-0"), (other, "team-1")):
        assert values["cluster"] is None
        assert not {"latencies", "events"} & values.keys()
        assert [use["tenant"] for use in values["tenants"]] == [team]
        assert f"of {team}" in str(values["findings"])
    assert one["samples"] == {"most": SAMPLES}


def test_status_interval_grows_with_its_cost(snapshot_for: Any, asked: Asked) -> None:
    snapshot_for(OPERATOR)
    asked.now_s += EVERY_S - 0.1
    snapshot_for(OPERATOR)
    assert asked.count == 1, "a viewer soon after must get the same status"
    asked.now_s, asked.took_s = asked.now_s + 0.2, 1.0
    began_s = asked.now_s
    snapshot_for(OPERATOR)
    asked.now_s = began_s + COST_FACTOR - 0.5
    snapshot_for(OPERATOR)
    assert asked.count == 2
    asked.now_s = began_s + COST_FACTOR + 0.5
    snapshot_for(OPERATOR)
    assert asked.count == 3


def test_namespaces_are_compared_seldom(
    snapshot_for: Any, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, findings = [], snapshot.findings
    monkeypatch.setattr(
        snapshot, "findings", lambda status: (made.append(asked.now_s), findings(status))[1]
    )
    for _ in range(int(3 * FINDINGS_S)):
        snapshot_for(OPERATOR)
        asked.now_s += 1.0
    assert 2 <= len(made) <= 4


def test_console_snapshot_is_bounded(snapshot_for: Any) -> None:
    for who in TEAMS:
        snapshot_for(who)
        assert all(len(kept) <= SCOPES_MAX for kept in snapshot_for.kept)
