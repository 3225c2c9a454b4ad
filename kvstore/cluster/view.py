"""Describe a cluster: a numbered list of members, and which of them own a key, without any I/O.

    joining    receives new pages, and fetches pages that it owns from their former owners
    serving    receives and serves pages
    draining   receives no new pages, and serves those that it still has

Keys are placed by weighted rendezvous hashing over slots, the same in every process and version:

    key --xxh3--> one of 2^19 slots --> members ranked by score --> the best R, in distinct zones

A member's score in a slot depends on its id, its weight and the slot only. So a member that joins
takes slots from all others in proportion to the weights, one that leaves gives its slots to all
others, and nothing else moves. A slot's owners are computed on first use: a view costs nothing
until then. (Thaler and Ravishankar 1998; weights as in Schindelhauer and Schomaker 2005.)
"""

import enum
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from kvstore.checksum import hash64, key_seed
from kvstore.config import split_address
from kvstore.errors import ConfigError
from kvstore.pb import kvstore_pb2 as pb

# With 64 equal members the fullest has 3 to 4 % more keys than the mean; with 2^16 slots, 8 %.
SLOT_COUNT = 1 << 19
UNIT = 1 / (1 << 64)  # maps 64 random bits to a number in 0..1
MEMBERS_MAX = 1024
REPLICAS_MAX = 8
WEIGHT_MAX = 1e6
NAME_NBYTES_MAX = 64  # bytes of the name of a cluster, a zone or a member
# host names have at most 253 bytes; a view with the most members still fits a message
ADDRESS_NBYTES_MAX = 300
REGISTRIES = ("static", "etcd")  # values of a member's registry state that mean "healthy"


class Candidate(NamedTuple):
    """A member that may own keys.

    `zone`: empty for a member that fails alone.
    """

    id: str
    weight: float
    zone: str = ""


class Placement:
    """Place keys on members.

    Thread-safe without a lock: two threads compute the same owners.
    """

    def __init__(self, candidates: Sequence[Candidate], replicas: int) -> None:
        ordered = sorted(candidates)
        self._ids = [some.id for some in ordered]
        self._zones = [some.zone for some in ordered]
        self._drawn = [(hash64(some.id.encode()), 1 / some.weight) for some in ordered]
        self._replicas = min(replicas, len(ordered))
        self._slots: list[tuple[str, ...] | None] = [None] * SLOT_COUNT
        # One shared tuple for all slots with the same owners
        self._alike: dict[tuple[str, ...], tuple[str, ...]] = {}

    def owners(self, namespace: bytes, prefix_hashes: Sequence[bytes]) -> list[tuple[str, ...]]:
        """Return the ids of each key's owners, the first owner first.

        There are as many as replicas, or as members if there are fewer. `namespace` is its digest.
        """
        known, found = self._slots, []
        for prefix_hash in prefix_hashes:
            slot = key_seed(namespace, prefix_hash) % SLOT_COUNT
            found.append(known[slot] or self._place(slot))
        return found

    def _place(self, slot: int) -> tuple[str, ...]:
        """Return a slot's owners.

        The lowest score wins: of exponential variables, a member's is the lowest with a probability
        in proportion to its weight.
        """
        name, log = slot.to_bytes(4, "little"), math.log
        scores = [-log((hash64(name, seed) + 1) * UNIT) * mean for seed, mean in self._drawn]
        owners = self._spread(sorted(range(len(scores)), key=scores.__getitem__))
        self._slots[slot] = owners = self._alike.setdefault(owners, owners)
        return owners

    def _spread(self, ranked: list[int]) -> tuple[str, ...]:
        """Choose the best-ranked members, in distinct zones as long as there are enough."""
        chosen: list[int] = []
        zones: set[str] = set()
        for member in ranked:
            if len(chosen) == self._replicas:
                break
            zone = self._zones[member]
            if not zone or zone not in zones:
                chosen.append(member)
                zones.add(zone)
        rest = (
            [member for member in ranked if member not in chosen]
            if len(chosen) < self._replicas
            else []
        )
        return tuple(self._ids[member] for member in (chosen + rest)[: self._replicas])


