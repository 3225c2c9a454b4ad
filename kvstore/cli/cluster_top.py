"""`kvstore top` of a cluster: what each member does and has, and the sums; who does not answer is told as such."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from kvstore.cli.members import (
    NOT_TOLD,
    Statuses,
    answers,
    by_id,
    handing_line,
    headline,
    member_json,
    state_of,
    stored_line,
    summed_peers,
    sweep_progress,
    troubled_first,
)
from kvstore.cli.output import fitting, human_nbytes
from kvstore.cli.rates import RATES, Sample, rates
from kvstore.cli.told import told_all
from kvstore.client import Client
from kvstore.cluster.view import Member, View
from kvstore.pb import kvstore_pb2 as pb

LOOK_S = 2.0  # for members to answer in: who is late is shown as such, and the others without delay
OTHER_LINES = (
    7  # of a screen: above the members two empty ones, the table's head, the sums, who is left out, and the cursor
)
COLUMNS = (
    "MEMBER",
    "STATE",
    ">RAM",
    ">DISK",
    ">HIT",
    ">GOT/s",
    ">PUT/s",
    ">TO HAND",
    ">SWEEP",
    "ZONE",
    ">GOT",
    ">PUT",
    ">ASKED/s",
    ">EVICTED/s",
)
_FIELDS = {
    "ram": ("used_nbytes", "capacity_nbytes", "page_count"),
    "disk": ("used_nbytes", "capacity_nbytes", "page_count"),
    "peers": (
        "queue_pages",
        "queue_nbytes",
        "pages_dropped",
        "copy_count",
        "sweeping",
        "sweep_pages_missing",
        "sweep_pages_fetched",
    ),
}


def cluster_samples(client: Client, interval_s: float, count: int) -> Iterator[Sample]:
    """`count` samples (0: without end), each over one interval. Members come, go and fail to answer meanwhile."""
    before = by_id(*_look(client, client.config.timeout_s))
    limit_s = min(client.config.timeout_s, max(LOOK_S, interval_s))
    taken = 0
    while not count or taken < count:
        time.sleep(interval_s)
        view, statuses = _look(client, limit_s)
        values = cluster_sample(view, statuses, before)
        yield Sample(values, partial(_view, values, view, statuses))
        before |= by_id(view, statuses)
        taken += 1


def _look(client: Client, limit_s: float) -> tuple[View, Statuses]:
    statuses = client.statuses(limit_s)
    view = client.view()
    assert view is not None
    return view, statuses


def cluster_sample(view: View, statuses: Statuses, before: dict[str, pb.NodeStatusReply]) -> dict[str, Any]:
    """Each member's rates since it answered last; who was not heard of before has none yet."""
    members = []
    for member in view.members:
        status = statuses.get(member.address)
        told = member_json(member, status)
        if isinstance(status, pb.NodeStatusReply):
            told |= _of_member(before.get(member.id, status), status)
        members.append(told)
    there = [told for told in members if told["answers"]]
    totals = {name: round(sum(told[name] for told in there), 1) for name in RATES}
    head = {"cluster": view.cluster, "view": view.number, "replicas": view.replicas}
    return {**head, "members": members, "totals": totals}


def _of_member(before: pb.NodeStatusReply, now: pb.NodeStatusReply) -> dict[str, Any]:
    """Its own clock tells the time between: an answer that came late was not made late."""
    restarted = before.instance_id != now.instance_id
    began_ms, base = (0, pb.Counters()) if restarted else (before.uptime_ms, before.totals)
    values: dict[str, Any] = {"node_state": now.state, "uptime_ms": now.uptime_ms, "restarted": restarted}
    for part, names in _FIELDS.items():
        told = getattr(now, part)
        values[part] = {name: getattr(told, name) for name in names} if told_all(now) else None
    return {**values, **rates(base, now.totals, max(1, now.uptime_ms - began_ms) / 1000)}


def _view(values: dict[str, Any], view: View, statuses: Statuses, out: Console) -> Group:
    told = dict(zip(view.members, values["members"], strict=True))
    head = _head(view, statuses)
    room = max(1, out.height - OTHER_LINES - len(head)) if out.is_terminal else len(told)
    shown = list(view.members) if len(told) <= room else troubled_first(view.members, statuses)[:room]
    rows = [_row(member, statuses, told[member]) for member in shown]
    rows.append(("all", "", *_rates_row(answers(statuses), values["totals"]), "", "", *_volume(values["totals"])))
    cut = out.is_terminal  # lines that were folded would push members off the screen
    top = Text("\n".join(head) + "\n", no_wrap=cut, overflow="ellipsis" if cut else None)
    parts: list[RenderableType] = [top, fitting(COLUMNS, rows, out.width)]
    if len(shown) < len(told):
        parts.append(Text(f"and {len(told) - len(shown):,} more members"))
    return Group(*parts)


def _head(view: View, statuses: Statuses) -> list[str]:
    there = answers(statuses)
    whole = [status for status in there if told_all(status)]
    lines = [headline(view, statuses)]
    if whole or not there:
        lines += [stored_line(whole), handing_line(summed_peers(whole))]
    return lines if len(whole) == len(there) else [*lines, NOT_TOLD]


def _row(member: Member, statuses: Statuses, told: dict[str, Any]) -> tuple[Any, ...]:
    status = statuses.get(member.address)
    about, zone = (member.id, state_of(member, status)), member.zone or "-"
    if not isinstance(status, pb.NodeStatusReply):
        return (*about, *("-",) * 7, zone, *("-",) * 4)
    return (*about, *_rates_row([status], told), sweep_progress(status.peers) or "-", zone, *_volume(told))


def _rates_row(there: list[pb.NodeStatusReply], told: dict[str, float]) -> tuple[Any, ...]:
    return (
        _share(sum(s.ram.used_nbytes for s in there), sum(s.ram.capacity_nbytes for s in there)),
        _share(sum(s.disk.used_nbytes for s in there), sum(s.disk.capacity_nbytes for s in there)),
        _share(told["prefix_hits_per_s"], told["asked_per_s"]),
        f"{told['got_per_s']:,.0f}",
        f"{told['put_per_s']:,.0f}",
        human_nbytes(sum(s.peers.queue_nbytes for s in there)) if any(map(told_all, there)) else "-",
    )


def _volume(told: dict[str, float]) -> tuple[str, ...]:
    return (
        human_nbytes(told["got_nbytes_per_s"]) + "/s",
        human_nbytes(told["put_nbytes_per_s"]) + "/s",
        f"{told['asked_per_s']:,.0f}",
        f"{told['evicted_per_s']:,.0f}",
    )


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"
