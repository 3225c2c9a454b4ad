"""Enforce tenants' rates and quotas, and count what was refused."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from kvstore.errors import Exhausted
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.identities import ALL, Principal
from node.auth.quotas import Bucket, Quota, Quotas
from node.disk.tier import DiskTier
from node.memory.tenant_usage import NOTHING, Use
from node.memory.tier import RamTier
from node.serving.limits import NO_CHARGE, Charge, QuotaLimits
from node.serving.status import clamp_to_field

# How many requests, and how many page bytes, a tenant may have per second: token buckets.
#
#     requests   one token each, and one more for every KEYS keys; none left: refused
#     bytes      the cost of a request (`Charge`) is known after it began; in debt: refused
#
# Both may be in debt, so that a batch of any size is possible, and must be paid for before the next
# one. A bucket holds the tokens of one second: a tenant that was quiet may use them at once.

KEYS = 256  # a request of so many takes about twice as long as one with a single key


class Rates:
    """Rate limits. Thread-safe.

    Remembers only tenants whose quota has a rate. `refused(tenant, what)` counts.
    """

    def __init__(
        self,
        quotas: Quotas,
        refused: Callable[[str, str], None],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quotas = quotas
        self._refused = refused
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._buckets: dict[tuple[str, str], Bucket] = {}
        quotas.listen(self._forget)

    def _forget(self) -> None:
        """Forget buckets of tenants without such a rate."""
        with self._lock:
            self._buckets = {
                key: bucket for key, bucket in self._buckets.items() if _rate(self._quotas, key)
            }

    def take(self, tenant: str, keys: int = 0) -> None:
        """Take a request with so many keys from the tenant's rates. Raises Exhausted."""
        quota = self._quotas.of(tenant)
        if not (quota.requests_per_s or quota.nbytes_per_s):
            return
        with self._lock:
            now_s = self._clock_s()
            if quota.nbytes_per_s:
                there = self._bucket(tenant, "bytes", quota.nbytes_per_s, now_s).left
                if there < 0:
                    raise self._refusal(tenant, "bytes", quota, -there / quota.nbytes_per_s)
            if quota.requests_per_s:
                bucket = self._bucket(tenant, "requests", quota.requests_per_s, now_s)
                if bucket.left < 1:
                    raise self._refusal(
                        tenant, "requests", quota, (1 - bucket.left) / quota.requests_per_s
                    )
                bucket.left -= 1 + keys // KEYS

    def charge(self, tenant: str, nbytes: int) -> None:
        """Debit a tenant's byte rate, also below zero (`node.serving.limits`)."""
        rate = self._quotas.of(tenant).nbytes_per_s
        if rate:
            with self._lock:
                self._bucket(tenant, "bytes", rate, self._clock_s()).left -= nbytes

    def _bucket(self, tenant: str, what: str, rate: int, now_s: float) -> Bucket:
        bucket = self._buckets.get((tenant, what))
        if bucket is None:
            bucket = self._buckets[tenant, what] = Bucket(rate, now_s)
        bucket.fill(rate, rate, now_s)
        return bucket

    def _refusal(self, tenant: str, what: str, quota: Quota, wait_s: float) -> Exhausted:
        self._refused(tenant, what)
        rate = quota.requests_per_s if what == "requests" else quota.nbytes_per_s
        return Exhausted(
            f"tenant {tenant} has had the {rate} {what} a second of its quota; wait "
            f"{max(wait_s, 0.001):.3f} s, make fewer and larger requests, or ask for a larger quota"
        )


def _rate(quotas: Quotas, key: tuple[str, str]) -> int:
    tenant, what = key
    return (
        quotas.of(tenant).requests_per_s if what == "requests" else quotas.of(tenant).nbytes_per_s
    )


TOLD_MAX = 256  # tenants in a status: those with a quota first, then those with most in RAM


