"""Show the members of a cluster: a row for each, sums over those that answer, and problems.

`at_each` runs a call at every member, and `without` reports those that did not answer.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kvstore.cli.exits import ExitCode, code_of
from kvstore.cli.invocation import Invocation
from kvstore.cli.output import (
    human_ms,
    human_nbytes,
    human_share,
    note,
    pages_told,
    percent,
    status_json,
    told_all,
)
from kvstore.client import Client
from kvstore.cluster.routing import Away
from kvstore.cluster.view import REGISTRIES, Member, State, View
from kvstore.doctor.members import few_copies, health, owned
from kvstore.errors import KVStoreError, Unavailable
from kvstore.results import (
    Counters,
    DiskStatus,
    Events,
    LostMember,
    NodeStatus,
    PeersStatus,
    RamStatus,
)
from kvstore.security.certificates import date

Statuses = Mapping[str, NodeStatus | KVStoreError]  # by address

Result = TypeVar("Result")
NO_ANSWER = "NO ANSWER"
SAME_EVENT_MS = 60_000  # clocks of members may differ, and etcd's watch may lag
DIGITS = 12  # of a digest, in tables
NOT_TOLD = "what members store, replicate and fetch is shown to identities of all tenants only"

# On a narrow terminal the first columns stay.
COLUMNS = (
    "MEMBER",
    "STATE",
    "ADDRESS",  # ids that nodes made themselves say nothing to people
    ">SHARE",
    ">HIT",
    ">RAM",
    ">DISK",
    ">PAGES",
    ">COPIES",
    ">QUEUED",
    ">DROPPED",
    ">UP",
    "IDENTITIES",
    "ZONE",
)
_STORED = ("used_nbytes", "capacity_nbytes", "page_count")
_SUMMED = (
    "queue_pages",
    "queue_nbytes",
    "queue_nbytes_max",
    "pages_handed",
    "pages_dropped",
    "copy_count",
    "copy_nbytes",
    "pages_fetched",
    "pages_fetch_failed",
)


def at_each(
    run: Invocation, do: Callable[[Client, str], Result]
) -> tuple[dict[str, Result], Away | None]:
    """Run a function at each member, and return its results and the members that failed.

    A node without a cluster has the id "" and None instead of failures. Raises a member's error if
    all members failed.
    """
    with run.client() as client:
        view = client.view()
        if view is None:
            return {"": do(client, "")}, None
    done: dict[str, Result] = {}
    away: Away = {}
    for member in view.members:
        try:
            with Client(run.config(address=member.address, direct=True)) as client:
                done[member.id] = do(client, member.id)
        except KVStoreError as error:
            away[member.id] = error
    if not done:
        raise next(iter(away.values()))
    return done, away


def report_failures(away: Away | None, remark: str = "") -> int:
    """Report the members that failed and return the exit code."""
    for member, error in (away or {}).items():
        note(f"without {member}: {error}{remark}")
    return max((code_of(error) for error in (away or {}).values()), default=ExitCode.OK)


def lost_away(client: Client) -> Away:
    """Return the lost members of a cluster as members that could not be called."""
    try:
        statuses = client.statuses()
    except KVStoreError:  # those in the view have reported their own errors
        return {}
    return {
        some.id: Unavailable("it is lost; if it returns with its disk, so do its pages")
        for some in lost_members(statuses)
    }


def away_json(away: Away | None) -> dict[str, Any]:
    """Return the JSON field for members that failed; empty without a cluster (None)."""
    return {} if away is None else {"away": sorted(away)}


def answers(statuses: Statuses) -> list[NodeStatus]:
    """Return the statuses of the members that answered."""
    return [status for status in statuses.values() if isinstance(status, NodeStatus)]


def by_id(view: View, statuses: Statuses) -> dict[str, NodeStatus]:
    """Return the statuses of the members that answered, by member id."""
    by_member = {member.id: statuses.get(member.address) for member in view.members}
    return {
        member: status for member, status in by_member.items() if isinstance(status, NodeStatus)
    }


def state_of(member: Member, status: NodeStatus | KVStoreError | None) -> str:
    """Return a member's state: its own if it is degraded or stopping, otherwise the view's."""
    if not isinstance(status, NodeStatus):
        return NO_ANSWER
    if status.state == "DEGRADED":
        return status.state
    return "stopping" if status.state == "DRAINING" else member.state.name.lower()


def troubled_first(members: Sequence[Member], statuses: Statuses) -> list[Member]:
    """Sort members with a problem before serving ones."""
    return sorted(
        members, key=lambda member: state_of(member, statuses.get(member.address)) == "serving"
    )


def rows(view: View, members: Sequence[Member], statuses: Statuses) -> list[tuple[Any, ...]]:
    """Return a table row per member."""
    weight = sum(member.weight for member in view.members if member.state is not State.DRAINING)
    found: list[tuple[Any, ...]] = []
    for member in members:
        status = statuses.get(member.address)
        share = percent(0.0 if member.state is State.DRAINING else member.weight, weight)
        about = (member.id, state_of(member, status), member.address, share)
        zone = member.zone or "-"
        if not isinstance(status, NodeStatus):
            found.append((*about, *("-",) * (len(COLUMNS) - len(about) - 1), zone))
            continue
        ram, disk, totals, peers = status.ram, status.disk, status.totals, status.peers
        found.append(
            (
                *about,
                percent(totals.prefix_hits, totals.pages_asked),
                human_share(ram.used_nbytes, ram.capacity_nbytes),
                human_share(disk.used_nbytes, disk.capacity_nbytes),
                pages_told(status),
                *(
                    (peers.copy_count, peers.queue_pages, peers.pages_dropped)
                    if told_all(status)
                    else ("-",) * 3
                ),
                human_ms(status.uptime_ms),
                digest_of(status)[:DIGITS] or "-",
                zone,
            )
        )
    return found


def lost_rows(statuses: Statuses) -> list[tuple[Any, ...]]:
    """Return a table row per lost member: since when, its address and its share."""
    found: list[tuple[Any, ...]] = []
    for lost in lost_members(statuses):
        away = human_ms(1000 * max(0.0, time.time() - lost.since_unix_s))
        since = f" {away}" if lost.since_unix_s else ""
        about = (lost.id, f"LOST{since}", lost.address, percent(lost.share, 1))
        found.append((*about, *("-",) * (len(COLUMNS) - len(about))))
    return found


def lost_members(statuses: Statuses) -> list[LostMember]:
    """Return the members that left without a drain, as those that answered report them."""
    lost = {some.id: some for status in answers(statuses) for some in status.peers.lost}
    return [lost[name] for name in sorted(lost)]


def merge_events(replies: Mapping[str, Events]) -> list[dict[str, Any]]:
    """Return the events of all members as JSON values, the oldest first.

    Events of one kind about one member are one event if different members saw them within
    SAME_EVENT_MS. `replies`: by the id of the member that answered, empty without a cluster.
    """
    found: list[dict[str, Any]] = []
    newest: dict[tuple[str, str], dict[str, Any]] = {}  # by kind and member
    reported = [(event, by) for by, reply in replies.items() for event in reply.events]
    for event, by in sorted(reported, key=lambda item: item[0].unix_ms):
        same = newest.get((event.kind, event.member))
        if same and by not in same["seen_by"] and event.unix_ms - same["unix_ms"] < SAME_EVENT_MS:
            same["seen_by"].append(by)
            continue
        about = {name: getattr(event, name) for name in ("unix_ms", "kind", "member", "text")}
        newest[event.kind, event.member] = {**about, "seen_by": [by]}
        found.append(newest[event.kind, event.member])
    for merged in found:
        merged["seen_by"] = sorted(filter(None, merged["seen_by"]))
    return found


def headline(view: View, statuses: Statuses) -> str:
    """Return the line with the cluster's name, view and member counts."""
    there = answers(statuses)
    registries = {status.peers.registry for status in there if status.peers}
    sources = sorted(
        {registry if registry in REGISTRIES else "the last one" for registry in registries}
    )
    lost, word = len(lost_members(statuses)), health(view, by_id(view, statuses))
    return (
        f"cluster {view.cluster}  health {word}  view {view.number}  members {len(view.members)}, "
        f"{len(there)} answer{f', {lost} lost' if lost else ''}  replicas {view.replicas}"
        f"{'  from ' + ' and '.join(sources) if sources else ''}"
    )


