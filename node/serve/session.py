"""Sessions: what a client's live connection holds at the node, freed when it ends, however it ends."""

import threading
from collections.abc import Sequence

from kvstore.errors import Exhausted
from kvstore.pb import kvstore_pb2 as pb
from node.ram.page import Page
from node.ram.reservation import Acquired, Reservation
from node.ram.tier import RamTier

# How long a reader waits for a page that another session is loading from disk.
LOAD_S_MAX = 10.0
# Expiry times are kept in 32 bits of seconds since the epoch; a page may be forgotten sooner.
TTL_S_MAX = 10 * 366 * 24 * 3600


class Session:
    """One put and one get at a time, as a connection has one. Used by one thread.

    A reservation belongs to the session until commit or abort, held pages until release; `close`
    gives back all of it. `maps_arena`: the client finds the bytes by itself, so it is told where.
    """

    def __init__(self, tier: RamTier, sessions: "Sessions", maps_arena: bool) -> None:
        self.maps_arena = maps_arena
        self._tier = tier
        self._sessions = sessions
        self._reservation: Reservation | None = None
        self._held: list[Page] = []
        self.put_request = pb.PutRequest()  # of the reservation
        self.promised: list[bytes] = []  # of its pages, those that must be durable when it is committed

    def reserve(self, digest: bytes, prefix_hashes: Sequence[bytes], page_nbytes: int) -> Reservation:
        assert self._reservation is None, "a session writes one batch at a time"
        reservation = self._tier.reserve(digest, prefix_hashes, page_nbytes)
        if reservation.pages:
            self._reservation = reservation
        return reservation

    @property
    def reserved(self) -> list[Page]:
        """Pages that wait for their bytes and the commit."""
        return self._reservation.pages if self._reservation else []

    @property
    def held(self) -> list[Page]:
        """Pages that are being read, or were to be."""
        return self._held

    def commit(self, checksums: Sequence[bytes], ttl_s: int) -> int:
        assert self._reservation is not None
        reservation, self._reservation = self._reservation, None
        return self._tier.commit(reservation, checksums, min(ttl_s, TTL_S_MAX))

    def abort(self) -> None:
        if self._reservation is not None:
            reservation, self._reservation = self._reservation, None
            self._tier.abort(reservation)

    def acquire(
        self, digest: bytes, prefix_hashes: Sequence[bytes], prefix_only: bool, wanted_nbytes: int
    ) -> list[Page | None]:
        acquired = self._tier.acquire(digest, prefix_hashes, prefix_only, wanted_nbytes)
        pages = self._keep(acquired)
        lost_count = pages.count(None) - acquired.pages.count(None)
        if lost_count:
            self._tier.count_lost(digest, lost_count, wanted_nbytes)
        return pages

    def inspect(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[Page | None]:
        return self._keep(self._tier.inspect(digest, prefix_hashes))

    def _keep(self, acquired: Acquired) -> list[Page | None]:
        """Loads what is on disk only, tail first so that the head ends up newest, and waits for what
        another session loads."""
        assert not self._held, "a session reads one batch at a time"
        pages = acquired.pages
        self._held = [page for page in pages if page is not None]
        loads = acquired.loads
        try:
            while loads:
                page, record = loads.pop()
                intact = False
                try:
                    intact = self._tier.below.read(record, page)
                finally:
                    self._tier.loads.end(page, intact)
        finally:  # if one broke, nobody may wait for the others
            for page, record in loads:
                self._tier.below.end_read(record)
                self._tier.loads.end(page, intact=False)
        return [page if page is not None and self._ready(page) else None for page in pages]

    def _ready(self, page: Page) -> bool:
        """Only a page that is being loaded, or whose load failed, has no checksum."""
        return bool(page.checksum) or self._tier.loads.wait(page, LOAD_S_MAX)

    def release(self) -> None:
        held, self._held = self._held, []
        self._tier.release(held)

    def close(self) -> None:
        self.abort()
        self.release()
        self._sessions.closed(self)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sessions:
    """The live sessions; at most `count_max`. Thread-safe."""

    def __init__(self, tier: RamTier, count_max: int) -> None:
        self._tier = tier
        self._count_max = count_max
        self._lock = threading.Lock()
        self._live: set[Session] = set()

    @property
    def count(self) -> int:
        return len(self._live)

    def open(self, maps_arena: bool = False) -> Session:
        session = Session(self._tier, self, maps_arena)
        with self._lock:
            if len(self._live) >= self._count_max:
                raise Exhausted(f"{self._count_max} sessions are open (sessions_max); use fewer connections per client")
            self._live.add(session)
        return session

    def closed(self, session: Session) -> None:
        with self._lock:
            self._live.discard(session)
