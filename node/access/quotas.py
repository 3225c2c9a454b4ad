"""How much of a node each tenant may have, and what of it the node keeps for it.

    ram=4GiB disk=40GiB pins=1000 held=1GiB connections=64 requests=1000/s bytes=1GiB/s

What is absent, or 0, has no limit. `ram` and `disk` are promises, too: docs/decisions/0029.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvstore.config import parse_nbytes
from kvstore.errors import ConfigError

COUNT_MAX = 1 << 48
PEER_PREFIX = "tenant "  # of a caller who is known: all hosts and processes of a tenant are one peer


@dataclass(frozen=True)
class Quota:
    """Of one tenant at one node; 0: no limit. `pins` counts pages in RAM, and as many on disk; `held_nbytes` are held
    in shared memory; `connections` are those of each wire, over gRPC the calls at a time."""

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
        raise ValueError(f"{text!r} is no whole number")
    return int(text)


def _per_s(parse: Callable[[str], int]) -> Callable[[str], int]:
    def parse_rate(text: str) -> int:
        if not text.endswith("/s"):
            raise ValueError(f"{text!r} is no rate; write for example 1000/s or 1GiB/s")
        return parse(text.removesuffix("/s"))

    return parse_rate


_FIELDS: dict[str, tuple[str, Callable[[str], int]]] = {
    "ram": ("ram_nbytes", parse_nbytes),
    "disk": ("disk_nbytes", parse_nbytes),
    "pins": ("pins", _count),
    "held": ("held_nbytes", parse_nbytes),
    "connections": ("connections", _count),
    "requests": ("requests_per_s", _per_s(_count)),
    "bytes": ("nbytes_per_s", _per_s(parse_nbytes)),
}


def quota_of(fields: Mapping[str, str]) -> Quota:
    """The quota that such fields write down. Raises ConfigError, which names the field."""
    values: dict[str, int] = {}
    for name, text in fields.items():
        if name not in _FIELDS:
            raise ConfigError(f"a quota has no field {name[:40]!r}; it has {', '.join(_FIELDS)}")
        attribute, parse = _FIELDS[name]
        try:
            value = parse(text)
        except ValueError as error:
            raise ConfigError(f"quota {name}: {str(error)[:120]}") from error
        if not 0 <= value <= COUNT_MAX:
            raise ConfigError(f"quota {name}={text[:40]} is not in 0..{COUNT_MAX}")
        values[attribute] = value
    return Quota(**values)


def peer_of_tenant(tenant: str) -> str:
    """As whom the callers of a tenant count, wherever they come from."""
    return PEER_PREFIX + tenant


def tenant_of_peer(peer: str) -> str:
    """Empty for a caller of whom only the address is known."""
    return peer.removeprefix(PEER_PREFIX) if peer.startswith(PEER_PREFIX) else ""


class Quotas:
    """Of all tenants. Thread-safe; replaced as a whole, while the node serves."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, Quota] = {}
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def set(self, quotas: Mapping[str, Quota]) -> None:
        """From now on these hold, and no others. Returns when all who keep accounts have heard of it."""
        with self._lock:
            self._by_tenant = dict(quotas)
            for listener in self._listeners:
                listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """It is called now and after each change."""
        with self._lock:
            self._listeners.append(listener)
            listener()

    def of(self, tenant: str) -> Quota:
        return self._by_tenant.get(tenant, NO_QUOTA)

    def of_peer(self, peer: str) -> Quota:
        """None of a caller of whom only the address is known."""
        return self.of(tenant_of_peer(peer)) if self._by_tenant else NO_QUOTA

    def tenants(self) -> list[str]:
        """Those that have one."""
        return list(self._by_tenant)

    def promised(self, field: str) -> int:
        """Of all tenants together."""
        return sum(getattr(quota, field) for quota in self._by_tenant.values())