def sums(view: View, statuses: Statuses) -> list[str]:
    """Return totals over the members that answered, where they report a figure."""
    there = answers(statuses)
    totals = sum((status.totals for status in there), Counters())
    hit = f"hit {percent(totals.prefix_hits, totals.pages_asked)}"
    whole = [status for status in there if told_all(status)]
    if there and not whole:
        return [hit, NOT_TOLD]
    peers = summed_peers(whole)
    lines = [
        stored_line(whole),
        f"{hit}  {copies_line(peers)}",
        replication_line(peers),
        _sweeps(view, statuses),
    ]
    return lines if len(whole) == len(there) else [*lines, NOT_TOLD]


def stored_line(there: Sequence[NodeStatus]) -> str:
    """Return the line with the RAM and disk use of all members."""
    ram = RamStatus(**_sums([status.ram for status in there], _STORED))
    disk = DiskStatus(**_sums([status.disk for status in there], _STORED))
    return "  ".join(
        _tier_line(name, tier)
        for name, tier in (("RAM", ram), ("disk", disk))
        if tier.capacity_nbytes
    )


def _tier_line(name: str, tier: Any) -> str:
    return (
        f"{name} {human_nbytes(tier.used_nbytes)} of {human_nbytes(tier.capacity_nbytes)}, "
        f"pages {tier.page_count:,}"
    )


