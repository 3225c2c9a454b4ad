"""The RAM tier in a seeded simulation, beside a model of visible, held and pinned pages.

The model does not know which page eviction chooses. It knows which it must not choose, and that
pages are evicted only when space is needed: with quotas, a tenant within its quota loses no page to
another. KVSTORE_MODEL_STEPS=20000 makes longer lives.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from sandbox import Sandbox

from kvstore.errors import Exhausted
from kvstore.layout import slot_nbytes
from node.memory.page import Page, PutStatus, Reservation

EXTENT = 64 << 10
EXTENTS = 8
PAGE_SIZES = {"tiny": 100, "small": 4096, "middle": 8192, "odd": 20_000, "large": 65_536}
TENANTS = {"tiny": "one", "small": "free", "middle": "two", "odd": "one", "large": "two"}
QUOTAS = {"one": EXTENT * 3, "two": EXTENT * 4}  # the last extent is for the tenant without a quota
KEYS = 40  # keys of each namespace
STEPS = int(os.environ.get("KVSTORE_MODEL_STEPS") or 1000)
Key = tuple[str, bytes]


@dataclass
class Model:
    visible: set[Key] = field(default_factory=set)
    writing: set[Key] = field(default_factory=set)
    unwanted: set[Key] = field(default_factory=set)  # removed while they were being written
    pinned: dict[Key, int] = field(default_factory=dict)  # expiry_ms
    # Ticket: (key, page, offset when held)
    holds: dict[int, tuple[Key, Page, int]] = field(default_factory=dict)

    def held(self, key: Key) -> bool:
        return any(key == other for other, _, _ in self.holds.values())

    def outlive(self, key: Key) -> None:
        """Move holds of a removed key aside: its bytes stay, but a new page of the key is
        not held.
        """
        for waiter, (other, page, offset) in self.holds.items():
            if other == key:
                self.holds[waiter] = ((key[0], b""), page, offset)


class Simulation:
    """Random operations on the tier, one per step, with `compare` after each."""

    def __init__(self, rng: random.Random, sandbox: type[Sandbox], limited: bool) -> None:
        self.rng = rng
        self.box = sandbox(EXTENT * EXTENTS, EXTENT)
        self.spaces = {
            name: self.box.open(name, nbytes, tenant=TENANTS[name])
            for name, nbytes in PAGE_SIZES.items()
        }
        self.limited = limited
        self.quotas: dict[str, int] = {}
        self.asking = ""  # the tenant that needs room
        self.model = Model()
        self.reservations: list[tuple[str, Reservation]] = []
        self.tickets: Iterator[int] = iter(range(1 << 30))
        self.done: dict[str, int] = {}

    def batch(self) -> tuple[str, list[bytes]]:
        # Traffic moves between page sizes: each is preferred for about 170 steps, in turns.
        name = self.rng.choice(
            [*self.spaces, list(self.spaces)[self.box.now_ms // 2000 % len(self.spaces)]]
        )
        return name, [
            self.spaces[name].key(n) for n in self.rng.sample(range(KEYS), self.rng.randint(1, 8))
        ]

    def step(self) -> None:
        self.box.now_ms += self.rng.choice((0, 0, 1, 7, 50))
        if self.limited and self.rng.random() < 0.02:
            self.change_quotas()
        operation = self.rng.choices(
            (
                self.reserve,
                self.commit,
                self.abort,
                self.acquire,
                self.release,
                self.remove,
                self.pin,
                self.unpin,
            ),
            (8, 8, 2, 6, 6, 1, 2, 1),
        )[0]
        before = set(self.model.visible)
        within = {name for name in self.spaces if self.is_within(TENANTS[name])}
        operation()
        over = {TENANTS[name] for name in within if not self.is_within(TENANTS[name])}
        assert not over, "a tenant exceeds its quota"
        lost = {name for name, _ in before - self.present()} & within
        if operation == self.reserve:
            assert {TENANTS[name] for name in lost} <= {self.asking}, (
                "a tenant within its quota lost a page to another"
            )
        self.done[operation.__name__] = self.done.get(operation.__name__, 0) + 1
        self.compare(before, may_evict=operation == self.reserve)

    def change_quotas(self) -> None:
        self.quotas = {t: nbytes for t, nbytes in QUOTAS.items() if self.rng.random() < 0.8}
        if self.rng.random() < 0.3:
            self.quotas = {t: nbytes // 4 for t, nbytes in self.quotas.items()}
        self.box.limit(**self.quotas)
        self.done["quotas"] = self.done.get("quotas", 0) + 1

    def is_within(self, tenant: str) -> bool:
        return tenant in self.quotas and self.box.nbytes(tenant) <= self.quotas[tenant]

    def present(self) -> set[Key]:
        return {
            (name, key)
            for name, pages in self.spaces.items()
            for key in self.box.present(pages, pages.keys(*range(KEYS)))
        }

    def reserve(self) -> None:
        name, keys = self.batch()
        self.asking = TENANTS[name]
        wanted = [(name, key) for key in keys]
        absent = [key for key in wanted if key not in self.model.visible | self.model.writing]
        try:
            result = self.box.reserve(self.spaces[name], keys)
        except Exhausted:
            assert len(absent) == len(wanted)
            self.check_full(name, set())
            self.done["exhausted"] = self.done.get("exhausted", 0) + 1
            return
        verdicts = dict(zip(wanted, result.verdicts, strict=True))
        for key, verdict in verdicts.items():
            assert (verdict == PutStatus.EXISTS) == (key in self.model.visible)
            assert (verdict == PutStatus.BUSY) == (key in self.model.writing)
        written = [key for key in wanted if verdicts[key] == PutStatus.WRITE]
        assert [key for _, key in written] == [page.prefix_hash for page in result.pages]
        if PutStatus.FULL in result.verdicts:
            self.check_full(name, set(wanted))
            self.done["full"] = self.done.get("full", 0) + 1
        self.box.write(self.spaces[name], result)
        self.model.writing.update(written)
        if written:
            self.reservations.append((name, result))

    def check_full(self, name: str, batch: set[Key]) -> None:
        """Assert that FULL was right: each page of this slot size is pinned, held or in the batch.

        It is also right if the quota is less than a page of this size takes.
        """
        box = self.box
        account = box.tier.eviction.order.accounts.of(TENANTS[name])
        if account.too_small_for(slot_nbytes(PAGE_SIZES[name])):
            return
        present = {
            (name, key)
            for key in box.present(self.spaces[name], self.spaces[name].keys(*range(KEYS)))
        }
        free = [
            key
            for key in present - batch
            if key not in self.model.pinned and not self.model.held(key)
        ]
        assert not free, f"full, but {len(free)} pages of {name} may be evicted"

    def commit(self) -> None:
        if self.reservations:
            name, reservation = self.reservations.pop(self.rng.randrange(len(self.reservations)))
            keys = {(name, page.prefix_hash) for page in reservation.pages}
            assert self.box.commit(reservation) == len(keys)
            self.model.writing -= keys
            self.model.visible |= keys - self.model.unwanted
            self.model.unwanted -= keys

    def abort(self) -> None:
        if self.reservations:
            name, reservation = self.reservations.pop(self.rng.randrange(len(self.reservations)))
            self.box.tier.abort(reservation)
            keys = {(name, page.prefix_hash) for page in reservation.pages}
            self.model.writing -= keys
            self.model.unwanted -= keys

    def acquire(self) -> None:
        name, keys = self.batch()
        for key, page in zip(keys, self.box.acquire(self.spaces[name], keys), strict=True):
            assert (page is not None) == ((name, key) in self.model.visible)
            if page is not None:
                self.model.holds[next(self.tickets)] = ((name, key), page, page.offset)

    def release(self) -> None:
        tickets = self.rng.sample(
            list(self.model.holds), min(len(self.model.holds), self.rng.randint(1, 12))
        )
        self.box.tier.release([self.model.holds.pop(waiter)[1] for waiter in tickets])

    def remove(self) -> None:
        name, keys = self.batch()
        removed = self.box.remove(self.spaces[name], keys)
        assert removed == [(name, key) in self.model.visible for key in keys]
        for key in keys:
            self.model.pinned.pop((name, key), None)
            self.model.visible.discard((name, key))
            self.model.outlive((name, key))
            self.model.unwanted |= {(name, key)} & self.model.writing

    def pin(self) -> None:
        name, keys = self.batch()
        expiry_ms = self.box.now_ms + (ttl_ms := self.rng.randint(1, 2000))
        try:
            pinned = self.box.pin(self.spaces[name], keys, ttl_ms)
        except Exhausted:
            self.expire()
            nbytes = sum(
                slot_nbytes(PAGE_SIZES[space])
                for space, _ in {*self.model.pinned, *((name, k) for k in keys)}
            )
            assert nbytes > EXTENT * EXTENTS / 2 / 8, (
                "pinned pages may take at most eight times their own space"
            )
            self.done["pins refused"] = self.done.get("pins refused", 0) + 1
            return
        assert pinned == [(name, key) in self.model.visible for key in keys]
        self.model.pinned.update(
            {(name, key): expiry_ms for key, done in zip(keys, pinned, strict=True) if done}
        )

    def unpin(self) -> None:
        name, keys = self.batch()
        self.expire()
        self.box.stat(self.spaces[name], keys)  # lets the tier see the clock, too
        unpinned = self.box.unpin(self.spaces[name], keys)
        assert unpinned == [self.model.pinned.pop((name, key), None) is not None for key in keys]

    def expire(self) -> None:
        now_ms = self.box.now_ms
        self.model.pinned = {
            key: expiry for key, expiry in self.model.pinned.items() if expiry > now_ms
        }

    def compare(self, before: set[Key], may_evict: bool) -> None:
        self.expire()
        box, model = self.box, self.model
        present = self.present()
        assert not present - model.visible, (
            "a page is visible that was never committed, or was removed"
        )
        evicted = model.visible - present
        assert not evicted or may_evict, "a page vanished although no space was needed"
        assert not evicted & set(model.pinned), "a pinned page was evicted"
        assert not any(model.held(key) for key in evicted), "a held page was evicted"
        assert evicted <= before
        model.visible = present
        self.done["evicted"] = self.done.get("evicted", 0) + len(evicted)
        for (name, _), page, offset in model.holds.values():
            assert page.offset == offset, "a held page moved"
            assert box.intact(self.spaces[name], page), "the bytes of a held page changed"
        for (name, key), expiry_ms in model.pinned.items():
            (info,) = box.stat(self.spaces[name], [key])
            assert info.pin_ttl_ms == expiry_ms - box.now_ms
        assert len(box.tier.eviction.pins) == len(model.pinned)
        assert box.tier.writing_count == len(model.writing)
        assert box.tier.visible_count == len(model.visible)
        assert box.tier.held_count == len({id(page) for _, page, _ in model.holds.values()})
        assert box.tier.check() == []

    def finish(self) -> None:
        """Check the bytes of all visible pages, then release everything."""
        self.box.tier.release([page for _, page, _ in self.model.holds.values()])
        for _, reservation in self.reservations:
            self.box.tier.abort(reservation)
        for name, pages in self.spaces.items():
            keys = pages.keys(*range(KEYS))
            hits = self.box.get(pages, keys)
            assert {(name, key) for key, hit in zip(keys, hits, strict=True) if hit} == {
                key for key in self.model.visible if key[0] == name
            }
            self.box.remove(pages, keys)
        assert self.box.tier.check() == []
        assert self.box.slots.used_nbytes == 0
        assert self.box.slots.extent_free_count == EXTENTS


@pytest.mark.parametrize(
    ("part", "limited"),
    [
        (0, False),
        (1, True),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((2, False), (3, True))),
    ],
)
def test_random_operations_agree_with_the_model(seed: int, part: int, limited: bool) -> None:
    simulation = Simulation(random.Random(f"{seed}/{part}"), Sandbox, limited)
    for _ in range(STEPS):
        simulation.step()
    simulation.finish()
    # The simulation must have met evictions and full tiers.
    assert simulation.done["evicted"] > 100, simulation.done
    assert simulation.done.get("full", 0) + simulation.done.get("exhausted", 0) > 0, simulation.done
