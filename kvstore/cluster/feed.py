"""Read the feed of stored blocks: of one node, or of all members of a cluster.

    a node     polls, from its last cursor on; the node decides what is new
    a cluster  polls of all members in turn (`merged_feed`); a new view, or a member that is gone,
               changes what counts

All calls are made by the thread that iterates.
"""

import logging
import time
from collections.abc import Iterator
from functools import partial

from kvstore.cluster.merged_feed import Change, MergedFeed
from kvstore.cluster.nodes import Nodes
from kvstore.config import FEED_WAIT_S_MAX
from kvstore.deadline import Deadline
from kvstore.errors import (
    DeadlineExceeded,
    Exhausted,
    InvalidRequest,
    KVStoreError,
    ProtocolError,
    Unavailable,
)
from kvstore.log_rate import LogRate
from kvstore.messages import result
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results.replies import FeedEvent
from kvstore.transports.channel import NodeChannel, NodeConnection

log = logging.getLogger(__name__)
log.addFilter(LogRate())

CURSOR_NBYTES = 16  # outside of a snapshot
PAUSE_S_MIN, PAUSE_S_MAX = 0.1, 5.0  # after a failed call
ROUND_S = 0.1  # between two polls of all members
FEW = 4096  # a reply with fewer keys was a member's last for now
POLL_S = 0.001  # of one member, whatever it has to tell
# What a member told that answers no more is forgotten after so long, as its lease in the registry.
AWAY_S = 15.0
PASSING = (Unavailable, DeadlineExceeded, Exhausted)  # what may be over with the next try


def feed(nodes: Nodes, model: str, idle_s: float, timeout_s: float) -> Iterator[FeedEvent]:
    """Yield the events of the single node, or of the cluster. Raises what does not pass by itself.

    `timeout_s`: of a call, beside the wait for news.
    """
    pauses = _pauses()
    while True:
        try:
            view = nodes.found(Deadline(timeout_s))
            break
        except PASSING as error:
            yield _away(nodes, error)
            time.sleep(next(pauses))
    wait_s = min(max(idle_s, ROUND_S), FEED_WAIT_S_MAX)
    if view is None:
        yield from _of_node(nodes, model, wait_s, timeout_s)
    yield from _ClusterFeed(nodes, model, wait_s, timeout_s).events()


def _of_node(nodes: Nodes, model: str, wait_s: float, timeout_s: float) -> Iterator[FeedEvent]:
    """Yield the events of a single node, until it is one of a cluster."""
    request, pauses = pb.FeedRequest(model=model), _pauses()
    while True:
        try:
            reply = _poll(nodes.only, request, wait_s, timeout_s)
        except PASSING as error:
            yield _away(nodes, error)
            time.sleep(next(pauses))
            continue
        except InvalidRequest:
            if nodes.view is None:
                raise
            return
        pauses, was_snapshot = _pauses(), len(request.cursor) > CURSOR_NBYTES
        request.cursor = reply.cursor
        yield from _told(reply, was_snapshot)


def _poll(
    channel: NodeChannel, request: pb.FeedRequest, wait_s: float, timeout_s: float
) -> pb.FeedReply:
    request.wait_ms = max(1, round(1000 * wait_s))
    call = partial(_call, request)
    return channel.run(call, None, Deadline(wait_s + timeout_s))


def _call(request: pb.FeedRequest, connection: NodeConnection, deadline: Deadline) -> pb.FeedReply:
    reply: pb.FeedReply = connection.wire.call("feed", request, deadline)
    if not {about.id for about in reply.models} >= {change.model for change in reply.changes}:
        raise ProtocolError("a node told changes of a model that it did not describe")
    return reply


