"""Merge the feeds of a cluster's members. Pure: replies go in, changes come out.

A member tells pages of single namespaces. A page is there while a member has it that is asked for
it: an owner, or who owned it before others joined. A block is stored when all its parts are there.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvstore.cluster.view import View
from kvstore.messages import result
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results.replies import FeedModel


class Change(NamedTuple):
    """Blocks of a model that are stored now, or no longer."""

    model: FeedModel
    removed: bool
    prefix_hashes: tuple[bytes, ...]


class Space:
    """A namespace: for each of its pages, the members that have it, one bit each."""

    def __init__(self, about: pb.FeedModel) -> None:
        self.digest: bytes = about.id
        self.about = about
        self.holders: dict[bytes, int] = {}

    def is_other(self, about: pb.FeedModel) -> bool:
        """Return whether this tells of another part of blocks, which the engine knew later.

        A member whose row is older may still tell less.
        """
        now = self.about
        return (about.blocks, about.group, about.rank) != (now.blocks, now.group, now.rank) and (
            (about.groups, about.ranks) >= (now.groups, now.ranks)
        )


class Blocks:
    """The namespaces of one engine's KV, by group and rank."""

    def __init__(self, about: pb.FeedModel) -> None:
        self._about = about
        self._spaces: dict[tuple[int, int], list[Space]] = {}
        self.told: set[bytes] = set()
        # The namespaces of each part; one part without any while one is missing
        self.parts: list[list[Space]] = [[]]

    def add(self, space: Space) -> None:
        """Add a namespace."""
        self._spaces.setdefault((space.about.group, space.about.rank), []).append(space)
        self._find_parts()

    @property
    def is_empty(self) -> bool:
        """Return whether there is no namespace."""
        return not self._spaces

    def drop(self, space: Space) -> None:
        """Remove a namespace."""
        place = space.about.group, space.about.rank
        self._spaces[place].remove(space)
        if not self._spaces[place]:
            del self._spaces[place]
        self._find_parts()

    def _find_parts(self) -> None:
        """Find the parts as the node does, without a visit of each that is missing."""
        known = [space.about for some in self._spaces.values() for space in some]
        groups = max((about.groups for about in known), default=1)
        ranks = Counter(group for group, _ in self._spaces)
        wanted = dict[int, int]()
        for about in known:
            wanted[about.group] = max(about.ranks, wanted.get(about.group, 0))
        is_whole = all(ranks[group] == wanted.get(group) for group in range(groups))
        self.parts = [
            some for (group, _), some in self._spaces.items() if is_whole and group < groups
        ] or [[]]

    @property
    def model(self) -> FeedModel:
        """Return its description."""
        about = self._about
        known = [space for some in self._spaces.values() for space in some]
        message = pb.FeedModel(
            id=about.blocks,
            tenant=about.tenant,
            model=about.model,
            revision=about.revision,
            epoch=about.epoch,
            page_tokens=about.page_tokens,
            namespaces=sorted(space.digest for space in known),
        )
        found: FeedModel = result(message)
        return found


_Looks = tuple[Blocks, list[bytes]]  # blocks to look at


def asked_members(view: View, digest: bytes, keys: Sequence[bytes]) -> list[set[str]]:
    """Return the members that clients ask for each page."""
    found = [{*members} for members in view.owners.owners(digest, keys)]
    if not view.settled:
        for members, before in zip(found, view.holders.owners(digest, keys), strict=True):
            members.update(before)
    return found


