"""Register the node in etcd under a lease, and watch the other members and removals.

    registry thread   keeps the lease alive and the own key written; starts over if etcd lost it
    watch thread      keys --RegistryState--> view --> membership
    removals thread   others' removals --> this node's tiers; this node's --> etcd

While etcd does not answer, the last view stays in force.
"""

import contextlib
import logging
import random
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from kvstore.cluster.view import Member, State, View, check_name
from kvstore.config import PROTOCOL_VERSION, split_address
from kvstore.deadline import Deadline
from kvstore.errors import ConfigError, InvalidRequest, KVStoreError, Unavailable
from kvstore.log_rate import LogRate
from node.cluster.etcd import Entry, Etcd, EtcdCredentials
from node.cluster.membership import (
    ETCD_SCHEME,
    TOKEN_NBYTES,
    Identity,
    LostMember,
    Membership,
    instance_at,
)
from node.cluster.registry_state import (
    BASE_MAX,
    NamespaceTombstones,
    Registered,
    RegistryState,
    Settings,
    is_reset,
    parse_member,
    parse_settings,
)
from node.cluster.remote_pages import peer_credentials
from node.config import NodeConfig

log = logging.getLogger(__name__)
log.addFilter(LogRate())

PAUSE_S = 0.5  # about so long between two tries while etcd does not answer
SAY_S = 5.0  # between two log lines of a start that waits
KEEPS = 3  # keep-alives per lifetime of a lease
END_S = 2.0  # for each thread at a stop; they are daemons


class IdInUse(Exception):
    """Another node has this id."""


@dataclass(frozen=True)
class RegistrationSettings:
    """`replicas` 0: the cluster's setting, 1 in a new cluster.

    `lease_s`: after so long without a keep-alive it is no member.
    """

    replicas: int
    lease_s: int
    wait_s: float


@dataclass(frozen=True)
class Registering:
    """The facts that a node registers about itself.

    `instance_id`: new at each start. `bulk_port`: of its frames, at the host of `address`.
    """

    address: str
    instance_id: bytes
    weight: float
    zone: str
    state: State
    bulk_port: int = 0


