"""Interpret a cluster's keys in etcd, and derive the view from them, without any I/O.

/kvstore/NAME/config            {"replicas": 2, "base": 0, "id": "5c.."}
/kvstore/NAME/members/ID        {"address": "10.0.0.1:7440", "bulk_port": 7441,
                                 "state": "SERVING", "protocol": 4, ...}
/kvstore/NAME/removed/DIGEST    {"removal": "9f..", "by": "n1", "erasure": "03.."}
"""

import contextlib
import functools
import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvstore.cluster.view import MEMBERS_MAX, REPLICAS_MAX, Member, State, View
from kvstore.config import speaks
from kvstore.errors import ConfigError
from kvstore.keys import REMOVAL_NBYTES
from node.cluster.etcd import Change, Entry, Etcd, KeysAtRevision
from node.cluster.membership import REMOVALS_KEPT_S, Identity, LostMember

BASE_MAX = 1 << 62  # a view's number has 64 bits, and etcd's revision 63
ID_CHARS_MAX = 64
LOST_S_MAX = 1 << 37  # in the year 6325; in milliseconds it fits an event


@dataclass(frozen=True)
class Registered:
    """A member's entry.

    `instance`: the run of the node; `token`: its data directory.
    """

    member: Member
    protocol: int
    token: str
    instance: str

    def value(self) -> bytes:
        """Serialise the entry."""
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
    """Settings of a whole cluster.

    `base`: added to etcd's revision for a view's number, which must rise even after etcd lost all
    data and counts from the beginning. `id`: random, another one after such a loss; empty if an
    older node wrote the settings.
    """

    replicas: int
    base: int
    id: str = ""

    def value(self) -> bytes:
        """Serialise the settings."""
        return json.dumps(self._asdict()).encode()


class Removal(NamedTuple):
    """Removal of a namespace. `number`: of the view when it was recorded.

    `erasure`: id of the tenant's erasure, if it is part of one.
    """

    digest: bytes
    removal: bytes
    number: int
    erasure: bytes = b""


