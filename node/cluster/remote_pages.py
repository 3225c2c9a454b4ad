"""Read pages from other members: the lower tier of a near node.

    find    keys  --> members that may have them, asked in parallel --> sources by key
    read    slots --> members send many pages at a time --> verified, reported on arrival

Members are asked without `near`, so that they do not ask others. A get that follows a lookup asks
the members that the lookup found, at once. No lock of the RAM tier is held here. Each member has
one connection pool to each other member (`PeerChannels`), over bulk TCP.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from operator import not_
from typing import Any, TypeVar, cast

from kvstore.checksum import stored_leaves
from kvstore.cluster.calls import batch_pages_max, key_seeds, look_up
from kvstore.cluster.fan_out import routes
from kvstore.cluster.routing import TRY_NEXT, in_parallel, try_owners
from kvstore.cluster.view import View
from kvstore.config import explicit_config
from kvstore.deadline import Deadline
from kvstore.errors import KVStoreError, Unavailable
from kvstore.keys import Namespace
from kvstore.log_rate import LogRate
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.secrets import token_of
from kvstore.transports.bulk import Arrived, BulkWire
from kvstore.transports.channel import NodeChannel, NodeConnection
from kvstore.transports.negotiation import member_name
from kvstore.transports.parallel import ParallelTransfer
from node.cluster.membership import Membership
from node.config import NodeConfig
from node.memory.lower_tier import Load, LowerTier, Query, Source
from node.memory.page import Page

log = logging.getLogger(__name__)
log.addFilter(LogRate())
Result = TypeVar("Result")

THREADS_MAX = 32  # besides the calling threads
# Bytes per request to one member. If a later request fails, the earlier pages are kept.
FETCHED_NBYTES = 64 << 20
CONNECTIONS_MAX = 4  # of each channel
TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 2.0
BACKOFF_S_MAX = 2.0  # short, so that a member that is back is used soon
KNOWN_S, KNOWN_MAX = 1.0, 1 << 14  # what lookups found is remembered up to twice as long, and many


def peer_credentials(config: NodeConfig) -> dict[str, Any]:
    """Return the ClientConfig fields for connections to members: token and certificate.

    Without TLS the token leaves this host only if `insecure` says so. Raises ConfigError.
    """
    known: dict[str, Any] = {
        "token": config.token,
        "token_file": config.token_file,
        "insecure": config.insecure,
    }
    token_of(explicit_config(**known))
    if config.tls_cert:
        known |= {
            "tls_ca": config.members_ca,
            "tls_cert": config.tls_cert,
            "tls_key": config.tls_key,
        }
        known["tls_name"] = config.tls_name
    return known


class PeerChannels:
    """Channels to the other members. Thread-safe.

    Channels to former members, or to former addresses, are closed.
    """

    def __init__(self, membership: Membership, config: NodeConfig | None = None) -> None:
        """Follow the views of `membership`.

        `config` says how the others authenticate this node; None: no calls.
        """
        self._membership = membership
        self._peer_credentials = peer_credentials(config) if config is not None else {}
        self._lock = threading.Lock()  # held for microseconds
        self._addresses: dict[str, str] = {}  # of the others, by id
        self._ports: dict[str, int] = {}  # ports of their frames, as far as the view has them
        self._channels: dict[str, NodeChannel] = {}
        self._closed = False
        self._cluster = ""
        membership.on_view(self._follow)

    def channel(self, member: str) -> NodeChannel:
        """Return the channel to a member.

        Raises Unavailable if it is no other member.
        """
        with self._lock:
            address = self._addresses.get(member)
            if address is None or self._closed:
                raise Unavailable(f"{member} is no other member of the cluster")
            channel = self._channels.get(member)
            if channel is None:
                config = explicit_config(
                    address=address,
                    direct=True,
                    wire="bulk",
                    timeout_s=TIMEOUT_S,
                    connect_timeout_s=CONNECT_TIMEOUT_S,
                    connections_max=CONNECTIONS_MAX,
                    backoff_s_max=BACKOFF_S_MAX,
                    **self._peer_credentials,
                )
                channel = self._channels[member] = NodeChannel(address, config)
                channel.expect(self._ports[member], member_name(self._cluster, member))
            return channel

    def failing(self) -> dict[str, bool]:
        """Return, for each other member, whether calls to it fail, so that few are tried."""
        with self._lock:
            return {
                member: member in self._channels and self._channels[member].failing
                for member in self._addresses
            }

    def _follow(self, view: View) -> None:
        own = self._membership.member
        addresses = {member.id: member.address for member in view.members if member.id != own}
        with self._lock:
            left = [
                name
                for name, channel in self._channels.items()
                if addresses.get(name) != channel.address
            ]
            channels = [self._channels.pop(name) for name in left]
            self._addresses, self._cluster = addresses, view.cluster
            self._ports = {member.id: member.bulk_port for member in view.members}
            for name, channel in self._channels.items():
                channel.expect(self._ports[name], member_name(view.cluster, name))
        for channel in channels:
            channel.close()

    def close(self) -> None:
        """Take no more calls; running ones may end."""
        with self._lock:
            self._closed = True
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.close()


class KnownPages:
    """Remember for a moment which members have pages, for the get after a lookup. Thread-safe.

    Each answer is used once: a get that fails asks anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: dict[tuple[bytes, bytes], str] = {}
        self._old: dict[tuple[bytes, bytes], str] = {}
        self._began_s = 0.0
        self._view: View | None = None

    def note(self, view: View, digest: bytes, members: Mapping[bytes, str]) -> None:
        """Remember the member of each of these keys, of a lookup that began with this view."""
        with self._lock:
            self._forget_old(view, time.monotonic())
            self._new.update(((digest, h), member) for h, member in members.items())

    def take(self, view: View, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[str]:
        """Return the member of each key, and forget it; nothing for those unknown in this view."""
        with self._lock:
            self._forget_old(view, time.monotonic())
            old, new = self._old, self._new
            keys = [(digest, prefix_hash) for prefix_hash in prefix_hashes]
            return [new.pop(key, "") or old.pop(key, "") for key in keys]

    def _forget_old(self, view: View, now_s: float) -> None:
        if view is not self._view or now_s - self._began_s > 2 * KNOWN_S:
            self._new, self._old, self._began_s, self._view = {}, {}, now_s, view
        elif now_s - self._began_s > KNOWN_S or len(self._new) > KNOWN_MAX:
            self._new, self._old, self._began_s = {}, self._new, now_s


class RemotePages(LowerTier):
    """Lower tier with the pages of other members. Thread-safe.

    `view(offset, nbytes)` is the arena's memory, `clock_s` gives whole seconds since the epoch. The
    `locator` of a source: the members to ask for the page, one after the other.
    """

    name = "peer"

    def __init__(
        self,
        membership: Membership,
        channels: PeerChannels,
        view: Callable[[int, int], memoryview],
        clock_s: Callable[[], int],
    ) -> None:
        self._membership = membership
        self._channels = channels
        self._view = view
        self._clock_s = clock_s
        self._threads = ParallelTransfer(THREADS_MAX, "kvstore-peers")
        self._known = KnownPages()
        self._lock = threading.Lock()  # guards the counters
        self.pages_fetched = 0
        self.nbytes_fetched = 0
        self.pages_fetch_failed = 0

    def copies(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> set[bytes]:
        """Return those of these keys that this node does not own."""
        view, own = self._membership.view, self._membership.member
        if view is None:
            return set()
        owners = view.owners.owners(digest, prefix_hashes)
        return {h for h, some in zip(prefix_hashes, owners, strict=True) if own not in some}

    # ---- find ----------------------------------------------------------------------------

    def is_asked(self, near: bool) -> bool:
        """Return whether to ask other members: only for a near node's client."""
        return near and self._membership.view is not None

    def find(self, query: Query) -> dict[bytes, Source]:
        """Find the members that have the pages."""
        namespace, hashes = query.namespace, query.prefix_hashes
        view, own = self._membership.view, self._membership.member
        if view is None:
            return {}
        digest, found = namespace.digest, dict[bytes, Source]()
        with contextlib.suppress(KVStoreError):
            members = routes(view, namespace, hashes, query.deadline)
            others = [tuple(member for member in route if member != own) for route in members]
            has = [""] * len(hashes) if query.is_lookup else self._known.take(view, digest, hashes)
            unknown = [index for index, member in enumerate(has) if not member]
            with contextlib.suppress(KVStoreError):
                keys, asked = [hashes[i] for i in unknown], [others[i] for i in unknown]
                for index, member in zip(unknown, self._ask(query, keys, asked), strict=True):
                    has[index] = member
            if query.is_lookup and not query.touch:  # no get follows a touch
                self._known.note(
                    view, digest, {h: m for h, m in zip(hashes, has, strict=True) if m}
                )
            copies = self.copies(digest, hashes)
            for prefix_hash, first, route in zip(hashes, has, others, strict=True):
                if first:
                    order = (first, *(member for member in route if member != first))
                    found[prefix_hash] = Source(self, order, prefix_hash in copies)
        return found

    def _ask(
        self, query: Query, hashes: Sequence[bytes], others: Sequence[tuple[str, ...]]
    ) -> list[str]:
        """Return for each key the first of its members that has the page, or nothing."""

        def ask(member: str, indices: list[int], limit: Deadline) -> list[str]:
            wanted = [hashes[index] for index in indices]

            def call(connection: NodeConnection, limit: Deadline) -> list[int]:
                return look_up(connection, query.namespace, wanted, query.touch, limit)

            present = self._call(member, call, query.namespace, limit)
            return [member if there else "" for there in present]

        return try_owners(others, in_parallel(ask, self._threads.run), not_, "", query.deadline)

    # ---- read ----------------------------------------------------------------------------

    def read(
        self,
        loads: Sequence[Load],
        arrived: Callable[[Page], None],
        has_left: Callable[[], bool],
        deadline: Deadline,
    ) -> None:
        """Fetch pages from their members into the given slots."""
        namespace = loads[0].page.namespace.value
        step = max(1, FETCHED_NBYTES // namespace.stored_nbytes)
        done: set[int] = set()

        def on_page(index: int) -> None:
            done.add(index)
            arrived(loads[index].page)

        def ask(member: str, indices: list[int], limit: Deadline) -> list[bool]:
            def call(connection: NodeConnection, limit: Deadline) -> None:
                # The channel may be a new one
                left = [index for index in indices if index not in done]
                some = min(step, batch_pages_max(namespace.stored_nbytes, connection.limits))
                for start in range(0, len(left), some):
                    if has_left():  # no error, which would speak against the member
                        return
                    batch = {index: loads[index].page for index in left[start : start + some]}
                    self._receive(connection, namespace, batch, on_page, limit)
                if len(left) > some:  # the member must evict a chain's end before its head
                    hashes = [loads[index].page.prefix_hash for index in left]
                    with contextlib.suppress(KVStoreError):
                        look_up(connection, namespace, hashes, True, limit)

            try:
                if not has_left():
                    self._call(member, call, namespace, limit)
            except Unavailable:
                if not done.intersection(indices):
                    raise
            return [index in done for index in indices]

        with contextlib.suppress(KVStoreError):
            try_owners(
                [load.source.locator for load in loads],
                in_parallel(ask, self._threads.run),
                not_,
                False,
                deadline,
            )
        with self._lock:
            self.pages_fetched += len(done)
            self.nbytes_fetched += len(done) * namespace.stored_nbytes
            self.pages_fetch_failed += len(loads) - len(done)

    def _call(
        self,
        member: str,
        call: Callable[[NodeConnection, Deadline], Result],
        namespace: Namespace,
        limit: Deadline,
    ) -> Result:
        """Call a member. Raises Unavailable, whatever its error: others may have the pages."""
        try:
            return self._channels.channel(member).run(call, namespace, limit)
        except KVStoreError as error:
            level = logging.INFO if isinstance(error, TRY_NEXT) else logging.WARNING
            log.log(level, "%s: %s", member, error)
            raise Unavailable(f"{member}: {error}") from error

    def _receive(
        self,
        connection: NodeConnection,
        namespace: Namespace,
        pages: Mapping[int, Page],
        on_page: Callable[[int], None],
        limit: Deadline,
    ) -> None:
        """Call `on_page` with the index of each page that arrives.

        Corrupt ones are reported to the member.
        """
        indices = list(pages)
        hashes = [page.prefix_hash for page in pages.values()]
        slots = [(self._view(page.offset, namespace.stored_nbytes),) for page in pages.values()]
        request = pb.GetRequest(namespace=namespace.digest, prefix_hashes=hashes)

        def take(number: int, got: Arrived) -> None:
            index = indices[number]
            if self._take(pages[index], got):
                on_page(index)

        seeds = key_seeds(namespace, hashes)
        came = cast(BulkWire, connection.wire).fetch(request, slots, seeds, limit, on_page=take)
        if corrupt := [
            h for h, page in zip(hashes, came, strict=True) if page is not None and not page.leaves
        ]:
            log.error(
                "%d pages of namespace %s arrived corrupt", len(corrupt), namespace.digest.hex()
            )
            verify = pb.VerifyRequest(namespace=namespace.digest, prefix_hashes=corrupt)
            with contextlib.suppress(KVStoreError):
                connection.wire.call("verify", verify, limit)

    def _take(self, page: Page, arrived: Arrived) -> bool:
        """Return whether the page may be used.

        The time to live is rounded down, so the page may expire here before it does at its owner.
        """
        ttl_s = arrived.ttl_ms // 1000 - 1
        if not arrived.leaves or (arrived.ttl_ms and ttl_s <= 0):
            return False
        page.leaves = stored_leaves(arrived.leaves)
        page.expiry_s = self._clock_s() + ttl_s if arrived.ttl_ms else 0
        page.checksum = arrived.checksum
        return True

    def close(self) -> None:
        """Stop; running calls end by their deadline."""
        self._threads.close()
