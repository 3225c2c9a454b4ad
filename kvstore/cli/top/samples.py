"""Compute rates and latencies from the differences of nodes' counters.

In a cluster: rates and use of each member, and their sums. A member that does not answer is marked.
"""

import time
from collections.abc import Iterator, Sequence
from operator import add, sub
from types import MappingProxyType
from typing import Any, NamedTuple

from kvstore.cli.members import Statuses, answers, by_id, member_json
from kvstore.cli.output import pages_told, told_all
from kvstore.client import Client
from kvstore.cluster.view import View
from kvstore.results import Counters, NodeStatus

LOOK_S = 2.0  # time limit for members to answer; a late one is marked, and delays no other
# Rates shown, and the counter that each is computed from.
RATES = {
    "asked_per_s": "pages_asked",
    "prefix_hits_per_s": "prefix_hits",
    "hits_per_s": "pages_hit",
    "hits_disk_per_s": "pages_hit_disk",
    "hits_peer_per_s": "pages_hit_peer",
    "put_per_s": "pages_put",
    "got_per_s": "pages_got",
    "evicted_per_s": "pages_evicted",
    "put_nbytes_per_s": "nbytes_put",
    "got_nbytes_per_s": "nbytes_got",
}
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
    """One sample: what --json prints, and for a cluster the view and the members' answers."""

    values: dict[str, Any]
    view: View | None = None
    statuses: Statuses = MappingProxyType({})


def node_samples(client: Client, interval_s: float, count: int) -> Iterator[Sample]:
    """Yield `count` samples (0: without end), each over one interval."""
    before, before_s = client.node_status(), time.monotonic()
    taken = 0
    while not count or taken < count:
        time.sleep(interval_s)
        now, now_s = client.node_status(), time.monotonic()
        values = sample(before, now, now_s - before_s)
        yield Sample({"address": client.config.address, **values})
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
            "page_tokens": info.namespace.layout.page_tokens,
            **rates(base.get(info.digest, zero), info.counters, seconds),
        }
        for info in now.namespaces
    ]
    return {
        "interval_s": round(seconds, 3),
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
        "operations": operations([(None if restarted else before, now)], seconds),
    }


def rates(before: Counters, now: Counters, seconds: float) -> dict[str, float]:
    """Return the rates of the counters per second."""
    # A namespace that was forgotten and opened again counts from zero: no negative rates.
    return {
        name: round(max(0, getattr(now, counter) - getattr(before, counter)) / seconds, 1)
        for name, counter in RATES.items()
    }


def operations(
    pairs: Sequence[tuple[NodeStatus | None, NodeStatus]], seconds: float
) -> list[dict[str, Any]]:
    """Return the rate and the latencies of each operation between two states of each node.

    Nodes with other bounds than the first, of another version, are left out.
    """
    bounds = next((list(now.request_times.bounds_ns) for _, now in pairs if told_all(now)), [])
    sums: dict[str, list[int]] = {}
    for before, now in pairs:
        if list(now.request_times.bounds_ns) != bounds:
            continue
        former = {one.op: one.counts for one in before.request_times.operations} if before else {}
        for one in now.request_times.operations:
            zero = [0] * len(one.counts)
            delta = map(sub, one.counts, former.get(one.op, zero))
            sums[one.op] = list(map(add, sums.get(one.op, zero), delta))
    return [
        {
            "op": op,
            "per_s": round(sum(counts) / seconds, 1),
            "p50_ms": quantile_ms(bounds, counts, 0.5),
            "p99_ms": quantile_ms(bounds, counts, 0.99),
        }
        for op, counts in sorted(sums.items(), key=lambda one: -sum(one[1]))
        if sum(counts) > 0
    ]


def quantile_ms(bounds_ns: Sequence[int], counts: Sequence[int], share: float) -> float:
    """Return a quantile of a histogram in milliseconds, interpolated within its bucket.

    Durations above the last bound count as that bound.
    """
    rank, passed, low = share * sum(counts), 0, 0
    for high, count in zip(bounds_ns, counts, strict=False):
        if count and passed + count >= rank:
            return round((low + (high - low) * (rank - passed) / count) / 1e6, 3)
        passed, low = passed + count, high
    return round(low / 1e6, 3)


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
        yield Sample(values, view, statuses)
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
    return {**head, "members": members, "totals": totals, "operations": _of_all(statuses, before)}


def _of_all(statuses: Statuses, before: dict[str, NodeStatus]) -> list[dict[str, Any]]:
    """Return the operations of all members together."""
    former = {status.instance_id: status for status in before.values()}
    pairs = [
        (former[now.instance_id], now) for now in answers(statuses) if now.instance_id in former
    ]
    longest_ms = max((now.uptime_ms - then.uptime_ms for then, now in pairs), default=0)
    return operations(pairs, max(1, longest_ms) / 1000)


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
    seconds = max(1, now.uptime_ms - began_ms) / 1000
    values["operations"] = operations([(None if restarted else before, now)], seconds)
    return {**values, **rates(base, now.totals, seconds)}