class RegistryState:
    """The cluster's keys as they were last read. Not thread-safe.

    `apart`: members outside the view, and why.
    """

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.prefix = f"/kvstore/{cluster}/"
        self.config_key = f"{self.prefix}config"
        self.entries: dict[str, Entry] = {}
        self.revision = 0
        self.apart: list[str] = []

    def member_key(self, member: str) -> str:
        """Return the key of a member's entry."""
        return f"{self.prefix}members/{member}"

    def known_key(self, member: str) -> str:
        """Return the key of the record that a member is expected; it has no lease."""
        return f"{self.prefix}known/{member}"

    def registered(self) -> set[str]:
        """Return the ids of the members that are registered, also outside the view."""
        prefix = self.member_key("")
        return {key.removeprefix(prefix) for key in self.entries if key.startswith(prefix)}

    def lost(self) -> list[LostMember]:
        """Return the members that are expected and not registered, by id, as many as may be."""
        prefix, found = self.known_key(""), []
        for key, entry in self.entries.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and self.member_key(name) not in self.entries:
                with contextlib.suppress(ConfigError):  # an entry that no node wrote
                    known = parse_known(name, entry.value)
                    found += [known] if known else []
        return sorted(found)[:MEMBERS_MAX]

    def removed_key(self, digest: bytes) -> str:
        """Return the key of a removal."""
        return f"{self.prefix}removed/{digest.hex()}"

    def reset(self, reading: KeysAtRevision) -> None:
        """Replace all keys."""
        self.revision, self.entries = reading.revision, dict(reading.entries)

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply changes from the watch."""
        for key, entry, revision in changes:
            self.revision = max(self.revision, revision)
            if entry is None:
                self.entries.pop(key, None)
            else:
                self.entries[key] = entry

    def settings(self) -> Settings | None:
        """Return the cluster's settings; None if they were never written.

        Raises ConfigError for an invalid value.
        """
        entry = self.entries.get(self.config_key)
        return parse_settings(entry.value) if entry else None

    @property
    def settings_id(self) -> str:
        """Return the id of the cluster's settings; empty if there is none."""
        settings = self.settings()
        return settings.id if settings else ""

    def view(self) -> View | None:
        """Return the view; None if there is none yet."""
        settings = self.settings()
        if settings is None:
            return None
        members: dict[str, Member] = {}
        apart: list[str] = []
        written = [
            (key, entry)
            for key, entry in self.entries.items()
            if key.startswith(self.member_key(""))
        ]
        for key, entry in sorted(written, key=lambda item: item[1].revision, reverse=True):
            name = key.removeprefix(self.member_key(""))
            try:
                there = parse_member(name, entry.value)
            except ConfigError as error:
                apart.append(f"{ascii(name)[1:-1]}: {error}")  # any text may be a key of etcd
                continue
            address = there.member.address
            if not speaks(there.protocol):
                apart.append(
                    f"{name} at {address} speaks protocol {there.protocol}; update the older one"
                )
            elif address in members:
                apart.append(f"{name} has the address {address} of {members[address].id}")
            elif len(members) == MEMBERS_MAX:
                apart.append(f"{name} is one too many: a cluster has at most {MEMBERS_MAX} members")
            else:
                members[address] = there.member
        self.apart = apart  # as a whole: other threads read it
        chosen = tuple(sorted(members.values(), key=lambda member: member.id))
        return View(self.cluster, settings.base + self.revision, chosen, settings.replicas)

    def removals(self, after: int = -1) -> list[Removal]:
        """Return the removals with numbers above `after`, in their order; there may be many."""
        settings = self.settings()
        base, prefix = settings.base if settings else 0, self.removed_key(b"")
        found = []
        for key, entry in self.entries.items():
            if base + entry.revision > after and key.startswith(prefix):
                with contextlib.suppress(ConfigError, ValueError):  # an entry that no node wrote
                    digest = bytes.fromhex(key.removeprefix(prefix))
                    removal, erasure = parse_removed(entry.value)
                    found.append(Removal(digest, removal, base + entry.revision, erasure))
        return sorted(found, key=lambda some: some.number)


def is_reset(known_id: str, settings_id: str) -> bool:
    """Return whether etcd lost its data between two ids of the settings.

    Then it numbers from the beginning, and may have come past the numbers that were known. An empty
    id tells nothing.
    """
    return bool(known_id and settings_id) and known_id != settings_id


def parse_settings(value: bytes) -> Settings:
    """Parse the settings. Raises ConfigError."""
    fields = _fields(value)
    replicas, base = fields.get("replicas"), fields.get("base", 0)
    settings_id = fields.get("id", "")
    if (
        not isinstance(replicas, int)
        or not isinstance(base, int)
        or not isinstance(settings_id, str)
        or not 1 <= replicas <= REPLICAS_MAX
        or not 0 <= base <= BASE_MAX
        or len(settings_id) > ID_CHARS_MAX
    ):
        raise ConfigError(
            f"the cluster's config in etcd says {value[:200]!r}; replicas must be in "
            f"1..{REPLICAS_MAX}, base in 0..{BASE_MAX}, id a text"
        )
    return Settings(replicas, base, settings_id)