def summed_peers(there: Sequence[NodeStatus]) -> PeersStatus:
    """Add up what the members report about their peers."""
    return PeersStatus(**_sums([status.peers for status in there], _SUMMED))


def _sums(parts: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: sum(getattr(part, name) for part in parts) for name in names}


def copies_line(peers: PeersStatus) -> str:
    """Return the line about copies of other members' pages."""
    return (
        f"copies of others' pages {peers.copy_count:,}, {human_nbytes(peers.copy_nbytes)}  "
        f"fetched {peers.pages_fetched:,}  failed {peers.pages_fetch_failed:,}"
    )


def replication_line(peers: PeersStatus) -> str:
    """Return the line about pages that wait for other members, or were dropped."""
    return (
        f"replication {peers.queue_pages:,} pages queued, {human_nbytes(peers.queue_nbytes)} of "
        f"{human_nbytes(peers.queue_nbytes_max)}  sent {peers.pages_handed:,}  dropped "
        f"{peers.pages_dropped:,}"
    )


def rebalance_progress(peers: PeersStatus) -> str:
    """Return the progress of a running rebalance; empty without one."""
    if not peers.sweeping:
        return ""
    return (
        percent(peers.sweep_pages_fetched, peers.sweep_pages_missing)
        if peers.sweep_pages_missing
        else "comparing"
    )


def rebalance_left(peers: PeersStatus) -> str:
    """Return what the last rebalance left undone; empty if nothing."""
    reasons = (
        (peers.sweep_pages_full, "found no space"),
        (peers.sweep_pages_failed, "could not be fetched"),
    )
    return ", ".join(f"{count:,} pages {why}" for count, why in reasons if count)


def rebalance_line(peers: PeersStatus) -> str:
    """Return the line about a member's rebalance."""
    count = f"{peers.sweep_pages_fetched:,} of {peers.sweep_pages_missing:,} pages fetched"
    if peers.sweeping:
        text = f"rebalancing  {count}"
    elif peers.sweep_age_ms:
        text = f"rebalanced {human_ms(peers.sweep_age_ms)} ago  {count}"
    else:
        return "not rebalanced yet"
    left = rebalance_left(peers)
    return f"{text}  {left}" if left else text


