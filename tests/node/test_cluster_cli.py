"""`kvstore` commands against a cluster: members, owners of a key, and all other commands."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_runner import CliRunner
from fleet import tell, view_of, wait_replicated
from known_pages import Pages
from local_nodes import Connect, StartNode
from waiting import wait_until

from kvstore import Client
from kvstore.cli.commands import build
from kvstore.cli.top.samples import cluster_samples
from kvstore.cluster.view import Member, View
from node.cluster.membership import LostMember
from node.events import Kind
from node.server import Node


@pytest.fixture
def fleet(start_node: StartNode) -> list[Node]:
    nodes = [start_node() for _ in range(2)]
    members = tuple(
        Member(f"n{i}", f"127.0.0.1:{node.grpc.port}", 1.0 + i) for i, node in enumerate(nodes)
    )
    for number, node in enumerate(nodes):
        node.membership.become(View("fleet", 1, members), f"n{number}")
    return nodes


@pytest.fixture
def kvstore_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Node], Callable[..., Any]]:
    def at(node: Node) -> Callable[..., Any]:
        monkeypatch.setenv("KVSTORE_ADDRESS", f"127.0.0.1:{node.grpc.port}")
        monkeypatch.setenv("KVSTORE_CONNECT_TIMEOUT_S", "5")
        return lambda *args: CliRunner().invoke(build(), list(args), prog_name="kvstore")

    return at


@pytest.fixture
def kvstore(
    fleet: list[Node], kvstore_at: Callable[[Node], Callable[..., Any]]
) -> Callable[..., Any]:
    return kvstore_at(fleet[0])


def test_members_and_shares(fleet: list[Node], kvstore: Callable[..., Any]) -> None:
    shown = kvstore("cluster")
    assert shown.exit_code == 0
    assert "cluster fleet  health green  view 1  members 2, 2 answer" in shown.stdout
    assert "33.3 %" in shown.stdout
    found = json.loads(kvstore("cluster", "--json").stdout)
    assert [member["answers"] for member in found["members"]] == [True, True]
    assert [member["weight"] for member in found["members"]] == [1.0, 2.0]


def test_events_of_all_members_that_answer(
    fleet: list[Node], kvstore: Callable[..., Any], start_node: StartNode, kvstore_at: Any
) -> None:
    for node in fleet:
        node.events.add(Kind.LOST, "n9", "it left h9:7440 without a drain")
    shown = kvstore("cluster", "events", "--limit", "1")
    assert (shown.exit_code, len(shown.stdout.splitlines())) == (0, 3)
    (row,) = (line for line in shown.stdout.splitlines() if " lost " in line)
    assert row.rstrip().endswith("n0 n1")
    assert "without a data directory, events since the last start only: n0, n1" in shown.stderr
    view = View("fleet", 2, (*fleet[0].membership.view.members, Member("gone", "127.0.0.1:9")))
    fleet[0].membership.become(view)
    told = kvstore("cluster", "events", "--json")
    assert (told.exit_code, "without gone: " in told.stderr) == (3, True)
    assert kvstore("tenants", "list").exit_code == 3, "their sums lack a member"
    found = json.loads(told.stdout)
    assert found["away"] == ["gone"]
    (lost,) = (event for event in found["events"] if event["kind"] == "lost")
    assert (lost["member"], lost["seen_by"]) == ("n9", ["n0", "n1"])
    assert (
        json.loads(kvstore("cluster", "events", "--since", "1ms", "--json").stdout)["events"] == []
    )
    nothing = kvstore("cluster", "events", "--since", "1ms")
    assert (nothing.stdout, "no events since 20" in nothing.stderr) == ("", True)
    for wrong, remedy in (
        (("--since", "x"), "is not a duration"),
        (("--limit", "-1"), "below 0"),
    ):
        refused = kvstore("cluster", "events", *wrong)
        assert (refused.exit_code, remedy in refused.stderr) == (2, True)
    alone = kvstore_at(start_node())("cluster", "events", "--json")
    assert [event["kind"] for event in json.loads(alone.stdout)["events"]] == ["started"]


def test_commands_report_a_dead_member(
    fleet: list[Node], kvstore: Callable[..., Any], connect: Connect, pages: Pages
) -> None:
    pages.put(connect(fleet[0]), pages.keys(*range(20)))
    view = View("fleet", 2, (*fleet[0].membership.view.members, Member("gone", "127.0.0.1:9")))
    fleet[0].membership.become(view)
    for command, code in (("cluster", 3), ("status", 0)):
        shown = kvstore(command)
        assert shown.exit_code == code
        assert "NO ANSWER" in shown.stdout
        assert "gone: " in shown.stderr
    assert json.loads(kvstore("status", "--json").stdout)["namespaces"][0]["page_count"] == 20
    listed = kvstore("ls", "--model", pages.namespace.model)
    assert listed.exit_code == 0
    assert listed.stderr.count("without") == 1


def test_cluster_wide_command_reports_unreachable_members(
    fleet: list[Node], kvstore: Callable[..., Any], connect: Connect, pages: Pages
) -> None:
    """Results of the other members are printed, and not lost behind an error."""
    keys = pages.keys(*range(20))
    pages.put(connect(fleet[0]), keys)
    gone = View("fleet", 2, (*fleet[0].membership.view.members, Member("gone", "127.0.0.1:9")))
    for number, node in enumerate(fleet):
        node.membership.become(gone, f"n{number}")
    model, known = ("--model", pages.namespace.model), [key.hex() for key in keys]
    for command, wanted in (
        (("verify", *model, "--all"), {"intact": 20, "dropped": 0}),
        (("unpin", *known), {"unpinned": 0}),
        (("rm", *model, "--all", "--yes"), {"removed": 20, "absent": 0}),
        (
            ("bench", "--seconds", "0.05", "--page-nbytes", "4KiB", "--batch", "2"),
            {"mismatches": 0},
        ),
        (("cluster", "rebalance"), {"dry_run": False}),
    ):
        ran = kvstore(*command, "--json")
        printed = json.loads(ran.stdout)
        assert (ran.exit_code, printed["away"]) == (3, ["gone"]), ran.stderr
        assert wanted.items() <= printed.items()
        assert "gone" in ran.stderr
    assert [node.tier.visible_count for node in fleet] == [0, 0]


def test_verify_reports_a_damaged_page_while_a_member_is_away(
    fleet: list[Node], kvstore: Callable[..., Any], connect: Connect, pages: Pages
) -> None:
    pages.put(connect(fleet[0]), pages.keys(*range(20)))
    gone = View("fleet", 2, (*fleet[0].membership.view.members, Member("gone", "127.0.0.1:9")))
    for number, node in enumerate(fleet):
        node.membership.become(gone, f"n{number}")
    holder = next(node for node in fleet if node.tier.visible_count)
    (index,) = holder.tier.namespaces.all()
    damaged = next(iter(index.pages.values()))
    holder.arena.view(damaged.offset, 8)[:] = b"damaged!"
    ran = kvstore("verify", "--model", pages.namespace.model, "--all", "--json")
    assert (ran.exit_code, json.loads(ran.stdout)["dropped"]) == (5, 1)


def test_replicated_pages_are_counted_once(
    fleet: list[Node], kvstore: Callable[..., Any], connect: Connect, pages: Pages
) -> None:
    members = fleet[0].membership.view.members
    for number, node in enumerate(fleet):
        node.membership.become(View("fleet", 2, members, 2), f"n{number}")
    pages.put(connect(fleet[0]), pages.keys(*range(20)))
    wait_replicated(fleet)
    assert "COPIES IN RAM" in kvstore("ls").stdout
    refused = kvstore("rm", "--model", pages.namespace.model, "--all")
    assert "Remove all 20 pages of" in refused.stderr
    removed = kvstore("rm", "--model", pages.namespace.model, "--all", "--yes")
    assert removed.stdout == "removed 20 of 20 pages\n"


def test_commands_work_as_with_one_node(
    fleet: list[Node], kvstore: Callable[..., Any], connect: Connect, pages: Pages
) -> None:
    keys = pages.keys(*range(20))
    pages.put(connect(fleet[1]), keys)
    known = [key.hex() for key in keys]
    listed = json.loads(kvstore("ls", "--model", pages.namespace.model, "--json").stdout)["pages"]
    assert [page["prefix_hash"] for page in listed] == sorted(known)
    owners = json.loads(kvstore("cluster", "owners", *known[:4], "--json").stdout)["keys"]
    assert {some for found in owners for some in found["owners"]} <= {"n0", "n1"}
    assert [found["prefix_hash"] for found in owners] == known[:4]
    assert "(127.0.0.1:" in kvstore("cluster", "owners", known[0]).stdout
    assert kvstore("lookup", *known).exit_code == 0
    assert kvstore("verify", *known).exit_code == 0
    assert json.loads(kvstore("status", "--json").stdout)["namespaces"][0]["page_count"] == 20
    assert kvstore("rm", *known).exit_code == 0
    assert [node.tier.visible_count for node in fleet] == [0, 0]


def test_commands_with_direct_ask_one_member(
    fleet: list[Node], kvstore: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = os.environ["KVSTORE_ADDRESS"]
    monkeypatch.setenv("KVSTORE_DIRECT", "1")
    assert json.loads(kvstore("status", "--json").stdout)["state"] == "SERVING"
    assert (
        "member n0 of fleet  view 1  members 2  replicas 1  registry static"
        in kvstore("status").stdout
    )
    assert "members" not in json.loads(
        kvstore("top", "--once", "--interval", "0.05", "--json").stdout
    )
    assert kvstore("cluster").exit_code == 2
    monkeypatch.setenv("KVSTORE_ADDRESS", f"{one},127.0.0.1:9")
    for command in ("top", "scrub", "recover"):
        refused = kvstore(command)
        assert (
            refused.exit_code,
            "names 2 nodes, but this needs a single one" in refused.stderr,
        ) == (
            2,
            True,
        )
        assert (
            "a single one"
            not in kvstore(command, *(("--once",) if command == "top" else ()), "-a", one).stderr
        )
    monkeypatch.setenv("KVSTORE_DIRECT", "maybe")
    assert "KVSTORE_DIRECT='maybe' must be one of" in kvstore("status").stderr


def test_disk_commands_reach_all_members(
    start_node: StartNode,
    kvstore_at: Callable[[Node], Callable[..., Any]],
    tmp_path: Path,
    connect: Connect,
    pages: Pages,
) -> None:
    """Disks are scrubbed one after the other, and only stopped ones are recovered."""
    nodes = [start_node(data_dir=str(tmp_path / f"n{i}"), disk_nbytes=16 << 20) for i in range(2)]
    tell(nodes, view_of(nodes, replicas=2))
    kvstore = kvstore_at(nodes[0])
    pages.put(connect(nodes[0]), pages.keys(*range(6)))
    wait_replicated(nodes)
    assert json.loads(kvstore("flush", "--json").stdout) == {"pages_on_disk": 12, "away": []}
    scrubbed = json.loads(kvstore("scrub", "--json").stdout)
    assert (scrubbed["intact"], scrubbed["damaged"], scrubbed["away"]) == (12, 0, [])
    assert kvstore("recover").stdout == "no disk is stopped at the 2 members that answer\n"
    assert nodes[1].disk is not None
    nodes[1].disk.on_error("writing", OSError("it broke"))
    shown = kvstore("cluster")
    assert (
        "DEGRADED" in shown.stdout,
        "n1: DISK STOPPED: writing failed: it broke" in shown.stderr,
    ) == (True, True)
    assert json.loads(kvstore("recover", "--json").stdout) == {"recovered": ["n1"], "away": []}
    assert "DEGRADED" not in kvstore("cluster").stdout


def test_pending_removals_are_shown(
    fleet: list[Node], kvstore: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "page.bin"
    file.write_bytes(bytes(4096))
    put = ("put", str(file), "--create-opaque", "acknowledged", "--tokens", "1", "--ack")
    members = fleet[0].membership.view.members
    for node in fleet:
        node.membership.become(View("fleet", 2, (*members, Member("gone", "127.0.0.1:9", 1e6)), 2))
    monkeypatch.setenv("KVSTORE_TIMEOUT_S", "6")
    refused = kvstore(*put, "all")
    assert (refused.exit_code, "visible but not at all owners" in refused.stderr) == (4, True)
    assert (
        "replication 1 pages queued, 4.0 KiB of 1.0 MiB  sent 0  dropped 0"
        in kvstore("cluster").stdout
    )
    for node in fleet:
        node.membership.become(View("fleet", 3, members, 2))
    assert kvstore(*put, "all").exit_code == 0
    assert "sent 1  dropped 1" in kvstore("status").stdout
    assert kvstore(*put, "both").exit_code == 2
    monkeypatch.setenv("KVSTORE_DIRECT", "1")
    shown = [kvstore("status", "-a", f"127.0.0.1:{node.grpc.port}").stdout for node in fleet]
    assert ["dropped 1" in text for text in shown].count(True) == 1


def test_top_shows_all_members(
    fleet: list[Node], kvstore: Callable[..., Any], connect: Connect, pages: Pages
) -> None:
    shown = kvstore("top", "--once", "--interval", "0.05")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.startswith(
        "cluster fleet  health green  view 1  members 2, 2 answer  replicas 1  from static\n"
    )
    assert [
        line.split()[0]
        for line in shown.stdout.splitlines()
        if line.startswith(("n0", "n1", "all"))
    ] == [
        "n0",
        "n1",
        "all",
    ]
    ran = kvstore("top", "--count", "2", "--interval", "0.05", "--json")
    assert [json.loads(line)["view"] for line in ran.stdout.splitlines()] == [1, 1]


def test_members_come_and_go_while_top_runs(
    fleet: list[Node], connect: Connect, pages: Pages
) -> None:
    client, members = connect(fleet[0]), fleet[0].membership.view.members
    client.namespaces()
    samples = cluster_samples(client, 0.01, 0)

    def seen() -> list[tuple[str, bool]]:
        return [(member["id"], member["answers"]) for member in next(samples).values["members"]]

    def become(number: int, *members: Member) -> None:
        for node in fleet:
            node.membership.become(View("fleet", number, members))

    assert seen() == [("n0", True), ("n1", True)]
    become(2, *members, Member("gone", "127.0.0.1:9"))
    wait_until(lambda: seen() == [("n0", True), ("n1", True), ("gone", False)])
    become(3, *members[:1])
    wait_until(lambda: seen() == [("n0", True)])
    become(4, *members)
    wait_until(lambda: seen() == [("n0", True), ("n1", True)])
    pages.put(client, pages.keys(*range(20)))
    assert next(samples).values["totals"]["put_per_s"] > 0


def test_lost_member_is_shown_and_forgotten(fleet: list[Node], kvstore: Callable[..., Any]) -> None:
    """Regression: seconds after a kill the command said that all was well, and exited with 0."""
    assert kvstore("cluster").exit_code == 0
    lost, forgotten = [LostMember("n9", "h9:7440", 3.0, 1_700_000_000)], list[str]()
    for node in fleet:
        node.membership.lost = lambda: [some for some in lost if some.id not in forgotten]
        node.membership.forget_lost = forgotten.append
    view = fleet[0].membership.view
    assert view is not None
    share = 3.0 / (3.0 + sum(member.weight for member in view.members))
    shown = kvstore("cluster")
    assert shown.exit_code == 3
    assert f"members {len(fleet)}, {len(fleet)} answer, 1 lost  " in shown.stdout
    assert "fleet  health yellow  view" in shown.stdout
    (row,) = (line.split() for line in shown.stdout.splitlines() if line.startswith("n9"))
    assert (row[1], row[4:6]) == ("LOST", ["h9:7440", f"{100 * share:.1f}"])
    assert "n9: LOST since 2023-11-14 22:13:20 UTC, at h9:7440, with " in shown.stderr
    told = kvstore("cluster", "--json")
    assert told.exit_code == 3
    (lost_json,) = json.loads(told.stdout)["lost"]
    assert abs(lost_json.pop("share_alone") - share) < 0.1
    about = {"id": "n9", "address": "h9:7440", "since_unix_s": 1_700_000_000}
    assert lost_json == {**about, "share": share, "owners_left": 0}
    found = kvstore("doctor")
    assert (found.exit_code, "n9 at h9:7440, since 2023-11-14" in found.stdout) == (1, True)
    assert kvstore("cluster", "forget-member", "n9").stdout == "n9 is not missed any more\n"
    assert kvstore("cluster").exit_code == 0


def test_removal_names_lost_members_whose_disks_may_have_the_pages(
    fleet: list[Node], kvstore: Callable[..., Any], pages: Pages
) -> None:
    """Regression: pages that were removed while a member was lost returned with it, unsaid."""
    with Client(f"127.0.0.1:{fleet[0].grpc.port}") as client:
        pages.put(client, pages.keys(1, 2))
    for node in fleet:
        node.membership.lost = lambda: [LostMember("n9", "h9:7440", 3.0, 1_700_000_000)]
    told = kvstore("rm", "--model", pages.namespace.model, "--all", "--yes", "--json")
    assert told.exit_code == 3
    found = json.loads(told.stdout)
    assert (found["removed"], found["away"]) == (2, ["n9"])
    assert "n9: it is lost" in told.stderr
    assert "remove them again when it answers" in told.stderr


def test_member_of_a_fixed_list_is_not_forgotten(
    fleet: list[Node], kvstore: Callable[..., Any]
) -> None:
    refused = kvstore("cluster", "forget-member", "n9")
    assert refused.exit_code == 2
    assert "members of a fixed list are not forgotten" in refused.stderr
