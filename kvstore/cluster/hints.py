"""Send hints to the nodes that they concern.

prefetch    to the near node, which asks the owners; without one as the others
delete      to all members, and what they deleted is removed everywhere
others      to the owners, as a pin
"""

from collections.abc import Sequence

from kvstore.cluster.calls import keyed_replies, per_key
from kvstore.cluster.fan_out import FanOut, Indices, select
from kvstore.deadline import Deadline
from kvstore.keys import Namespace
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results.hints import Hint, HintAction, HintResult
from kvstore.transports.channel import NodeConnection

AWAY = "no owner of the page could be reached"


def send_hint(
    fan_out: FanOut,
    namespace: Namespace,
    prefix_hashes: Sequence[bytes],
    hint: Hint,
    deadline: Deadline,
) -> HintResult:
    """Send a hint about pages; return what became of it."""
    reasons: dict[str, None] = {}

    def message(namespace: bytes, prefix_hashes: Sequence[bytes]) -> pb.HintRequest:
        return hint.message(namespace, prefix_hashes)

    def ask(indices: Indices, connection: NodeConnection, deadline: Deadline) -> list[int]:
        hashes = select(prefix_hashes, indices)
        replies = keyed_replies(connection, "hint", message, namespace, hashes, deadline)
        reasons.update((reply.reason, None) for reply in replies if reply.reason)
        return per_key(replies, "verdicts", hashes)

    found = None
    if hint.action is HintAction.PREFETCH:
        found = fan_out.near(ask, namespace, prefix_hashes, deadline)
    if found is None:
        found = fan_out.route(ask, namespace, prefix_hashes, deadline, _is_refused, 0)
    if 0 in found:
        reasons[AWAY] = None
    accepted, clipped = found.count(pb.HINT_ACCEPTED), found.count(pb.HINT_CLIPPED)
    refused = len(found) - accepted - clipped
    why = tuple(reasons) if clipped or refused else ()
    return HintResult(accepted, clipped, refused, why)


def _is_refused(verdict: int) -> bool:
    return verdict not in (pb.HINT_ACCEPTED, pb.HINT_CLIPPED)


def end_session(
    fan_out: FanOut, namespace: Namespace, hint: Hint, deadline: Deadline
) -> list[bytes]:
    """Delete a session's own pages at all nodes; return their keys."""

    def ask(connection: NodeConnection, limit: Deadline) -> list[bytes]:
        deleted: list[bytes] = []
        while True:
            request = hint.message(namespace.digest, ())
            reply = connection.wire.call("hint", request, limit)
            deleted += reply.deleted
            if not reply.more:
                return deleted

    replies = fan_out.all(ask, namespace, deadline)
    return list(dict.fromkeys(key for keys in replies for key in keys))