class MergedFeed:
    """Keep what the members have told. One thread."""

    def __init__(self) -> None:
        self._view: View | None = None
        self._bits: dict[str, int] = {}  # of each member
        self._spaces: dict[bytes, Space] = {}
        self._blocks: dict[bytes, Blocks] = {}
        self._fresh: dict[str, set[tuple[bytes, bytes]]] = {}  # of snapshots that are running

    def set_view(self, view: View) -> bool:
        """Take a view; return whether other members answer for pages now, so that all is new."""
        known, self._view = self._view, view
        for member in list(self._bits):
            if member not in view.by_id:
                self._drop(member)
                self._close_empty(list(self._spaces.values()))
        return known is None or view.members != known.members or view.replicas != known.replicas

    def _drop(self, member: str) -> None:
        bit = self._bits.pop(member)
        self._fresh.pop(member, None)
        for space in self._spaces.values():
            left = {key: bits & ~bit for key, bits in space.holders.items() if bits & ~bit}
            space.holders = left

    def all(self) -> Iterator[Change]:
        """Yield all blocks that are stored."""
        for blocks in self._blocks.values():
            parts = blocks.parts
            keys = {key for space in parts[0] for key in space.holders}
            blocks.told = {key for key in keys if self._is_stored(parts, key)}
            if blocks.told:
                yield Change(blocks.model, False, tuple(sorted(blocks.told)))

    def forget(self, member: str) -> list[Change]:
        """Forget what a member told that can not be reached."""
        if member not in self._bits:
            return []
        bit = self._bits[member]
        keys = [
            (
                self._blocks[space.about.blocks],
                [k for k, bits in space.holders.items() if bits & bit],
            )
            for space in self._spaces.values()
        ]
        self._drop(member)
        found = self._look(keys)
        self._close_empty(list(self._spaces.values()))
        return found

    def take(self, member: str, reply: pb.FeedReply) -> list[Change]:
        """Take a member's reply, and return what has changed by it."""
        bit = self._bit(member)
        if reply.begin:
            self._fresh[member] = set()
        fresh, looks = self._fresh.get(member), list[_Looks]()
        for about in reply.models:
            looks += self._describe(about)
        for change in reply.changes:
            space = self._spaces[change.model]
            for key in change.prefix_hashes:
                bits = space.holders.get(key, 0)
                bits = bits & ~bit if change.removed else bits | bit
                if bits:
                    space.holders[key] = bits
                else:
                    space.holders.pop(key, None)
                if fresh is not None:
                    fresh.add((space.digest, key))
            looks.append((self._blocks[space.about.blocks], list(change.prefix_hashes)))
        touched = [self._spaces[change.model] for change in reply.changes]
        if fresh is not None and not reply.snapshot:
            touched = list(self._spaces.values())
            looks += self._end_snapshot(bit, fresh)
            del self._fresh[member]
        found = self._look(looks)
        self._close_empty(touched)
        return found

    def _close_empty(self, spaces: Sequence[Space]) -> None:
        """Forget namespaces without pages: a salt per request makes many."""
        for space in spaces:
            if not space.holders and self._spaces.pop(space.digest, None) is not None:
                blocks = self._blocks[space.about.blocks]
                blocks.drop(space)
                if blocks.is_empty:
                    del self._blocks[space.about.blocks]

    def _describe(self, about: pb.FeedModel) -> list[_Looks]:
        """Take the description of a namespace; return blocks of which parts are others now."""
        space, looks = self._spaces.get(about.id), list[_Looks]()
        if space is not None and not space.is_other(about):
            return looks
        if space is not None:
            before = self._blocks[space.about.blocks]
            looks.append((before, list(space.holders)))
            before.drop(space)
            if before.is_empty:
                del self._blocks[space.about.blocks]
            space.about = about
        else:
            space = self._spaces[about.id] = Space(about)
        blocks = self._blocks.setdefault(about.blocks, Blocks(about))
        blocks.add(space)
        return [*looks, (blocks, [*blocks.told, *space.holders])]

    def _end_snapshot(self, bit: int, fresh: set[tuple[bytes, bytes]]) -> list[_Looks]:
        """Forget what the member had before, and has not any more."""
        looks = []
        for space in self._spaces.values():
            gone = [
                key
                for key, bits in space.holders.items()
                if bits & bit and (space.digest, key) not in fresh
            ]
            for key in gone:
                space.holders[key] &= ~bit
                if not space.holders[key]:
                    del space.holders[key]
            looks.append((self._blocks[space.about.blocks], gone))
        return looks

    def _bit(self, member: str) -> int:
        if member not in self._bits:
            used, bit = set(self._bits.values()), 1
            while bit in used:
                bit <<= 1
            self._bits[member] = bit
        return self._bits[member]

    def _look(self, keys: Sequence[_Looks]) -> list[Change]:
        """Look at blocks of which pages came or went."""
        found: list[Change] = []
        for blocks, some in keys:
            parts, came, went = blocks.parts, [], []
            for key in dict.fromkeys(some):
                stored, told = self._is_stored(parts, key), key in blocks.told
                if stored and not told:
                    came.append(key)
                elif told and not stored:
                    went.append(key)
            blocks.told.update(came)
            blocks.told.difference_update(went)
            found += [Change(blocks.model, True, tuple(went))] * bool(went)
            found += [Change(blocks.model, False, tuple(came))] * bool(came)
        return found

    def _is_stored(self, parts: list[list[Space]], key: bytes) -> bool:
        return all(any(self._is_there(space, key) for space in part) for part in parts)

    def _is_there(self, space: Space, key: bytes) -> bool:
        """Return whether a member has the page that clients ask for it."""
        bits = space.holders.get(key, 0)
        if not bits or self._view is None:
            return False
        (asked,) = asked_members(self._view, space.digest, [key])
        return any(bits & self._bits.get(member, 0) for member in asked)
