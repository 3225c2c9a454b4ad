"""Namespaces of a node: who may share which pages, and what became of each lookup."""

from collections.abc import Callable, Sequence
from typing import Any

from kvstore.checksum import key_seed
from kvstore.errors import Exhausted, InvalidRequest, LayoutMismatch
from kvstore.keys import Namespace, shown, unknown
from kvstore.layout import slot_nbytes
from kvstore.messages import namespace_message
from node.ram.accounts import Account
from node.ram.counters import Counters
from node.ram.ghosts import Ghosts
from node.ram.page import Page

# All descriptions together. With them, NodeStatus and ListNamespaces tell of every namespace in one
# message: 1 MiB + namespaces_max (at most 2,048) x 230 bytes of digest and counters < 2 MiB.
DESCRIPTIONS_NBYTES_MAX = 1 << 20
SHRUNK = 8  # a namespace of an eighth of the pages that it had gives memory back
PAGES_SMALL = 512  # not worth it, until it is empty


class NamespaceIndex:
    """The pages of one namespace by prefix hash, WRITING ones included, DOOMED ones not."""

    def __init__(self, value: Namespace, account: Account[Any], peer: str = "") -> None:
        self.value = value
        self.account = account
        self.peer = peer  # the client that opened it; empty if restored from disk or opened by another node
        self.digest = value.digest
        self.page_nbytes = value.stored_nbytes
        self.slot_nbytes = slot_nbytes(self.page_nbytes)
        self.pages: dict[bytes, Page] = {}
        self._peak_count = 0
        self.busy = 0  # batches at work on it, which let others have their turn: it can not be forgotten
        self.counters = Counters()
        self.described_nbytes: int = namespace_message(value).ByteSize()

    def add(self, pages: Sequence[Page]) -> None:
        for page in pages:
            self.pages[page.prefix_hash] = page
        self._peak_count = max(self._peak_count, len(self.pages))

    def drop(self, page: Page) -> None:
        """A dict never gets smaller by itself, so what has become small gets a new one."""
        del self.pages[page.prefix_hash]
        if len(self.pages) * SHRUNK < self._peak_count and (not self.pages or self._peak_count > PAGES_SMALL):
            self.pages = dict(self.pages)
            self._peak_count = len(self.pages)

    def seed(self, prefix_hash: bytes) -> int:
        """Seed of the page's checksum."""
        return key_seed(self.digest, prefix_hash)

    def count_lookup(self, present: list[bool], absent: list[bytes], ghosts: Ghosts) -> None:
        """Counts what a lookup found and why it missed. `absent`: keys that are not here in any
        state; what else is not present is being written."""
        counters, count, hits = self.counters, len(present), present.count(True)
        counters.pages_asked += count
        counters.pages_hit += hits
        counters.prefix_hits += present.index(False) if hits < count else count
        counters.miss_writing += count - hits - len(absent)
        for reason, missed in ghosts.reasons(self.digest, absent).items():
            name = f"miss_{reason}"
            setattr(counters, name, getattr(counters, name) + missed)


