"""`kvstore top`: rates from counters, and a screen of limited size."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from kvstore import Namespace, opaque_layout
from kvstore.cli.top.boards import board_of
from kvstore.cli.top.keyboard import parse_keys
from kvstore.cli.top.samples import Sample, cluster_sample, quantile_ms, sample
from kvstore.cli.top.screen import Controls, draw
from kvstore.cluster.view import Member, State, View
from kvstore.errors import Unavailable
from kvstore.results import (
    Counters,
    DiskStatus,
    NamespaceInfo,
    NodeStatus,
    OperationTimes,
    PeersStatus,
    RamStatus,
    RequestTimes,
)

SPACE = Namespace("m", opaque_layout(512))


def state(instance: bytes = b"i", **counters: int) -> NodeStatus:
    totals = Counters(**counters)
    space = NamespaceInfo(SPACE.digest, SPACE, counters=totals)
    return NodeStatus(instance_id=instance, totals=totals, namespaces=(space,))


def test_rates_are_differences_divided_by_time() -> None:
    values = sample(
        state(pages_asked=10, nbytes_put=100), state(pages_asked=30, nbytes_put=1100), 2.0
    )
    assert values["totals"]["asked_per_s"] == values["namespaces"][0]["asked_per_s"] == 10.0
    assert values["totals"]["put_nbytes_per_s"] == 500.0


def test_found_tokens_are_shown_by_tier() -> None:
    now = state(pages_asked=20, prefix_hits=10, pages_hit=10, pages_hit_disk=4, pages_hit_peer=6)
    values = sample(state(), now, 2.0)
    board = board_of(Sample({"address": "a", **values}))
    tokens = SPACE.layout.page_tokens
    found = dict(zip(board.columns, board.rows[0], strict=True))
    assert [found[f">{tier} TOK/s"].value for tier in ("RAM", "DISK", "PEER")] == [
        3.0 * tokens,
        2.0 * tokens,
        3.0 * tokens,
    ]
    assert board.total[-3:] == ["-"] * 3  # namespaces of one model have the same tokens


def test_restarted_node_counts_from_zero() -> None:
    values = sample(state(b"old", pages_asked=1000), state(b"new", pages_asked=6), 2.0)
    assert values["restarted"]
    assert values["totals"]["asked_per_s"] == values["namespaces"][0]["asked_per_s"] == 3.0


def test_reopened_namespace_has_no_negative_rate() -> None:
    before = state(pages_put=50)
    now = replace(before, namespaces=state(pages_put=4).namespaces)
    assert sample(before, now, 1.0)["namespaces"][0]["put_per_s"] == 0.0


def test_new_namespace_counts_from_zero() -> None:
    before = replace(state(), namespaces=())
    assert sample(before, state(pages_got=8), 4.0)["namespaces"][0]["got_per_s"] == 2.0


def cluster(count: int) -> View:
    return View(
        "fleet", 7, tuple(Member(f"n{i}", f"host{i}:7440", zone="r1") for i in range(count)), 2
    )


def node(instance: bytes = b"i", uptime_ms: int = 1000, **counters: int) -> NodeStatus:
    known: dict[str, Any] = {
        "instance_id": instance,
        "state": "SERVING",
        "uptime_ms": uptime_ms,
        "ram": RamStatus(capacity_nbytes=1),
    }
    return NodeStatus(**known, totals=Counters(**counters))


def test_rates_of_a_member_use_its_own_clock() -> None:
    """A member's rates use its own clock, so a late answer does not raise them."""
    before = {"n0": node(pages_got=10), "n1": node(uptime_ms=1000, pages_got=10)}
    now = {
        "host0:7440": node(uptime_ms=3000, pages_got=30),
        "host1:7440": node(uptime_ms=5000, pages_got=30),
    }
    shown_values = cluster_sample(cluster(2), now, before)
    assert [member["got_per_s"] for member in shown_values["members"]] == [10.0, 5.0]
    assert shown_values["totals"]["got_per_s"] == 15.0


def test_new_restarted_and_silent_members_are_shown() -> None:
    before = {"n1": node(b"old", 9000, pages_put=500), "n2": node()}
    now: dict[str, Any] = {
        "host0:7440": node(uptime_ms=90_000, pages_put=70),
        "host1:7440": node(b"new", 2000, pages_put=6),
        "host2:7440": Unavailable("it is away"),
    }
    shown_values = cluster_sample(cluster(4), now, before)
    new, restarted, silent, joined = shown_values["members"]
    assert (new["put_per_s"], restarted["put_per_s"], restarted["restarted"]) == (0.0, 3.0, True)
    assert (silent["answers"], silent["error"]) == (False, "it is away")
    assert (joined["answers"], joined["error"]) == (False, "not asked yet")
    assert shown_values["totals"]["put_per_s"] == 3.0


def screen(
    view: View, statuses: dict[str, Any], width: int = 80, controls: Controls | None = None
) -> list[str]:
    out = Console(
        file=io.StringIO(), width=width, height=24, force_terminal=True, color_system=None
    )
    before = {member.id: node() for member in view.members}
    board = board_of(Sample(cluster_sample(view, statuses, before), view, statuses))
    out.print(draw(board, controls or Controls(), out))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue().splitlines()


def times(*counts: int) -> RequestTimes:
    return RequestTimes((500_000, 1_000_000), (OperationTimes("get", counts),))


