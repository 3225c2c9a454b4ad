"""Limit connections, calls and bytes in flight, per peer and in total.

Each resource has a limit in total and one for a peer, half of it, so that no peer can exhaust it
(docs/operations.md, "Limits"). A tenant is one peer, from all of its addresses, and its quota may
be less than that half.

    Budget              amounts by name: taken at once or refused at once
    ConnectionLimiter   connections or calls: if full, the longest idle one is evicted
"""

import ipaddress
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.checksum import LEAF_NBYTES, LEAF_SUM_NBYTES
from kvstore.config import GET_RANGES_MAX
from kvstore.errors import Exhausted, InvalidRequest
from kvstore.keys import PREFIX_HASH_NBYTES_MAX
from kvstore.messages import field_of
from kvstore.pb import kvstore_pb2 as pb
from node.auth.quotas import tenant_of
from node.config import NodeConfig

# The cost of a request in its tenant's byte rate: bytes transferred, or bytes read and hashed.


def _nothing(nbytes: int) -> None:
    """Charge no tenant."""


class Charge:
    """Charge one request the larger of two sums: page bytes transferred, and page bytes processed.

    Processed means read from disk, fetched from another member, or hashed. A plain get reads a page
    once and sends it once, so it costs the page's bytes. Processing is charged before it is done,
    so a request that then fails, or has very short ranges, is no cheaper. `take` debits the
    tenant's rate, also below zero.
    """

    __slots__ = ("_charged", "_processed", "_take", "_transferred")

    def __init__(self, take: Callable[[int], None] = _nothing) -> None:
        self._take = take
        self._transferred = self._processed = self._charged = 0

    def add_processed(self, nbytes: int) -> None:
        """Count bytes that were processed."""
        self._processed += nbytes
        self._settle()

    def add_transferred(self, nbytes: int) -> None:
        """Count bytes that were transferred."""
        self._transferred += nbytes
        self._settle()

    def _settle(self) -> None:
        more = max(self._transferred, self._processed) - self._charged
        if more > 0:
            self._charged += more
            self._take(more)


NO_CHARGE = Charge()


# A transfer must end within its bytes at this rate plus `stall_s`, however steadily it trickles.
TRANSFER_NBYTES_PER_S_MIN = 1 << 20

# Time limit of a connection, or a call over gRPC, for its first request.
REQUEST_S_MAX = 10.0

# Requests in flight and decoded, of more than REQUEST_NBYTES_FREE; keys and ranges as Python
# objects take up to eight times their size on the wire: 16 of the largest messages (2 MiB) at a
# time.
REQUEST_NBYTES_FREE = 64 << 10
# Of a gateway's statement about a caller: its token, which gRPC limits, or the names in its
# certificate.
ON_BEHALF_NBYTES_MAX = 48 << 10
REQUEST_NBYTES_FACTOR = 8
REQUESTS_NBYTES_MAX = 256 << 20

# Calls that work on many pages or namespaces, or wait for the disk: how many at a time, each at
# most the half for one peer. Other calls need microseconds, or are bounded by their connection.
LONG_CALLS = {
    "list": 8,
    "feed": 16,
    "query": 8,
    "verify": 4,
    "flush": 8,
    "scrub": 1,
    "recover": 1,
    "drain": 4,
    "sweep": 2,
    "record": 2,
    "push_identities": 2,
    "remove_namespace": 2,
    "forget": 1,
    "node_status": 8,
    "list_namespaces": 8,
}
SCRUB_NBYTES_MAX = 256 << 20  # of one scrub call
SCRUB_S_MAX = 5.0  # after this time it ends as well

# Of one namespace; node.memory.page limits all together. Some 100 bytes for each plane of each
# group of layers, so 128 different layers fit.
DESCRIPTION_NBYTES_MAX = 32 << 10

REFLECTION_STREAMS_MAX = 8
REFLECTION_S_MAX = 30.0
HEALTH_CALLS_MAX = 64
HEALTH_WATCH_S_MAX = 3600.0
FOLLOWERS_MAX = 1024
FOLLOW_S_MAX = 60.0
FEEDS_MAX = 16
FEED_S_MAX = 3600.0
# For scrapes, probes and browsers. Only the console's calls, reads and watchers (below) can be busy
# for long. All of them are fewer than the half that one peer may have, so a scrape always gets a
# connection.
HTTP_CONNECTIONS_MAX = 64
HTTP_REQUEST_S_MAX = 5.0
HTTP_REPLY_S_MAX = 30.0
CONSOLE_CALLS_MAX = 8
WATCHERS_MAX = 8


