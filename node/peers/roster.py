"""What is in etcd of a cluster, and the view that it makes. Pure: fed with what was read and what changed.

/kvstore/NAME/config            {"replicas": 2, "base": 0}
/kvstore/NAME/members/ID        {"address": "10.0.0.1:7440", "bulk_port": 7441, "state": "SERVING", "protocol": 4, ...}
/kvstore/NAME/removed/DIGEST    {"removal": "9f..", "by": "n1", "erasure": "03.."}
"""

import contextlib
import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.cluster.view import MEMBERS_MAX, REPLICAS_MAX, Member, State, View
from kvstore.config import speaks
from kvstore.errors import ConfigError
from node.peers.etcd import Change, Entry, Reading

BASE_MAX = 1 << 62  # a view's number has 64 bits, and etcd's revision 63


@dataclass(frozen=True)
class Registered:
    """A member as it is written. `instance`: which start of the node; `token`: which data directory."""

    member: Member
    protocol: int
    token: str
    instance: str

    def value(self) -> bytes:
        member = self.member
        return json.dumps(
            {
                "address": member.address,
                "bulk_port": member.bulk_port,
                "weight": member.weight,
                "zone": member.zone,
                "state": member.state.name,
                "protocol": self.protocol,
                "token": self.token,
                "instance": self.instance,
            }
        ).encode()


class Settings(NamedTuple):
    """What holds for all of a cluster. `base`: what is added to etcd's revision for a view's number, which is to rise
    although an etcd that lost all begins anew."""

    replicas: int
    base: int

    def value(self) -> bytes:
        return json.dumps(self._asdict()).encode()


class Removal(NamedTuple):
    """`number`: of the view when it was recorded. `erasure`: the name of that of the tenant, if it is part of one."""

    digest: bytes
    removal: bytes
    number: int
    erasure: bytes = b""


class Roster:
    """Not thread-safe. `apart`: members that are not of the view, and why."""

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.prefix = f"/kvstore/{cluster}/"
        self.config_key = f"{self.prefix}config"
        self.entries: dict[str, Entry] = {}
        self.revision = 0
        self.apart: list[str] = []

    def member_key(self, member: str) -> str:
        return f"{self.prefix}members/{member}"

    def removed_key(self, digest: bytes) -> str:
        return f"{self.prefix}removed/{digest.hex()}"

    def reset(self, reading: Reading) -> None:
        self.revision, self.entries = reading.revision, dict(reading.entries)

    def apply(self, changes: Iterable[Change]) -> None:
        for key, entry, revision in changes:
            self.revision = max(self.revision, revision)
            if entry is None:
                self.entries.pop(key, None)
            else:
                self.entries[key] = entry

    def settings(self) -> Settings | None:
        """None: nobody has made them. Raises ConfigError for what is not ours."""
        entry = self.entries.get(self.config_key)
        return parse_settings(entry.value) if entry else None

    def view(self) -> View | None:
        """None: there is none yet."""
        settings = self.settings()
        if settings is None:
            return None
        members: dict[str, Member] = {}
        self.apart = []
        written = [(key, entry) for key, entry in self.entries.items() if key.startswith(self.member_key(""))]
        for key, entry in sorted(written, key=lambda item: item[1].revision, reverse=True):
            name = key.removeprefix(self.member_key(""))
            try:
                there = parse_member(name, entry.value)
            except ConfigError as error:
                self.apart.append(f"{name}: {error}")
                continue
            address = there.member.address
            if not speaks(there.protocol):
                self.apart.append(f"{name} at {address} speaks protocol {there.protocol}; update the older one")
            elif address in members:
                self.apart.append(f"{name} says it is at {address}, where {members[address].id} is")
            elif len(members) == MEMBERS_MAX:
                self.apart.append(f"{name} is one too many: a cluster has at most {MEMBERS_MAX} members")
            else:
                members[address] = there.member
        chosen = tuple(sorted(members.values(), key=lambda member: member.id))
        return View(self.cluster, settings.base + self.revision, chosen, settings.replicas)

    def removals(self, after: int = -1) -> list[Removal]:
        """In the order in which they were recorded, those with numbers above `after`: there may be many, of 30 days."""
        settings = self.settings()
        base, prefix = settings.base if settings else 0, self.removed_key(b"")
        found = []
        for key, entry in self.entries.items():
            if base + entry.revision > after and key.startswith(prefix):
                with contextlib.suppress(ConfigError, ValueError):  # what no node has written
                    digest = bytes.fromhex(key.removeprefix(prefix))
                    removal, erasure = parse_removed(entry.value)
                    found.append(Removal(digest, removal, base + entry.revision, erasure))
        return sorted(found, key=lambda some: some.number)


def parse_settings(value: bytes) -> Settings:
    fields = _fields(value)
    replicas, base = fields.get("replicas"), fields.get("base", 0)
    if (
        not isinstance(replicas, int)
        or not isinstance(base, int)
        or not 1 <= replicas <= REPLICAS_MAX
        or not 0 <= base <= BASE_MAX
    ):
        raise ConfigError(
            f"the cluster's config in etcd says {value[:200]!r}; replicas must be in 1..{REPLICAS_MAX}, base in "
            f"0..{BASE_MAX}"
        )
    return Settings(replicas, base)


@functools.lru_cache(2 * MEMBERS_MAX)
def parse_member(name: str, value: bytes) -> Registered:
    """Raises ConfigError for what no node writes."""
    fields = _fields(value)
    try:
        about = str(fields["address"]), float(fields["weight"]), str(fields["zone"]), State[fields["state"]]
        bulk_port = int(fields.get("bulk_port", 0))  # an older node does not write it
        protocol, token, instance = int(fields["protocol"]), str(fields["token"]), str(fields["instance"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"what is written of it is not understood ({error!r}): {value[:200]!r}") from error
    return Registered(Member(name, *about, bulk_port), protocol, token, instance)


@functools.lru_cache(2 * MEMBERS_MAX)
def parse_removed(value: bytes) -> tuple[bytes, bytes]:
    """The names of a removal and of the erasure that it is part of, empty if it is of none. Raises ConfigError."""
    try:
        fields = _fields(value)
        return bytes.fromhex(str(fields["removal"])), bytes.fromhex(str(fields.get("erasure", "")))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{value[:200]!r} is no removal") from error


def _fields(value: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{value[:200]!r} is no JSON") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{value[:200]!r} is no JSON object")
    return fields
