"""Describe a page in RAM, apart from its bytes."""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from kvstore.checksum import key_seed
from kvstore.errors import Exhausted, InvalidRequest, LayoutMismatch
from kvstore.keys import Namespace, shown, unknown
from kvstore.layout import slot_nbytes
from kvstore.messages import namespace_message
from node.memory.tenant_usage import TenantAccount

# Removed pages remembered, in two generations of this many; about 80 bytes each, so 10 MB when
# full.
GENERATION_COUNT_MAX = 65_536
FREED = 2  # entries of an older generation freed with each new one


class MissReasons:
    """Remember for a while why pages were removed, to explain misses.

    A hash collision only mislabels a counter.
    """

    def __init__(self, count_max: int = GENERATION_COUNT_MAX) -> None:
        self._count_max = count_max
        self._new: dict[int, str] = {}
        self._old: dict[int, str] = {}
        self._gone: dict[int, str] = {}  # an outdated generation: freed bit by bit, not at once

    def remember(self, digest: bytes, prefix_hash: bytes, reason: str) -> None:
        """Remember why a page left: 'evicted', 'removed', 'expired' or 'corrupt'."""
        if len(self._new) >= self._count_max:
            self._new, self._old, self._gone = {}, self._new, self._old
        if self._gone:
            for _ in range(min(FREED, len(self._gone))):
                self._gone.popitem()
        self._new[hash(digest) ^ hash(prefix_hash)] = reason

    def forget(self) -> None:
        """Forget all reasons."""
        self._new, self._old, self._gone = {}, {}, {}

    def reasons(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> dict[str, int]:
        """Count, by reason, why pages are gone; 'absent' for unknown or long gone ones."""
        new, old, salt = self._new.get, self._old.get, hash(digest)
        keys = [salt ^ hash(prefix_hash) for prefix_hash in prefix_hashes]
        found = [new(key) or old(key, "absent") for key in keys]
        return {reason: found.count(reason) for reason in set(found)}


@dataclass(slots=True)
class Counters:
    """Counters of events on pages of a namespace; names as in the Counters message."""

    pages_asked: int = 0
    prefix_hits: int = 0
    pages_hit: int = 0
    miss_absent: int = 0
    miss_evicted: int = 0
    miss_writing: int = 0
    miss_removed: int = 0
    miss_corrupt: int = 0
    miss_expired: int = 0
    pages_put: int = 0
    pages_put_exists: int = 0
    pages_put_busy: int = 0
    pages_put_full: int = 0
    pages_put_aborted: int = 0
    pages_got: int = 0
    pages_get_missed: int = 0
    pages_evicted: int = 0
    nbytes_put: int = 0
    nbytes_got: int = 0
    pages_hit_disk: int = 0
    pages_hit_peer: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def add(self, other: Counters) -> None:
        """Add other counters."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def count_put(self, exists: int, busy: int, full: int) -> None:
        """Count pages of a put that are not to be written."""
        self.pages_put_exists += exists
        self.pages_put_busy += busy
        self.pages_put_full += full

    def count_get(self, hits: int, misses: int, wanted_nbytes: int) -> None:
        """Count pages of a get, and `wanted_nbytes` of each hit."""
        self.pages_got += hits
        self.nbytes_got += hits * wanted_nbytes
        self.pages_get_missed += misses


class PageNamespace(Protocol):
    """Provide what a page needs: a `NamespaceIndex`, or a `PartialPage` for parts only."""

    value: Namespace
    digest: bytes
    page_nbytes: int
    slot_nbytes: int
    account: TenantAccount[Any]  # of its tenant; its pool is a `node.memory.pools.EvictionPool`
    pages: dict[bytes, Page]
    counters: Counters

    def seed(self, prefix_hash: bytes) -> int:
        """Return the checksum seed of a page."""

    def drop(self, page: Page) -> None:
        """Remove a page."""


class State(enum.IntEnum):
    """Enumerate the states of a page in RAM.

    reserve            commit              remove, while held
    --------> WRITING --------> VISIBLE -------------------------> DOOMED
                 | abort         ^ | remove, evict                    | last release
                 v               | v                                  v
                gone    LOADING -+ gone                              gone
                        (from disk, from another node; fails: DOOMED)
    """

    WRITING = 0  # a writer owns the slot; no other thread may read it
    VISIBLE = 1
    DOOMED = 2  # it can not be found (any more), but the slot waits for its readers
    LOADING = 3  # being read from a lower tier; readers may wait for it


class Page:
    """A slot of the RAM tier and its page.

    With __slots__, because 200,000 of these must be small.

    `holds` counts running reads: a held page keeps its slot in any case. `used_ms` and `stored_ms`
    are the tier's clock; pages of one batch share the int object.
    """

    __slots__ = (
        "checksum",
        "expiry_s",
        "holds",
        "is_copy",
        "is_fetched",
        "leaves",
        "namespace",
        "newer",
        "offset",
        "older",
        "order",
        "prefix_hash",
        "state",
        "stored_ms",
        "used_ms",
    )

    def __init__(
        self, namespace: PageNamespace, prefix_hash: bytes, now_ms: int, is_copy: bool = False
    ) -> None:
        self.namespace = namespace
        self.prefix_hash = prefix_hash
        self.offset = -1
        self.checksum = b""
        self.leaves = b""  # only of a page that has several (`kvstore.checksum`)
        self.expiry_s = 0  # since the epoch; 0: never
        self.state = State.WRITING
        self.holds = 0
        self.is_copy = is_copy  # other members of the cluster own it
        self.is_fetched = False  # from a lower tier or another member, which stored it earlier
        self.stored_ms = self.used_ms = now_ms
        # a `pools.SizeOrder`, if it may be evicted; untyped, because pools imports this file
        self.order: Any = None
        self.older: Page | None = None
        self.newer: Page | None = None


# Limit of all namespaces' descriptions together. So NodeStatus and ListNamespaces describe every
# namespace in one message: 1 MiB + namespaces_max (at most 2,048) x 230 bytes of digest and
# counters < 2 MiB.
DESCRIPTIONS_NBYTES_MAX = 1 << 20
SHRUNK = 8  # a namespace with an eighth of its former pages frees memory
PAGES_SMALL = 512  # smaller ones only when they are empty


class NamespaceIndex:
    """The pages of one namespace by prefix hash, WRITING ones included, DOOMED ones not."""

    def __init__(self, value: Namespace, account: TenantAccount[Any], peer: str = "") -> None:
        self.value = value
        self.account = account
        # the client that opened it; empty if restored from disk or opened by another node
        self.peer = peer
        self.digest = value.digest
        self.page_nbytes = value.stored_nbytes
        self.slot_nbytes = slot_nbytes(self.page_nbytes)
        self.pages: dict[bytes, Page] = {}
        self._peak_count = 0
        # batches that work on it and let other threads run in between: it can not be forgotten
        self.busy = 0
        self.counters = Counters()
        self.described_nbytes: int = namespace_message(value).ByteSize()

    def add(self, pages: Sequence[Page]) -> None:
        """Add pages."""
        for page in pages:
            self.pages[page.prefix_hash] = page
        self._peak_count = max(self._peak_count, len(self.pages))

    def drop(self, page: Page) -> None:
        """Remove a page.

        A dict never shrinks by itself, so a namespace that became small gets a new one.
        """
        del self.pages[page.prefix_hash]
        if len(self.pages) * SHRUNK < self._peak_count and (
            not self.pages or self._peak_count > PAGES_SMALL
        ):
            self.pages = dict(self.pages)
            self._peak_count = len(self.pages)

    def loading(self, prefix_hash: bytes) -> Page | None:
        """Return the page if it is being read from a lower tier."""
        page = self.pages.get(prefix_hash)
        return page if page is not None and page.state is State.LOADING else None

    def seed(self, prefix_hash: bytes) -> int:
        """Return the seed of the page's checksum."""
        return key_seed(self.digest, prefix_hash)

    def count_lookup(
        self, present: list[bool], absent: list[bytes], miss_reasons: MissReasons
    ) -> None:
        """Count the results of a lookup and why it missed.

        `absent` holds keys that are here in no state; other missing ones are being written.
        """
        counters, count, hits = self.counters, len(present), present.count(True)
        counters.pages_asked += count
        counters.pages_hit += hits
        if hits == count:
            counters.prefix_hits += count
            return
        counters.prefix_hits += present.index(False)
        counters.miss_writing += count - hits - len(absent)
        for reason, missed in miss_reasons.reasons(self.digest, absent).items():
            name = f"miss_{reason}"
            setattr(counters, name, getattr(counters, name) + missed)


class Namespaces:
    """The open namespaces.

    Bounded; an empty one is closed for a new one. Not thread-safe; the tier's lock guards it.
    """

    def __init__(self, count_max: int, page_nbytes_max: int) -> None:
        self._count_max = count_max
        self._page_nbytes_max = page_nbytes_max
        self._by_digest: dict[bytes, NamespaceIndex] = {}
        # Account of a tenant in the RAM tier of these namespaces
        self.account_of: Callable[[str], TenantAccount[Any]]
        # The owner whose share a namespace counts to, by its tenant and the peer that opened it;
        # empty: no owner.
        self.owner_of: Callable[[str, str], str] = lambda tenant, peer: peer
        self.below_count: Callable[[bytes], int] = lambda digest: 0  # pages in the local lower tier
        self.forgotten = Counters()  # of closed namespaces, so that totals never shrink

    def open(
        self, value: Namespace, digest: bytes, peer: str = "", restored: bool = False
    ) -> tuple[NamespaceIndex, bool]:
        """Open a namespace; return it and whether it is new.

        `digest` is the one that the caller will use. One owner (`owner_of`) may have half of all
        namespaces; an empty `peer` has no such limit. A `restored` one has pages on disk and always
        fits, as it did before.
        """
        if digest != value.digest:
            raise LayoutMismatch(
                f"namespace digest {shown(digest)} does not belong to this description, whose "
                f"digest is {value.digest.hex()} (layout {value.layout.fingerprint.hex()[:16]}, "
                f"{value.stored_nbytes} bytes a page); compute it from the same layout"
            )
        known = self._by_digest.get(digest)
        if known is not None:
            if known.value != value:
                raise LayoutMismatch(
                    f"namespace {digest.hex()} is registered with another layout or identity"
                )
            self._claim(known, peer)
            if value.part and not known.value.part:  # it was opened by who did not know
                known.value = value
            return known, False
        if value.stored_nbytes > self._page_nbytes_max:
            raise InvalidRequest(
                f"a page of this layout has {value.stored_nbytes} bytes, this node takes at most "
                f"{self._page_nbytes_max} (extent_nbytes); use fewer tokens per page or larger "
                "extents"
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

        It had no owner after a restart, or was opened by another tenant that reads it. It is never
        refused, because its pages exist.
        """
        tenants = self.owner_of(known.value.tenant, "")
        if peer and (
            self.owner_of(known.value.tenant, peer) == tenants if tenants else not known.peer
        ):
            known.peer = peer

    def _make_room_of_owner(self, new: NamespaceIndex) -> None:
        """Close empty namespaces of the new one's owner, who may have half of the limit.

        Namespaces without an owner (restored, or from other nodes, on a node without tenants) are
        subtracted from the limit first. Otherwise a peer that opens its half after each restart
        would soon have all.
        """
        owned: dict[str, list[NamespaceIndex]] = {}
        for index in self._by_digest.values():
            owned.setdefault(self.owner_of(index.value.tenant, index.peer), []).append(index)
        unowned = [index for index in owned.get("", ()) if not self._is_empty(index)]
        count_max = max(0, self._count_max - len(unowned))
        nbytes_max = max(
            0, DESCRIPTIONS_NBYTES_MAX - sum(index.described_nbytes for index in unowned)
        )
        owner = self.owner_of(new.value.tenant, new.peer)
        self._make_room(
            new, owned.get(owner, []), -(-count_max // 2), -(-nbytes_max // 2), f"of {owner}"
        )

    def _is_empty(self, index: NamespaceIndex) -> bool:
        return not (index.pages or index.busy or self.below_count(index.digest))

    def _make_room(
        self,
        new: NamespaceIndex,
        there: list[NamespaceIndex],
        count_max: int,
        nbytes_max: int,
        whose: str,
    ) -> None:
        """Close empty namespaces of those, first opened first, until one more fits."""
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
            if not whose:  # a caller must not learn how much others have
                there_now = "there is no room for one more namespace"
            raise Exhausted(
                f"{there_now}; allowed are {count_max} (namespaces_max) and {nbytes_max} bytes of "
                "descriptions, remove some of their pages"
            )

    def find(self, digest: bytes) -> NamespaceIndex:
        """Return a namespace. Raises UnknownNamespace."""
        index = self._by_digest.get(digest)
        if index is None:
            raise unknown(digest)
        return index

    def close(self, digest: bytes) -> bool:
        """Close an empty namespace.

        Return False if it has pages, or is busy.
        """
        index = self._by_digest.get(digest)
        if index is None or not self._is_empty(index):
            return index is None
        self.forgotten.add(index.counters)
        del self._by_digest[digest]
        return True

    def all(self) -> list[NamespaceIndex]:
        """Return all namespaces."""
        return list(self._by_digest.values())


class PutStatus(enum.IntEnum):
    """Answer to a writer, per key; values as in the PutVerdict message."""

    WRITE = 1
    EXISTS = 2
    BUSY = 3
    FULL = 4


@dataclass
class Reservation:
    """A put between its request and its commit.

    `pages` are to be written, head first; `chain` also has those that exist already.
    """

    namespace: NamespaceIndex
    prefix_hashes: Sequence[bytes]
    copies: Container[bytes] = ()  # keys that other members own
    now_ms: int = 0
    verdicts: list[int] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)
    chain: list[Page] = field(default_factory=list)
    is_full: bool = False  # no slot for one more

    def write(self, pages: Sequence[Page]) -> None:
        """Add the status of the next keys, which are those of new pages."""
        self.verdicts += [PutStatus.WRITE] * len(pages)
        self.chain += pages

    def add_status(self, page: Page | None, is_below: bool) -> None:
        """Add the status of the next key: stored, being written, or no space."""
        if page is None:
            self.verdicts.append(PutStatus.EXISTS if is_below else PutStatus.FULL)
        elif page.state is State.VISIBLE:
            self.verdicts.append(PutStatus.EXISTS)
            self.chain.append(page)
        else:
            self.verdicts.append(PutStatus.BUSY)

    def count(self) -> None:
        """Count the pages that are not to be written."""
        refused = map(self.verdicts.count, (PutStatus.EXISTS, PutStatus.BUSY, PutStatus.FULL))
        self.namespace.counters.count_put(*refused)

    def count_stored(self) -> None:
        """Count the pages that were written."""
        counters = self.namespace.counters
        counters.pages_put += len(self.pages)
        counters.nbytes_put += len(self.pages) * self.namespace.page_nbytes
