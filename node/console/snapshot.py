"""Build the JSON that console users receive: status, findings and the cluster's members.

A user sees the node's status within its rights. Findings are those of `kvstore doctor` that derive
from a node's report, seen from the node: only the command checks a client's host, settings and
connection. Members are asked through this node, and only while a user watches.
"""

import json
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from kvstore.cluster.view import REGISTRIES, Member, View
from kvstore.deadline import Deadline
from kvstore.doctor.checks import Finding, FindingState, warn
from kvstore.doctor.members import check_status, few_copies, lost_members, state
from kvstore.doctor.pages import hints
from kvstore.errors import KVStoreError
from kvstore.keys import short
from kvstore.messages import plain, result
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results import NodeStatus, PeersStatus
from kvstore.security.identities import Principal
from kvstore.transports.channel import NodeConnection
from node.auth.access import Caller
from node.cluster.membership import Membership
from node.cluster.remote_pages import PeerLinks
from node.console.history import History
from node.serving.hot_prefixes import HotPrefixes
from node.serving.request_metrics import SlowCall, SlowCalls
from node.serving.service import Service

# below a watcher's interval: each of its events is new, and concurrent watchers share one
EVERY_S = 1.9
# a snapshot is valid for 50 times the time that it took: at most a fiftieth of one core
COST_FACTOR = 50
SCOPES_MAX = 64
NAMESPACES_MAX = 50
TENANTS_MAX = 50
HOT_MAX = 12
SAMPLES = 6  # the newest of the last hour: a watcher that was updated a minute ago misses none
FINDINGS_S = 10.0
COMPARED_MAX = 64  # namespaces, for findings
ASKED_S = 5.0  # how often members are asked, at most
ROUND_S = 10.0  # for all of them; members not asked in it come first in the next
CALL_S = 2.0  # for one of them
_STATUS_FIELDS = ("version", "state", "uptime_ms")
_OF_NODE = ("insecure", "session_count", "rss_nbytes", "refused_calls")
_PARTS = ("ram", "disk", "peers", "shm", "tls")
_TIER = ("used_nbytes", "capacity_nbytes", "page_count")
_PEERS = (
    "copy_count",
    "copy_nbytes",
    "queue_pages",
    "queue_nbytes",
    "queue_nbytes_max",
    "pages_dropped",
    "sweeping",
    "sweep_pages_missing",
    "sweep_pages_fetched",
    "view_number",
)
_TOTALS = ("pages_asked", "prefix_hits", "nbytes_put", "nbytes_got")

Begin = Callable[[Callable[[], object]], "Future[Any] | None"]


class Members:
    """Status of the members, as they report it.

    Used by one thread at a time. `begin` runs work in another.
    """

    def __init__(self, membership: Membership, links: PeerLinks, begin: Begin) -> None:
        self._membership = membership
        self._links = links
        self._begin = begin
        self._lock = threading.Lock()
        self._statuses: dict[str, dict[str, Any]] = {}  # by member
        self._asked_s: dict[str, float] = {}
        self._round: Future[Any] | None = None
        self._began_s = -ASKED_S

    def describe(self, own: pb.NodeStatusReply) -> dict[str, Any] | None:
        """Return the view and each member's last status; None without a cluster."""
        view = self._membership.view
        if view is None:
            return None
        self._ask(view)
        now_s = time.monotonic()
        with self._lock:
            told = self._statuses | {
                self._membership.member: {"status": summary(own), "at_s": now_s}
            }
        return {
            "cluster": view.cluster,
            "number": view.number,
            "replicas": view.replicas,
            "own": self._membership.member,
            "members": [_member(member, told.get(member.id, {}), now_s) for member in view.members],
        }

    def _ask(self, view: View) -> None:
        now_s = time.monotonic()
        if (self._round is None or self._round.done()) and now_s - self._began_s >= ASKED_S:
            self._began_s = now_s
            self._round = self._begin(lambda: self._ask_all(view))

    def _ask_all(self, view: View) -> None:
        """Ask the members, those asked longest ago first.

        A member that does not answer costs `CALL_S` once, and is then skipped for a while.
        """
        end_s = time.monotonic() + ROUND_S
        others = [member.id for member in view.members if member.id != self._membership.member]
        for member in sorted(others, key=lambda name: self._asked_s.get(name, 0.0)):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                break
            said = self._request_status(member, min(CALL_S, left_s))
            with self._lock:
                self._statuses[member] = said
                self._asked_s[member] = said["at_s"]
        with self._lock:
            for name in self._statuses.keys() - set(others):
                del self._statuses[name]
                self._asked_s.pop(name, None)

    def _request_status(self, member: str, timeout_s: float) -> dict[str, Any]:
        def call(link: NodeConnection, deadline: Deadline) -> pb.NodeStatusReply:
            reply: pb.NodeStatusReply = link.wire.call(
                "node_status", pb.NodeStatusRequest(), deadline
            )
            return reply

        said: dict[str, Any] = {"status": None, "error": ""}
        try:
            said["status"] = summary(self._links.link(member).run(call, None, Deadline(timeout_s)))
        except KVStoreError as error:
            said["error"] = str(error)
        return said | {"at_s": time.monotonic()}


