"""Pages of other members: which of them have what is not here, and how it comes here.

    find     keys  --> who may have them? --> they are asked at the same time --> Found
    fetch    slots --> members send what they have, many pages at a time --> checked, told as it comes

A member is asked without `near`, so that it asks nobody else. No lock of the RAM tier is taken here.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import not_
from typing import Any, TypeVar, cast

from kvstore.checksum import kept
from kvstore.cluster.calls import batch_pages_max, key_seeds, look_up
from kvstore.cluster.fan_out import routes
from kvstore.cluster.routing import try_owners
from kvstore.cluster.view import View
from kvstore.config import ClientConfig
from kvstore.deadline import Deadline
from kvstore.errors import KVStoreError, Unavailable
from kvstore.keys import Namespace
from kvstore.log_rate import LogRate
from kvstore.pb import kvstore_pb2 as pb
from kvstore.secrets import token_of
from kvstore.transports.bulk import Arrived, BulkWire
from kvstore.transports.channel import NodeChannel, NodeConnection
from kvstore.transports.negotiation import member_name
from kvstore.transports.parallel import ParallelTransfer
from node.cluster.membership import Membership
from node.config import NodeConfig
from node.memory.page import Page

# Links from a member to the others: one to each, made when it is first needed, over the bulk wire.

CONNECTIONS_MAX = 4  # of each link
TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 2.0
BACKOFF_S_MAX = 2.0  # who is back is served soon


def known_by(config: NodeConfig) -> dict[str, Any]:
    """Fields of a ClientConfig for connections to other members: this node's token and its own certificate. Without TLS
    the token leaves this host only if `insecure` says so, whatever addresses the cluster tells. Raises ConfigError for
    a token that can not be used."""
    known: dict[str, Any] = {"token": config.token, "token_file": config.token_file, "insecure": config.insecure}
    token_of(ClientConfig(**known))
    if config.tls_cert:
        known |= {"tls_ca": config.members_ca, "tls_cert": config.tls_cert, "tls_key": config.tls_key}
        known["tls_name"] = config.tls_name
    return known


class PeerLinks:
    """Thread-safe. Links to who is no member any more, or has another address now, are closed."""

    def __init__(self, membership: Membership, config: NodeConfig | None = None) -> None:
        """`config`: of this node, which says how the others know it; None: nobody asks."""
        self._membership = membership
        self._known_by = known_by(config) if config is not None else {}
        self._lock = threading.Lock()  # held for moments
        self._addresses: dict[str, str] = {}  # of the others, by id
        self._ports: dict[str, int] = {}  # where they serve frames, as far as the view says it
        self._links: dict[str, NodeChannel] = {}
        self._closed = False
        self._cluster = ""
        membership.on_view(self._follow)

    def link(self, member: str) -> NodeChannel:
        """Raises Unavailable for who is no other member."""
        with self._lock:
            address = self._addresses.get(member)
            if address is None or self._closed:
                raise Unavailable(f"{member} is no other member of the cluster")
            link = self._links.get(member)
            if link is None:
                config = ClientConfig(
                    address=address,
                    direct=True,
                    wire="bulk",
                    timeout_s=TIMEOUT_S,
                    connect_timeout_s=CONNECT_TIMEOUT_S,
                    connections_max=CONNECTIONS_MAX,
                    backoff_s_max=BACKOFF_S_MAX,
                    **self._known_by,
                )
                link = self._links[member] = NodeChannel(address, config)
                link.expect(self._ports[member], member_name(self._cluster, member))
            return link

    def failing(self) -> dict[str, bool]:
        """Of each other member, whether calls to it fail, and are not even tried but now and then."""
        with self._lock:
            return {member: member in self._links and self._links[member].failing for member in self._addresses}

    def _follow(self, view: View) -> None:
        own = self._membership.member
        addresses = {member.id: member.address for member in view.members if member.id != own}
        with self._lock:
            left = [name for name, link in self._links.items() if addresses.get(name) != link.address]
            links = [self._links.pop(name) for name in left]
            self._addresses, self._cluster = addresses, view.cluster
            self._ports = {member.id: member.bulk_port for member in view.members}
            for name, link in self._links.items():
                link.expect(self._ports[name], member_name(view.cluster, name))
        for link in links:
            link.close()

    def close(self) -> None:
        """Takes no more calls; those that run may end."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.close()


log = logging.getLogger(__name__)
log.addFilter(LogRate())
Result = TypeVar("Result")

THREADS_MAX = 32  # beside those that ask
FETCHED_NBYTES = 64 << 20  # of one member at a time: what has come by then is there, whatever becomes of the rest


@dataclass
class RemoteLookup:
    """Pages that others have. `routes`: of each key, the members to fetch it from, one after the other; `copies`:
    whether it is a copy here."""

    namespace: Namespace
    routes: dict[bytes, tuple[str, ...]] = field(default_factory=dict)
    copies: dict[bytes, bool] = field(default_factory=dict)


