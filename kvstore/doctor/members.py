"""Check what nodes report about themselves and about each other.

One node: version, clock, RAM, disk, gateways, certificates. A cluster: one view, one registry, a
near node. No I/O: all reports were requested before.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import kvstore
from kvstore.cluster.view import REGISTRIES, View, parse_view
from kvstore.config import PROTOCOL_VERSION, ClientConfig
from kvstore.doctor.checks import Finding, FindingState, fail, ok, skipped, warn
from kvstore.doctor.connectivity import Clock, Connectivity
from kvstore.doctor.host import check_expiry
from kvstore.errors import ConfigError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.certificates import date

if TYPE_CHECKING:
    from kvstore.results.replies import LostMember, NodeStatus, PeersStatus, RamStatus, TlsStatus

# Certificates of `kvstore certs` are valid from five minutes before they are made
CLOCK_WARN_S, CLOCK_FAIL_S = 2.0, 300.0
QUEUE_FULL_SHARE = 0.9
STREAK_MIN = 3  # gateway ends within a minute that are no accident
SETTLE_S = 1.0  # a new view reaches all members within that time
NOT_TOLD = "shown to identities of all tenants only"
GIB = 1 << 30

Views = dict[str, View]


def about(node: Connectivity) -> Iterator[Finding]:
    """Yield findings on a node that said hello."""
    assert node.hello is not None
    yield version(node.hello)
    if node.status is None:
        return
    yield state(node.status)
    yield clock(node.clock)
    if not node.status.ram:
        yield skipped("memory and disk", NOT_TOLD, "use a token of tenant '*'")
        return
    yield from check_status(node.status)


def check_status(status: "NodeStatus") -> Iterator[Finding]:
    """Yield findings on a node's status."""
    yield ram(status.ram)
    yield disk(status)
    yield from certificates(status.tls)
    yield from gateways(status)
    if status.insecure:
        remedy = (
            "--identities, --tls-cert and --tls-key in place of --insecure, unless this "
            "network is private"
        )
        yield warn("strangers", status.insecure, remedy)


def version(hello: pb.HelloReply) -> Finding:
    """Check the node's version."""
    text = f"kvstore {hello.version}, protocol {hello.protocol_version}"
    if hello.protocol_version != PROTOCOL_VERSION:
        remedy = "update the older one soon: only adjacent protocol versions work together"
        return warn("version", f"{text}; here {PROTOCOL_VERSION}", remedy)
    if hello.version != kvstore.__version__:
        return warn(
            "version",
            f"{text}; here {kvstore.__version__}",
            "update the older one; they work together",
        )
    return ok("version", text)


def state(status: "NodeStatus") -> Finding:
    """Check the node's state."""
    text = f"{status.state}, up {status.uptime_ms / 3_600_000:,.1f} h"
    if status.state == "DRAINING":
        return warn("state", text, "it is being stopped, and takes no new pages")
    if status.state == "DEGRADED":
        return warn("state", text, "its disk is stopped: an operator runs `kvstore recover`")
    return ok("state", text)


def clock(offset: Clock | None) -> Finding:
    """Compare the node's clock with this host's."""
    if offset is None:
        return skipped("clock", "an older node does not report its clock")
    off_s = max(0.0, abs(offset.ahead_s) - offset.within_s)
    side = "ahead of" if offset.ahead_s > 0 else "behind"
    text = f"{abs(offset.ahead_s):.3f} s {side} this host's, ± {offset.within_s:.3f} s"
    remedy = (
        "set the clock that is wrong, and run chrony or systemd-timesyncd there: "
        "certificates depend on it"
    )
    if off_s >= CLOCK_FAIL_S:
        return fail("clock", text, remedy)
    return warn("clock", text, remedy) if off_s >= CLOCK_WARN_S else ok("clock", text)


def ram(status: "RamStatus") -> Finding:
    """Check the RAM tier."""
    text = (
        f"{status.used_nbytes / GIB:.1f} of {status.capacity_nbytes / GIB:.1f} GiB, "
        f"{status.page_count:,} pages"
    )
    return ok("RAM", f"{text}, {status.huge_nbytes / GIB:.1f} GiB in huge pages")


