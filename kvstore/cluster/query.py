"""Find who has the blocks of a prompt: the leading ones that are complete, in all and per host.

Each node tells what its namespaces have. They are combined as the members' feeds are
(`merged_feed`): a block is complete when all ranks and cache groups of its KV have a page of it.
"""

from collections.abc import Callable, Mapping, Sequence

from kvstore.cluster.fan_out import FanOut
from kvstore.cluster.merged_feed import Blocks, Space, asked_members
from kvstore.cluster.view import View
from kvstore.deadline import Deadline
from kvstore.errors import KVStoreError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results.replies import HostBlocks, QueryResult
from kvstore.transports.channel import NodeConnection

RAM, DISK, COPY = 1, 2, 4  # the schema's `QueryPart.places`
MEDIA = (RAM | DISK, RAM, DISK)
# 1 for each place that is wanted; whether copies are left out
_TABLES = {
    (wanted, owned): bytes(bool(at & wanted and not (owned and at & COPY)) for at in range(256))
    for wanted in MEDIA
    for owned in (False, True)
}


def query(
    fan_out: FanOut,
    answered: Callable[[Mapping[str, pb.QueryReply | KVStoreError]], dict[str, pb.QueryReply]],
    about: pb.QueryRequest,
    prefix_hashes: Sequence[bytes],
    deadline: Deadline,
) -> list[QueryResult]:
    """Ask all nodes, and combine what those say that answer."""

    def ask(connection: NodeConnection, limit: Deadline) -> pb.QueryReply:
        parts: dict[bytes, pb.QueryPart] = {}
        for start in range(0, len(prefix_hashes), connection.limits.batch_keys_max):
            some = prefix_hashes[start : start + connection.limits.batch_keys_max]
            request = pb.QueryRequest(model=about.model, tenant=about.tenant, prefix_hashes=some)
            reply: pb.QueryReply = connection.wire.call("query", request, limit)
            for part in reply.parts:
                known = parts.setdefault(part.about.id, pb.QueryPart(about=part.about))
                known.places = known.places.ljust(start, b"\0") + part.places
        return pb.QueryReply(parts=parts.values())

    replies = answered(fan_out.each(ask, None, deadline))
    return combined(replies, fan_out.nodes.view, prefix_hashes)


def combined(
    replies: Mapping[str, pb.QueryReply], view: View | None, prefix_hashes: Sequence[bytes]
) -> list[QueryResult]:
    """Return what the nodes have of each KV, by what each said; pure.

    `replies`: by address. Without a view there is one node.
    """
    places = _Places(view, prefix_hashes)
    for address, reply in replies.items():
        for part in reply.parts:
            places.add(address, part)
    found = []
    for _, blocks in sorted(places.blocks.items()):
        leading, ram, disk = (places.leading(blocks, wanted) for wanted in MEDIA)
        hosts = [
            HostBlocks(address, *(places.leading(blocks, wanted, address) for wanted in MEDIA))
            for address in replies
        ]
        hosts = sorted((h for h in hosts if h.blocks), key=lambda h: (-h.blocks, h.host))
        if leading or hosts:
            found.append(QueryResult(blocks.model, leading, ram, disk, tuple(hosts)))
    return found


class _Places:
    """Keep where pages are: for each namespace and address a number, a byte of it for each key."""

    def __init__(self, view: View | None, prefix_hashes: Sequence[bytes]) -> None:
        self._view = view
        self._hashes = prefix_hashes
        self._names = {member.address: member.id for member in view.members} if view else {}
        self._asked: dict[bytes, list[set[str]]] = {}
        self._places: dict[bytes, dict[str, bytes]] = {}
        self._spaces: dict[bytes, Space] = {}
        self.blocks: dict[bytes, Blocks] = {}

    def add(self, address: str, part: pb.QueryPart) -> None:
        """Take what a node has of a namespace."""
        about, count = part.about, len(self._hashes)
        known = self._spaces.get(about.id)
        if known is None or known.is_other(about):
            if known is not None:
                self.blocks[known.about.blocks].drop(known)
            self._spaces[about.id] = Space(about)
            self.blocks.setdefault(about.blocks, Blocks(about)).add(self._spaces[about.id])
        places = part.places[:count].ljust(count, b"\0")
        self._places.setdefault(about.id, {})[address] = places

    def leading(self, blocks: Blocks, wanted: int, address: str = "") -> int:
        """Return how many leading blocks are complete in places that are wanted.

        `address`: at this node alone, copies too; else at the members that are asked for them.
        """
        parts, count = blocks.parts, len(self._hashes)
        complete = int.from_bytes(b"\1" * count, "big") if parts else 0
        for part in parts:
            there = 0
            for space in part:
                for at, places in self._places[space.digest].items():
                    if address in ("", at):
                        there |= self._mask(space.digest, at, places, wanted, bool(address))
            complete &= there
        first = complete.to_bytes(count, "big").find(b"\0")
        return count if first < 0 else first

    def _mask(self, digest: bytes, at: str, places: bytes, wanted: int, alone: bool) -> int:
        owned = self._view is not None and not alone
        there = places.translate(_TABLES[wanted, owned])
        if self._view is not None and not alone:
            asked, name = self._asked_for(self._view, digest), self._names.get(at)
            there = bytes(bit and name in some for bit, some in zip(there, asked, strict=True))
        return int.from_bytes(there, "big")

    def _asked_for(self, view: View, digest: bytes) -> list[set[str]]:
        if digest not in self._asked:
            self._asked[digest] = asked_members(view, digest, self._hashes)
        return self._asked[digest]
