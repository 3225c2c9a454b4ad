"""How many requests, and how many page bytes, a tenant may have in a second: buckets that fill steadily.

    requests   one is taken for each, and one more for every KEYS keys; none left: refused
    bytes      what a request transfers or processes (`Charge`) is known when it has begun; in debt: refused

Both may be in debt, so that a batch of any size can be had, and is paid for before the next one.

A bucket holds what comes in a second: who has been quiet may have that at once.
"""

import threading
import time
from collections.abc import Callable

from kvstore.errors import Exhausted
from node.access.bucket import Bucket
from node.access.quotas import Quota, Quotas

KEYS = 256  # a request of so many takes about as long as another of one


class Rates:
    """Thread-safe. Remembers only tenants whose quota has a rate. `refused(tenant, what)` counts."""

    def __init__(
        self, quotas: Quotas, refused: Callable[[str, str], None], clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._quotas = quotas
        self._refused = refused
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._buckets: dict[tuple[str, str], Bucket] = {}
        quotas.listen(self._forget)

    def _forget(self) -> None:
        """Those whose quota has no such rate any more."""
        with self._lock:
            self._buckets = {key: bucket for key, bucket in self._buckets.items() if _rate(self._quotas, key)}

    def take(self, tenant: str, keys: int = 0) -> None:
        """For a request of so many keys, before it is worked on. Raises Exhausted."""
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
                    raise self._refusal(tenant, "requests", quota, (1 - bucket.left) / quota.requests_per_s)
                bucket.left -= 1 + keys // KEYS

    def charge(self, tenant: str, nbytes: int) -> None:
        """Debit a tenant's byte rate, also below zero (`node.serve.charge`)."""
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
            f"tenant {tenant} has had the {rate} {what} a second of its quota; wait {max(wait_s, 0.001):.3f} s, make "
            "fewer and larger requests, or ask for a larger quota"
        )


def _rate(quotas: Quotas, key: tuple[str, str]) -> int:
    tenant, what = key
    return quotas.of(tenant).requests_per_s if what == "requests" else quotas.of(tenant).nbytes_per_s