def busy(sweeping: bool = False) -> NodeStatus:
    status = node(
        uptime_ms=2000,
        pages_asked=100,
        prefix_hits=90,
        pages_got=4321,
        nbytes_got=1 << 30,
        pages_put=20,
    )
    return replace(
        status,
        request_times=times(0, 10, 0),
        ram=RamStatus(used_nbytes=900 << 30, capacity_nbytes=1 << 40),
        disk=DiskStatus(used_nbytes=9 << 40, capacity_nbytes=16 << 40),
        peers=PeersStatus(
            queue_nbytes=900 << 20,
            queue_nbytes_max=64 << 30,
            sweeping=sweeping,
            sweep_pages_missing=200,
            sweep_pages_fetched=50,
        ),
    )


def test_twelve_members_fit_one_screen() -> None:
    view = cluster(12)
    statuses: dict[str, Any] = {member.address: busy(member.id == "n3") for member in view.members}
    statuses["host5:7440"] = Unavailable("it is away")
    shown = screen(view, statuses)
    assert len(shown) < 24
    assert all(len(line) <= 80 for line in shown)
    rows = {line.split()[0]: line for line in shown if line.strip()}
    assert all(f"n{i}" in rows for i in range(12))
    assert "NO ANSWER" in rows["n5"]
    assert (
        " ".join(rows["n3"].split()) == "n3 serving 88 % 56 % 90 % 4,321 20 750 µs 995 µs 900.0 MiB"
    )
    assert " ".join(rows["all"].split()) == "all 88 % 56 % 90 % 47,531 220 750 µs 995 µs 9.7 GiB"


def test_members_in_trouble_are_shown_first() -> None:
    many = cluster(40)
    view = View(
        "fleet", 7, (*many.members[:-1], Member("n39", "host39:7440", state=State.DRAINING)), 2
    )
    statuses: dict[str, Any] = {member.address: busy() for member in view.members}
    statuses["host38:7440"] = Unavailable("it is away")
    shown = screen(view, statuses)
    assert len(shown) < 24
    rows = {line.split()[0] for line in shown if line.strip()}
    assert {"n38", "n39", "all"} <= rows
    assert shown[-1] == f"and {40 - len([row for row in rows if row.startswith('n')])} more members"
    assert len(rows & {f"n{i}" for i in range(40)}) == 14


def test_long_headings_leave_space_for_the_members() -> None:
    view = cluster(40)
    long = View(
        "a-cluster-of-many-members-with-a-long-name-in-eu-west-1", 123_456_789, view.members, 2
    )
    statuses: dict[str, Any] = {member.address: busy() for member in view.members}
    for width in (40, 60, 80):
        shown = screen(long, statuses, width)
        assert len(shown) < 24
        assert shown[-1].endswith("more members")


def busy_cluster() -> tuple[View, dict[str, Any]]:
    """Return four members: n0 and n1 in zone r1 with fewer hits, n2 silent, n3 in zone r2."""
    members = (*cluster(3).members, Member("n3", "host3:7440", zone="r2"))
    statuses: dict[str, Any] = {f"host{i}:7440": busy() for i in (0, 1, 3)}
    more = replace(busy().totals, pages_got=5000)
    statuses["host1:7440"] = replace(busy(), totals=more)
    statuses["host2:7440"] = Unavailable("it is away")
    return View("fleet", 7, members, 2), statuses


def order(shown: list[str]) -> list[str]:
    names = [line.split()[0] for line in shown if line.strip()]
    return [name for name in names if name in ("n0", "n1", "n2", "n3")]


def test_rows_are_sorted_and_filtered() -> None:
    view, statuses = busy_cluster()
    assert order(screen(view, statuses)) == ["n0", "n1", "n2", "n3"]
    by_rate = Controls(sort="GOT/s")
    assert order(screen(view, statuses, controls=by_rate))[0] == "n1"
    assert order(screen(view, statuses, controls=by_rate))[-1] == "n2"  # it has no value
    by_rate.reverse = True
    assert order(screen(view, statuses, controls=by_rate))[-2:] == ["n1", "n2"]
    filtered = screen(view, statuses, controls=Controls(text="R2"))
    assert order(filtered) == ["n3"]
    assert "1 of 4 members match" in "\n".join(filtered)


def test_latencies_are_those_of_the_interval() -> None:
    before = replace(busy(), request_times=times(1000, 0, 0))
    now = replace(before, request_times=times(1000, 98, 2))
    (get,) = sample(before, now, 2.0)["operations"]
    assert get == {"op": "get", "per_s": 50.0, "p50_ms": 0.755, "p99_ms": 1.0}


def test_quantiles_are_interpolated_within_a_bucket() -> None:
    bounds = [1_000_000, 2_000_000]
    assert quantile_ms(bounds, [100, 0, 0], 0.5) == 0.5
    assert quantile_ms(bounds, [50, 50, 0], 0.99) == 1.98
    assert quantile_ms(bounds, [0, 0, 5], 0.5) == 2.0


def test_keys_change_the_view() -> None:
    controls, columns = Controls(), ("MEMBER", ">RAM")
    for key, sort in (("s", "MEMBER"), ("s", "RAM"), ("s", ""), ("S", "RAM")):
        assert controls.press(key, columns)
        assert controls.sort == sort
    for key in ("/", *"rack", "backspace", "q", "enter"):
        assert controls.press(key, columns)
    assert (controls.text, controls.typing) == ("racq", False)
    assert controls.press("p", columns)
    assert controls.paused
    assert not controls.press("q", columns)


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"sq", ["s", "q"]),
        (b"\x1b[A\x1b[Bj", ["up", "down", "j"]),
        (b"\x1b", ["escape"]),
        (b"\x1b[1;5Cq", ["q"]),  # Ctrl and an arrow: unknown
        ("ü\r".encode(), ["ü", "enter"]),
        (b"\xff\x00q", ["q"]),
        (b"\x1b[", []),
    ],
)
def test_bytes_of_a_terminal_become_keys(data: bytes, keys: list[str]) -> None:
    assert parse_keys(data) == keys
