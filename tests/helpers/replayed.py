"""Readers of the feed that keep what they are told, to be compared with the lists of the pages."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from kvstore import Client, Namespace
from kvstore.cluster.feed import CURSOR_NBYTES
from kvstore.keys import block_part
from kvstore.pb import kvstore_pb2 as pb
from node.feed.models import Model
from node.server import Node


class Caller:
    peer = "reader"

    @staticmethod
    def has_left() -> bool:
        return False


class Reader:
    """Polls a node's feed in this process, and replays it."""

    def __init__(self, sees: Callable[[Model], bool] = lambda model: True) -> None:
        self.cursor = b""
        self.stored: dict[bytes, set[bytes]] = defaultdict(set)
        self.names: dict[bytes, str] = {}
        self.begins = 0
        self.sequence = 0
        self._sees = sees

    def poll(self, node: Node, model: str = "") -> pb.FeedReply:
        request = pb.FeedRequest(cursor=self.cursor, model=model)
        found = node.service.feed.poll(request, Caller(), self._sees)
        reply = pb.FeedReply.FromString(found.SerializeToString())
        self.take(reply)
        return reply

    def take(self, reply: pb.FeedReply) -> None:
        self.cursor = reply.cursor
        if reply.begin:
            self.begins += 1
            self.stored.clear()
            self.sequence = 0
        self.names |= {about.id: about.model for about in reply.models}
        for change in reply.changes:
            assert change.model in self.names, "a model that was not described"
            assert change.sequence == 0 or change.sequence > self.sequence
            self.sequence = max(self.sequence, change.sequence)
            if change.removed:
                self.stored[change.model].difference_update(change.prefix_hashes)
            else:
                self.stored[change.model].update(change.prefix_hashes)

    def catch_up(self, node: Node, model: str = "") -> dict[bytes, set[bytes]]:
        """Poll until there is nothing new, and return what is stored."""
        while True:
            was_snapshot = len(self.cursor) > CURSOR_NBYTES
            reply = self.poll(node, model)
            if not (reply.begin or was_snapshot or reply.changes):
                return self.now()

    def now(self) -> dict[bytes, set[bytes]]:
        return {model: keys for model, keys in self.stored.items() if keys}


def listed(client: Client, spaces: Iterable[Namespace]) -> dict[bytes, set[bytes]]:
    """Return the blocks that all of their namespaces list, by model."""
    known = {space.digest for space, _ in client.namespaces()}
    found: dict[bytes, list[set[bytes]]] = defaultdict(list)
    for space in spaces:
        pages = client.list_pages(space) if space.digest in known else ()
        found[block_part(space).id].append({page.prefix_hash for page in pages})
    blocks = {model: set.intersection(*parts) for model, parts in found.items()}
    return {model: keys for model, keys in blocks.items() if keys}


def only(stored: dict[bytes, set[bytes]], space: Namespace) -> set[bytes]:
    """Return the blocks of a namespace's model."""
    return stored.get(block_part(space).id, set())


def hashes(keys: Sequence[bytes]) -> set[bytes]:
    return set(keys)
