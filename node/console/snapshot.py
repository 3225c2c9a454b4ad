"""What watchers are told: the node's own status, as he who watches may see it, in JSON."""

import json
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from kvstore.cluster.view import REGISTRIES
from kvstore.doctor.checks import Finding, State, warn
from kvstore.doctor.members import state, told
from kvstore.doctor.pages import hints
from kvstore.identities import Principal
from kvstore.keys import short
from kvstore.messages import namespace_value, plain
from kvstore.pb import kvstore_pb2 as pb
from node.auth.access import Caller
from node.console.history import History
from node.console.members import Members
from node.serving.hot_prefixes import HotPrefixes
from node.serving.request_metrics import SlowCall, SlowCalls
from node.serving.service import Service

# What an operator should know and do: what `kvstore doctor` would say of what a node tells of
# itself.
#
# It looks from the node. What a client's host, its settings and its way to the node are like, the
# command looks at.

COMPARED_MAX = 64  # namespaces


def findings(status: pb.NodeStatusReply) -> list[Finding]:
    """What is not as it should be."""
    of_node = told(status) if status.HasField("ram") else ()
    found = [state(status), *of_node, *_of_peers(status.peers), *_of_hits(status)]
    return [finding for finding in found if finding.state in (State.WARN, State.FAIL)]


def _of_peers(peers: pb.PeersStatus) -> Iterator[Finding]:
    if peers.registry not in ("", *REGISTRIES):
        yield warn("registry", f"it can not be asked: {peers.registry}", "the last view is kept meanwhile")
    for line in peers.apart:
        yield warn("members", f"not of the view: {line}", "")
    if peers.pages_dropped:
        found = f"{peers.pages_dropped:,} pages were not handed to their owners since the start"
        yield warn("members", found, "a member is away, full, or slower than the puts; a sweep fetches them")


def _of_hits(status: pb.NodeStatusReply) -> Iterator[Finding]:
    """Of those with most pages, or questions, which are what others are compared with."""
    chosen: Sequence[pb.NamespaceInfo] = sorted(
        status.namespaces, key=lambda info: -(info.page_count + info.counters.pages_asked)
    )[:COMPARED_MAX]
    for hint in hints([(namespace_value(info.namespace), info) for info in chosen]):
        yield warn("hits", hint, "")


EVERY_S = 1.9  # below that of a watcher: each of its events is new, and all watchers of a moment get the same
COST_FACTOR = 50  # of what making it took it is good for so long at least: a fiftieth of one core
SCOPES_MAX = 64
NAMESPACES_MAX = 50
TENANTS_MAX = 50
HOT_MAX = 12
SAMPLES = 6  # the newest of the last hour: none is missed by who was told a minute ago
FINDINGS_S = 10.0
_SAID = ("version", "state", "uptime_ms")
_OF_NODE = ("insecure", "session_count", "rss_nbytes", "refused_calls")
_PARTS = ("ram", "disk", "peers", "shm", "tls")


class _Made(NamedTuple):
    until_s: float
    text: str


class Snapshots:
    """Used by one thread at a time."""

    def __init__(
        self, service: Service, history: History, heat: HotPrefixes, members: Members, slow: SlowCalls
    ) -> None:
        self._service = service
        self._history = history
        self._heat = heat
        self._members = members
        self._slow = slow
        self._made: dict[Hashable, _Made] = {}
        self._found: dict[Hashable, tuple[float, list[dict[str, Any]]]] = {}
        self._hours: dict[Hashable, tuple[int, str]] = {}  # of how many samples

    def first(self, principal: Principal, caller: Caller) -> str:
        """With the last hour, and who he is."""
        now = self._now(principal, caller).text
        who = {
            "name": principal.name,
            "tenant": principal.tenant,
            "role": principal.role.name.lower(),
            "models": list(principal.models),
            "asked": not self._service.gate.access.open,
        }
        return f'{now[:-1]},"who":{_text(who)},"history":{self._hour(principal)}}}'

    def next(self, principal: Principal, caller: Caller) -> str:
        return self._now(principal, caller).text

    def _hour(self, principal: Principal) -> str:
        """Made anew with each sample: it takes ten milliseconds, and a page can be opened again and again."""
        count, hour = self._hours.get(principal.scope, (0, "null"))
        if count != self._history.count(principal):
            told = self._history.told(principal)
            count, hour = told["count"] if told else 0, _text(told)
            self._hours[principal.scope] = count, hour
        return hour

    def _now(self, principal: Principal, caller: Caller) -> _Made:
        """The same for all who are told the same, for a while."""
        made, began_s = self._made.get(principal.scope), time.monotonic()
        if made is None or began_s >= made.until_s:
            values = self._make(principal, caller)
            text = _text(values)
            took_s = time.monotonic() - began_s
            for kept in (self._made, self._found, self._hours):
                if len(kept) >= SCOPES_MAX:
                    kept.clear()
            made = self._made[principal.scope] = _Made(began_s + max(EVERY_S, COST_FACTOR * took_s), text)
        return made

    def _make(self, principal: Principal, caller: Caller) -> dict[str, Any]:
        status: pb.NodeStatusReply = self._service.call("node_status", pb.NodeStatusRequest(), caller)
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
            "hot": self._hot(status),
            "findings": self._findings(principal, status),
            "samples": self._history.told(principal, SAMPLES),
            "cluster": self._members.told(status) if principal.of_all else None,
        }
        if principal.of_all:
            values["slow"] = [_slow(call) for call in self._slow.newest()]
        return values

    def _hot(self, status: pb.NodeStatusReply) -> list[dict[str, Any]]:
        """Of namespaces that he sees. No more of a head than logs say."""
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
        """Comparing namespaces takes milliseconds."""
        until_s, told = self._found.get(principal.scope, (0.0, []))
        if time.monotonic() >= until_s:
            told = [finding._asdict() | {"state": finding.state.value} for finding in findings(status)]
            self._found[principal.scope] = (time.monotonic() + FINDINGS_S, told)
        return told


def _of_node(status: pb.NodeStatusReply) -> dict[str, Any]:
    """What is not told is not there."""
    names = (*_SAID, *(_OF_NODE if status.HasField("ram") else ()))
    told = {name: getattr(status, name) for name in names}
    parts = {name: plain(getattr(status, name)) for name in _PARTS if status.HasField(name)}
    if "ram" in parts:
        del parts["ram"]["size_classes"]
    return told | parts


def _size(use: pb.TenantUse) -> int:
    """Those with most bytes first."""
    return -(use.ram_nbytes + use.disk_nbytes)


def _namespaces(status: pb.NodeStatusReply) -> list[dict[str, Any]]:
    """Those with most bytes."""

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