def _member(member: Member, said: Mapping[str, Any], now_s: float) -> dict[str, Any]:
    return {
        "id": member.id,
        "address": member.address,
        "zone": member.zone,
        "weight": member.weight,
        "state": member.state.name.lower(),
        "status": said.get("status"),
        "error": said.get("error", ""),
        "age_s": round(now_s - said["at_s"], 1) if "at_s" in said else None,
    }


def summary(status: pb.NodeStatusReply) -> dict[str, Any]:
    """Return the fields of a member that the console's map shows."""
    parts = {
        "ram": (status.ram, _TIER),
        "peers": (status.peers, _PEERS),
        "totals": (status.totals, _TOTALS),
    }
    if status.HasField("disk"):
        parts["disk"] = (status.disk, (*_TIER, "state"))
    told = {
        name: {field: plain(part)[field] for field in fields}
        for name, (part, fields) in parts.items()
    }
    return {
        "state": status.state,
        "version": status.version,
        "uptime_ms": status.uptime_ms,
        "disk": None,
        **told,
    }


class _Made(NamedTuple):
    until_s: float
    text: str


class Snapshots:
    """Messages for users. Used by one thread at a time."""

    def __init__(
        self,
        service: Service,
        history: History,
        heat: HotPrefixes,
        members: Members,
        slow: SlowCalls,
    ) -> None:
        self._service = service
        self._history = history
        self._heat = heat
        self._members = members
        self._slow = slow
        self._made: dict[Hashable, _Made] = {}
        self._found: dict[Hashable, tuple[float, list[dict[str, Any]]]] = {}
        self._hours: dict[Hashable, tuple[int, str]] = {}  # by number of samples

    def first(self, principal: Principal, caller: Caller) -> str:
        """Return the first message: the status, the last hour and the user's identity."""
        now = self._now(principal, caller).text
        who = {
            "name": principal.name,
            "tenant": principal.tenant,
            "role": principal.role.name.lower(),
            "models": list(principal.models),
            "asked": not self._service.authorizer.access.open,
        }
        return f'{now[:-1]},"who":{_text(who)},"history":{self._hour(principal)}}}'

    def next(self, principal: Principal, caller: Caller) -> str:
        """Return the next message."""
        return self._now(principal, caller).text

    def _hour(self, principal: Principal) -> str:
        """Return the last hour as JSON, built once per sample because that takes 10 ms."""
        count, hour = self._hours.get(principal.scope, (0, "null"))
        if count != self._history.count(principal):
            told = self._history.visible_to(principal)
            count, hour = told["count"] if told else 0, _text(told)
            self._hours[principal.scope] = count, hour
        return hour

    def _now(self, principal: Principal, caller: Caller) -> _Made:
        """Return the status as JSON, shared for a while by all who may see the same."""
        made, began_s = self._made.get(principal.scope), time.monotonic()
        if made is None or began_s >= made.until_s:
            values = self._make(principal, caller)
            text = _text(values)
            took_s = time.monotonic() - began_s
            for kept in (self._made, self._found, self._hours):
                if len(kept) >= SCOPES_MAX:
                    kept.clear()
            made = self._made[principal.scope] = _Made(
                began_s + max(EVERY_S, COST_FACTOR * took_s), text
            )
        return made

    def _make(self, principal: Principal, caller: Caller) -> dict[str, Any]:
        status: pb.NodeStatusReply = self._service.call(
            "node_status", pb.NodeStatusRequest(), caller
        )
        values = {
            "unix_s": round(time.time(), 3),
            "instance": status.instance_id.hex(),
            "every_s": EVERY_S,
            **_of_node(status),
            "totals": plain(status.totals),
            "namespaces": _namespaces(status),
            "namespace_count": len(status.namespaces),
            "page_nbytes": {
                "ram": sum(info.page_nbytes * info.page_count for info in status.namespaces),
                "disk": sum(info.page_nbytes * info.disk_page_count for info in status.namespaces),
            },
            "tenants": [plain(use) for use in sorted(status.tenants, key=_size)[:TENANTS_MAX]],
            "tenant_count": len(status.tenants),
            "hot": self._hot_prefixes(status),
            "findings": self._findings(principal, status),
            "samples": self._history.visible_to(principal, SAMPLES),
            "cluster": self._members.describe(status) if principal.of_all else None,
        }
        if principal.of_all:
            values["slow"] = [_slow(call) for call in self._slow.newest()]
        return values

    def _hot_prefixes(self, status: pb.NodeStatusReply) -> list[dict[str, Any]]:
        """Return the hot prefixes of visible namespaces, shortened as in logs."""
        infos = {info.digest: info for info in status.namespaces}
        told = [hot for hot in self._heat.hottest() if hot.namespace in infos][:HOT_MAX]
        return [
            {
                "namespace": hot.namespace.hex(),
                "model": infos[hot.namespace].namespace.model,
                "head": short(hot.head),
                "lookups": hot.lookups,
                "error": hot.error,
                "pages": round(hot.pages, 1),
            }
            for hot in told
        ]

    def _findings(self, principal: Principal, status: pb.NodeStatusReply) -> list[dict[str, Any]]:
        """Return findings, cached because comparing namespaces takes milliseconds."""
        until_s, told = self._found.get(principal.scope, (0.0, []))
        if time.monotonic() >= until_s:
            told = [
                finding._asdict() | {"state": finding.state.value} for finding in findings(status)
            ]
            self._found[principal.scope] = (time.monotonic() + FINDINGS_S, told)
        return told


