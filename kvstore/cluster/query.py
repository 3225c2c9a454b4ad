"""Find who has the blocks of a prompt: the leading ones that are complete, in all and per host.

Each node tells what its namespaces have. They are combined as the members' feeds are
(`merged_feed`): a block is complete when all ranks and cache groups of its KV have a page of it.
"""

from collections.abc import Callable, Mapping, Sequence

from kvstore.cluster.fan_out import FanOut
from kvstore.cluster.merged_feed import MergedFeed
from kvstore.cluster.view import View
from kvstore.deadline import Deadline
from kvstore.errors import KVStoreError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results.replies import FeedModel, HostBlocks, QueryResult
from kvstore.transports.channel import NodeConnection

RAM, DISK, COPY = 1, 2, 4  # the schema's `QueryPart.places`
MEDIA = (RAM | DISK, RAM, DISK)
Replies = Mapping[str, pb.QueryReply]
Complete = dict[bytes, tuple[FeedModel, set[bytes]]]  # blocks by KV


def query(
    fan_out: FanOut,
    answered: Callable[[Mapping[str, pb.QueryReply | KVStoreError]], dict[str, pb.QueryReply]],
    about: pb.QueryRequest,
    prefix_hashes: Sequence[bytes],
    deadline: Deadline,
) -> list[QueryResult]:
    """Ask all nodes, and combine what those say that answer."""

    def ask(link: NodeConnection, limit: Deadline) -> pb.QueryReply:
        parts: dict[bytes, pb.QueryPart] = {}
        for start in range(0, len(prefix_hashes), link.limits.batch_keys_max):
            some = prefix_hashes[start : start + link.limits.batch_keys_max]
            request = pb.QueryRequest(model=about.model, tenant=about.tenant, prefix_hashes=some)
            reply: pb.QueryReply = link.wire.call("query", request, limit)
            for part in reply.parts:
                known = parts.setdefault(part.about.id, pb.QueryPart(about=part.about))
                known.places = known.places.ljust(start, b"\0") + part.places
        return pb.QueryReply(parts=parts.values())

    replies = answered(fan_out.each(ask, None, deadline))
    return combined(replies, fan_out.nodes.view, prefix_hashes)


def combined(
    replies: Replies, view: View | None, prefix_hashes: Sequence[bytes]
) -> list[QueryResult]:
    """Return what the nodes have of each KV, by what each said; pure.

    `replies`: by address. Without a view there is one node.
    """
    everywhere = [_complete(replies, view, wanted, prefix_hashes) for wanted in MEDIA]
    by_host = {
        address: [_complete({address: reply}, None, wanted, prefix_hashes) for wanted in MEDIA]
        for address, reply in replies.items()
    }
    models: dict[bytes, FeedModel] = {}
    for complete in (everywhere, *by_host.values()):
        models |= {name: model for name, (model, _) in complete[0].items()}
    found = []
    for name, model in sorted(models.items()):

        def leading(complete: list[Complete], name: bytes = name) -> list[int]:
            return [_leading(one, name, prefix_hashes) for one in complete]

        hosts = [HostBlocks(address, *leading(some)) for address, some in by_host.items()]
        hosts = sorted((h for h in hosts if h.blocks), key=lambda h: (-h.blocks, h.host))
        blocks, ram, disk = leading(everywhere)
        if blocks or hosts:
            found.append(QueryResult(model, blocks, ram, disk, tuple(hosts)))
    return found


def _complete(
    replies: Replies, view: View | None, wanted: int, prefix_hashes: Sequence[bytes]
) -> Complete:
    """Return which blocks are complete at the members that are asked for them, or at a node."""
    merged, found = MergedFeed(anywhere=view is None), Complete()
    if view is not None:
        merged.set_view(view)
    names = {member.address: member.id for member in view.members} if view else {}
    for address, reply in replies.items():
        feed = pb.FeedReply(begin=True, models=[part.about for part in reply.parts])
        for part in reply.parts:
            there = zip(prefix_hashes, part.places, strict=False)
            keys = [key for key, at in there if at & wanted and not (view and at & COPY)]
            feed.changes.append(pb.FeedChange(model=part.about.id, prefix_hashes=keys))
        for change in merged.take(names.get(address, address), feed):
            found.setdefault(change.model.id, (change.model, set()))[1].update(change.prefix_hashes)
    return found


def _leading(known: Complete, name: bytes, prefix_hashes: Sequence[bytes]) -> int:
    blocks = known[name][1] if name in known else ()
    return next(
        (place for place, key in enumerate(prefix_hashes) if key not in blocks), len(prefix_hashes)
    )