def _told(reply: pb.FeedReply, was_snapshot: bool) -> Iterator[FeedEvent]:
    """Yield the events of a reply of a single node."""
    models = {about.id: result(about) for about in reply.models}
    if reply.begin:
        yield FeedEvent("reset")
    for change in reply.changes:
        kind = "removed" if change.removed else "stored"
        hashes = tuple(change.prefix_hashes)
        yield FeedEvent(kind, models[change.model], hashes, change.sequence)
    if (reply.begin or was_snapshot) and not reply.snapshot:
        yield FeedEvent("ready")
    elif not (reply.begin or reply.changes or reply.snapshot):
        yield FeedEvent("idle")


def _pauses() -> Iterator[float]:
    """Yield the seconds to wait after each of several failed calls."""
    pause_s = PAUSE_S_MIN
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, PAUSE_S_MAX)


def _away(nodes: Nodes, error: KVStoreError, member: str = "") -> FeedEvent:
    """Return the event of a failed call; raise its error if the client was closed meanwhile."""
    if nodes.closed:
        raise error
    return FeedEvent("away", text=f"{member}: {error}" if member else str(error))


def _event(change: Change) -> FeedEvent:
    kind = "removed" if change.removed else "stored"
    return FeedEvent(kind, change.model, change.prefix_hashes)


class _Member:
    """A member's cursor, and since when it does not answer."""

    def __init__(self) -> None:
        self.cursor = b""
        self.away_since_s = 0.0
        self.forgotten = False

    @property
    def is_told(self) -> bool:
        """Return whether all of its snapshot has come."""
        return len(self.cursor) == CURSOR_NBYTES


class _ClusterFeed:
    """The merged feed of the members. One thread."""

    def __init__(self, nodes: Nodes, model: str, idle_s: float, timeout_s: float) -> None:
        self._nodes = nodes
        self._model = model
        self._idle_s = idle_s
        self._timeout_s = timeout_s
        self._merged = MergedFeed()
        self._members: dict[str, _Member] = {}

    def events(self) -> Iterator[FeedEvent]:
        """Yield the events, without end."""
        view, told_s, ready = None, time.monotonic(), False
        while True:
            began_s = time.monotonic()
            if self._nodes.view is not view:
                view = self._nodes.view
                assert view is not None
                if self._merged.set_view(view):
                    self._members = {
                        name: self._members.get(name) or _Member() for name in view.by_id
                    }
                    yield FeedEvent("reset")
                    yield from map(_event, self._merged.all())
                    ready = False
            for name, member in list(self._members.items()):
                for event in self._of_member(name, member):
                    told_s = time.monotonic()
                    yield event
            if not ready and all(m.is_told or m.away_since_s for m in self._members.values()):
                ready, told_s = True, time.monotonic()
                yield FeedEvent("ready")
            if time.monotonic() - told_s >= self._idle_s:
                told_s = time.monotonic()
                yield FeedEvent("idle")
            time.sleep(max(0.0, ROUND_S - (time.monotonic() - began_s)))

    def _of_member(self, name: str, member: _Member) -> Iterator[FeedEvent]:
        """Poll a member until it has told all that it has to tell now."""
        view = self._nodes.view
        if view is None or name not in view.by_id:
            return
        request = pb.FeedRequest(model=self._model, member=True)
        while True:
            request.cursor = member.cursor
            try:
                reply = _poll(self._nodes.member(view, name), request, POLL_S, self._timeout_s)
            except PASSING as error:
                now_s, away = time.monotonic(), _away(self._nodes, error, name)
                if not member.away_since_s:
                    member.away_since_s = now_s
                    yield away
                if now_s - member.away_since_s > AWAY_S and not member.forgotten:
                    member.forgotten, member.cursor = True, b""
                    yield from map(_event, self._merged.forget(name))
                return
            member.cursor, member.away_since_s, member.forgotten = reply.cursor, 0.0, False
            yield from map(_event, self._merged.take(name, reply))
            if not (reply.begin or reply.changes or reply.snapshot):
                return
            if not reply.snapshot and sum(len(c.prefix_hashes) for c in reply.changes) < FEW:
                return