class RemotePages:
    """Thread-safe. `view(offset, nbytes)` is the arena's memory, `clock_s` gives whole seconds since the epoch."""

    def __init__(
        self,
        membership: Membership,
        links: PeerLinks,
        view: Callable[[int, int], memoryview],
        clock_s: Callable[[], int],
    ) -> None:
        self._membership = membership
        self._links = links
        self._view = view
        self._clock_s = clock_s
        self._abreast = ParallelTransfer(THREADS_MAX, "kvstore-peers")
        self._lock = threading.Lock()  # of the counters
        self.pages_fetched = 0
        self.nbytes_fetched = 0
        self.pages_fetch_failed = 0

    def copies(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> set[bytes]:
        """Of these keys, those that this node does not own."""
        view, own = self._membership.view, self._membership.member
        if view is None:
            return set()
        owners = view.owners.owners(digest, prefix_hashes)
        return {h for h, some in zip(prefix_hashes, owners, strict=True) if own not in some}

    # ---- find ----------------------------------------------------------------------------

    def find(self, namespace: Namespace, hashes: Sequence[bytes], touch: bool, deadline: Deadline) -> RemoteLookup:
        """Who has these pages; `touch` counts as a use there. What a member that does not answer has is not known, and
        nothing is raised for it."""
        found = RemoteLookup(namespace)
        if not hashes or self._membership.view is None:
            return found
        with contextlib.suppress(KVStoreError):
            others = self._others(namespace, hashes, deadline)

            def ask(member: str, places: list[int], limit: Deadline) -> list[str]:
                wanted = [hashes[place] for place in places]

                def call(link: NodeConnection, limit: Deadline) -> list[bool]:
                    return look_up(link, namespace, wanted, touch, limit)

                return [member if there else "" for there in self._at(member, namespace, limit, call)]

            first = try_owners(others, ask, self._abreast.run, not_, "", deadline)
            copies = self.copies(namespace.digest, hashes)
            for prefix_hash, has, route in zip(hashes, first, others, strict=True):
                if has:
                    found.routes[prefix_hash] = (has, *(member for member in route if member != has))
                    found.copies[prefix_hash] = prefix_hash in copies
        return found

    def _others(self, namespace: Namespace, hashes: Sequence[bytes], deadline: Deadline) -> list[tuple[str, ...]]:
        """Of each key, the other members that may have it."""
        view, own = self._membership.view, self._membership.member
        assert view is not None, "a node in a cluster stays in one"
        return [tuple(some for some in route if some != own) for route in routes(view, namespace, hashes, deadline)]

    def _at(
        self, member: str, namespace: Namespace, limit: Deadline, call: Callable[[NodeConnection, Deadline], Result]
    ) -> Result:
        return self._links.link(member).run(call, namespace, limit)

    # ---- fetch ---------------------------------------------------------------------------

    def fetch(
        self,
        found: RemoteLookup,
        pages: Sequence[Page],
        came: Callable[[Page], None],
        gone: Callable[[], bool],
        deadline: Deadline,
    ) -> None:
        """Fills the pages' slots. `came` is told, by any thread, of each that is intact and has its checksum. What
        members fail at is no error; nobody writes to a slot any more when this ends, however it ends."""
        done: set[int] = set()

        def ask(member: str, places: list[int], limit: Deadline) -> list[bool]:
            try:
                self._at(member, found.namespace, limit, lambda link, left: fill(link, places, left))
            except KVStoreError as error:
                log.info("%s: %s", member, error)
                if not done.intersection(places):
                    raise
            return [place in done for place in places]

        def fill(link: NodeConnection, places: Sequence[int], limit: Deadline) -> None:
            places = [place for place in places if place not in done]  # the link may have been made anew
            nbytes = found.namespace.stored_nbytes
            step = min(batch_pages_max(nbytes, link.limits), max(1, FETCHED_NBYTES // nbytes))
            for start in range(0, len(places), step):
                if gone():
                    raise Unavailable("nobody waits for these pages any more")
                some = places[start : start + step]
                for place in self._receive(link, found.namespace, pages, some, limit):
                    done.add(place)
                    came(pages[place])

        with contextlib.suppress(KVStoreError):
            try_owners(
                [found.routes[page.prefix_hash] for page in pages], ask, self._abreast.run, not_, False, deadline
            )
        with self._lock:
            self.pages_fetched += len(done)
            self.nbytes_fetched += len(done) * found.namespace.stored_nbytes
            self.pages_fetch_failed += len(pages) - len(done)

    def _receive(
        self, link: NodeConnection, namespace: Namespace, pages: Sequence[Page], places: Sequence[int], limit: Deadline
    ) -> list[int]:
        """Of the pages at these places, those that came. The member is told of what does not match its checksum."""
        hashes = [pages[place].prefix_hash for place in places]
        slots = [(self._view(pages[place].offset, namespace.stored_nbytes),) for place in places]
        request = pb.GetRequest(namespace=namespace.digest, prefix_hashes=hashes)
        arrived = cast(BulkWire, link.wire).fetch(request, slots, key_seeds(namespace, hashes), limit)
        if corrupt := [h for h, page in zip(hashes, arrived, strict=True) if page is not None and not page.leaves]:
            log.error("%d pages of namespace %s came damaged", len(corrupt), namespace.digest.hex())
            verify = pb.VerifyRequest(namespace=namespace.digest, prefix_hashes=corrupt)
            with contextlib.suppress(KVStoreError):
                link.wire.call("verify", verify, limit)
        return [place for place, page in zip(places, arrived, strict=True) if page and self._take(pages[place], page)]

    def _take(self, page: Page, arrived: Arrived) -> bool:
        """Whether the page may be used. Its time to live is over here before it is at its owner."""
        ttl_s = arrived.ttl_ms // 1000 - 1
        if not arrived.leaves or (arrived.ttl_ms and ttl_s <= 0):
            return False
        page.leaves = kept(arrived.leaves)
        page.expiry_s = self._clock_s() + ttl_s if arrived.ttl_ms else 0
        page.checksum = arrived.checksum
        return True

    def close(self) -> None:
        """What runs ends by its deadline."""
        self._abreast.close()
