"""Ask the other members for their status, and add it up, while a user watches.

Members are asked through this node, one after the other in a thread of their own: a dead one delays
no message, and its row keeps the error.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from kvstore.cluster.view import Member, View
from kvstore.deadline import Deadline
from kvstore.doctor.members import health
from kvstore.errors import KVStoreError
from kvstore.messages import plain
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.channel import NodeConnection
from node.cluster.membership import Membership
from node.cluster.remote_pages import PeerChannels

ASKED_S = 5.0  # how often members are asked, at most
ROUND_S = 10.0  # for all of them; members not asked in it come first in the next
CALL_S = 2.0  # for one of them
_FIELDS = ("state", "version", "uptime_ms", "session_count", "metrics_port")
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
    "pages_under_replicated",
    "view_number",
)
_SUMMED = (
    "copy_count",
    "copy_nbytes",
    "queue_pages",
    "queue_nbytes",
    "pages_dropped",
    "pages_under_replicated",
)
_TOTALS = ("pages_asked", "prefix_hits", "nbytes_put", "nbytes_got")

Begin = Callable[[Callable[[], object]], "Future[Any] | None"]


class Members:
    """Status of the members, as they report it.

    Used by one thread at a time. `begin` runs work in another.
    """

    def __init__(self, membership: Membership, channels: PeerChannels, begin: Begin) -> None:
        self._membership = membership
        self._channels = channels
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
            known = self._statuses | {
                self._membership.member: _answer(own) | {"error": "", "at_s": now_s}
            }
        there = {
            member.id: known[member.id]
            for member in view.members
            if known.get(member.id, {}).get("status")
        }
        return {
            "cluster": view.cluster,
            # a member that was not queried yet is not missing
            "health": health(view, {name: one["health"] for name, one in there.items()})
            if all(member.id in known for member in view.members)
            else "",
            "number": view.number,
            "replicas": view.replicas,
            "own": self._membership.member,
            "members": [
                _member(member, known.get(member.id, {}), now_s) for member in view.members
            ],
            "sums": _sums([one["status"] for one in there.values()]),
            "lost": [plain(lost) for lost in own.peers.lost],
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
            answer = self._request_status(member, min(CALL_S, left_s))
            with self._lock:
                self._statuses[member] = answer
                self._asked_s[member] = answer["at_s"]
        with self._lock:
            for name in self._statuses.keys() - set(others):
                del self._statuses[name]
                self._asked_s.pop(name, None)

    def _request_status(self, member: str, timeout_s: float) -> dict[str, Any]:
        def call(connection: NodeConnection, deadline: Deadline) -> pb.NodeStatusReply:
            reply: pb.NodeStatusReply = connection.wire.call(
                "node_status", pb.NodeStatusRequest(), deadline
            )
            return reply

        answer: dict[str, Any] = {"status": None, "error": ""}
        try:
            answer |= _answer(self._channels.channel(member).run(call, None, Deadline(timeout_s)))
        except KVStoreError as error:
            answer["error"] = str(error)
        return answer | {"at_s": time.monotonic()}


def _answer(status: pb.NodeStatusReply) -> dict[str, Any]:
    """Return what is kept of a status: what is shown, and what decides on the cluster's health."""
    health = pb.NodeStatusReply(state=status.state, peers=status.peers)
    return {"status": summary(status), "health": health}


def _member(member: Member, answer: Mapping[str, Any], now_s: float) -> dict[str, Any]:
    return {
        "id": member.id,
        "address": member.address,
        "zone": member.zone,
        "weight": member.weight,
        "state": member.state.name.lower(),
        "status": answer.get("status"),
        "error": answer.get("error", ""),
        "age_s": round(now_s - answer["at_s"], 1) if "at_s" in answer else None,
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
    fields_of_node = {
        name: {field: plain(part)[field] for field in fields}
        for name, (part, fields) in parts.items()
    }
    return {
        **{field: getattr(status, field) for field in _FIELDS},
        "disk": None,
        **fields_of_node,
    }


def _sums(statuses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of the members that answered. Members without a disk add nothing to it."""
    found: dict[str, Any] = {
        "answered": len(statuses),
        "session_count": sum(status["session_count"] for status in statuses),
    }
    for part, fields in (("totals", _TOTALS), ("ram", _TIER), ("disk", _TIER), ("peers", _SUMMED)):
        parts = [status[part] for status in statuses if status[part]]
        found[part] = {field: sum(one[field] for one in parts) for field in fields}
    return found
