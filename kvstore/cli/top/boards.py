"""Turn samples of `kvstore top` into tables: of a node's namespaces, or of a cluster's members."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.cli.members import (
    NOT_TOLD,
    Statuses,
    answers,
    headline,
    rebalance_progress,
    replication_line,
    state_of,
    stored_line,
    summed_peers,
)
from kvstore.cli.output import human_latency, human_nbytes, percent, told_all
from kvstore.cli.top.samples import RATES, Sample
from kvstore.cli.top.screen import Board, Cell
from kvstore.cluster.view import Member, View
from kvstore.results import NodeStatus

NODE_COLUMNS = (
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
    ">RAM TOK/s",
    ">DISK TOK/s",
    ">PEER TOK/s",
)
CLUSTER_COLUMNS = (
    "MEMBER",
    "STATE",
    ">RAM",
    ">DISK",
    ">HIT",
    ">GOT/s",
    ">PUT/s",
    ">GET p50",
    ">GET p99",
    ">QUEUED",
    ">SWEEP",
    "ZONE",
    ">LOOKUP p50",
    ">LOOKUP p99",
    ">PUT p50",
    ">PUT p99",
    ">GOT",
    ">PUT",
    ">ASKED/s",
    ">EVICTED/s",
    ">ON DISK",
    ">AT PEERS",
)
SILENT = ("hello", "node_status")  # operations that `top` itself makes
NONE = Cell("-")


def board_of(sample: Sample) -> Board:
    """Return a sample as tables."""
    if sample.view is None:
        return _of_node(sample.values)
    return _of_cluster(sample.values, sample.view, sample.statuses)


def _of_node(values: Mapping[str, Any]) -> Board:
    head = f"{values['address']}  {values['state']}  "
    if values["ram_capacity_nbytes"] is not None:
        used, capacity = values["ram_used_nbytes"], values["ram_capacity_nbytes"]
        head += (
            f"RAM {human_nbytes(used)} of {human_nbytes(capacity)} ({percent(used, capacity)})  "
        )
    head += f"pages {values['page_count']:,}"
    if values["session_count"] is not None:
        head += f"  sessions {values['session_count']}"
    rows = [
        _namespace_row(space["digest"][:12], space["model"], space["page_count"], space)
        for space in values["namespaces"]
        # skip namespaces without traffic, such as those of old benchmarks
        if space["page_count"] or any(space[rate] for rate in RATES)
    ]
    total = _namespace_row("all", "", values["page_count"], values["totals"])
    total_texts = [cell.text for cell in total]
    return Board(
        [head], NODE_COLUMNS, rows, total_texts, _operations(values["operations"]), "namespaces"
    )


def _namespace_row(
    digest: str, model: str, pages: int, rates: Mapping[str, float]
) -> tuple[Cell, ...]:
    return (
        Cell(digest, digest),
        Cell(model, model),
        Cell(f"{pages:,}", pages),
        _per_s(rates["asked_per_s"]),
        _share(rates["prefix_hits_per_s"], rates["asked_per_s"]),
        _per_s(rates["put_per_s"]),
        _per_s(rates["got_per_s"]),
        _per_s(rates["evicted_per_s"]),
        _nbytes_per_s(rates["put_nbytes_per_s"]),
        _nbytes_per_s(rates["got_nbytes_per_s"]),
        *_hit_tokens(rates),
    )


def _hit_tokens(rates: Mapping[str, float]) -> tuple[Cell, ...]:
    """Return the tokens of found pages by tier; none of all namespaces, which share tokens."""
    if "page_tokens" not in rates:
        return (NONE,) * 3
    disk, peer = rates["hits_disk_per_s"], rates["hits_peer_per_s"]
    found = (max(0.0, rates["hits_per_s"] - disk), disk, peer)
    return tuple(_per_s(rate * rates["page_tokens"]) for rate in found)


def _of_cluster(values: Mapping[str, Any], view: View, statuses: Statuses) -> Board:
    members = dict(zip(view.members, values["members"], strict=True))
    rows = [_member_row(member, statuses, told) for member, told in members.items()]
    total = (
        *(Cell("all"), Cell("")),
        *_use(answers(statuses), values["totals"]),
        *_latencies(values["operations"], "get"),
        *(_queued(answers(statuses)), Cell(""), Cell("")),
        *_latencies(values["operations"], "lookup"),
        *_latencies(values["operations"], "put"),
        *_volume(values["totals"]),
    )
    return Board(
        _head(view, statuses),
        CLUSTER_COLUMNS,
        rows,
        [cell.text for cell in total],
        _operations(values["operations"]),
        "members",
        [i for i, row in enumerate(rows) if row[1].text != "serving"],
    )


def _head(view: View, statuses: Statuses) -> list[str]:
    there = answers(statuses)
    whole = [status for status in there if told_all(status)]
    lines = [headline(view, statuses)]
    if whole or not there:
        lines += [stored_line(whole), replication_line(summed_peers(whole))]
    return lines if len(whole) == len(there) else [*lines, NOT_TOLD]


def _member_row(member: Member, statuses: Statuses, told: Mapping[str, Any]) -> tuple[Cell, ...]:
    status = statuses.get(member.address)
    state = state_of(member, status)
    about = (Cell(member.id, member.id), Cell(state, state))
    zone = Cell(member.zone or "-", member.zone or None)
    if not isinstance(status, NodeStatus):
        return (*about, *(NONE,) * 9, zone, *(NONE,) * 10)
    return (
        *about,
        *_use([status], told),
        *_latencies(told["operations"], "get"),
        _queued([status]),
        Cell(rebalance_progress(status.peers) or "-"),
        zone,
        *_latencies(told["operations"], "lookup"),
        *_latencies(told["operations"], "put"),
        *_volume(told),
    )


def _use(there: Sequence[NodeStatus], rates: Mapping[str, float]) -> tuple[Cell, ...]:
    return (
        _part(there, "ram"),
        _part(there, "disk"),
        _share(rates["prefix_hits_per_s"], rates["asked_per_s"], digits=0),
        _per_s(rates["got_per_s"]),
        _per_s(rates["put_per_s"]),
    )


def _part(there: Sequence[NodeStatus], tier: str) -> Cell:
    """Return how much of a tier is used at these nodes."""
    tiers: list[Any] = [getattr(status, tier) for status in there if getattr(status, tier)]
    used: int = sum(one.used_nbytes for one in tiers)
    capacity: int = sum(one.capacity_nbytes for one in tiers)
    return _share(used, capacity, digits=0)


def _queued(there: Sequence[NodeStatus]) -> Cell:
    if not any(map(told_all, there)):
        return NONE
    nbytes: int = sum(status.peers.queue_nbytes for status in there)
    return Cell(human_nbytes(nbytes), nbytes)


def _latencies(operations: Sequence[Mapping[str, Any]], op: str) -> tuple[Cell, Cell]:
    """Return the median and the 99th percentile of an operation."""
    found = next((one for one in operations if one["op"] == op), None)
    if found is None:
        return NONE, NONE
    median, high = (found[name] for name in ("p50_ms", "p99_ms"))
    return Cell(human_latency(median), median), Cell(human_latency(high), high)


def _operations(operations: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            one["op"],
            f"{one['per_s']:,.0f}",
            human_latency(one["p50_ms"]),
            human_latency(one["p99_ms"]),
        )
        for one in operations
        if one["op"] not in SILENT
    ]


def _volume(rates: Mapping[str, float]) -> tuple[Cell, ...]:
    return (
        _nbytes_per_s(rates["got_nbytes_per_s"]),
        _nbytes_per_s(rates["put_nbytes_per_s"]),
        _per_s(rates["asked_per_s"]),
        _per_s(rates["evicted_per_s"]),
        _share(rates["hits_disk_per_s"], rates["hits_per_s"] + rates["hits_peer_per_s"]),
        _share(rates["hits_peer_per_s"], rates["hits_per_s"] + rates["hits_peer_per_s"]),
    )


def _per_s(rate: float) -> Cell:
    return Cell(f"{rate:,.0f}", rate)


def _nbytes_per_s(rate: float) -> Cell:
    return Cell(f"{human_nbytes(rate)}/s", rate)


def _share(part: float, whole: float, digits: int = 1) -> Cell:
    return Cell(f"{100 * part / whole:.{digits}f} %", part / whole) if whole else NONE
