"""Merge the feeds of a cluster's members. Pure: replies go in, changes come out.

A member tells pages of single namespaces. A page is there while a member has it that is asked for
it: an owner, or who owned it before others joined. A block is stored when all its parts are there.
"""

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


class _Space:
    """A namespace: for each of its pages, the members that have it, one bit each."""

    def __init__(self, about: pb.FeedModel) -> None:
        self.digest: bytes = about.id
        self.about = about
        self.holders: dict[bytes, int] = {}


class _Blocks:
    """The namespaces of one engine's KV, by group and rank."""

    def __init__(self) -> None:
        self.spaces: dict[tuple[int, int], list[_Space]] = {}
        self.told: set[bytes] = set()

    def add(self, space: _Space) -> None:
        self.spaces.setdefault((space.about.group, space.about.rank), []).append(space)

    @property
    def parts(self) -> list[list[_Space]]:
        """Return the namespaces of each part; empty while one is missing."""
        ranks = {place[0]: some[0].about.ranks for place, some in self.spaces.items()}
        groups = next(iter(self.spaces.values()))[0].about.groups
        wanted = [(group, rank) for group in range(groups) for rank in range(ranks.get(group, 1))]
        return [self.spaces.get(place, []) for place in wanted]

    @property
    def model(self) -> FeedModel:
        """Return its description."""
        about = next(iter(self.spaces.values()))[0].about
        known = [space for some in self.spaces.values() for space in some]
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


class MergedFeed:
    """What the members have told. One thread."""

    def __init__(self) -> None:
        self._view: View | None = None
        self._bits: dict[str, int] = {}  # of each member
        self._spaces: dict[bytes, _Space] = {}
        self._blocks: dict[bytes, _Blocks] = {}
        self._fresh: dict[str, set[tuple[bytes, bytes]]] = {}  # of snapshots that are running

    def set_view(self, view: View) -> bool:
        """Take a view; return whether other members answer for pages now, so that all is new."""
        known, self._view = self._view, view
        for member in list(self._bits):
            if member not in view.by_id:
                self._drop(member)
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
            (space, [key for key, bits in space.holders.items() if bits & bit])
            for space in self._spaces.values()
        ]
        self._drop(member)
        return self._look(keys)

    def take(self, member: str, reply: pb.FeedReply) -> list[Change]:
        """Take a member's reply, and return what has changed by it."""
        bit = self._bit(member)
        if reply.begin:
            self._fresh[member] = set()
        fresh, looks = self._fresh.get(member), list[tuple[_Space, list[bytes]]]()
        for about in reply.models:
            if about.id not in self._spaces:
                space = self._spaces[about.id] = _Space(about)
                self._blocks.setdefault(about.blocks, _Blocks()).add(space)
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
            looks.append((space, list(change.prefix_hashes)))
        if fresh is not None and not reply.snapshot:
            looks += self._end_snapshot(bit, fresh)
            del self._fresh[member]
        return self._look(looks)

    def _end_snapshot(
        self, bit: int, fresh: set[tuple[bytes, bytes]]
    ) -> list[tuple[_Space, list[bytes]]]:
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
            looks.append((space, gone))
        return looks

    def _bit(self, member: str) -> int:
        if member not in self._bits:
            used, bit = set(self._bits.values()), 1
            while bit in used:
                bit <<= 1
            self._bits[member] = bit
        return self._bits[member]

    def _look(self, keys: Sequence[tuple[_Space, list[bytes]]]) -> list[Change]:
        """Look at blocks of which pages came or went."""
        found: list[Change] = []
        for space, some in keys:
            blocks = self._blocks[space.about.blocks]
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

    def _is_stored(self, parts: list[list[_Space]], key: bytes) -> bool:
        return all(any(self._is_there(space, key) for space in part) for part in parts)

    def _is_there(self, space: _Space, key: bytes) -> bool:
        """Return whether a member has the page that clients ask for it."""
        bits = space.holders.get(key, 0)
        if not bits or self._view is None:
            return False
        view = self._view
        asked = {*view.owners.owners(space.digest, [key])[0]}
        asked |= set() if view.settled else {*view.holders.owners(space.digest, [key])[0]}
        return any(bits & self._bits.get(member, 0) for member in asked)
