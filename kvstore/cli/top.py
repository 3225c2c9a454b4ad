"""Run `kvstore top`: show a node's rates per second, from the differences of its counters.

In a cluster: rates and use of each member, and their sums. A member that does not answer is marked.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvstore.cli.invocation import Invocation
from kvstore.cli.members import (
    NOT_TOLD,
    Statuses,
    answers,
    by_id,
    headline,
    member_json,
    rebalance_progress,
    replication_line,
    state_of,
    stored_line,
    summed_peers,
    troubled_first,
)
from kvstore.cli.output import (
    console,
    emit,
    fitting,
    human_nbytes,
    pages_told,
    percent,
    table,
    told_all,
)
from kvstore.client import Client
from kvstore.cluster.view import Member, View
from kvstore.errors import InvalidRequest
from kvstore.results import Counters, NodeStatus

INTERVAL_S_MIN = 0.05
LOOK_S = 2.0  # time limit for members to answer; a late one is marked, and delays no other
# Lines of a screen beside the members: two empty ones, the table's head, the sums, the line about
# members that did not answer, and the cursor.
OTHER_LINES = 7

# Rates shown, and the counter that each is computed from.
RATES = {
    "asked_per_s": "pages_asked",
    "prefix_hits_per_s": "prefix_hits",
    "put_per_s": "pages_put",
    "got_per_s": "pages_got",
    "evicted_per_s": "pages_evicted",
    "put_nbytes_per_s": "nbytes_put",
    "got_nbytes_per_s": "nbytes_got",
}
COLUMNS = (
    "MEMBER",
    "STATE",
    ">RAM",
    ">DISK",
    ">HIT",
    ">GOT/s",
    ">PUT/s",
    ">QUEUED",
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


class Sample(NamedTuple):
    """One sample of `kvstore top`: what --json prints, and what a terminal shows."""

    values: dict[str, Any]
    view: Callable[[Console], Group]


def top(
    run: Invocation,
    interval: Annotated[
        float, typer.Option("--interval", "-i", metavar="SECONDS", help="Time between samples.")
    ] = 1.0,
    count: Annotated[
        int, typer.Option("--count", "-c", metavar="N", help="End after N samples; 0: go on.")
    ] = 0,
    once: Annotated[bool, typer.Option("--once", help="One sample, then end.")] = False,
) -> None:
    """Watch the node, or the members of a cluster, live.

    Requests, hit rate, throughput and evictions per second; of a cluster each member and the sums
    of those that answer. Ctrl-C ends it. With --json one object per sample is printed, one per
    line.

    \b
    Examples:
      kvstore top
      kvstore top --direct -a node7:7440
      kvstore top --interval 5
      kvstore top --once
      kvstore top --json --count 10 | jq .totals.put_nbytes_per_s
    """
    if interval < INTERVAL_S_MIN:
        raise InvalidRequest(f"--interval {interval:g} is below {INTERVAL_S_MIN} s")
    if count < 0:
        raise InvalidRequest(f"--count {count} is negative; 0 goes on until Ctrl-C")
    with run.client() as client:
        samples = _samples if client.view() is None else cluster_samples
        try:
            _watch(samples(client, interval, 1 if once else count), run.as_json)
        except KeyboardInterrupt:  # the usual way to end a live view
            return


def _watch(samples: Iterator[Sample], as_json: bool) -> None:
    out = console()
    if as_json:
        for sample in samples:
            emit(sample.values)
    elif out.is_terminal:
        with Live(console=out, auto_refresh=False) as live:
            for sample in samples:
                live.update(sample.view(out), refresh=True)
    else:
        for sample in samples:
            out.print(sample.view(out))


def _samples(client: Client, interval_s: float, count: int) -> Iterator[Sample]:
    """Yield `count` samples (0: without end), each over one interval."""
    before, before_s = client.node_status(), time.monotonic()
    taken = 0
    while not count or taken < count:
        time.sleep(interval_s)
        now, now_s = client.node_status(), time.monotonic()
        values = sample(before, now, now_s - before_s)
        yield Sample(values, partial(_view, values, client.config.address))
        before, before_s = now, now_s
        taken += 1


def sample(before: NodeStatus, now: NodeStatus, seconds: float) -> dict[str, Any]:
    """Return the rates between two states of a node; a restart reset its counters."""
    restarted, whole = before.instance_id != now.instance_id, told_all(now)
    base = {} if restarted else {info.digest: info.counters for info in before.namespaces}
    zero = Counters()
    namespaces = [
        {
            "digest": info.digest.hex(),
            "model": info.namespace.model,
            "page_count": info.page_count,
            **rates(base.get(info.digest, zero), info.counters, seconds),
        }
        for info in now.namespaces
    ]
    return {
        "seconds": round(seconds, 3),
        "restarted": restarted,
        "state": now.state,
        "uptime_ms": now.uptime_ms,
        "session_count": now.session_count if whole else None,
        "rss_nbytes": now.rss_nbytes if whole else None,
        "ram_used_nbytes": now.ram.used_nbytes if whole else None,
        "ram_capacity_nbytes": now.ram.capacity_nbytes if whole else None,
        "page_count": pages_told(now),
        "totals": rates(zero if restarted else before.totals, now.totals, seconds),
        "namespaces": namespaces,
    }


def rates(before: Counters, now: Counters, seconds: float) -> dict[str, float]:
    """Return the rates of the counters per second."""
    # A namespace that was forgotten and opened again counts from zero: no negative rates.
    return {
        name: round(max(0, getattr(now, counter) - getattr(before, counter)) / seconds, 1)
        for name, counter in RATES.items()
    }


def _view(values: dict[str, Any], address: str, out: Console) -> Group:
    head = f"{address}  {values['state']}  "
    if values["ram_capacity_nbytes"] is not None:
        ram = (
            f"RAM {human_nbytes(values['ram_used_nbytes'])} of "
            f"{human_nbytes(values['ram_capacity_nbytes'])}"
        )
        head += f"{ram} ({percent(values['ram_used_nbytes'], values['ram_capacity_nbytes'])})  "
    head += f"pages {values['page_count']:,}"
    if values["session_count"] is not None:
        head += f"  sessions {values['session_count']}"
    columns = (
        "NAMESPACE",
        "MODEL",
        ">PAGES",
        ">ASKED/s",
        ">HIT",
        ">PUT/s",
        ">GOT/s",
        ">EVICTED/s",
        ">PUT",
        ">GOT",
    )
    rows = [
        _row(space["digest"][:12], space["model"], space["page_count"], space)
        for space in values["namespaces"]
        if space["page_count"]
        # skip namespaces without traffic, such as those of old benchmarks
        or any(space[rate] for rate in RATES)
    ]
    rows.append(_row("all", "", values["page_count"], values["totals"]))
    return Group(Text(head + "\n"), table(columns, rows))


def _row(digest: str, model: str, pages: int, rates: dict[str, float]) -> tuple[Any, ...]:
    return (
        digest,
        model,
        pages,
        f"{rates['asked_per_s']:,.0f}",
        percent(rates["prefix_hits_per_s"], rates["asked_per_s"]),
        f"{rates['put_per_s']:,.0f}",
        f"{rates['got_per_s']:,.0f}",
        f"{rates['evicted_per_s']:,.0f}",
        human_nbytes(rates["put_nbytes_per_s"]) + "/s",
        human_nbytes(rates["got_nbytes_per_s"]) + "/s",
    )


def cluster_samples(client: Client, interval_s: float, count: int) -> Iterator[Sample]:
    """Yield `count` samples (0: without end) of a cluster.

    Members may join, leave and fail to answer meanwhile.
    """
    before = by_id(*_look(client, client.config.timeout_s))
    limit_s = min(client.config.timeout_s, max(LOOK_S, interval_s))
    taken = 0
    while not count or taken < count:
        time.sleep(interval_s)
        view, statuses = _look(client, limit_s)
        values = cluster_sample(view, statuses, before)
        yield Sample(values, partial(_cluster_view, values, view, statuses))
        before |= by_id(view, statuses)
        taken += 1


def _look(client: Client, limit_s: float) -> tuple[View, Statuses]:
    statuses = client.statuses(limit_s)
    view = client.view()
    assert view is not None
    return view, statuses


def cluster_sample(view: View, statuses: Statuses, before: dict[str, NodeStatus]) -> dict[str, Any]:
    """Return each member's rates since its last answer; new members have none yet."""
    members = []
    for member in view.members:
        status = statuses.get(member.address)
        told = member_json(member, status)
        if isinstance(status, NodeStatus):
            told |= _of_member(before.get(member.id, status), status)
        members.append(told)
    there = [told for told in members if told["answers"]]
    totals = {name: round(sum(told[name] for told in there), 1) for name in RATES}
    head = {"cluster": view.cluster, "view": view.number, "replicas": view.replicas}
    return {**head, "members": members, "totals": totals}