def _sweeps(view: View, statuses: Statuses) -> str:
    by_member = {name: status.peers for name, status in by_id(view, statuses).items()}
    running = [
        f"{name} {rebalance_progress(peers)}" for name, peers in by_member.items() if peers.sweeping
    ]
    left = [
        f"{name} {rebalance_left(peers)}"
        for name, peers in by_member.items()
        if rebalance_left(peers)
    ]
    return "  ".join(
        [
            f"rebalancing {', '.join(running) or 'none run'}",
            *(["left " + "; ".join(left)] if left else []),
        ]
    )


def troubles(view: View, statuses: Statuses) -> list[str]:
    """Return problems: silent members, unhealthy disks or registries, other views."""
    lines: dict[str, None] = {}
    for member in view.members:
        status = statuses.get(member.address)
        if not isinstance(status, NodeStatus):
            lines[f"{member.id}: {status or 'not asked yet'}"] = None
            continue
        if status.disk and status.disk.limit:
            lines[f"{member.id}: DISK LIMITED: {status.disk.limit}"] = None
        if status.disk and status.disk.state != "SERVING":
            lines[
                f"{member.id}: DISK STOPPED: {status.disk.reason}; repair it, then: kvstore recover"
            ] = None
        if status.peers.registry not in ("", *REGISTRIES):
            lines[f"{member.id}: its registry does not answer: {status.peers.registry}"] = None
        lines |= dict.fromkeys(f"outside the view: {line}" for line in status.peers.apart)
    if line := _different_identities(view, statuses):
        lines[line] = None
    for lost in lost_members(statuses):
        since = f" since {date(lost.since_unix_s)}" if lost.since_unix_s else ""
        lines[
            f"{lost.id}: LOST{since}, at {lost.address}, with {owned(lost)}: start it again, or: "
            f"kvstore cluster forget-member {lost.id}"
        ] = None
    by_member = {name: status.peers for name, status in by_id(view, statuses).items()}
    lines |= dict.fromkeys(f"{some.found}: {some.remedy}" for some in few_copies(by_member))
    if view.replicas > len(view.members):
        lines[
            f"{view.replicas} replicas are configured, but there are only "
            f"{len(view.members)} members"
        ] = None
    return list(lines)


def digest_of(status: NodeStatus) -> str:
    """Return the digest of a member's identities file in hex; empty without one."""
    return status.identities.digest.hex()


def _different_identities(view: View, statuses: Statuses) -> str:
    """Return a line about members with different identities files; empty if all are equal."""
    found: dict[str, list[str]] = {}
    for name, status in by_id(view, statuses).items():
        if told_all(status):
            found.setdefault(digest_of(status)[:DIGITS] or "none", []).append(name)
    if len(found) < 2:
        return ""
    text = "; ".join(f"{digest} at {', '.join(names)}" for digest, names in found.items())
    return f"identities differ: {text}: kvstore identities push FILE gives all the same"


def members_json(view: View, statuses: Statuses) -> dict[str, Any]:
    """Return the cluster's status as JSON values."""
    members = []
    for member in view.members:
        status = statuses.get(member.address)
        whole = status_json(status) if isinstance(status, NodeStatus) else None
        members.append({**member_json(member, status), "status": whole})
    return {
        "cluster": view.cluster,
        "view": view.number,
        "replicas": view.replicas,
        "health": health(view, by_id(view, statuses)),
        "pages_under_replicated": sum(
            status.peers.pages_under_replicated for status in answers(statuses)
        ),
        "members": members,
        "lost": [
            {
                "id": lost.id,
                "address": lost.address,
                "since_unix_s": lost.since_unix_s,
                "share": lost.share,
                "owners_left": lost.owners_left,
                "share_alone": lost.share_alone,
            }
            for lost in lost_members(statuses)
        ],
    }


def member_json(member: Member, status: NodeStatus | KVStoreError | None) -> dict[str, Any]:
    """Return a member's status as JSON values."""
    there = isinstance(status, NodeStatus)
    return {
        "id": member.id,
        "address": member.address,
        "weight": member.weight,
        "zone": member.zone,
        "state": member.state.name,
        "answers": there,
        "error": "" if there else str(status or "not asked yet"),
    }