class Registry:
    """Registration of this node: call `connect`, then `join`, then `close`.

    The first two raise ConfigError, and any error that `pulse` raises meanwhile.
    """

    def __init__(
        self,
        etcd: Etcd,
        identity: Identity,
        membership: Membership,
        terms: RegistrationSettings,
        removals: NamespaceTombstones,
        instance_at: Callable[[str], bytes],
    ) -> None:
        """Prepare the registration; `instance_at` returns the instance id at an address."""
        self._instance_at = instance_at
        self._etcd = etcd
        self._identity = identity
        self._membership = membership
        self._terms = terms
        self._removals = removals
        self._registry_state = RegistryState(identity.cluster)
        self._lock = threading.Lock()  # guards the state and the published view
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._self: Registered | None = None
        self._lease, self._lease_s = 0, float(terms.lease_s)
        # Revision and value of our key; 0: it does not exist
        self._written: tuple[int, bytes] = (0, b"")
        self.lost: list[LostMember] = []  # members that left without a drain
        self._troubles: dict[str, tuple[float, str]] = {}  # by thread: since when, what
        # until then the last view holds: members register again after etcd lost its data
        self._settle_at = 0.0
        self._threads = [
            threading.Thread(target=self._run, args=(step,), name=name, daemon=True)
            for name, step in (
                ("registry", self._keep_registered),
                ("registry-watch", self._follow),
                ("removals", self._remove),
            )
        ]

    # ---- for others ----------------------------------------------------------------------------

    @property
    def status(self) -> str:
        """Return `etcd`, or why it cannot be reached."""
        troubles = list(self._troubles.values())
        if not troubles:
            return "etcd"
        since, said = min(troubles)
        return f"for {time.monotonic() - since:.0f} s: {said}; the last view stays in force"

    @property
    def apart(self) -> list[str]:
        """Return the registered members that are not part of the view."""
        return list(self._registry_state.apart)

    def forget(self, member: str) -> None:
        """Stop reporting a lost member.

        Raises InvalidRequest if it is not lost, and Unavailable if etcd does not answer, or if the
        member returns at this moment.
        """
        lost = sorted(some.id for some in self.lost)
        if member not in lost:
            raise InvalidRequest(
                f"{member} is not lost; lost members are {', '.join(lost) or 'none'}. A member "
                "that is there is drained: kvstore cluster drain ID"
            )
        if not self._expect(member, b""):
            raise Unavailable(f"the record of {member} changed meanwhile; try again")

    @property
    def addresses(self) -> list[str]:
        """Return etcd's endpoints."""
        return self._etcd.endpoints

    # ---- start ---------------------------------------------------------------------------

    def connect(self, pulse: Callable[[], None]) -> None:
        """Wait for etcd and carry out the removals that this node missed."""
        self._etcd.pulse = pulse
        end, say = time.monotonic() + self._terms.wait_s, 0.0
        while True:
            try:
                anew = self._read_all()
                break
            except InvalidRequest as error:
                raise ConfigError(
                    f"{error}; see etcd_user, etcd_password (KVSTORE_NODE_ETCD_PASSWORD)"
                ) from error
            except Unavailable as error:
                if time.monotonic() >= end:
                    raise ConfigError(
                        f"etcd was not reached in {self._terms.wait_s:g} s (cluster_wait_s) at "
                        f"{', '.join(self.addresses)}: {error}"
                    ) from error
                if time.monotonic() >= say:
                    log.warning("waiting for etcd: %s", error)
                    say = time.monotonic() + SAY_S
            self._sleep(PAUSE_S, pulse)
        state = self._registry_state
        try:
            self._removals.catch_up(state.removals(), self._number(), state.settings_id, anew)
        except (KVStoreError, OSError) as error:  # an error of the disk, which is stopped then
            log.error("pages removed meanwhile may return at the next start: %s", error)

    def _read_all(self) -> bool:
        """Read the cluster from etcd.

        Return whether etcd has lost data since this node was last a member.

        If so, raise etcd's base above the last number that this node applied, or it would skip new
        removals.
        """
        anew, applied = False, self._identity.applied
        while True:
            self._settle()
            self._registry_state.reset(self._etcd.read(self._registry_state.prefix))
            settings_id = self._registry_state.settings_id
            is_lost = self._number() < applied or is_reset(self._identity.settings_id, settings_id)
            if is_lost and not anew:
                log.warning(
                    "etcd has lost its data of the cluster %s, so removals that this node missed "
                    "while it was away are unknown; if a tenant was forgotten meanwhile, forget it "
                    "again (kvstore forget)",
                    self._identity.cluster,
                )
            anew = anew or is_lost
            # Beyond BASE_MAX it can not be raised
            if self._number() >= applied or applied > BASE_MAX:
                return anew
            self._raise_number(applied)

    def join(self, about: Registering, pulse: Callable[[], None]) -> None:
        """Register this node and return when it is part of the view."""
        name = self._identity.member
        member = Member(name, about.address, about.weight, about.zone, about.state, about.bulk_port)
        self._self = Registered(
            member, PROTOCOL_VERSION, self._identity.token, about.instance_id.hex()
        )
        began = say = time.monotonic()
        end, patience = began + self._terms.wait_s, began + 2 * self._terms.lease_s + 1
        while True:
            try:
                self._register()
                break
            except InvalidRequest as error:
                raise ConfigError(str(error)) from error
            except IdInUse as error:  # by a node that has died, perhaps
                if time.monotonic() >= patience:
                    raise ConfigError(
                        f"{error}; give this one another id (--member), or stop that one"
                    ) from error
                if time.monotonic() >= say:
                    log.warning("%s; waiting for its lease to end", error)
                    say = time.monotonic() + SAY_S
            except Unavailable as error:
                if time.monotonic() >= end:
                    raise ConfigError(
                        f"not registered in {self._terms.wait_s:g} s (cluster_wait_s): {error}"
                    ) from error
            self._sleep(PAUSE_S, pulse)
        self._etcd.pulse = lambda: None
        for thread in self._threads:
            thread.start()
        while self._membership.joining:
            if time.monotonic() >= end:
                raise ConfigError(
                    f"{member.id} is outside the view: {self.status}; {'; '.join(self.apart)}"
                )
            self._sleep(0.01, pulse)
        log.info(
            "registered as %s at %s in the cluster %s",
            member.id,
            member.address,
            self._identity.cluster,
        )

    def _sleep(self, seconds: float, pulse: Callable[[], None]) -> None:
        pulse()
        self._stop.wait(seconds)

    def set_state(self, state: State) -> None:
        """Announce this member's state as soon as etcd answers."""
        assert self._self is not None
        self._self = replace(self._self, member=replace(self._self.member, state=state))
        self._wake.set()

    def record_removal(self, digest: bytes, removal: bytes, erasure: bytes = b"") -> None:
        """Record that this node has removed a namespace.

        `removal` names the removal, `erasure` a tenant's; both may be empty.
        """
        self._removals.record(digest, removal, erasure)

    def begin_erasure(self, erasure: bytes) -> None:
        """Record that this node was asked to erase a tenant."""
        self._removals.begin_erasure(erasure)

    def close(self) -> None:
        """Leave the cluster if etcd answers at once. It may be called at any point of a start."""
        self._stop.set()
        self._wake.set()
        limit = Deadline(END_S)
        self._etcd.pulse = lambda: _wants(limit)
        if self._lease and "registry" not in self._troubles:
            try:
                if self._self and self._self.member.state is State.DRAINING:
                    self._expect(self._identity.member, b"")
                self._etcd.revoke(self._lease)
            except KVStoreError as error:
                log.warning(
                    "not taken out of the cluster, which happens in %g s: %s", self._lease_s, error
                )
        self._removals.close()
        self._etcd.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(END_S)

    # ---- threads -------------------------------------------------------------------------

    def _run(self, step: Callable[[], None]) -> None:
        """Repeat a step until the end; a failed step is logged and repeated after a pause."""
        while not self._stop.is_set():
            try:
                step()
                continue
            except (KVStoreError, OSError, IdInUse) as error:
                if not self._stop.is_set():
                    self._suffer(error)
            except Exception:
                log.exception("the registry failed; it is retried")
            self._stop.wait(PAUSE_S * random.uniform(0.5, 1.5))

    def _suffer(self, error: Exception) -> None:
        name = threading.current_thread().name
        since, _ = self._troubles.get(name, (time.monotonic(), ""))
        if name not in self._troubles:
            log.warning("%s: %s; the last view stays in force", name, error)
        self._troubles[name] = since, str(error)

    def _clear_trouble(self) -> bool:
        """Forget a thread's trouble; return whether there was none."""
        name = threading.current_thread().name
        since, _ = self._troubles.pop(name, (0.0, ""))
        if since:
            log.info("%s: recovered after %.1f s", name, time.monotonic() - since)
        return not since

    def _keep_registered(self) -> None:
        """Keep the registration and the saved state up to date, then pause."""
        assert self._self is not None
        if not self._leased() or self._written[1] != self._self.value():
            self._settle()
            self._register()
        self._keep_expected(self._self.member)
        if known := self._membership.view:
            # The view may be of an etcd that was reset already; the known removals are older.
            self._raise_number(max(known.number, self._removals.highest, self._identity.applied))
        self._clear_trouble()
        self._tell()
        self._wake.wait(self._lease_s / KEEPS)
        self._wake.clear()

    def _follow(self) -> None:
        """Read the cluster's keys and follow their changes until the watch breaks."""
        reading = self._etcd.read(self._registry_state.prefix)
        if not self._clear_trouble():
            self._settle_at = time.monotonic() + self._lease_s
        with self._lock:
            self._registry_state.reset(reading)
            self.lost = self._registry_state.lost()
        self._heard()
        for changes in self._etcd.watch(self._registry_state.prefix, reading.revision + 1):
            with self._lock:
                self._registry_state.apply(changes)
                self.lost = self._registry_state.lost()
            self._heard()
        self._stop.wait(PAUSE_S)

    def _heard(self) -> None:
        with self._lock:
            mine = self._registry_state.entries.get(
                self._registry_state.member_key(self._identity.member)
            )
            self._removals.receive(
                self._registry_state.removals, self._number(), self._registry_state.settings_id
            )
            registered = self._registry_state.registered()
        # The entry was removed or replaced, or the lease ended
        if self._written[0] and not self._is_own(mine):
            self._written = (0, b"")
            self._wake.set()
        if any(not member.lost_s for member in self.lost):
            self._wake.set()
        self._membership.on_lost(self.lost, registered)
        self._tell()

    def _is_own(self, mine: Entry | None) -> bool:
        """Return whether this node wrote its entry, not one with a copy of its data directory."""
        if mine is None or self._self is None:
            return False
        with contextlib.suppress(ConfigError):
            return parse_member(self._identity.member, mine.value).instance == self._self.instance
        return True  # unreadable: no node uses it, and the next registration replaces it

    def _remove(self) -> None:
        self._removals.work(self._etcd, self._registry_state)
        self._clear_trouble()

    # ---- steps ---------------------------------------------------------------------------

    def _settle(self) -> None:
        """Read or write the cluster's settings.

        Raises ConfigError if this node has others.
        """
        wanted = self._terms.replicas
        known = self._membership.view
        own_id, key = secrets.token_hex(TOKEN_NBYTES), self._registry_state.config_key
        made = Settings(wanted or (known.replicas if known else 1), 0, own_id)
        there, _ = self._etcd.swap(key, made.value(), 0, 0)
        settings = parse_settings(there.value) if there else made
        if there and not settings.id:  # an older node wrote them
            self._etcd.swap(key, settings._replace(id=own_id).value(), 0, there.revision)
        if wanted and wanted != settings.replicas:
            raise ConfigError(
                f"replicas={wanted}, but the cluster {self._identity.cluster} has "
                f"{settings.replicas}: start this node with that or without; "
                f"{self._registry_state.config_key} in etcd has the number for all"
            )

    def _raise_number(self, least: int) -> None:
        """Raise the numbers of views and removals after etcd was lost, above all earlier ones."""
        with self._lock:
            entry, number = (
                self._registry_state.entries.get(self._registry_state.config_key),
                self._number(),
            )
        if entry is None or number >= least or least > BASE_MAX:
            return
        settings = parse_settings(entry.value)
        raised = settings._replace(base=least)
        self._etcd.swap(self._registry_state.config_key, raised.value(), 0, entry.revision)

    def _keep_expected(self, own: Member) -> None:
        """Record that this member is expected, and since when others are lost."""
        record = LostMember(own.id, own.address, own.weight, zone=own.zone).value()
        with self._lock:
            there = self._registry_state.entries.get(self._registry_state.known_key(own.id))
        if there is None or there.value != record:
            self._expect(own.id, record)
        for member in self.lost:
            if not member.lost_s and time.monotonic() >= self._settle_at:
                log.error("%s at %s is lost: it left without a drain", member.id, member.address)
                self._expect(member.id, member._replace(lost_s=int(time.time())).value())

    def _expect(self, member: str, record: bytes) -> bool:
        """Write the record of an expected member; return False if another node did meanwhile."""
        key = self._registry_state.known_key(member)
        with self._lock:
            there = self._registry_state.entries.get(key)
        return self._etcd.swap(key, record, 0, there.revision if there else 0)[0] is None

    def _leased(self) -> bool:
        """Keep the lease alive; return whether there is one."""
        if self._lease and not self._etcd.keep_alive(self._lease):
            log.warning("the lease has ended: registering again")
            self._lease, self._written = 0, (0, b"")
        return bool(self._lease)

    def _register(self) -> None:
        """Write this node's entry. Raises IdInUse."""
        assert self._self is not None
        key, own = self._registry_state.member_key(self._identity.member), self._self
        if not self._leased():
            self._lease, self._lease_s = self._etcd.grant(self._terms.lease_s)
        revision, value = self._written[0], own.value()
        while not self._stop.is_set():
            there, now = self._etcd.swap(key, value, self._lease, revision)
            if there is None:
                self._written = (now, value)
                return
            if there.revision:
                other = parse_member(self._identity.member, there.value)
                # A restart takes the entry over, a registered node does not. A live node keeps its
                # entry.
                again = self._membership.joining and not self._is_alive(other)
                if other.token != own.token or (other.instance != own.instance and not again):
                    what = (
                        "a copy of this data directory"
                        if other.token == own.token
                        else "another node"
                    )
                    id_here = (
                        f"the id {self._identity.member} in the cluster {self._identity.cluster}"
                    )
                    raise IdInUse(f"{id_here} is that of {what}, at {other.member.address}")
            revision = there.revision

    def _is_alive(self, other: Registered) -> bool:
        """Return whether that instance answers, so that a copy of this directory is in use."""
        return self._instance_at(other.member.address).hex() == other.instance

    def _number(self) -> int:
        settings = self._registry_state.settings()
        return (settings.base if settings else 0) + self._registry_state.revision

    def _tell(self) -> None:
        """Publish the view if it has changed and this node is or was part of it."""
        with self._lock:
            view, known = self._registry_state.view(), self._membership.view
            if view is None or time.monotonic() < self._settle_at or self._stop.is_set():
                return
            own = self._identity.member
            if known is None and own not in view.by_id:
                return
            if known is not None and (
                view.number < known.number or replace(view, number=known.number) == known
            ):
                return
            self._say(view, known)
            self._membership.become(view, own)

    def _say(self, view: View, known: View | None) -> None:
        before = set(known.by_id) if known else set()
        joined, left = sorted(set(view.by_id) - before), sorted(before - set(view.by_id))
        log.info(
            "view %d: %d members; new: %s; gone: %s", view.number, len(view.members), joined, left
        )
        if view.replicas > len(view.members):
            log.warning(
                "%d replicas are configured, but there are only %d members",
                view.replicas,
                len(view.members),
            )
        for line in self._registry_state.apart:
            log.warning("outside the view: %s", line)