class State(enum.Enum):
    """Enumerate the states of a member."""

    JOINING = pb.MEMBER_JOINING
    SERVING = pb.MEMBER_SERVING
    DRAINING = pb.MEMBER_DRAINING


@dataclass(frozen=True)
class Member:
    """A node of a cluster.

    `address`: host:port of its gRPC service as all members reach it, or bulk://host:port. `weight`:
    its share of the keys, relative to the other members'.
    `zone`: members of one zone fail together, such as a rack; empty: it fails alone. `bulk_port`:
    its port for frames over TCP at the same host; 0: unknown.
    """

    id: str
    address: str
    weight: float = 1.0
    zone: str = ""
    state: State = State.SERVING
    bulk_port: int = 0

    def __post_init__(self) -> None:
        check_name("a member's id", self.id)
        if self.zone:
            check_name(f"the zone of {self.id}", self.zone)
        if len(self.address) > ADDRESS_NBYTES_MAX:
            raise ConfigError(
                f"the address of {self.id} is not host:port: it has {len(self.address)} "
                f"characters, at most {ADDRESS_NBYTES_MAX}"
            )
        if not self.address.isprintable():
            raise ConfigError(f"the address of {self.id} is not host:port: {self.address!r}")
        split_address(self.address)
        if not 0 < self.weight <= WEIGHT_MAX:
            raise ConfigError(
                f"the weight of {self.id} is {self.weight}; it must be above 0, at most "
                f"{WEIGHT_MAX:g}"
            )
        if not 0 <= self.bulk_port < 1 << 16:
            raise ConfigError(f"the bulk port of {self.id} is {self.bulk_port}, which is no port")


@dataclass(frozen=True)
class View:
    """The members of a cluster.

    `number` rises with every change. `replicas`: how many members own a key, if there are as many.

    Raises ConfigError for an impossible cluster.
    """

    cluster: str
    number: int
    members: tuple[Member, ...]
    replicas: int = 1

    def __post_init__(self) -> None:
        check_name("the cluster", self.cluster)
        if not 1 <= self.replicas <= REPLICAS_MAX:
            raise ConfigError(f"replicas={self.replicas} must be in 1..{REPLICAS_MAX}")
        _check_count(len(self.members))
        for what in ("id", "address"):
            counts = Counter(getattr(member, what) for member in self.members)
            if twice := [name for name, count in counts.items() if count > 1]:
                raise ConfigError(
                    f"two members of {self.cluster} have the {what} {min(twice)}; each needs its "
                    "own"
                )

    def after(self, known: "View | None") -> "View":
        """Return this view, reusing the placement computed for `known` if that still holds.

        Placement depends on neither the view's number nor addresses and ports.
        """
        if known is not None and _placed_alike(self, known):
            for name in ("owners", "holders"):
                if name in known.__dict__:
                    self.__dict__[name] = known.__dict__[name]
        return self

    def with_ports(self, known: "View | None") -> "View":
        """Return this view with the bulk ports that only `known` has.

        With a fixed member list each node knows only its own port.
        """
        if known is None or known.number != self.number:
            return self
        ports = {(member.id, member.address): member.bulk_port for member in known.members}
        members = tuple(
            member
            if member.bulk_port
            else replace(member, bulk_port=ports.get((member.id, member.address), 0))
            for member in self.members
        )
        return self if members == self.members else replace(self, members=members)

    @cached_property
    def by_id(self) -> dict[str, Member]:
        """Return the members by id."""
        return {member.id: member for member in self.members}

    @cached_property
    def message(self) -> pb.View:
        """Return the view's message; it is built once, because each hello contains it.

        Do not change it.
        """
        return view_message(self)

    @cached_property
    def owners(self) -> Placement:
        """Return the placement on the members that receive new pages and are asked first."""
        return self._placed(State.SERVING, State.JOINING)

    @cached_property
    def holders(self) -> Placement:
        """Return the placement on the members that owned keys before others joined or were drained.

        Clients ask these members for pages that the owners lack.
        """
        return self._placed(State.SERVING, State.DRAINING)

    @cached_property
    def settled(self) -> bool:
        """Return whether no member joins or drains: then holders are owners."""
        return all(member.state is State.SERVING for member in self.members)

    def _placed(self, *states: State) -> Placement:
        chosen = [member for member in self.members if member.state in states]
        return Placement(
            [Candidate(member.id, member.weight, member.zone) for member in chosen], self.replicas
        )


