"""The display of a cluster's members: one screen for any number, problems, progress of sweeps."""

from dataclasses import replace
from typing import Any

import pytest
from cli_runner import Kvstore

from kvstore import Client, Namespace, opaque_layout
from kvstore.cli.members import (
    COLUMNS,
    NOT_TOLD,
    members_json,
    rebalance_line,
    rows,
    sums,
    troubles,
)
from kvstore.cluster.view import Member, State, View
from kvstore.doctor.members import health
from kvstore.errors import Unavailable
from kvstore.results import (
    DiskStatus,
    LostMember,
    NamespaceInfo,
    NodeStatus,
    PeersStatus,
    RamStatus,
)

MANY = View("fleet", 7, tuple(Member(f"n{i}", f"host{i}:7440") for i in range(40)), 2)


def serving(**peers: Any) -> NodeStatus:
    spaces = [Namespace(f"model-{i}", opaque_layout(512)) for i in range(30)]
    return NodeStatus(
        state="SERVING",
        ram=RamStatus(capacity_nbytes=1),
        peers=PeersStatus(**{"registry": "etcd", **peers}),
        namespaces=tuple(
            NamespaceInfo(space.digest, space, page_nbytes=512, page_count=i)
            for i, space in enumerate(spaces)
        ),
    )


@pytest.mark.parametrize("count", [3, 12, 40])
def test_status_is_one_screen(
    kvstore: Kvstore, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    view = View("fleet", 7, MANY.members[:count], 2)
    statuses: dict[str, Any] = {member.address: serving() for member in view.members}
    statuses[view.members[-1].address] = Unavailable("it is away")
    monkeypatch.setattr(Client, "view", lambda *_, **__: view)
    monkeypatch.setattr(Client, "statuses", lambda *_, **__: statuses)
    ran = kvstore("status")
    lines = ran.stdout.splitlines()
    assert len(lines) + ran.stderr.count("\n") <= 24
    assert any(line.startswith(f"n{count - 1} ") and "NO ANSWER" in line for line in lines)
    if count > 8:
        assert f"and {count - 8} more members: kvstore cluster" in lines
    assert lines[-1].endswith(" more namespaces: kvstore ls")
    shown = kvstore("cluster")
    assert (shown.code, sum(line.startswith("n") for line in shown.stdout.splitlines())) == (
        3,
        count,
    )
    named = {
        space["model"]: space["page_count"]
        for space in kvstore("status", "--json").json["namespaces"]
    }
    assert named["model-29"] == 29 * (count - 1)


def test_troubles_of_a_cluster_are_listed() -> None:
    view = View("fleet", 7, MANY.members[:4], 5)
    disk = DiskStatus(state="POISONED", reason="writing failed")
    stopped = replace(serving(), state="DEGRADED", disk=disk)
    silent = "for 7 s: no answer; the last view stays in force"
    deaf = serving(apart=("n9: protocol 9",), registry=silent)
    statuses: dict[str, Any] = {"host0:7440": serving(), "host1:7440": stopped, "host2:7440": deaf}
    assert troubles(view, statuses) == [
        "n1: DISK STOPPED: writing failed; repair it, then: kvstore recover",
        "n2: its registry does not answer: for 7 s: no answer; the last view stays in force",
        "outside the view: n9: protocol 9",
        "n3: not asked yet",
        "5 replicas are configured, but there are only 4 members",
    ]
    assert [row[1] for row in rows(view, view.members, statuses)] == [
        "serving",
        "DEGRADED",
        "serving",
        "NO ANSWER",
    ]


def test_health_and_pages_with_too_few_copies() -> None:
    view = View("fleet", 7, MANY.members[:3], 2)
    there = {member.id: serving(replicas=2) for member in view.members}
    statuses: dict[str, Any] = {f"host{i}:7440": there[f"n{i}"] for i in range(3)}
    assert (health(view, there), troubles(view, statuses)) == ("green", [])
    there["n0"] = serving(replicas=2, pages_under_replicated=1000)
    there["n2"] = serving(replicas=2, pages_under_replicated=234)
    statuses = {f"host{i}:7440": there[f"n{i}"] for i in range(3)}
    assert health(view, there) == "yellow"
    assert troubles(view, statuses) == [
        "1,234 pages have fewer than 2 copies, by n0, n2: these members fetch them; "
        "kvstore cluster events tells when it is done"
    ]
    told = members_json(view, statuses)
    assert (told["health"], told["pages_under_replicated"]) == ("yellow", 1234)
    alone = {"n1": there["n1"]}
    assert health(view, alone) == "red"  # a key may have both of its owners away
    assert health(view, {**alone, "n2": serving()}) == "yellow"
    lost = serving(lost=(LostMember(id="n9", owners_left=1),))
    assert health(view, {**dict.fromkeys(there, serving()), "n1": lost}) == "yellow"


def test_sums_leave_out_members_without_values() -> None:
    view = View("fleet", 7, MANY.members[:2], 2)
    whole = serving(pages_handed=7)
    own = replace(serving(), ram=RamStatus(), peers=PeersStatus())
    lines = sums(view, {"host0:7440": whole, "host1:7440": own})
    assert "sent 7 " in lines[2]
    assert lines[-1] == NOT_TOLD
    full, less = (
        dict(zip(COLUMNS, row, strict=True))
        for row in rows(view, view.members, {"host0:7440": whole, "host1:7440": own})
    )
    assert (full[">COPIES"], full[">DROPPED"]) == (0, 0)
    assert (less[">COPIES"], less[">DROPPED"], less[">PAGES"]) == ("-", "-", sum(range(30)))


def test_progress_of_sweeps_is_shown() -> None:
    found: dict[str, Any] = {"sweep_pages_missing": 8, "sweep_pages_fetched": 2}
    runs, looks = PeersStatus(sweeping=True, **found), PeersStatus(sweeping=True)
    over = PeersStatus(sweep_age_ms=90_000, sweep_pages_full=5, sweep_pages_failed=1, **found)
    assert rebalance_line(runs) == "rebalancing  2 of 8 pages fetched"
    assert rebalance_line(over) == (
        "rebalanced 1.5 min ago  2 of 8 pages fetched  5 pages found no space, 1 pages could not "
        "be fetched"
    )
    assert rebalance_line(PeersStatus()) == "not rebalanced yet"
    view = View(
        "fleet", 7, tuple(Member(f"n{i}", f"host{i}:7440", state=State.JOINING) for i in range(3))
    )
    statuses = {
        f"host{i}:7440": NodeStatus(ram=RamStatus(capacity_nbytes=1), peers=peers)
        for i, peers in enumerate((runs, looks, over))
    }
    assert sums(view, statuses)[-1] == (
        "rebalancing n0 25.0 %, n1 comparing  left n2 5 pages found no space, "
        "1 pages could not be fetched"
    )
