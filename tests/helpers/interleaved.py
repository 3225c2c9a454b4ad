"""Interleave the users of a RAM tier in random order on one thread, reproducibly by seed.

Every user is a generator, and others may run at each `yield` in it: between the slices of the
tier's own work, and while slots are written, read, moved or loaded from the tier below. The arena
has one token per 4 KiB instead of bytes. These invariants hold after every step:

    pages of the table        share no unit of 4 KiB
    a visible page            has all of its own tokens
    a page being written      keeps its slot and what was written so far
    a held page               keeps its slot, its tokens and its key
    an erased page            leaves none of its tokens in the slot that it frees
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

from kvstore import Namespace, opaque_layout
from kvstore.deadline import Deadline
from kvstore.errors import Exhausted
from node.memory.lock_slices import SlicedWork, Work
from node.memory.lower_tier import Load, LocalTier, LowerTier, Query, Source
from node.memory.page import Namespaces, Page, PutStatus, Reservation, State
from node.memory.promotion import Acquired, PartialPage
from node.memory.removal import remove_namespace, zero_leftovers
from node.memory.tier import RamTier
from node.slab import Block, SlotAllocator

T = TypeVar("T")
Task = Generator[None, None, T]
Key = tuple[bytes, bytes]  # digest, prefix hash

UNIT = 4096
PAGE_UNITS = (1, 2, 3, 4, 5, 8, 16)
KEYS = 24  # per namespace
STEPS = 4000
LAST_STEPS = 4000  # for running users to finish, without new ones
CHECKED = 16  # steps between checks of the tier's counters


class Cancelled(Exception):
    """A user was cancelled between two slices of its work."""


class Arena:
    """A token for each unit: the checksum of the page written there, and the unit's number."""

    def __init__(self, units: int) -> None:
        self._tokens: list[tuple[bytes, int]] = [(b"", 0)] * units

    def write(self, offset: int, number: int, checksum: bytes) -> None:
        self._tokens[offset // UNIT + number] = (checksum, number)

    def copy(self, source: int, target: int, number: int) -> None:
        self._tokens[target // UNIT + number] = self._tokens[source // UNIT + number]

    def zero(self, offset: int, nbytes: int) -> None:
        start, count = offset // UNIT, nbytes // UNIT
        self._tokens[start : start + count] = [(b"", 0)] * count

    def is_zero(self, offset: int, nbytes: int) -> bool:
        start, count = offset // UNIT, nbytes // UNIT
        return self._tokens[start : start + count] == [(b"", 0)] * count

    def mentions(self, offset: int, checksum: bytes) -> bool:
        return self._tokens[offset // UNIT][0] == checksum

    def has(self, page: Page, checksum: bytes, first: int | None = None) -> bool:
        """Return whether the first `first` units of the page, or all of them, are in its slot."""
        start, count = page.offset // UNIT, page_units(page) if first is None else first
        return self._tokens[start : start + count] == [
            (checksum, number) for number in range(count)
        ]


def page_units(page: Page) -> int:
    return -(-page.namespace.page_nbytes // UNIT)


class Stored(LocalTier):
    """A lower tier that keeps half of the pages that it is offered, immediately."""

    reads_parts = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pages: dict[Key, bytes] = {}
        self._records = itertools.count(1)
        self.reads: dict[int, tuple[Key, bytes]] = {}  # running reads: record -> key and checksum

    def present(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        return [(digest, prefix_hash) in self._pages for prefix_hash in prefix_hashes]

    def remove(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        return [
            self._pages.pop((digest, prefix_hash), None) is not None
            for prefix_hash in prefix_hashes
        ]

    def offer(self, pages: Sequence[Page], urgent: bool) -> int:
        for page in pages:
            assert not page.is_copy, "a copy was offered to the tier below"
            if self._rng.random() < 0.5:
                self._pages[page.namespace.digest, page.prefix_hash] = page.checksum
        return 0

    def is_asked(self, near: bool) -> bool:
        return True

    def find(self, query: Query) -> dict[bytes, Source]:
        found = {}
        for prefix_hash in query.prefix_hashes:
            key = (query.namespace.digest, prefix_hash)
            if key in self._pages:
                record = next(self._records)
                self.reads[record] = key, self._pages[key]
                found[prefix_hash] = Source(self, record)
        return found

    def is_there(self, source: Source) -> bool:
        key, checksum = self.reads[source.locator]
        return self._pages.get(key) == checksum

    def release(self, sources: Iterable[Source]) -> None:
        for source in sources:
            del self.reads[source.locator]


class Others(LowerTier):
    """Other members: each page is found with some probability, and owned with another."""

    name = "peer"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def is_asked(self, near: bool) -> bool:
        return near

    def find(self, query: Query) -> dict[bytes, Source]:
        some = [prefix_hash for prefix_hash in query.prefix_hashes if self._rng.random() < 0.6]
        return {prefix_hash: Source(self, None, self._rng.random() < 0.8) for prefix_hash in some}

    def read(self, *_: object) -> None:
        raise AssertionError("pages are fetched by `_fetch`")


class Life:
    """One tier, from its start until its last user has finished.

    `done` counts what happened.
    """

    def __init__(self, rng: random.Random, has_below: bool, may_cancel: bool) -> None:
        extent_units = rng.choice((4, 16, 64))
        arena_units = extent_units * rng.choice((1, 2, 4))
        self.done: Counter[str] = Counter()
        self._rng = rng
        self._may_cancel = may_cancel
        self._now_ms = 1
        self._at_work = 0  # users between two slices, when a block may be closed
        self._users_max = rng.choice((2, 4, 8))
        self._versions = itertools.count(1)
        self._arena = Arena(arena_units)
        self._erased: set[Page] = set()
        self._tier = RamTier(
            Namespaces(64, extent_units * UNIT),
            SlotAllocator(arena_units * UNIT, extent_units * UNIT),
            self._no_copy,
            self._arena.zero,
            lambda: self._now_ms,
            lambda: self._now_ms // 1000,
        )
        self._free = self._tier.slots.free
        self._tier.slots.free = self._checked_free  # type: ignore[method-assign]
        self._has_peers = rng.random() < 0.5
        self._tier.eviction.copy_nbytes_max = int(arena_units * UNIT * rng.choice((0.1, 0.5, 1.0)))
        self._below = Stored(rng)
        if has_below:
            self._tier.below = self._below
        self._tier.remote = (Others(rng),)
        sizes = [units for units in PAGE_UNITS if units <= extent_units]
        self._spaces = [
            Namespace(f"{units} units", opaque_layout(units * UNIT - rng.choice((0, 100))))
            for units in rng.sample(sizes, rng.randint(2, len(sizes)))
        ]
        for space in self._spaces:
            self._tier.open_namespace(space, space.digest)

    def _no_copy(self, source: int, target: int, nbytes: int) -> None:
        raise AssertionError("moves are made by `_move` of this class")

    def _checked_free(self, offset: int) -> Block:
        block = self._tier.slots.block_of(offset)
        page, nbytes = (
            block.owners[(offset - block.offset) // block.kind.slot_nbytes],
            block.kind.slot_nbytes,
        )
        if page in self._erased:
            assert self._arena.is_zero(offset, nbytes), (
                "an erased page left its bytes in a free slot"
            )
            self.done["erased"] += 1
        return self._free(offset)

    def run(self) -> None:
        users: list[Task[None]] = []
        for step in range(STEPS + LAST_STEPS):
            self._now_ms += self._rng.choice((0, 0, 0, 1, 3))
            while step < STEPS and len(users) < self._users_max:
                users.append(self._user())
            if not users:
                break
            user = self._rng.choice(users)
            if next(user, StopIteration) is StopIteration:
                users.remove(user)
            self._check()
            if not self._at_work and step % CHECKED == 0:
                assert self._tier.check() == []
        assert not users, f"{len(users)} users did not finish"
        assert self._tier.check() == []
        if not self._may_cancel:  # a cancelled batch does not release its pages
            assert (self._tier.held_count, self._tier.writing_count) == (0, 0)

    def _check(self) -> None:
        owners: dict[int, Page] = {}
        for index in self._tier.namespaces.all():
            for page in index.pages.values():
                start = page.offset // UNIT
                for unit in range(start, start + page_units(page)):
                    other = owners.setdefault(unit, page)
                    assert other is page, (
                        f"two pages share a unit: {other.state.name} and {page.state.name}"
                    )
                if page.state is State.VISIBLE:
                    assert self._arena.has(page, page.checksum), "a visible page has wrong bytes"

    # ---- users ---------------------------------------------------------------------------

    def _user(self) -> Task[None]:
        kinds: tuple[Callable[[Namespace, list[bytes]], Task[None]], ...] = (
            self._put,
            self._get,
            self._pin,
            self._unpin,
            self._remove,
            self._remove_all,
            self._erase,
            self._keep,
        )
        (kind,) = self._rng.choices(kinds, (60, 40, 12, 2, 6, 4, 2, 2))
        prefix_hashes = [
            bytes([self._rng.randrange(KEYS)] * 16) for _ in range(self._rng.randint(1, 5))
        ]
        try:
            yield from kind(self._rng.choice(self._spaces), list(dict.fromkeys(prefix_hashes)))
        except Cancelled:
            self.done["cancelled"] += 1

    def _in_turns(self, work: Work[T]) -> Task[T]:
        """Run sliced work of the tier, with slices of random length and other users in between."""
        self._at_work += 1
        try:
            return (yield from self._turns(work))
        finally:
            self._at_work -= 1

    def _turns(self, work: Work[T]) -> Task[T]:
        copied: SlicedWork | None = None
        answer: Any = None
        while True:
            with self._tier.lock:
                self._tier.eviction.budget.left = self._rng.choice((1, 1, 2, 3, 8, 256))
                try:
                    move = work.send(answer)
                except StopIteration as end:
                    result: T = end.value
                    return result
                finally:
                    if copied is not None and copied.page in self._erased:
                        assert not self._arena.mentions(copied.target, copied.page.checksum), (
                            "an erased page left a copy"
                        )
                        self.done["erased copies"] += 1
                        copied = None
            answer = None
            yield
            if isinstance(move, SlicedWork):
                yield from self._move(move)
                copied = move
            elif move is not None:
                answer = move()
                yield
            else:
                self.done["yields"] += 1
                if self._may_cancel and self._rng.random() < 0.02:
                    with self._tier.lock:
                        work.close()
                    raise Cancelled

    def _move(self, move: SlicedWork) -> Task[None]:
        page, source = move.page, move.page.offset
        for number in range(page_units(page)):
            assert page.offset == source, "the slot of a moving page changed"
            self._arena.copy(source, move.target, number)
            yield from self._perhaps(0.3)
        self._tier.release([page])
        self.done["moves"] += 1
        yield

    def _put(self, space: Namespace, prefix_hashes: list[bytes]) -> Task[None]:
        try:
            reservation = yield from self._in_turns(
                self._tier._reserve(
                    space.digest,
                    prefix_hashes,
                    space.layout.page_nbytes,
                    self._others(prefix_hashes),
                )
            )
        except Exhausted:
            self.done["exhausted"] += 1
            return
        verdicts = zip(prefix_hashes, reservation.verdicts, strict=True)
        to_write = [prefix_hash for prefix_hash, verdict in verdicts if verdict == PutStatus.WRITE]
        assert [page.prefix_hash for page in reservation.pages] == to_write, (
            "a writer got the slot of another page"
        )
        checksums = [self._checksum(page) for page in reservation.pages]
        for page, checksum in zip(reservation.pages, checksums, strict=True):
            yield from self._write(page, checksum)
        yield
        for page, checksum in zip(reservation.pages, checksums, strict=True):
            assert self._arena.has(page, checksum), "a slot changed before it was committed"
        self._end_put(reservation, checksums)

    def _checksum(self, page: Page) -> bytes:
        """Return a checksum that identifies the page and its version."""
        return page.namespace.digest + page.prefix_hash + next(self._versions).to_bytes(4, "big")

    def _write(self, page: Page, checksum: bytes) -> Task[None]:
        offset = page.offset
        for number in range(page_units(page)):
            assert page.state is State.WRITING, "another user ended a write"
            assert page.offset == offset, "a page moved while it was written"
            assert self._arena.has(page, checksum, number), "a slot changed while it was written"
            self._arena.write(offset, number, checksum)
            yield from self._perhaps(0.1)

    def _end_put(self, reservation: Reservation, checksums: list[bytes]) -> None:
        if self._rng.random() < 0.15:
            self._tier.abort(reservation)
        else:
            self._tier.commit(reservation, checksums, ttl_s=self._rng.choice((0, 0, 0, 1)))
            self.done["puts"] += 1

    def _get(self, space: Namespace, prefix_hashes: list[bytes]) -> Task[None]:
        parts = (
            PartialPage(self._tier.namespaces.find(space.digest), [(0, 1)])
            if self._rng.random() < 0.2
            else None
        )
        near = Deadline(1.0) if self._has_peers else None
        wanted = Acquired(space.digest, prefix_hashes, self._rng.random() < 0.3, parts, near)
        acquired = yield from self._in_turns(self._tier._acquire(wanted, 1))
        for load in acquired.loads:
            if isinstance(load.source.tier, Others):
                yield from self._fetch(load.page)
            else:
                yield from self._load(load)
        held = [page for page in acquired.pages if page is not None]
        yield from self._look(held, self._rng.randint(1, 30))
        self._tier.release(held)
        self.done["hits"] += len(held)
        self.done["reads of parts"] += sum(
            isinstance(p.namespace, PartialPage) for p in acquired.private.values()
        )

    def _others(self, prefix_hashes: list[bytes]) -> list[bytes]:
        """Return the keys that other members have, or own."""
        return [
            prefix_hash
            for prefix_hash in prefix_hashes
            if self._has_peers and self._rng.random() < 0.6
        ]

    def _fetch(self, page: Page) -> Task[None]:
        """Fetch a page from another node; one in five fails."""
        comes, checksum, offset = self._rng.random() < 0.8, self._checksum(page), page.offset
        for number in range(page_units(page)):
            assert page.offset == offset, "a page moved while it was fetched"
            self._arena.write(offset, number, checksum if comes else b"bad")
            yield from self._perhaps(0.2)
        if comes:
            page.checksum = checksum
        self._tier.promotion.end(page, comes)
        self.done["fetches"] += 1
        self.done["copies fetched"] += comes and page.is_copy

    def _load(self, load: Load) -> Task[None]:
        """Load a page from the tier below; one in five fails."""
        page = load.page
        intact, (_, checksum), offset = (
            self._rng.random() < 0.8,
            self._below.reads[load.source.locator],
            page.offset,
        )
        for number in range(page_units(page)):
            assert page.offset == offset, "a page moved while it was loaded"
            self._arena.write(offset, number, checksum if intact else b"bad")
            yield from self._perhaps(0.2)
        if intact:
            page.checksum = checksum
        self._below.release([load.source])
        self._tier.promotion.end(page, intact)
        self.done["loads"] += 1

    def _look(self, held: list[Page], times: int) -> Task[None]:
        """Check held pages repeatedly.

        Pages that another user is loading have no checksum at first.
        """
        offsets = [page.offset for page in held]
        for _ in range(times):
            assert [page.offset for page in held] == offsets, "a held page moved"
            for page in held:
                if page.state is not State.LOADING and page.checksum:
                    assert self._arena.has(page, page.checksum), "the bytes of a held page changed"
                    assert page.checksum.startswith(page.namespace.digest + page.prefix_hash), (
                        "a held page has another page's bytes"
                    )
            yield

    def _pin(self, space: Namespace, prefix_hashes: list[bytes]) -> Task[None]:
        try:
            self._tier.pin(space.digest, prefix_hashes, self._rng.choice((5, 50, 500)))
            self.done["pins"] += 1
        except Exhausted:
            self.done["pins refused"] += 1
        yield

    def _unpin(self, space: Namespace, prefix_hashes: list[bytes]) -> Task[None]:
        self._tier.unpin(space.digest, prefix_hashes)
        yield

    def _remove(self, space: Namespace, prefix_hashes: list[bytes]) -> Task[None]:
        self.done["removes"] += sum(self._tier.remove(space.digest, prefix_hashes))
        yield

    def _remove_all(self, space: Namespace, prefix_hashes: list[bytes]) -> Task[None]:
        """Remove a namespace, which frees blocks that others may be using or clearing."""
        self.done["removes"] += remove_namespace(self._tier, space.digest)
        yield

    def _erase(self, space: Namespace, prefix_hashes: list[bytes]) -> Task[None]:
        """Erase a namespace, as for a forgotten tenant; pages in use are erased when released."""
        owners = [page for block in self._tier.slots.blocks() for page in block.owners]
        self._erased |= {
            p
            for p in owners
            if p is not None and p.offset >= 0 and p.namespace.digest == space.digest
        }
        remove_namespace(self._tier, space.digest, zero=True)
        zero_leftovers(self._tier, [space.digest])
        yield

    def _keep(self, space: Namespace, prefix_hashes: list[bytes]) -> Task[None]:
        """Hold pages as the tier below does while it writes them."""
        table = self._tier.namespace(space.digest).pages
        held = self._tier.hold_visible(
            [table[prefix_hash] for prefix_hash in prefix_hashes if prefix_hash in table]
        )
        yield from self._look(held, 5)
        self._tier.release(held)

    def _perhaps(self, chance: float) -> Task[None]:
        """Let other users run, with this probability."""
        if self._rng.random() < chance:
            yield