class Namespaces:
    """The namespaces that were opened. Bounded; an empty one makes room for a new one.

    Not thread-safe; the tier's lock guards it.
    """

    def __init__(self, count_max: int, page_nbytes_max: int) -> None:
        self._count_max = count_max
        self._page_nbytes_max = page_nbytes_max
        self._by_digest: dict[bytes, NamespaceIndex] = {}
        self.account_of: Callable[[str], Account[Any]]  # of a tenant, in the RAM tier that these are of
        # The owner whose share a namespace counts to, by its tenant and the peer that opened it; empty: no owner.
        self.owner_of: Callable[[str, str], str] = lambda tenant, peer: peer
        self.below_count: Callable[[bytes], int] = lambda digest: 0  # pages in the tier below
        self.forgotten = Counters()  # of namespaces that made room, so that totals never shrink

    def open(
        self, value: Namespace, digest: bytes, peer: str = "", restored: bool = False
    ) -> tuple[NamespaceIndex, bool]:
        """(the namespace, whether it is new). `digest` is what the caller will use in its keys. Half of all is
        for one owner (`owner_of`); for no `peer` there is no such limit. One that is `restored` has pages below and
        needs no room made: it is there, and an earlier run had room."""
        if digest != value.digest:
            raise LayoutMismatch(
                f"namespace digest {shown(digest)} does not belong to this description, whose digest is "
                f"{value.digest.hex()} (layout {value.layout.fingerprint.hex()[:16]}, "
                f"{value.stored_nbytes} bytes a page); compute it from the same layout"
            )
        known = self._by_digest.get(digest)
        if known is not None:
            if known.value != value:
                raise LayoutMismatch(f"namespace {digest.hex()} is registered with another layout or identity")
            self._claim(known, peer)
            return known, False
        if value.stored_nbytes > self._page_nbytes_max:
            raise InvalidRequest(
                f"a page of this layout has {value.stored_nbytes} bytes, this node takes at most "
                f"{self._page_nbytes_max} (extent_nbytes); use fewer tokens per page or larger extents"
            )
        index = NamespaceIndex(value, self.account_of(value.tenant), peer)
        if peer and not restored:
            self._make_room_of_owner(index)
        if not restored:
            self._make_room(index, self.all(), self._count_max, DESCRIPTIONS_NBYTES_MAX, "")
        self._by_digest[digest] = index
        return index, True

    def _claim(self, known: NamespaceIndex, peer: str) -> None:
        """Count a known namespace to its owner when the owner opens it.

        It had no owner after a restart, or was opened by another tenant that reads it. It is never refused,
        because its pages exist.
        """
        tenants = self.owner_of(known.value.tenant, "")
        if peer and (self.owner_of(known.value.tenant, peer) == tenants if tenants else not known.peer):
            known.peer = peer

    def _make_room_of_owner(self, new: NamespaceIndex) -> None:
        """Forget empty namespaces of the new one's owner, who may have half of the limit.

        Namespaces without an owner (restored, or from other nodes, on a node without tenants) are subtracted
        from the limit first. Otherwise a peer that opens its half after each restart would soon have all.
        """
        owned: dict[str, list[NamespaceIndex]] = {}
        for index in self._by_digest.values():
            owned.setdefault(self.owner_of(index.value.tenant, index.peer), []).append(index)
        unowned = [index for index in owned.get("", ()) if not self._is_empty(index)]
        count_max = max(0, self._count_max - len(unowned))
        nbytes_max = max(0, DESCRIPTIONS_NBYTES_MAX - sum(index.described_nbytes for index in unowned))
        owner = self.owner_of(new.value.tenant, new.peer)
        self._make_room(new, owned.get(owner, []), -(-count_max // 2), -(-nbytes_max // 2), f"of {owner}")

    def _is_empty(self, index: NamespaceIndex) -> bool:
        return not (index.pages or index.busy or self.below_count(index.digest))

    def _make_room(
        self, new: NamespaceIndex, there: list[NamespaceIndex], count_max: int, nbytes_max: int, whose: str
    ) -> None:
        """Forgets empty namespaces of those, first opened first, until one more fits."""
        described = new.described_nbytes + sum(index.described_nbytes for index in there)
        count = len(there) + 1
        for index in there:
            if count <= count_max and described <= nbytes_max:
                return
            if self._is_empty(index):
                self.forgotten.add(index.counters)
                del self._by_digest[index.digest]
                count, described = count - 1, described - index.described_nbytes
        if count > count_max or described > nbytes_max:
            there_now = f"{count - 1} namespaces {whose} with pages are open, described by "
            there_now += f"{described - new.described_nbytes} bytes"
            if not whose:  # who asks is not told how much others have
                there_now = "there is no room for one more namespace"
            raise Exhausted(
                f"{there_now}; allowed are {count_max} (namespaces_max) and {nbytes_max} bytes of descriptions, "
                "remove some of their pages"
            )

    def find(self, digest: bytes) -> NamespaceIndex:
        index = self._by_digest.get(digest)
        if index is None:
            raise unknown(digest)
        return index

    def close(self, digest: bytes) -> bool:
        """Forgets an empty namespace; False if it has pages, or is busy."""
        index = self._by_digest.get(digest)
        if index is None or not self._is_empty(index):
            return index is None
        self.forgotten.add(index.counters)
        del self._by_digest[digest]
        return True

    def all(self) -> list[NamespaceIndex]:
        return list(self._by_digest.values())
