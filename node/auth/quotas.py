"""Limit how much of a node each tenant may use, and how much is reserved for it.

    ram=4GiB disk=40GiB pins=1000 held=1GiB connections=64 requests=1000/s bytes=1GiB/s

A missing field, or 0, means no limit. `ram` and `disk` are also guaranteed: docs/decisions/0029.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import ConfigError
from kvstore.units import parse_nbytes

COUNT_MAX = 1 << 48
PEER_PREFIX = "tenant "


@dataclass(frozen=True)
class Quota:
    """Quota of one tenant at one node; 0: no limit.

    `pins` counts pages in RAM, and as many on disk; `held_nbytes` are held in shared memory;
    `connections` are those of each transport, over gRPC concurrent calls.
    """

    ram_nbytes: int = 0
    disk_nbytes: int = 0
    pins: int = 0
    held_nbytes: int = 0
    connections: int = 0
    requests_per_s: int = 0
    nbytes_per_s: int = 0


NO_QUOTA = Quota()


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError
    return int(text)


def _per_s(parse: Callable[[str], int]) -> Callable[[str], int]:
    def parse_rate(text: str) -> int:
        if not text.endswith("/s"):
            raise ValueError
        return parse(text.removesuffix("/s"))

    return parse_rate


class _Field(NamedTuple):
    name: str
    parse: Callable[[str], int]
    example: str


_FIELDS = {
    "ram": _Field("ram_nbytes", parse_nbytes, "4GiB"),
    "disk": _Field("disk_nbytes", parse_nbytes, "40GiB"),
    "pins": _Field("pins", _count, "1000"),
    "held": _Field("held_nbytes", parse_nbytes, "1GiB"),
    "connections": _Field("connections", _count, "64"),
    "requests": _Field("requests_per_s", _per_s(_count), "1000/s"),
    "bytes": _Field("nbytes_per_s", _per_s(parse_nbytes), "1GiB/s"),
}


def quota_of(fields: Mapping[str, str]) -> Quota:
    """Parse the fields of a quota.

    The ConfigError names the field but not its value, which may be a misplaced secret.
    """
    values: dict[str, int] = {}
    for name, text in fields.items():
        if name not in _FIELDS:
            raise ConfigError(f"a quota has the fields {', '.join(_FIELDS)}, and no others")
        field = _FIELDS[name]
        try:
            values[field.name] = value = field.parse(text)
        except ValueError:
            value = -1
        if not 0 <= value <= COUNT_MAX:
            raise ConfigError(
                f"{name} must be a number as in {name}={field.example}, from 0 on"
            ) from None
    return Quota(**values)


def tenant_of(peer: str) -> str:
    """Return the tenant of a peer key that names one; empty for an address."""
    return peer.removeprefix(PEER_PREFIX) if peer.startswith(PEER_PREFIX) else ""


class Quotas:
    """Quotas of all tenants.

    Thread-safe; replaced as a whole, while the node serves.
    """

    def __init__(self) -> None:
        self._by_tenant: dict[str, Quota] = {}
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def set(self, quotas: Mapping[str, Quota]) -> None:
        """Replace all quotas and notify the listeners.

        Returns after all listeners have returned.
        """
        with self._lock:
            self._by_tenant = dict(quotas)
            for listener in self._listeners:
                listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call a listener now and after each change."""
        with self._lock:
            self._listeners.append(listener)
            listener()

    def of(self, tenant: str) -> Quota:
        """Return a tenant's quota."""
        return self._by_tenant.get(tenant, NO_QUOTA)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._by_tenant

    def tenants(self) -> list[str]:
        """Return the tenants that have a quota."""
        return list(self._by_tenant)

    def reserved_total(self, field: str) -> int:
        """Return the sum of a field over all tenants."""
        return sum(getattr(quota, field) for quota in self._by_tenant.values())


class Bucket:
    """A token bucket.

    Not thread-safe. `left` may become negative, and is refilled to 0 first.
    """

    __slots__ = ("at_s", "left")

    def __init__(self, most: float, now_s: float) -> None:
        self.left = most
        self.at_s = now_s

    def fill(self, rate: float, most: float, now_s: float) -> float:
        """Refill the bucket and return its level."""
        self.left = min(most, self.left + rate * (now_s - self.at_s))
        self.at_s = now_s
        return self.left

    def take(self, rate: float, most: float, now_s: float) -> bool:
        """Take one token if there is one."""
        if self.fill(rate, most, now_s) < 1.0:
            return False
        self.left -= 1.0
        return True