def disk(status: "NodeStatus") -> Finding:
    """Check the disk tier."""
    tier = status.disk
    if not status.disk:
        return skipped("disk", "this node has none (--data-dir)")
    text = (
        f"{tier.used_nbytes / GIB:.1f} of {tier.capacity_nbytes / GIB:.1f} GiB in {tier.data_dir}"
    )
    if tier.state != "SERVING":
        return fail(
            "disk",
            f"STOPPED, RAM still serves: {tier.reason}",
            "repair the cause, then: kvstore recover",
        )
    if tier.limit:
        return warn("disk", f"{text}; {tier.limit}", "free space there, or lower --disk-bytes")
    if tier.pages_corrupt:
        remedy = (
            "the medium or the memory corrupts data: replace it; kvstore scrub reads "
            "everything once"
        )
        return warn(
            "disk", f"{text}; {tier.pages_corrupt:,} pages were found damaged, and dropped", remedy
        )
    if tier.queue_nbytes > QUEUE_FULL_SHARE * tier.queue_nbytes_max:
        remedy = (
            "the disk is slower than the puts: a faster one, more members, or a larger "
            "--disk-queue-bytes"
        )
        return warn("disk", f"{text}; the write queue is full", remedy)
    if not tier.direct_io:
        remedy = (
            "put --data-dir on ext4 or xfs on a local disk: here pages go through the page "
            "cache, and its memory"
        )
        return warn("disk", f"{text}, which has no O_DIRECT", remedy)
    return ok("disk", f"{text}, {tier.page_count:,} pages, O_DIRECT")


def gateways(status: "NodeStatus") -> Iterator[Finding]:
    """Check whether the gateway processes stay alive; older nodes report none."""
    if not status.gateways:
        return
    ended = sum(gateway.recent_ends for gateway in status.gateways)
    ready = sum(gateway.ready for gateway in status.gateways)
    why = ", ".join(f"{end.why} {end.count:,}" for end in status.gateway_ends if end.count)
    text = f"{ready} of {len(status.gateways)} serve" + (
        f"; ended since its start: {why}" if why else ""
    )
    if ended >= STREAK_MIN or not ready:
        remedy = (
            "the gRPC port is flooded, or --grpc-memory-bytes is too small for its callers: bind "
            "it to another network (--grpc-host), or require client certificates"
        )
        finding = warn if ready else fail
        yield finding("gRPC gateways", f"{text}; {ended} times in the last minute", remedy)
        return
    yield ok("gRPC gateways", text)


def certificates(tls: "TlsStatus") -> Iterator[Finding]:
    """Check the node's certificates."""
    for some in tls.certificates:
        yield check_expiry(some.setting, "its own", some.ends_unix_s)
    if tls.problem:
        remedy = "correct the files; the node reloads them within a second"
        yield warn("its TLS files", f"the current files are not in use: {tls.problem}", remedy)


