"""Build the JSON that console users receive: status, findings, slow calls and the cluster.

A user sees the node's status within its rights. Findings are those of `kvstore doctor` that derive
from a node's report, seen from the node: only the command checks a client's host, settings and
connection.
"""

import json
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.cluster.view import REGISTRIES
from kvstore.doctor.checks import Finding, FindingState, warn
from kvstore.doctor.members import check_status, few_copies, lost_members, state
from kvstore.doctor.pages import hints
from kvstore.keys import short
from kvstore.messages import plain, result
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.identities import Principal
from node.auth.access import Caller
from node.console.history import History
from node.console.members import Members
from node.serving.hot_prefixes import HotPrefixes
from node.serving.request_metrics import SlowCall, SlowCalls
from node.serving.service import Service

if TYPE_CHECKING:
    from kvstore.results.replies import NodeStatus, PeersStatus

# below a watcher's interval: each of its events is new, and concurrent watchers share one
EVERY_S = 1.9
# a snapshot is valid for 50 times the time that it took: at most a fiftieth of one core
COST_FACTOR = 50
SCOPES_MAX = 64
NAMESPACES_MAX = 50
TENANTS_MAX = 50
HOT_MAX = 12
EVENTS_MAX = 50
# The newest samples, beside the whole history of the first message: a watcher that was updated a
# minute ago misses none.
SAMPLES = 6
DAY_SAMPLES = 1
FINDINGS_S = 10.0
COMPARED_MAX = 64  # namespaces, for findings
_STATUS_FIELDS = ("version", "state", "uptime_ms")
_OF_NODE = ("insecure", "session_count", "rss_nbytes", "refused_calls")
_PARTS = ("ram", "disk", "peers", "shm", "tls")


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
        self._histories: dict[Hashable, tuple[int, str]] = {}  # by number of samples

    def first(self, principal: Principal, caller: Caller) -> str:
        """Return the first message: the status, the whole history and the user's identity."""
        now = self._now(principal, caller).text
        who = {
            "name": principal.name,
            "tenant": principal.tenant,
            "role": principal.role.name.lower(),
            "models": list(principal.models),
            "asked": not self._service.authorizer.access.open,
        }
        return f'{now[:-1]},"who":{_text(who)},"history":{self._whole_history(principal)}}}'

    def next(self, principal: Principal, caller: Caller) -> str:
        """Return the next message."""
        return self._now(principal, caller).text

    def _whole_history(self, principal: Principal) -> str:
        """Return the history as JSON, built once per sample because that takes 20 ms."""
        count, text = self._histories.get(principal.scope, (0, "null"))
        if count != (now := self._history.count(principal)):
            count, text = now, _text(self._history.visible_to(principal))
            self._histories[principal.scope] = count, text
        return text

    def _now(self, principal: Principal, caller: Caller) -> _Made:
        """Return the status as JSON, shared for a while by all who may see the same."""
        made, began_s = self._made.get(principal.scope), time.monotonic()
        if made is None or began_s >= made.until_s:
            values = self._make(principal, caller)
            text = _text(values)
            took_s = time.monotonic() - began_s
            for kept in (self._made, self._found, self._histories):
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
            "samples": self._history.visible_to(principal, SAMPLES, DAY_SAMPLES),
            "slow": self._slow_calls(principal, status),
            "cluster": self._members.describe(status) if principal.of_all else None,
        }
        if principal.of_all:
            values["latencies"] = self._history.latencies()
            newest = self._service.call("events", pb.EventsRequest(limit=EVENTS_MAX), caller)
            values["events"] = [plain(event) for event in reversed(newest.events)]
        return values

    def _slow_calls(self, principal: Principal, status: pb.NodeStatusReply) -> list[dict[str, Any]]:
        """Return the slow calls on the user's own namespaces; all of them to operators."""
        visible = {info.digest for info in status.namespaces}
        calls = self._slow.newest()
        if not principal.of_all:
            calls = [
                call
                for call in calls
                if call.subject.tenant == principal.tenant and call.subject.namespace in visible
            ]
        return [_slow(call) for call in calls]

    def _hot_prefixes(self, status: pb.NodeStatusReply) -> list[dict[str, Any]]:
        """Return the hot prefixes of visible namespaces, shortened as in logs."""
        infos = {info.digest: info for info in status.namespaces}
        hottest = [hot for hot in self._heat.hottest() if hot.namespace in infos][:HOT_MAX]
        return [
            {
                "namespace": hot.namespace.hex(),
                "model": infos[hot.namespace].namespace.model,
                "head": short(hot.head),
                "lookups": hot.lookups,
                "error": hot.error,
                "pages": round(hot.pages, 1),
            }
            for hot in hottest
        ]

    def _findings(self, principal: Principal, status: pb.NodeStatusReply) -> list[dict[str, Any]]:
        """Return findings, cached because comparing namespaces takes milliseconds."""
        until_s, advice = self._found.get(principal.scope, (0.0, []))
        if time.monotonic() >= until_s:
            advice = [
                finding._asdict() | {"state": finding.state.value} for finding in findings(status)
            ]
            self._found[principal.scope] = (time.monotonic() + FINDINGS_S, advice)
        return advice


def _of_node(status: pb.NodeStatusReply) -> dict[str, Any]:
    """Return the node's own values; what the caller may not see is left out."""
    names = (*_STATUS_FIELDS, *(_OF_NODE if status.HasField("ram") else ()))
    fields = {name: getattr(status, name) for name in names}
    parts = {name: plain(getattr(status, name)) for name in _PARTS if status.HasField(name)}
    if "ram" in parts:
        del parts["ram"]["size_classes"]
    return fields | parts


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
    subject = call.subject
    return {
        **call._asdict(),
        "spans": [span._asdict() for span in call.spans],
        "subject": {
            **subject._asdict(),
            "namespace": subject.namespace.hex(),
            "key": short(subject.key) if subject.key else "",
        },
    }


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


def _of_peers(peers: "PeersStatus") -> Iterator[Finding]:
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