def _of_node(status: pb.NodeStatusReply) -> dict[str, Any]:
    """Return the node's own values; what the caller may not see is left out."""
    names = (*_STATUS_FIELDS, *(_OF_NODE if status.HasField("ram") else ()))
    told = {name: getattr(status, name) for name in names}
    parts = {name: plain(getattr(status, name)) for name in _PARTS if status.HasField(name)}
    if "ram" in parts:
        del parts["ram"]["size_classes"]
    return told | parts


def _size(use: pb.TenantUse) -> int:
    """Return a sort key that puts the largest use first."""
    return -(use.ram_nbytes + use.disk_nbytes)


def _namespaces(status: pb.NodeStatusReply) -> list[dict[str, Any]]:
    """Return the namespaces with most bytes."""

    def nbytes(info: pb.NamespaceInfo) -> int:
        return info.page_nbytes * (info.page_count + info.disk_page_count)

    chosen = sorted(status.namespaces, key=lambda info: (-nbytes(info), -info.counters.pages_asked))
    return [
        {
            "digest": info.digest.hex(),
            "tenant": info.namespace.tenant,
            "model": info.namespace.model,
            "revision": info.namespace.revision,
            "page_nbytes": info.page_nbytes,
            "page_count": info.page_count,
            "disk_page_count": info.disk_page_count,
            "counters": plain(info.counters),
        }
        for info in chosen[:NAMESPACES_MAX]
    ]


def _slow(call: SlowCall) -> dict[str, Any]:
    return {**call._asdict(), "spans": [span._asdict() for span in call.spans]}


def _text(values: dict[str, Any] | None) -> str:
    return json.dumps(values, allow_nan=False, separators=(",", ":"))


def findings(status: pb.NodeStatusReply) -> list[Finding]:
    """Return the warnings and failures."""
    own = pb.NodeStatusReply()
    own.CopyFrom(status)
    own.ClearField("namespaces")  # converting all of them would take milliseconds
    node: NodeStatus = result(own)
    of_node = check_status(node) if node.ram else ()
    found = [state(node), *of_node, *_of_peers(node.peers), *_of_hits(status)]
    return [finding for finding in found if finding.state in (FindingState.WARN, FindingState.FAIL)]


def _of_peers(peers: PeersStatus) -> Iterator[Finding]:
    if peers.registry not in ("", *REGISTRIES):
        yield warn(
            "registry", f"it does not answer: {peers.registry}", "the last view stays in force"
        )
    for line in peers.apart:
        yield warn("members", f"outside the view: {line}", "")
    yield from lost_members(peers.lost)
    yield from few_copies({peers.member_id: peers})
    if peers.pages_dropped:
        found = f"{peers.pages_dropped:,} pages were not replicated to their owners since the start"
        yield warn(
            "members",
            found,
            "a member is away, full, or slower than the puts; a rebalance fetches them",
        )


def _of_hits(status: pb.NodeStatusReply) -> Iterator[Finding]:
    """Yield findings on hits of the busiest namespaces, with which others are compared."""
    chosen: Sequence[pb.NamespaceInfo] = sorted(
        status.namespaces, key=lambda info: -(info.page_count + info.counters.pages_asked)
    )[:COMPARED_MAX]
    for hint in hints([(info.namespace, info) for info in map(result, chosen)]):
        yield warn("hits", hint, "")