@functools.lru_cache(2 * MEMBERS_MAX)
def parse_member(name: str, value: bytes) -> Registered:
    """Parse a member's entry. Raises ConfigError."""
    fields = _fields(value)
    try:
        about = (
            str(fields["address"]),
            float(fields["weight"]),
            str(fields["zone"]),
            State[fields["state"]],
        )
        bulk_port = int(fields.get("bulk_port", 0))  # older nodes do not write it
        protocol, token, instance = (
            int(fields["protocol"]),
            str(fields["token"]),
            str(fields["instance"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"its entry is not understood ({error!r}): {value[:200]!r}") from error
    return Registered(Member(name, *about, bulk_port), protocol, token, instance)


@functools.lru_cache(2 * MEMBERS_MAX)
def parse_known(name: str, value: bytes) -> LostMember | None:
    """Parse the record of an expected member; None if it was drained or forgotten.

    Raises ConfigError.
    """
    if not value:
        return None
    fields = _fields(value)
    try:
        about = str(fields["address"]), float(fields["weight"]), int(fields["lost_s"])
        known = LostMember(name, *about, str(fields.get("zone", "")))
        Member(name, known.address, known.weight, known.zone)  # it may be placed again
        if not 0 <= known.lost_s <= LOST_S_MAX:
            raise ValueError(f"lost_s is not in 0..{LOST_S_MAX}")
        return known
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{value[:200]!r} is no known member") from error


@functools.lru_cache(2 * MEMBERS_MAX)
def parse_removed(value: bytes) -> tuple[bytes, bytes]:
    """Parse a removal to its name and its erasure's, empty without one. Raises ConfigError."""
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


# Carry out removals of namespaces in a whole cluster: once at each member, also at one that was
# away.
#
#     a client's call --> this node, and --> etcd --> members that were called, too, or were away

log = logging.getLogger(__name__)

DONE_MAX = 1 << 12  # removals that are known to be done here
WAITING_MAX = 1 << 10  # removals that are still to be written to etcd
RECORD_S = 1.0  # time that a call waits for etcd; the rest is written when etcd answers
TOUCH_S = 3600.0


@dataclass(frozen=True)
class _Record:
    digest: bytes
    removal: bytes
    erasure: bytes
    written: threading.Event = field(default_factory=threading.Event)


class NamespaceTombstones:
    """Carry removed namespaces out at all members. Thread-safe.

    `remove` forgets a namespace's pages here, `settle` returns when they stay forgotten after a
    power loss, `erase` returns when nothing of some namespaces is left. All may raise KVStoreError.
    """

    def __init__(
        self,
        identity: Identity,
        remove: Callable[[bytes], None],
        settle: Callable[[], None],
        erase: Callable[[list[bytes]], None],
    ) -> None:
        self._identity = identity
        self._remove = remove
        self._settle = settle
        self._erase = erase
        # Namespaces that are removed here already, perhaps by an earlier run
        self._to_erase = list(identity.to_erase)
        self._wake = threading.Condition()
        self._done: OrderedDict[bytes, None] = OrderedDict()  # ids of removals
        self._records: list[_Record] = []
        self._heard: list[Removal] = []
        self._number, self._settings_id = identity.applied, identity.settings_id
        # Numbers of the newest removal that was received, and of the newest ever
        self._seen = self._highest = identity.applied
        self._saved_at = 0.0
        self._closed = False

    def catch_up(
        self, removals: Sequence[Removal], number: int, settings_id: str = "", anew: bool = False
    ) -> None:
        """Apply missed removals at the start, before requests are served.

        `anew`: etcd was reset while this node was away, so numbers do not tell which removals it
        missed, and all are applied. On KVStoreError or OSError it is unknown how many were applied.
        """
        missed = [some for some in removals if anew or some.number > self._identity.applied]
        for some in missed:
            self._remove(some.digest)
            self._to_erase += [some.digest] if some.erasure else []
        if missed:
            log.info(
                "%d namespaces were removed while this node was away: their pages are gone",
                len(missed),
            )
            self._settle()
        self._settings_id = settings_id or self._settings_id
        self._save(number, self._settings_id)
        self._seen = self._highest = max(self._seen, number)

    def record(self, digest: bytes, removal: bytes, erasure: bytes = b"") -> None:
        """Record a removal of this node for the others, and wait briefly until etcd has it.

        The namespaces of an erasure are not waited for; it takes long by itself.
        """
        record = _Record(digest, removal or os.urandom(REMOVAL_NBYTES), erasure)
        self._note(record.removal)
        with self._wake:
            if len(self._records) >= WAITING_MAX:
                log.error(
                    "the removal of namespace %s is not recorded: etcd has been "
                    "unreachable for too many",
                    digest.hex(),
                )
                return
            self._records.append(record)
            self._wake.notify_all()
        if not erasure and not record.written.wait(RECORD_S):
            log.warning(
                "the removal of namespace %s is not in etcd yet; members that are away "
                "keep the pages",
                digest.hex(),
            )

    def begin_erasure(self, erasure: bytes) -> None:
        """Note that this node carries the erasure out itself."""
        if erasure:
            self._note(erasure)

    @property
    def highest(self) -> int:
        """Return the highest number of a received removal, also from before etcd was reset."""
        return self._highest

    def receive(
        self, removals: Callable[[int], list[Removal]], number: int, settings_id: str
    ) -> None:
        """Take the removals that etcd has; must not block.

        `removals` returns those after a number, in their order.
        """
        with self._wake:
            if is_reset(self._settings_id, settings_id):
                self._seen = -1
            fresh = removals(self._seen)
            if fresh:
                self._seen = fresh[-1].number
                self._highest = max(self._highest, self._seen)
                self._heard += fresh
                self._wake.notify_all()
            self._number = max(self._number, number)
            self._settings_id = settings_id or self._settings_id

    def close(self) -> None:
        """End the work."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def work(self, etcd: Etcd, registry_state: RegistryState) -> None:
        """Wait for work and do one round. Any error leaves the work to be repeated."""
        with self._wake:
            self._wake.wait_for(
                lambda: self._closed or self._records or self._heard or self._to_erase, TOUCH_S
            )
            if self._closed:
                return
            heard, number, records = list(self._heard), self._number, list(self._records)
            to_erase, settings_id = list(self._to_erase), self._settings_id
        with contextlib.ExitStack() as both:
            both.callback(self._record_all, records, etcd, registry_state)
            self._apply(heard, number, settings_id)
        if to_erase:  # removals that arrive meanwhile wait
            self._erase(to_erase)
            with self._wake:
                del self._to_erase[: len(to_erase)]
            self._save(self._identity.applied, self._identity.settings_id)

    def _apply(self, heard: list[Removal], number: int, settings_id: str) -> None:
        for some in heard:
            if some.removal not in self._done and some.erasure not in self._done:
                log.info("namespace %s was removed from the cluster", some.digest.hex())
                self._remove(some.digest)
                self._note(some.removal)
                self._to_erase += [some.digest] if some.erasure else []
        if heard:
            self._settle()
        with self._wake:
            del self._heard[: len(heard)]
        if heard or time.monotonic() - self._saved_at >= TOUCH_S:
            self._save(number, settings_id)

    def _record_all(
        self, records: list[_Record], etcd: Etcd, registry_state: RegistryState
    ) -> None:
        for record in records:
            self._write(record, etcd, registry_state)
            with self._wake:
                self._records.remove(record)
            record.written.set()

    def _write(self, record: _Record, etcd: Etcd, registry_state: RegistryState) -> None:
        """Write a removal to etcd once, although several members may have received the call."""
        key, revision = registry_state.removed_key(record.digest), 0
        removal = record.removal.hex()
        fields = {"removal": removal, "by": self._identity.member}
        if record.erasure:
            fields["erasure"] = record.erasure.hex()
        value = json.dumps(fields).encode()
        lease, _ = etcd.grant(REMOVALS_KEPT_S)
        while True:
            there, _ = etcd.swap(key, value, lease, revision)
            if there is None:
                return
            with contextlib.suppress(ConfigError):
                if there.revision and parse_removed(there.value)[0] == record.removal:
                    break
            revision = there.revision
        etcd.revoke(lease)

    def _note(self, removal: bytes) -> None:
        """Note that this node has carried out a removal or erasure."""
        with self._wake:
            self._done[removal] = None
            if len(self._done) > DONE_MAX:
                self._done.popitem(last=False)

    def _save(self, number: int, settings_id: str) -> None:
        self._identity.save(max(number, self._identity.applied), self._to_erase, settings_id)
        self._saved_at = time.monotonic()
