"""Account each tenant's use of a tier, and order tenants for eviction.

    over its quota      first, after a quota was lowered
    without a quota     then, all of them together as one: they share the rest
    within its quota    last, and only if the quotas exceed the tier: the tenant that has most of
                        its quota first

A tenant at its quota evicts its own oldest page for each new one. So a tenant within its quota
loses nothing to another. Bytes are those of the blocks that a tenant's pages need when packed: a
page of each of many sizes counts as much as it keeps from others.
"""

import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from kvstore.errors import Exhausted
from node.slab import SlotAllocator


class Packed:
    """`count` slots of one size, packed into as few blocks as possible; for RAM and disk."""

    __slots__ = ("block_nbytes", "count", "per_block")

    def __init__(self, slots: SlotAllocator, slot_nbytes: int) -> None:
        self.block_nbytes = slots.unit_nbytes << slots.level(slot_nbytes)
        self.per_block = max(1, self.block_nbytes // slot_nbytes)
        self.count = 0

    def need(self, count: int) -> int:
        """Return the bytes of the blocks that so many slots take."""
        return -(-count // self.per_block) * self.block_nbytes


Pool = TypeVar("Pool")

GRADES = 32  # steps of the share of its quota that a tenant uses
OVER = GRADES + 1


class Limits(NamedTuple):
    """Limits of one tenant in one tier; 0: none."""

    nbytes: int = 0
    pins: int = 0


class Use(NamedTuple):
    """A tenant's use of one tier, and how often it was refused there."""

    nbytes: int = 0
    pins: int = 0
    refused_puts: int = 0
    refused_pins: int = 0


NOTHING = Use()


class TenantAccount(Generic[Pool]):
    """Account of one tenant.

    `pool` has its evictable pages; all tenants without a quota share one.
    """

    __slots__ = (
        "__weakref__",
        "_accounts",
        "_sizes",
        "grade",
        "nbytes",
        "nbytes_max",
        "pins",
        "pins_max",
        "pool",
        "refused_pins",
        "refused_puts",
        "tenant",
    )

    def __init__(self, tenant: str, accounts: "TenantUsage[Pool]") -> None:
        self.tenant = tenant
        self._accounts = accounts
        self._sizes: dict[int, Packed] = {}
        self.nbytes = 0
        self.nbytes_max = 0  # its quota; 0: none
        self.pins = self.pins_max = 0
        self.refused_puts = self.refused_pins = 0
        self.grade = -1  # of its quota in steps; -1: it has no quota or no pages
        self.pool = accounts.shared

    @property
    def is_over(self) -> bool:
        """Return whether the tenant is over its quota."""
        return self.grade == OVER

    def full_for(self, slot_nbytes: int) -> bool:
        """Return whether one more page of this size would exceed the quota."""
        if not self.nbytes_max:
            return False
        return self.nbytes + self._more(slot_nbytes) > self.nbytes_max

    def too_small_for(self, slot_nbytes: int) -> bool:
        """Return whether a page of this size would exceed the quota even without other pages."""
        return 0 < self.nbytes_max < self._accounts.size(slot_nbytes).block_nbytes

    def _more(self, slot_nbytes: int) -> int:
        size = self._sizes.get(slot_nbytes) or self._accounts.size(slot_nbytes)
        return 0 if size.count % size.per_block else size.block_nbytes

    def take(self, slot_nbytes: int, count: int = 1) -> None:
        """Add slots of a size."""
        if not count:
            return
        size = self._sizes.get(slot_nbytes)
        if size is None:
            size = self._sizes[slot_nbytes] = self._accounts.size(slot_nbytes)
        more_nbytes = size.need(size.count + count) - size.need(size.count)
        size.count += count
        if more_nbytes:
            self._add(more_nbytes)

    def give(self, slot_nbytes: int) -> None:
        """Remove a slot of a size."""
        size = self._sizes[slot_nbytes]
        size.count -= 1
        if not size.count % size.per_block:
            self._add(-size.block_nbytes)
            if not size.count:
                del self._sizes[slot_nbytes]

    def _add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if self.nbytes_max:
            self._accounts.grade(self)
        elif self.nbytes == nbytes or not self.nbytes:
            self._accounts.note_sharing(self)

    def counts(self) -> dict[int, int]:
        """Return the slots by size."""
        return {slot_nbytes: size.count for slot_nbytes, size in self._sizes.items()}

    def use(self) -> Use:
        """Return what the tenant uses."""
        return Use(self.nbytes, self.pins, self.refused_puts, self.refused_pins)

    def room(self, slot_nbytes: int) -> int:
        """Return how many more slots of this size the quota, which must exist, allows."""
        size = self._sizes.get(slot_nbytes) or self._accounts.size(slot_nbytes)
        blocks = max(0, self.nbytes_max - self.nbytes) // size.block_nbytes
        return -size.count % size.per_block + blocks * size.per_block

    def check_pins(self, more: int) -> None:
        """Raise Exhausted if so many more pins exceed the quota."""
        if self.pins_max and self.pins + more > self.pins_max:
            self.refused_pins += 1
            raise Exhausted(
                f"tenant {self.tenant} has {self.pins} pages pinned and requests {more} "
                f"more; its quota is {self.pins_max}; unpin some, wait until their pins "
                "end, or ask for a larger quota"
            )

    def refusal(self, slot_nbytes: int, what: str) -> str:
        """Return why the quota allows no slot of this size, and count that; empty if it does."""
        if not self.full_for(slot_nbytes):
            return ""
        self.refused_puts += 1
        block = self._accounts.size(slot_nbytes).block_nbytes
        why = (
            "and the quota is less: ask for a larger quota"
            if self.too_small_for(slot_nbytes)
            else "and none of its own pages may be evicted: unpin or release some, or ask for a "
            "larger quota"
        )
        return (
            f"tenant {self.tenant} has {self.nbytes} of the {self.nbytes_max} bytes of its {what} "
            f"quota, a page of this size takes blocks of {block} bytes, {why}"
        )


class TenantUsage(Generic[Pool]):
    """All tenants that have namespaces here.

    Not thread-safe: the tier's lock guards it. No call takes longer the more pages there are; only
    the search among tenants with a quota takes longer the more of them there are.
    """

    def __init__(self, slots: SlotAllocator, make_pool: Callable[[], Pool]) -> None:
        self._slots = slots
        self._make_pool = make_pool
        self.shared: Pool = make_pool()
        self._limits: Callable[[str], Limits] = lambda tenant: Limits()
        self._by_tenant: weakref.WeakValueDictionary[str, TenantAccount[Pool]] = (
            weakref.WeakValueDictionary()
        )
        self._grades: list[dict[TenantAccount[Pool], None]] = [{} for _ in range(OVER + 1)]
        self._graded = 0  # bit g: there is a tenant of grade g
        self.promised_nbytes = 0  # all quotas together
        self._sharing: dict[TenantAccount[Pool], None] = {}

    @property
    def any_limited(self) -> bool:
        """Return whether a tenant with a quota has pages."""
        return self._graded > 0

    @property
    def sharing_count(self) -> int:
        """Return how many tenants have pages and no quota."""
        return len(self._sharing)

    def note_sharing(self, account: TenantAccount[Pool]) -> None:
        """Note whether a tenant has pages and no quota, after its first and its last page."""
        if account.nbytes and not account.nbytes_max:
            self._sharing[account] = None
        else:
            self._sharing.pop(account, None)

    def of(self, tenant: str) -> TenantAccount[Pool]:
        """Return a tenant's account, which lives as long as a namespace has it."""
        account = self._by_tenant.get(tenant)
        if account is None:
            account = self._by_tenant[tenant] = TenantAccount(tenant, self)
            self._limit(account)
        return account

    def all(self) -> list[TenantAccount[Pool]]:
        """Return all accounts."""
        return list(self._by_tenant.values())

    def size(self, slot_nbytes: int) -> Packed:
        """Return the packing of a tenant that has no page of this size."""
        return Packed(self._slots, slot_nbytes)

    # ---- quotas --------------------------------------------------------------------------

    def set_limits(
        self, limits: Callable[[str], Limits], promised_nbytes: int
    ) -> list[TenantAccount[Pool]]:
        """Set each tenant's limits; return accounts whose pages must change their pool.

        `promised_nbytes` is the sum of all quotas.
        """
        self._limits = limits
        self.promised_nbytes = promised_nbytes
        return [account for account in self.all() if self._limit(account)]

    def _limit(self, account: TenantAccount[Pool]) -> bool:
        """Set an account's limits; return whether its pool has changed."""
        account.nbytes_max, account.pins_max = self._limits(account.tenant)
        self.grade(account)
        self.note_sharing(account)
        if (account.pool is self.shared) == (not account.nbytes_max):
            return False
        account.pool = self._make_pool() if account.nbytes_max else self.shared
        return True

    def grade(self, account: TenantAccount[Pool]) -> None:
        """Grade an account after its bytes or its quota have changed."""
        grade = -1
        if account.nbytes_max and account.nbytes:
            grade = (
                OVER
                if account.nbytes > account.nbytes_max
                else account.nbytes * GRADES // account.nbytes_max
            )
        if grade == account.grade:
            return
        if account.grade >= 0:
            there = self._grades[account.grade]
            del there[account]
            if not there:
                self._graded &= ~(1 << account.grade)
        if grade >= 0:
            self._grades[grade][account] = None
            self._graded |= 1 << grade
        account.grade = grade

    # ---- order of eviction ---------------------------------------------------------------------

    def first(self, asking: TenantAccount[Pool]) -> Pool:
        """Return the pool to evict from first for a page of `asking`."""
        return next(self.victims(asking)) if self._graded else self.shared

    def victims(self, asking: TenantAccount[Pool]) -> Iterator[Pool]:
        """Yield pools to evict from for a page of `asking`, which is within its quota."""
        for account in self._graded_from(OVER, OVER):
            yield account.pool
        yield self.shared
        if not asking.nbytes_max:
            return
        if self.promised_nbytes <= self._slots.usable_nbytes:
            yield asking.pool  # the others have a guarantee that can be kept
            return
        for account in self._graded_from(GRADES, asking.grade + 1):
            yield account.pool
        yield asking.pool

    def with_copies(self, asking: TenantAccount[Pool]) -> Iterator[Pool]:
        """Yield pools to evict from for a copy: the tenant's own first, any at last."""
        others = (account.pool for account in self._graded_from(OVER, 0))
        yield from dict.fromkeys(chain((asking.pool,), self.victims(asking), others))

    def _graded_from(self, high: int, low: int) -> Iterator[TenantAccount[Pool]]:
        for grade in range(high, max(low, 0) - 1, -1):
            if self._graded >> grade & 1:
                yield from list(self._grades[grade])

    # ---- check ---------------------------------------------------------------------------

    def check(self, found: dict[str, dict[int, int]]) -> list[str]:
        """Return violated invariants, given the slots by tenant and size; empty if all is well."""
        wrong = []
        for account in self.all():
            counts = found.pop(account.tenant, {})
            if account.counts() != counts:
                wrong.append(
                    f"tenant {account.tenant} has slots {counts}, counted {account.counts()}"
                )
            nbytes = sum(
                self.size(slot_nbytes).need(count) for slot_nbytes, count in counts.items()
            )
            if nbytes != account.nbytes:
                wrong.append(
                    f"tenant {account.tenant} has {nbytes} bytes, counted {account.nbytes}"
                )
            is_graded = account.grade >= 0
            if is_graded != (account.nbytes_max > 0 and nbytes > 0) or (
                is_graded and account not in self._grades[account.grade]
            ):
                wrong.append(
                    f"tenant {account.tenant} has grade {account.grade} and is listed elsewhere"
                )
            if (account.pool is self.shared) != (not account.nbytes_max):
                wrong.append(
                    f"tenant {account.tenant} with quota {account.nbytes_max} is in the wrong pool"
                )
        wrong += [
            f"tenant {tenant} has slots {counts}, and no account"
            for tenant, counts in found.items()
        ]
        sharing = {each for each in self.all() if each.nbytes and not each.nbytes_max}
        if self._sharing.keys() != sharing:
            wrong.append("tenants share the rest that have a quota or no pages, or are missing")
        if self._graded != sum(1 << grade for grade, there in enumerate(self._grades) if there):
            wrong.append("grades are listed that are empty, or empty that are not")
        return wrong