def peer_of(host: str) -> str:
    """Return the key of a peer: an IPv4 address, or the /64 network of an IPv6 host."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


@dataclass(frozen=True)
class Limit:
    """A limit; `what` and `remedy` are for the message of a refusal."""

    what: str
    total: int
    per_peer: int
    remedy: str

    def refusal(self, peer: str, used: int, used_by_peer: int, most: int = 0) -> Exhausted:
        """Return the error of an exceeded limit; a tenant learns only about itself."""
        if tenant_of(peer):
            whose = "for one tenant" if most == self.per_peer else "by its quota"
            return Exhausted(
                f"{self.what}: {used_by_peer} of {peer}; allowed are {most} {whose}, less while "
                f"others need them; {self.remedy}"
            )
        return Exhausted(
            f"{self.what}: {used_by_peer} of {peer} and {used} in all; allowed are {self.per_peer} "
            f"for one peer and {self.total} in all; {self.remedy}"
        )


def make_limit(what: str, total: int, remedy: str, per_peer: int = 0) -> Limit:
    """Make a limit of which one peer gets half, unless told otherwise."""
    return Limit(what, total, per_peer or max(1, -(-total // 2)), remedy)


class QuotaLimits(NamedTuple):
    """Apply tenants' quotas to a limit.

    `most` returns a tenant's quota, 0 for none; `refused` counts refusals.
    """

    most: Callable[[str], int] = lambda tenant: 0
    refused: Callable[[str], None] = lambda tenant: None

    def of(self, peer: str, cap: Limit) -> int:
        """Return the limit for a peer."""
        tenant = tenant_of(peer)
        return min(self.most(tenant) or cap.per_peer, cap.per_peer) if tenant else cap.per_peer


NO_QUOTAS = QuotaLimits()


class PerPeerQueue:
    """Run one call of each peer at a time; its other calls wait.

    So a peer with a hundred connections gets no more of the GIL than one with a single one.
    Thread-safe; remembers only peers with running calls.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[threading.Event]] = {}  # of each peer with a running call

    @contextmanager
    def turn(self, peer: str) -> Iterator[None]:
        """Run the block as the peer's only call."""
        self.begin(peer)
        try:
            yield
        finally:
            self.end(peer)

    @property
    def waiting_count(self) -> int:
        """Return how many calls wait for another one of their peer."""
        with self._lock:
            return sum(map(len, self._waiting.values()))

    def begin(self, peer: str) -> int:
        """Begin the peer's call, which must `end`; 1 µs faster than `turn`.

        Return when it began to wait (monotonic ns), or 0 if it did not wait.
        """
        with self._lock:
            waiting = self._waiting.get(peer)
            if waiting is None:
                self._waiting[peer] = deque()
                return 0
            mine = threading.Event()
            waiting.append(mine)
        began_ns = time.monotonic_ns()
        mine.wait()
        return began_ns

    def end(self, peer: str) -> None:
        """End the peer's call and wake the longest waiting one."""
        with self._lock:
            if waiting := self._waiting[peer]:
                waiting.popleft().set()
            else:
                del self._waiting[peer]


class Budget:
    """An amount that is shared by peers.

    Thread-safe; remembers only peers that have some.
    """

    def __init__(self, cap: Limit, quoted: QuotaLimits = NO_QUOTAS) -> None:
        self.cap = cap
        self._quoted = quoted
        self._lock = threading.Lock()
        self._by_peer: dict[str, int] = {}
        self.used = 0

    def take(self, peer: str, amount: int = 1) -> None:
        """Take an amount. Raises Exhausted, and takes nothing, beyond the limit.

        An amount of 0 is always granted.
        """
        if not amount:
            return
        with self._lock:
            used_by_peer = self._by_peer.get(peer, 0)
            most = self._quoted.of(peer, self.cap)
            if self.used + amount > self.cap.total or used_by_peer + amount > most:
                self._quoted.refused(tenant_of(peer))
                raise self.cap.refusal(peer, self.used, used_by_peer, most)
            self.used += amount
            self._by_peer[peer] = used_by_peer + amount

    def give(self, peer: str, amount: int = 1) -> None:
        """Return an amount."""
        if not amount:
            return
        with self._lock:
            self.used -= amount
            left = self._by_peer[peer] - amount
            assert left >= 0
            if left:
                self._by_peer[peer] = left
            else:
                del self._by_peer[peer]

    @contextmanager
    def lent(self, peer: str, amount: int = 1) -> Iterator[None]:
        """Take an amount within the block."""
        self.take(peer, amount)
        try:
            yield
        finally:
            self.give(peer, amount)


