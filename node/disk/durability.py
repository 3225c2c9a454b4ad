"""Make pages durable: write them to the disk tier, then wait for a sync."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.errors import Exhausted, InvalidRequest, UnknownNamespace
from node.disk.tier import DiskTier
from node.disk.writer import GONE_S
from node.memory.inventory import Inventory
from node.memory.tier import RamTier

LOCKED_PAGES = 64  # checked or offered under one lock: gets must not wait for a flush
ROUNDS_MAX = 4

Batch = tuple[bytes, Sequence[bytes]]  # a namespace's digest, and prefix hashes


class Wait(NamedTuple):
    """A wait for the disk: until `end` in monotonic time, or until the caller leaves."""

    end: float
    has_left: Callable[[], bool]

    @property
    def left_s(self) -> float:
        """Return the seconds left."""
        return max(0.0, self.end - time.monotonic())


class Durability:
    """Durability of a node with a data directory.

    Thread-safe. Failures raise Exhausted, not Unavailable: the node still answers from RAM.
    """

    def __init__(self, tier: RamTier, disk: DiskTier | None, flush_s: float) -> None:
        self._tier = tier
        self._inventory = Inventory(tier)
        self._disk = disk
        self._flush_s = flush_s

    @property
    def disk(self) -> DiskTier:
        """Return the disk tier. Raises InvalidRequest without one."""
        if self._disk is None:
            raise InvalidRequest("this node has no disk tier; start it with --data-dir")
        return self._disk

    def begin_wait(self, wait_ms: int = 0, has_left: Callable[[], bool] = lambda: False) -> Wait:
        """Begin a wait of at most flush_s, or less if the caller says so."""
        return Wait(
            time.monotonic() + min(self._flush_s, wait_ms / 1000 or self._flush_s), has_left
        )

    def keep(self, digest: bytes, prefix_hashes: Sequence[bytes], wait: Wait) -> None:
        """Return when these pages are durable.

        Raises Exhausted if the disk is full, stopped or too slow, or if one of the pages has been
        removed: a missing page must not be acknowledged.
        """
        self._barrier(wait)  # queued pages need not be offered again
        self._save(wait, lambda: [(digest, self._unsafe(digest, prefix_hashes))])

    def verify(
        self, digest: bytes, prefix_hash: bytes, before_read: Callable[[], None] = lambda: None
    ) -> bool | None:
        """Return whether the copy on disk is intact, None if there is none.

        Raises Exhausted if it can not be read. `before_read` is called if there is a copy, before
        it is read.
        """
        borrowed = (
            self._disk.reading.borrow_page(digest, prefix_hash) if self._disk is not None else None
        )
        if self._disk is None or borrowed is None:
            return None
        before_read()
        try:
            return self._disk.reading.verify(borrowed)
        except OSError as error:
            raise Exhausted(f"not verified, a page can not be read: {error}") from error

    def settle(self) -> None:
        """Return when all removals are durable. Raises Exhausted."""
        if self._disk is not None:
            self._barrier(self.begin_wait())

    def flush(self, wait: Wait) -> None:
        """Return when all current pages are durable.

        Pages that are put or removed meanwhile are not waited for.
        """
        now_ms = self._tier.clock_ms()
        self._barrier(wait)
        self._save(wait, lambda: self._inventory.unsaved(now_ms))
        # Another thread may have stored a page that left RAM before this check
        if self.disk.unsafe_count:
            self._barrier(wait)

    def _save(self, wait: Wait, find_unsafe: Callable[[], Sequence[Batch]]) -> None:
        """Write those pages that `find_unsafe` returns and wait for them, for a few rounds.

        On a full disk a write may evict whole cold blocks, and with them pages that were safe a
        moment ago. So each round looks at all pages again. Only the check of each page decides: a
        barrier does not cover what another thread wrote after it.
        """
        for _ in range(ROUNDS_MAX):
            unsafe = [(digest, hashes) for digest, hashes in find_unsafe() if hashes]
            if not unsafe:
                return
            for digest, hashes in unsafe:
                for start in range(0, len(hashes), LOCKED_PAGES):
                    self._offer_all(digest, hashes[start : start + LOCKED_PAGES], wait)
            self._barrier(wait)
        count = sum(len(hashes) for _, hashes in find_unsafe())
        if count:
            raise Exhausted(
                f"{count} pages are not on disk: it, or their tenant's quota of it, is full "
                "of pinned or newer pages, they were removed meanwhile, they are larger "
                "than that quota or than the extents of data_dir, or the node ran out of "
                "memory or descriptors (then its log says so)"
            )

    def _unsafe(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bytes]:
        found: list[bytes] = []
        for start in range(0, len(prefix_hashes), LOCKED_PAGES):
            some = prefix_hashes[start : start + LOCKED_PAGES]
            found += [
                h for h, safe in zip(some, self.disk.safe(digest, some), strict=True) if not safe
            ]
        return found

    def _offer_all(self, digest: bytes, prefix_hashes: Sequence[bytes], wait: Wait) -> None:
        try:
            left = prefix_hashes
            while left := self._tier.offer(digest, left):
                self._check(wait)
                self.disk.writer.wait_room(self._tier.namespace(digest), min(GONE_S, wait.left_s))
        except UnknownNamespace:
            return

    def _barrier(self, wait: Wait) -> None:
        if not self.disk.writer.flush(wait.left_s, wait.has_left):
            self._check(wait)
            raise Exhausted(
                "the disk tier stopped, its file system is full, or the node ran out of memory or "
                "descriptors, before the pages were safe; see its status and its log"
            )

    def _check(self, wait: Wait) -> None:
        if self.disk.stop_reason:
            raise Exhausted(
                "pages are visible but not durable, the disk tier is stopped: "
                f"{self.disk.stop_reason}"
            )
        if wait.has_left():
            raise Exhausted("pages are visible but not durable: the caller has left")
        if not wait.left_s:
            raise Exhausted(
                "pages are visible but were not durable in the time of the call and the node's "
                "flush_s"
            )
