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
from typing import TypeVar, cast

from kvstore.batches import batch_pages_max, key_seeds, look_up
from kvstore.checksum import kept
from kvstore.cluster.fan_out import routes
from kvstore.cluster.spread import spread
from kvstore.deadline import Deadline
from kvstore.errors import KVStoreError, Unavailable
from kvstore.keys import Namespace
from kvstore.link import Link
from kvstore.log_rate import LogRate
from kvstore.pb import kvstore_pb2 as pb
from kvstore.wires.abreast import Abreast
from kvstore.wires.bulk import Arrived, BulkWire
from node.peers.links import PeerLinks
from node.peers.membership import Membership
from node.ram.page import Page

log = logging.getLogger(__name__)
log.addFilter(LogRate())
Result = TypeVar("Result")

THREADS_MAX = 32  # beside those that ask
FETCHED_NBYTES = 64 << 20  # of one member at a time: what has come by then is there, whatever becomes of the rest


@dataclass
class Found:
    """Pages that others have. `routes`: of each key, the members to fetch it from, one after the other; `copies`:
    whether it is a copy here."""

    namespace: Namespace
    routes: dict[bytes, tuple[str, ...]] = field(default_factory=dict)
    copies: dict[bytes, bool] = field(default_factory=dict)


class Elsewhere:
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
        self._abreast = Abreast(THREADS_MAX, "kvstore-peers")
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

    def find(self, namespace: Namespace, hashes: Sequence[bytes], touch: bool, deadline: Deadline) -> Found:
        """Who has these pages; `touch` counts as a use there. What a member that does not answer has is not known, and
        nothing is raised for it."""
        found = Found(namespace)
        if not hashes or self._membership.view is None:
            return found
        with contextlib.suppress(KVStoreError):
            others = self._others(namespace, hashes, deadline)

            def ask(member: str, places: list[int], limit: Deadline) -> list[str]:
                wanted = [hashes[place] for place in places]

                def call(link: Link, limit: Deadline) -> list[bool]:
                    return look_up(link, namespace, wanted, touch, limit)

                return [member if there else "" for there in self._at(member, namespace, limit, call)]

            first = spread(others, ask, self._abreast.run, not_, "", deadline)
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
        self, member: str, namespace: Namespace, limit: Deadline, call: Callable[[Link, Deadline], Result]
    ) -> Result:
        return self._links.link(member).run(call, namespace, limit)

    # ---- fetch ---------------------------------------------------------------------------

    def fetch(
        self,
        found: Found,
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

        def fill(link: Link, places: Sequence[int], limit: Deadline) -> None:
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
            spread([found.routes[page.prefix_hash] for page in pages], ask, self._abreast.run, not_, False, deadline)
        with self._lock:
            self.pages_fetched += len(done)
            self.nbytes_fetched += len(done) * found.namespace.stored_nbytes
            self.pages_fetch_failed += len(pages) - len(done)

    def _receive(
        self, link: Link, namespace: Namespace, pages: Sequence[Page], places: Sequence[int], limit: Deadline
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