class ConnectionSlot:
    """Slot of one connection or call.

    An idle one may be evicted: `leave` is called then, once, and its user must end.
    """

    def __init__(self, limiter: "ConnectionLimiter", peer: str, leave: Callable[[], None]) -> None:
        self._limiter = limiter
        self.peer = peer
        self.leave = leave
        self.taken_away = False
        self.known = False  # whether it has sent a request yet

    def idle(self) -> None:
        """Mark the connection as idle: it may be closed for another one.

        Unused connections are closed first, then the longest idle ones.
        """
        self._limiter.set_idle(self)

    def busy(self) -> bool:
        """Mark the connection as busy; return False if it was evicted meanwhile."""
        return self._limiter.set_busy(self)

    def change(self, peer: str) -> None:
        """Count the connection to another peer.

        Raises Exhausted, and changes nothing, if that peer has its share of busy ones.
        """
        self._limiter.change(self, peer)

    def close(self) -> None:
        """Free the slot."""
        self._limiter.remove(self)


class ConnectionLimiter:
    """Limit connections or calls, in total and per peer.

    Thread-safe; O(1) unless it is full.
    """

    def __init__(self, cap: Limit, quoted: QuotaLimits = NO_QUOTAS) -> None:
        self.cap = cap
        self._quoted = quoted
        self._lock = threading.Lock()
        self._count = 0
        self._counts: dict[str, int] = {}
        # Of each peer, longest idle first: those that never sent a request, and the others.
        self._idle: dict[
            str, tuple[OrderedDict[ConnectionSlot, None], OrderedDict[ConnectionSlot, None]]
        ] = {}
        self._closed = False

    @property
    def count(self) -> int:
        """Return the number of connections."""
        return self._count

    def enter(self, peer: str, leave: Callable[[], None]) -> ConnectionSlot:
        """Return a busy slot. Raises Exhausted if no idle connection can be closed for it."""
        with self._lock:
            goes = None
            most = self._quoted.of(peer, self.cap)
            if self._counts.get(peer, 0) >= most:
                goes = self._longest_idle(peer)
            elif self._count >= self.cap.total:
                goes = self._longest_idle(self._greediest())
            else:
                return self._add(peer, leave)
            if goes is None:
                self._quoted.refused(tenant_of(peer))
                raise self.cap.refusal(peer, self._count, self._counts.get(peer, 0), most)
            self._take_away(goes)
            place = self._add(peer, leave)
        goes.leave()
        return place

    def change(self, place: ConnectionSlot, peer: str) -> None:
        """Count a slot to another peer. Raises Exhausted."""
        goes = None
        with self._lock:
            if place.taken_away or place.peer == peer:
                return
            most, count = self._quoted.of(peer, self.cap), self._counts.get(peer, 0)
            if count >= most:
                goes = self._longest_idle(peer)
                if goes is None:
                    self._quoted.refused(tenant_of(peer))
                    raise self.cap.refusal(peer, self._count, count, most)
                self._take_away(goes)
            self._not_idle(place)
            self._subtract(place.peer)
            place.peer = peer
            self._count += 1
            self._counts[peer] = self._counts.get(peer, 0) + 1
        if goes is not None:
            goes.leave()

    def drop_idle(self) -> bool:
        """Close one idle connection; return False if none is idle."""
        with self._lock:
            goes = self._longest_idle(self._greediest())
            if goes is not None:
                self._take_away(goes)
        if goes is not None:
            goes.leave()
        return goes is not None

    def close(self) -> None:
        """Close idle connections, and later ones when they become idle."""
        self._closed = True
        while self.drop_idle():
            pass

    def _greediest(self) -> str:
        """Return the peer with idle connections that has most connections."""
        idle = (peer for peer, (new, known) in self._idle.items() if new or known)
        return max(idle, key=lambda peer: self._counts[peer], default="")

    def _longest_idle(self, peer: str) -> ConnectionSlot | None:
        new, known = self._idle.get(peer, ({}, {}))
        return next(iter(new or known), None)

    def _add(self, peer: str, leave: Callable[[], None]) -> ConnectionSlot:
        self._count += 1
        self._counts[peer] = self._counts.get(peer, 0) + 1
        return ConnectionSlot(self, peer, leave)

    def _take_away(self, place: ConnectionSlot) -> None:
        place.taken_away = True
        self._not_idle(place)
        self._subtract(place.peer)

    def _subtract(self, peer: str) -> None:
        self._count -= 1
        self._counts[peer] -= 1
        if not self._counts[peer]:
            del self._counts[peer]
            self._idle.pop(peer, None)

    def _not_idle(self, place: ConnectionSlot) -> None:
        idle = self._idle.get(place.peer)
        if idle is not None:
            idle[place.known].pop(place, None)

    def set_idle(self, place: ConnectionSlot) -> None:
        """Mark a slot as idle."""
        with self._lock:
            if not place.taken_away:
                idle = self._idle.get(place.peer)
                if idle is None:
                    idle = self._idle[place.peer] = (OrderedDict(), OrderedDict())
                idle[place.known][place] = None
        while self._closed and self.drop_idle():
            pass

    def set_busy(self, place: ConnectionSlot) -> bool:
        """Mark a slot as busy; return False if it was evicted."""
        with self._lock:
            self._not_idle(place)
            place.known = True
            return not place.taken_away

    def remove(self, place: ConnectionSlot) -> None:
        """Free a slot; may be called twice."""
        with self._lock:
            if not place.taken_away:
                self._take_away(place)