def _placed_alike(one: View, other: View) -> bool:
    if one.replicas != other.replicas or len(one.members) != len(other.members):
        return False
    return all(
        (a.id, a.weight, a.zone, a.state) == (b.id, b.weight, b.zone, b.state)
        for a, b in zip(one.members, other.members, strict=True)
    )


def _check_count(members: int) -> None:
    if members > MEMBERS_MAX:
        raise ConfigError(f"{members} members are too many for one cluster; at most {MEMBERS_MAX}")


def check_name(what: str, name: str) -> None:
    """Raise ConfigError for an illegal name.

    Names stand in paths, metrics and logs.
    """
    fits = (
        name.isascii()
        and len(name) <= NAME_NBYTES_MAX
        and name.replace("-", "").replace("_", "").isalnum()
    )
    if not fits:
        raise ConfigError(
            f"{what} is called {name!r}; use up to {NAME_NBYTES_MAX} of a-z, A-Z, 0-9, - and _"
        )


def static_view(text: str) -> View:
    """Parse a cluster with fixed members. Raises ConfigError.

    The form is `static:NAME/ID=HOST:PORT[@ZONE][*WEIGHT],...`, or ID=bulk://HOST:PORT.
    """
    scheme, _, rest = text.partition(":")
    cluster, slash, members = rest.partition("/")
    if scheme != "static" or not slash:
        raise ConfigError(
            f"cluster={text!r} is neither etcd://HOST:PORT,.../NAME nor "
            "static:NAME/ID=HOST:PORT[@ZONE][*WEIGHT],..."
        )
    return View(cluster, 1, tuple(_described(member) for member in members.split(",")))


def _described(text: str) -> Member:
    member, equals, rest = text.strip().partition("=")
    if not equals:
        raise ConfigError(
            f"{text!r} is no member; write ID=HOST:PORT, with @ZONE and *WEIGHT if they matter"
        )
    rest, _, weight = rest.partition("*")
    address, _, zone = rest.partition("@")
    try:
        return Member(member, address, float(weight or 1.0), zone)
    except ValueError as error:
        raise ConfigError(f"the weight of {member} is {weight!r}, which is no number") from error


def view_message(view: View) -> pb.View:
    """Convert a view to its message."""
    members = [
        pb.Member(
            id=member.id,
            address=member.address,
            weight=member.weight,
            zone=member.zone,
            state=member.state.value,
            bulk_port=member.bulk_port,
        )
        for member in view.members
    ]
    return pb.View(
        cluster=view.cluster, number=view.number, replicas=view.replicas, members=members
    )


def parse_view(message: pb.View) -> View:
    """Return the view of a message.

    Raises ConfigError for an impossible cluster.
    """
    _check_count(len(message.members))  # before the members are parsed
    return View(message.cluster, message.number, tuple(_parsed(message.members)), message.replicas)


def _parsed(members: Sequence[pb.Member]) -> Iterator[Member]:
    for member in members:
        try:
            state = State(member.state)
        except ValueError as error:
            raise ConfigError(f"{member.id} is in an unknown state: {error}") from error
        yield Member(member.id, member.address, member.weight, member.zone, state, member.bulk_port)