class Tenants:
    """Usage and limits of tenants. Thread-safe."""

    def __init__(self, quotas: Quotas, tier: RamTier) -> None:
        self.quotas = quotas
        self._tier = tier
        self.disk: DiskTier | None = None
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()  # bytes
        self._refused: dict[str, Counter[str]] = {}
        self.rates = Rates(quotas, self.refused)
        quotas.listen(self._forget)

    def _forget(self) -> None:
        """Forget counts of tenants without a quota."""
        with self._lock:
            self._refused = {
                tenant: counts for tenant, counts in self._refused.items() if tenant in self.quotas
            }

    def refused(self, tenant: str, what: str) -> None:
        """Count a refusal of a tenant with a quota."""
        if tenant in self.quotas:
            with self._lock:
                self._refused.setdefault(tenant, Counter())[what] += 1

    def quoted(self, what: str, field: str) -> QuotaLimits:
        """Return the quotas of connections or of held bytes; `field` is one of `Quota`."""
        return QuotaLimits(
            lambda tenant: int(getattr(self.quotas.of(tenant), field)),
            partial(self.refused, what=what),
        )

    # ---- rates ---------------------------------------------------------------------------

    def begin(self, principal: Principal, request: Any) -> None:
        """Begin a principal's request. Raises Exhausted."""
        if principal.tenant != ALL:
            self.rates.take(principal.tenant, len(getattr(request, "prefix_hashes", ())))

    def charge(self, principal: Principal) -> Charge:
        """Return the charge for one request of this identity."""
        return (
            NO_CHARGE
            if principal.tenant == ALL
            else Charge(partial(self.rates.charge, principal.tenant))
        )

    # ---- held in shared memory -----------------------------------------------------------------

    def hold(self, tenant: str, nbytes: int) -> None:
        """Count held bytes. Raises Exhausted, and counts nothing, beyond the quota."""
        most = self.quotas.of(tenant).held_nbytes
        with self._lock:
            held = self._held[tenant]
            if not most or held + nbytes <= most:
                self._held[tenant] = held + nbytes
                return
        self.refused(tenant, "held")
        raise Exhausted(
            f"tenant {tenant} holds {held} bytes in shared memory and requests {nbytes} "
            f"more; its quota is {most}; release what was read, read smaller batches, or "
            "ask for a larger quota"
        )

    def release(self, tenant: str, nbytes: int) -> None:
        """Count released bytes."""
        with self._lock:
            self._held[tenant] -= nbytes
            if not self._held[tenant]:
                del self._held[tenant]

    # ---- status --------------------------------------------------------------------------------

    def uses(self) -> list[pb.TenantUse]:
        """Return what tenants with a quota or pages use, up to a number."""
        with self._tier.lock:
            accounts = self._tier.eviction.order.accounts.all()
            ram = {account.tenant: account.use() for account in accounts}
        disk = self.disk.uses() if self.disk is not None else {}
        known = sorted({*ram, *disk} - {""}, key=lambda tenant: -ram.get(tenant, NOTHING).nbytes)
        chosen = [*dict.fromkeys([*sorted(self.quotas.tenants()), *known])][:TOLD_MAX]
        return [
            self._use(tenant, ram.get(tenant, NOTHING), disk.get(tenant, NOTHING))
            for tenant in chosen
        ]

    def _use(self, tenant: str, ram: Use, disk: Use) -> pb.TenantUse:
        quota = self.quotas.of(tenant)
        with self._lock:
            refused, held_nbytes = Counter(self._refused.get(tenant, {})), self._held[tenant]
        return clamp_to_field(
            pb.TenantUse,
            tenant=tenant,
            ram_nbytes=ram.nbytes,
            ram_quota_nbytes=quota.ram_nbytes,
            disk_nbytes=disk.nbytes,
            disk_quota_nbytes=quota.disk_nbytes,
            pin_count=max(ram.pins, disk.pins),
            pin_quota=quota.pins,
            held_nbytes=held_nbytes,
            held_quota_nbytes=quota.held_nbytes,
            refused_puts=ram.refused_puts,
            refused_pins=ram.refused_pins + disk.refused_pins,
            refused_holds=refused["held"],
            refused_connections=refused["connections"],
            refused_requests=refused["requests"],
            refused_bytes=refused["bytes"],
        )