# Limit the size of requests by kind: checked by their length, before they are parsed.
#
# Parsing holds the GIL and makes up to a hundred bytes of each byte. So requests larger than any
# valid one are refused unparsed, and large ones are parsed one at a time.

_RANGE_WIRE_NBYTES = 24  # two numbers of ten bytes, their tags and a header
_TYPES = {
    field.name: (field.number, getattr(pb, field.message_type.name))
    for field in pb.BulkRequest.DESCRIPTOR.fields
    if field.message_type
}
KEYED = ("lookup", "put", "verify", "remove", "pin", "unpin", "stat", "hint", "query")
_OPS = {number: op for op, (number, _) in _TYPES.items()}


class Requests:
    """Parse requests within limits. Thread-safe.

    `op` is the field's name in BulkRequest; `data` the request in its wire form.
    """

    def __init__(self, config: NodeConfig, budget: Budget, turns: PerPeerQueue) -> None:
        self._budget = budget
        self._turns = turns
        self._parsing = threading.Lock()  # held for large ones
        keys = config.batch_keys_max * (PREFIX_HASH_NBYTES_MAX + 2) + 1024
        leaves = (
            config.batch_keys_max * (LEAF_SUM_NBYTES + 3)
            + config.batch_nbytes_max // LEAF_NBYTES * 8
        )
        most = dict.fromkeys(KEYED, keys)
        most |= {"get": keys + GET_RANGES_MAX * _RANGE_WIRE_NBYTES, "commit": leaves}
        most["open_namespace"] = 4 * DESCRIPTION_NBYTES_MAX
        self._nbytes_max = {op: max(most.get(op, 0), REQUEST_NBYTES_FREE) for op in _TYPES}

    def take(self, peer: str, nbytes: int) -> int:
        """Take from the budget for a request of `nbytes` and return the amount to give back.

        Raises Exhausted.
        """
        taken = nbytes * REQUEST_NBYTES_FACTOR if nbytes > REQUEST_NBYTES_FREE else 0
        self._budget.take(peer, taken)
        return taken

    def parsed(self, op: str, data: bytes | memoryview, peer: str) -> Any:
        """Parse a request, a large one in its peer's turn.

        Raises InvalidRequest, or protobuf's DecodeError for an invalid message.
        """
        if len(data) > self._nbytes_max[op]:
            raise InvalidRequest(
                f"a {op} of {len(data)} bytes; the largest that this node serves has "
                f"{self._nbytes_max[op]}, split the batch (batch_keys_max)"
            )
        if len(data) <= REQUEST_NBYTES_FREE:
            return _TYPES[op][1].FromString(data)
        with self._turns.turn(peer), self._parsing:
            message = _TYPES[op][1].FromString(data)
            if op == "get" and len(message.ranges) > GET_RANGES_MAX:
                raise InvalidRequest(
                    f"a get of {len(message.ranges)} ranges, at most {GET_RANGES_MAX}; split them"
                )
            return message


def inside(header: bytes) -> tuple[str, memoryview]:
    """Return (op, request bytes) of a BulkRequest with only one field. Raises InvalidRequest."""
    number, request = field_of(memoryview(header))
    if number not in _OPS:
        raise InvalidRequest("a large request is one operation and nothing else")
    return _OPS[number], request