def _of_member(before: NodeStatus, now: NodeStatus) -> dict[str, Any]:
    """Return a member's rates over its own clock: a late reply does not distort them."""
    restarted = before.instance_id != now.instance_id
    began_ms, base = (0, Counters()) if restarted else (before.uptime_ms, before.totals)
    values: dict[str, Any] = {
        "node_state": now.state,
        "uptime_ms": now.uptime_ms,
        "restarted": restarted,
    }
    for part, names in _FIELDS.items():
        told = getattr(now, part)
        values[part] = {name: getattr(told, name) for name in names} if told_all(now) else None
    return {**values, **rates(base, now.totals, max(1, now.uptime_ms - began_ms) / 1000)}


def _cluster_view(values: dict[str, Any], view: View, statuses: Statuses, out: Console) -> Group:
    told = dict(zip(view.members, values["members"], strict=True))
    head = _head(view, statuses)
    room = max(1, out.height - OTHER_LINES - len(head)) if out.is_terminal else len(told)
    shown = (
        list(view.members) if len(told) <= room else troubled_first(view.members, statuses)[:room]
    )
    rows = [_member_row(member, statuses, told[member]) for member in shown]
    rows.append(
        (
            "all",
            "",
            *_rates_row(answers(statuses), values["totals"]),
            "",
            "",
            *_volume(values["totals"]),
        )
    )
    cut = out.is_terminal  # folded lines would push members off the screen
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
        lines += [stored_line(whole), replication_line(summed_peers(whole))]
    return lines if len(whole) == len(there) else [*lines, NOT_TOLD]


def _member_row(member: Member, statuses: Statuses, told: dict[str, Any]) -> tuple[Any, ...]:
    status = statuses.get(member.address)
    about, zone = (member.id, state_of(member, status)), member.zone or "-"
    if not isinstance(status, NodeStatus):
        return (*about, *("-",) * 7, zone, *("-",) * 4)
    return (
        *about,
        *_rates_row([status], told),
        rebalance_progress(status.peers) or "-",
        zone,
        *_volume(told),
    )


def _rates_row(there: list[NodeStatus], told: dict[str, float]) -> tuple[Any, ...]:
    return (
        _share(sum(s.ram.used_nbytes for s in there), sum(s.ram.capacity_nbytes for s in there)),
        _share(sum(s.disk.used_nbytes for s in there), sum(s.disk.capacity_nbytes for s in there)),
        _share(told["prefix_hits_per_s"], told["asked_per_s"]),
        f"{told['got_per_s']:,.0f}",
        f"{told['put_per_s']:,.0f}",
        human_nbytes(sum(s.peers.queue_nbytes for s in there))
        if any(map(told_all, there))
        else "-",
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