def reached(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Summarise the connection: one line if all is well, otherwise the problems."""
    bad = [
        finding for finding in findings if finding.state in (FindingState.FAIL, FindingState.WARN)
    ]
    tcp = next((finding for finding in findings if finding.name == "TCP"), None)
    if tcp is not None and not bad:
        yield ok("reached", tcp.found)
    yield from bad


def findings(view: View, nodes: Mapping[str, Connectivity]) -> Iterator[Finding]:
    """Yield findings on the members of a view. `nodes` holds their examined connections by id."""
    there = {member: node for member, node in nodes.items() if node.hello is not None}
    yield _answers(view, there)
    if there:
        yield _agreement(there)
        yield _registry(there)
        lost_by_node = [
            node.status.peers.lost for node in there.values() if node.status is not None
        ]
        yield from lost_members(lost for some in lost_by_node for lost in some)
        yield from few_copies(
            {name: node.status.peers for name, node in there.items() if node.status is not None}
        )
    if view.replicas > len(view.members):
        remedy = "start more members, or lower --replicas"
        yield warn(
            "replicas",
            f"{view.replicas} are configured, but there are only {len(view.members)} members",
            remedy,
        )


def near(view: View, config: ClientConfig, shared: Mapping[str, bool]) -> Finding:
    """Check the near node. `shared` says per member whether its memory can be mapped from here."""
    if config.near == "none":
        return ok("near node", "disabled (KVSTORE_NEAR=none): each page's owners are asked")
    if config.near != "auto":
        if config.near in view.by_id:
            return ok("near node", f"{config.near}, as KVSTORE_NEAR says")
        known = ", ".join(sorted(view.by_id))
        return fail(
            "near node", f"KVSTORE_NEAR={config.near} is no member", f"name one of {known}, or auto"
        )
    if config.wire not in ("auto", "shm"):
        return ok("near node", f"none by wire {config.wire}: each page's owners are asked")
    found = [member for member, mapped in shared.items() if mapped]
    if found:
        which = f"one of {', '.join(found)}" if len(found) > 1 else found[0]
        return ok("near node", f"{which}, by shared memory: it is asked for everything")
    return skipped(
        "near node", "no member's shared memory can be mapped here: each page's owners are asked"
    )


def _answers(view: View, there: Mapping[str, Connectivity]) -> Finding:
    away = [member.id for member in view.members if member.id not in there]
    text = f"{len(there)} of {len(view.members)} answer here"
    if away:
        remedy = "see each of them above; their pages come from other owners, or are misses"
        return fail("members", f"{text}; not {', '.join(away)}", remedy)
    return ok("members", text)


def _agreement(there: Mapping[str, Connectivity]) -> Finding:
    """Check that the members agree on the view; those with an older one are asked once more."""
    views = _view_of_each(there)
    if len({seen.number for seen in views.values()}) > 1:
        time.sleep(SETTLE_S)
        for node in there.values():
            node.ask_again()
        views = _view_of_each(there)
    alone = sorted(there.keys() - views.keys())
    if alone:
        remedy = "start it with the same --cluster as the others"
        return fail(
            "view", f"{', '.join(alone)} is in no cluster, or sends an invalid view", remedy
        )
    numbers = {seen.number for seen in views.values()}
    if len(numbers) > 1:
        text = ", ".join(f"{member} has {seen.number}" for member, seen in sorted(views.items()))
        return fail(
            "view",
            text,
            "members with an older view do not receive changes: check their registry, and etcd",
        )
    # With a fixed list, each node knows only its own frame port, so ports are not compared.
    lists = {
        tuple(replace(listed, bulk_port=0) for listed in seen.members): member
        for member, seen in sorted(views.items())
    }
    if len(lists) > 1:
        text = f"{' and '.join(lists.values())} have lists of members that differ"
        return fail(
            "view",
            text,
            "give all members the same text as --cluster static:..., and restart those that differ",
        )
    if len({(seen.cluster, seen.replicas) for seen in views.values()}) > 1:
        return fail(
            "view",
            "members differ in the cluster's name or in --replicas",
            "give all of them the same",
        )
    return ok("view", f"number {numbers.pop()}, the same at all that answer")


def _view_of_each(there: Mapping[str, Connectivity]) -> Views:
    views = Views()
    for member, node in there.items():
        if node.hello is not None and node.hello.HasField("view"):
            try:
                views[member] = parse_view(node.hello.view)
            except ConfigError:
                continue
    return views


def lost_members(lost: "Iterable[LostMember]") -> Iterator[Finding]:
    """Report members that left without a drain, each once."""
    for member in {member.id: member for member in lost}.values():
        since = date(member.since_unix_s) if member.since_unix_s else "a moment"
        yield fail(
            "lost",
            f"{member.id} at {member.address}, since {since}: it had {owned(member)}",
            f"start it again; if it never returns: kvstore cluster forget-member {member.id}",
        )


def owned(lost: "LostMember") -> str:
    """Describe the keys that a lost member owned, and their other owners."""
    count = lost.owners_left
    left = f"each has {count} other owner{'s' * (count > 1)}" if count else ""
    alone = f"{lost.share_alone:.0%} of all keys had no other owner" if lost.share_alone else ""
    return ", ".join(filter(None, (f"{lost.share:.0%} of keys", left, alone)))


def few_copies(by_member: "Mapping[str, PeersStatus]") -> Iterator[Finding]:
    """Report pages with fewer copies than replicas. `by_member`: who reports them."""
    thin = {name: peers for name, peers in by_member.items() if peers.pages_under_replicated}
    if thin:
        count = sum(peers.pages_under_replicated for peers in thin.values())
        replicas = max(peers.replicas for peers in thin.values())
        yield warn(
            "copies",
            f"{count:,} pages have fewer than {replicas} copies, by {', '.join(sorted(thin))}",
            "these members fetch them; kvstore cluster events tells when it is done",
        )


def health(view: View, statuses: "Mapping[str, NodeStatus]") -> str:
    """Return green, yellow or red. `statuses`: of the members that answer, by id.

    Yellow: a member is away, has stopped its disk, or pages have too few copies. Red: so many
    members do not answer that some keys may have no owner.
    """
    silent = [member for member in view.members if member.id not in statuses]
    if len(silent) >= min(view.replicas, len(view.members)):
        return "red"
    troubled = any(
        status.state == "DEGRADED" or status.peers.lost or status.peers.pages_under_replicated
        for status in statuses.values()
    )
    return "yellow" if silent or troubled or view.replicas > len(view.members) else "green"


def _registry(there: Mapping[str, Connectivity]) -> Finding:
    wrong: dict[str, None] = {}
    has_status = False
    for member, node in sorted(there.items()):
        if node.status is None or not node.status.peers:
            continue
        has_status, peers = True, node.status.peers
        if peers.registry not in REGISTRIES:
            wrong[f"the registry of {member} does not answer: {peers.registry}"] = None
        wrong |= dict.fromkeys(f"outside the view: {line}" for line in peers.apart)
    if wrong:
        return warn(
            "registry",
            "; ".join(wrong),
            "repair etcd, or the connection to it; members outside the view report why: "
            "docs/cluster.md",
        )
    if not has_status:
        return skipped("registry", "shown to identities of all tenants only")
    return ok("registry", "it answers all members, and all are in the view")
