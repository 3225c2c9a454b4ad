"""Fetch pages into RAM ahead of a request: one thread, and a bounded queue.

Pages come from the disk, or from the members that own them, as for a get; nothing is sent. A chain
is fetched from its head on, a part at a time, and ends at its first miss.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.deadline import Deadline
from kvstore.errors import KVStoreError
from node.memory.tier import RamTier

log = logging.getLogger(__name__)
WAITING_MAX = 256  # hints; one peer has at most half
WAITING_PAGES_MAX = 1 << 16
PART_PAGES = 64  # held at a time
PART_NBYTES = 64 << 20  # unless one page is larger
PART_S_MAX = 10.0
IDLE_S = 10.0  # until the thread ends


class _Chain(NamedTuple):
    peer: str
    digest: bytes
    prefix_hashes: Sequence[bytes]
    charge: Callable[[int], None]


class Prefetcher:
    """Fetches what it is given, one chain after the other. Thread-safe."""

    def __init__(self, tier: RamTier) -> None:
        self._tier = tier
        self._changed = threading.Condition()
        self._waiting: deque[_Chain] = deque()
        self._pages = 0  # of those
        self._of_peer: Counter[str] = Counter()
        self._running = False
        self._closed = False

    @property
    def waiting_count(self) -> int:
        """Return how many chains wait."""
        return len(self._waiting)

    def add(
        self,
        peer: str,
        digest: bytes,
        prefix_hashes: Sequence[bytes],
        charge: Callable[[int], None],
    ) -> bool:
        """Fetch a chain soon; return False if too many wait.

        `charge` is told the bytes of what was fetched.
        """
        count = len(prefix_hashes)
        with self._changed:
            if (
                self._closed
                or len(self._waiting) >= WAITING_MAX
                or self._of_peer[peer] >= WAITING_MAX // 2
                or self._pages + count > WAITING_PAGES_MAX
            ):
                return False
            if not self._running:
                try:
                    threading.Thread(target=self._run, name="prefetch", daemon=True).start()
                except RuntimeError:  # no thread is left
                    return False
                self._running = True
            self._waiting.append(_Chain(peer, digest, prefix_hashes, charge))
            self._pages += count
            self._of_peer[peer] += 1
            self._changed.notify()
            return True

    def close(self) -> None:
        """Fetch nothing more."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._running, PART_S_MAX)

    def _run(self) -> None:
        while (chain := self._next()) is not None:
            try:
                self._fetch(chain)
            except KVStoreError as error:  # such as a namespace that was removed meanwhile
                log.info("a prefetch ended: %s", error)
            except Exception:
                log.exception("a prefetch failed")

    def _next(self) -> _Chain | None:
        """Return the next chain; None, and the thread ends, after a while without one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, IDLE_S)
            if self._closed or not self._waiting:
                self._running = False
                self._changed.notify_all()
                return None
            chain = self._waiting.popleft()
            self._pages -= len(chain.prefix_hashes)
            self._of_peer[chain.peer] -= 1
            if not self._of_peer[chain.peer]:
                del self._of_peer[chain.peer]
            return chain

    def _fetch(self, chain: _Chain) -> None:
        tier, hashes, from_others = self._tier, chain.prefix_hashes, False
        space = tier.namespace(chain.digest)
        page_nbytes = space.page_nbytes
        step = max(1, min(PART_PAGES, PART_NBYTES // page_nbytes))
        for start in range(0, len(hashes), step):
            some = hashes[start : start + step]
            acquired = tier.acquire(chain.digest, some, True, 0, near=Deadline(PART_S_MAX))
            held = [page for page in acquired.pages if page is not None]
            try:
                loads = len(acquired.loads)
                from_others |= any(load.source.tier in tier.remote for load in acquired.loads)
                pages = tier.promotion.read(acquired, lambda: self._closed)
            finally:
                tier.release(held)
                # It is no get of a client
                with tier.lock:
                    acquired.index.counters.count_get(-len(held), len(held) - len(some), 0)
            chain.charge(loads * page_nbytes)
            if None in pages or self._closed:
                break
        # The end of the chain is evicted first, here and where its parts came from
        tier.lookup(chain.digest, hashes, touch=True)
        if from_others and len(hashes) > step and not self._closed:
            tier.promotion.lookup(space.value, hashes, True, Deadline(PART_S_MAX))