def _wants(limit: Deadline) -> None:
    """Raise DeadlineExceeded past the limit."""
    limit.remaining()


# Parse the setting `--cluster`: nothing, a fixed list of members, or the address of a registry.

PORT = 2379
# Settings of a registered node, with their defaults.
NAMES = ("advertise", "zone", "etcd_ca", "etcd_cert", "etcd_key", "etcd_user")
OF_ETCD = (("weight", 1.0), *((name, "") for name in NAMES))


def open_registry(
    config: NodeConfig,
    membership: Membership,
    remove: Callable[[bytes], None],
    settle: Callable[[], None],
    erase: Callable[[list[bytes]], None],
) -> Registry | None:
    """Return the registry; None for a node that is not registered. Raises ConfigError.

    `remove`, `settle` and `erase` are those of `NamespaceTombstones`.
    """
    if not config.cluster.startswith(ETCD_SCHEME):
        for name, default in OF_ETCD:
            if (value := getattr(config, name)) != default:
                raise ConfigError(
                    f"{name}={value} is for a cluster on etcd; a fixed list says it of each member"
                )
        return None
    endpoints, cluster = endpoints_and_name(config.cluster)
    access = EtcdCredentials(
        config.etcd_ca, config.etcd_cert, config.etcd_key, config.etcd_user, config.etcd_password
    )
    if config.zone:
        check_name("zone", config.zone)
    identity = Identity(config.data_dir, cluster, config.member)
    terms = RegistrationSettings(config.replicas, config.lease_s, config.cluster_wait_s)
    removals = NamespaceTombstones(identity, remove, settle, erase)
    found = partial(instance_at, peer_credentials=peer_credentials(config))
    return Registry(Etcd(endpoints, access), identity, membership, terms, removals, found)


def endpoints_and_name(text: str) -> tuple[list[str], str]:
    """Parse etcd://HOST:PORT,.../NAME. Raises ConfigError."""
    if "://" in text.removeprefix(ETCD_SCHEME):  # etcd's own tools take http://HOST:PORT
        bare = re.sub(r"[A-Za-z][A-Za-z0-9+.-]*://", "", text.removeprefix(ETCD_SCHEME))
        raise ConfigError(f"cluster={text!r} has a URL in it: write {ETCD_SCHEME}{bare}")
    hosts, slash, name = text.removeprefix(ETCD_SCHEME).partition("/")
    named = [host.strip() for host in hosts.split(",")]
    if not slash or not all(named):
        raise ConfigError(f"cluster={text!r} is not etcd://HOST:PORT,.../NAME")
    endpoints = [host if re.search(r":\d+$", host) else f"{host}:{PORT}" for host in named]
    for endpoint in endpoints:
        host, _ = split_address(endpoint)
        if ":" in host and not endpoint.startswith("["):
            raise ConfigError(
                f"{endpoint!r} is not host:port; an IPv6 address is written [::1]:{PORT}"
            )
    check_name("the cluster", name)
    return endpoints, name
