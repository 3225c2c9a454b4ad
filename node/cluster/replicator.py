"""Send pages from RAM to other members on threads, in the order of the replication queue."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from kvstore.checksum import root
from kvstore.cluster.calls import batches
from kvstore.cluster.view import View
from kvstore.deadline import Deadline
from kvstore.errors import InvalidRequest, KVStoreError, LayoutMismatch
from kvstore.log_rate import LogRate
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.bulk import BulkWire
from kvstore.transports.channel import NodeConnection
from node.cluster.membership import Membership
from node.cluster.remote_pages import PeerChannels
from node.cluster.replication_queue import AckWaiter, Batch, Group, ReplicationQueue
from node.memory.page import Page, State
from node.memory.tier import RamTier

log = logging.getLogger(__name__)
log.addFilter(LogRate())

REPLICATION_THREADS = 4  # targets that are served at a time
HAND_S = 5.0  # for a batch: at most 64 pages and 16 MiB, or one page
LOOK_S = 0.2  # between two checks whether a waiting caller is still connected
REFUSED = (InvalidRequest, LayoutMismatch)  # by the target, or here before anything was committed


class Replicator:
    """Send queued pages on threads. Thread-safe.

    Its lock is never taken under the RAM tier's, nor the other way round. No thread runs before a
    page is offered. A copy that no owner took becomes this node's own page, so that its disk keeps
    it until an owner fetches it in a rebalance.
    """

    def __init__(
        self,
        membership: Membership,
        channels: PeerChannels,
        tier: RamTier,
        view: Callable[[int, int], memoryview],
        queue_nbytes_max: int,
        nbytes_per_s: int,
    ) -> None:
        """Prepare the replication; `view` returns arena memory at an offset."""
        self._membership = membership
        self._channels = channels
        self._tier = tier
        self._view = view
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._work = threading.Condition(lock)  # a page wakes one of the waiting threads
        self._queue: ReplicationQueue[Page] = ReplicationQueue(
            queue_nbytes_max, _gone, nbytes_per_s
        )
        self._threads: list[threading.Thread] = []
        self._stop_at: float | None = None
        membership.on_view(self._follow)

    def offer(
        self,
        pages: Sequence[Page],
        targets: Sequence[Collection[str]],
        durable: bool = False,
        whole: bool = False,
    ) -> AckWaiter:
        """Queue pages, a chain's head first, for the members named for each.

        They stay held until they are sent or dropped. Pages that were removed meanwhile are
        skipped; with `whole` they count as lost. The end of a chain is sent first, so that its head
        is the newest at the target, too.
        """
        waiter = AckWaiter()
        wanted = {page: some for page, some in zip(pages, targets, strict=True) if some}
        if not wanted:
            return waiter
        held = self._tier.hold_visible(list(wanted))
        waiter.lost_count = len(wanted) - len(held) if whole else 0
        with self._changed:
            now = time.monotonic()
            for page in reversed(held):
                group = Group(page.namespace.digest, page.expiry_s, durable)
                self._queue.offer(
                    page,
                    page.prefix_hash,
                    page.namespace.slot_nbytes,
                    group,
                    wanted[page],
                    now,
                    waiter,
                )
            if self._stop_at is not None:
                self._queue.clear()
            elif held:
                self._begin()
            self._changed.notify_all()
            self._work.notify()
        self._release_freed()
        return waiter

    def wait(
        self, waiter: AckWaiter, end: float, has_left: Callable[[], bool], patient: bool = True
    ) -> bool:
        """Wait for an AckWaiter; return False if pages were lost, late or the caller has left.

        `end` is in monotonic seconds. Without `patient`, a failed target ends the wait, too.
        """
        with self._changed:
            while (
                waiter.open_count
                and time.monotonic() < end
                and not has_left()
                and (patient or not waiter.failed)
            ):
                self._changed.wait(max(0.0, min(LOOK_S, end - time.monotonic())))
            return not (waiter.open_count or waiter.lost_count)

    def settle_copies(self, end: float, has_left: Callable[[], bool]) -> int:
        """Wait until an owner has the pages that are queued now and are copies here.

        Those that have reached no owner by `end`, in monotonic seconds, or when the caller has
        left, become this node's own. Return the number of the others.
        """
        with self._changed:
            copies = [queued for queued in self._queue.queued_pages if queued.page.is_copy]
            waiting = [queued for queued in copies if not queued.arrived]
            while waiting and time.monotonic() < end and not has_left():
                self._changed.wait(max(0.0, min(LOOK_S, end - time.monotonic())))
                left = self._queue.queued_pages
                waiting = [queued for queued in waiting if queued in left and not queued.arrived]
            unsent = [queued.page for queued in copies if not queued.arrived]
        self._tier.own(unsent)
        return len(copies) - len(unsent)

    def drop_gone(self) -> None:
        """Release removed pages; those being sent are released within HAND_S."""
        with self._changed:
            self._queue.drop_gone()
            self._changed.notify_all()
        self._release_freed()

    def settle_missed(self, member: str) -> None:
        """Note that a member compares its pages with those here."""
        with self._changed:
            self._queue.settle_missed(member)

    def wait_room(self, nbytes: int, timeout_s: float) -> bool:
        """Wait until the queue has space for so many bytes."""
        with self._changed:
            return self._changed.wait_for(lambda: self._queue.has_room(nbytes), timeout_s)

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until the queue is empty."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue.page_count, timeout_s)

    def status(self, status: pb.PeersStatus) -> None:
        """Add the replication's part of the status."""
        with self._changed:
            queue, counts = self._queue, self._queue.counts
            status.queue_pages, status.queue_nbytes = queue.page_count, queue.nbytes
            status.queue_nbytes_max = queue.nbytes_max
            status.pages_handed, status.nbytes_handed = counts.pages_handed, counts.nbytes_handed
            status.pages_dropped = counts.pages_dropped
            status.pages_under_replicated += queue.under_replicated

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        with self._changed:
            return self._queue.check()

    def stop(self, timeout_s: float) -> None:
        """Send what waits for members that answer, within the time, and drop the rest."""
        end = time.monotonic() + timeout_s
        with self._changed:
            self._stop_at = end
            self._queue.hurry()
            self._work.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._changed:
            left = self._queue.page_count
            self._queue.clear()
            self._changed.notify_all()
        if left:
            log.warning("%d pages were not replicated before the stop", left)
        self._release_freed()

    def _follow(self, view: View) -> None:
        with self._changed:
            self._queue.follow({member.id for member in view.members} - {self._membership.member})
            self._changed.notify_all()
        self._release_freed()

    # ---- threads ---------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start threads, with the lock held.

        If no more can be started, the existing ones do all the work.
        """
        try:
            while len(self._threads) < REPLICATION_THREADS:
                thread = threading.Thread(target=self._run, name="replicate", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            log.warning(
                "%d threads replicate pages, no more can be started: %s", len(self._threads), error
            )

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            taken: list[bytes] | None = None
            refused = False
            try:
                taken = self._send(batch)
            except KVStoreError as error:
                refused = isinstance(error, REFUSED)
                log.warning(
                    "%s did not get %d pages: %s", batch.target, len(batch.queued_pages), error
                )
            except Exception:  # the thread must go on, or holds would never end
                log.exception("replicating pages to %s failed", batch.target)
            with self._changed:
                now = time.monotonic()
                if taken is None:
                    self._queue.failed(batch, now, refused)
                else:
                    self._queue.done(batch, taken, now)
                self._changed.notify_all()
            self._release_freed()

    def _next(self) -> Batch[Page] | None:
        """Wait for a batch; None ends the thread."""
        while True:
            freed = False
            with self._changed:
                now = time.monotonic()
                stopping = self._stop_at is not None
                if self._stop_at is not None and now >= self._stop_at:
                    return None
                batch, due = self._queue.next(now), self._queue.due(now)
                if batch is not None:
                    # another thread serves the rest, now or when its time comes
                    if due is not None:
                        self._work.notify()
                    return batch
                freed = bool(self._queue.freed)
                if not freed:
                    if stopping and not self._queue.under_way:
                        self._work.notify_all()
                        return None
                    self._work.wait(
                        LOOK_S if stopping else None if due is None else max(0.0, due - now)
                    )
            if freed:
                self._release_freed()

    def _release_freed(self) -> None:
        if not self._queue.freed:  # so that `offer` does not wait for a thread that was just woken
            return
        with self._changed:
            freed, self._queue.freed = self._queue.freed, []
            unsent, self._queue.unsent = self._queue.unsent, []
        self._tier.own(unsent)  # no owner has them: as copies they would be lost first
        self._tier.release(freed)

    # ---- one batch -------------------------------------------------------------------------

    def _send(self, batch: Batch[Page]) -> list[bytes]:
        """Send a batch and return the keys that the target has now."""
        left_s = HAND_S if self._stop_at is None else self._stop_at - time.monotonic()
        deadline = Deadline(min(HAND_S, max(0.01, left_s)))
        namespace = self._tier.namespace(batch.group.digest).value
        channel = self._channels.channel(batch.target)
        damaged: list[Page] = []
        try:
            return channel.run(partial(self._put, batch, damaged), namespace, deadline)
        finally:
            for page in damaged:
                self._tier.drop_corrupt(page)

    def _put(
        self,
        batch: Batch[Page],
        damaged: list[Page],
        connection: NodeConnection,
        deadline: Deadline,
    ) -> list[bytes]:
        """Put pages at the target with their original checksums.

        A page that was corrupted in this RAM since is not sent. A page that was removed meanwhile
        is not committed: the target must remove it, too.
        """
        assert isinstance(connection.wire, BulkWire)
        pages = {queued.prefix_hash: queued.page for queued in reversed(batch.queued_pages)}
        group, keys = batch.group, list(pages)
        nbytes = batch.queued_pages[0].page.namespace.page_nbytes
        ttl_ms = max(1, 1000 * (group.expiry_s - self._tier.clock_s())) if group.expiry_s else 0

        def is_unchanged(prefix_hash: bytes, leaves: bytes) -> bool:
            page = pages[prefix_hash]
            if _gone(page):
                return False
            if root(leaves, page.namespace.seed(prefix_hash)) == page.checksum:
                return True
            damaged.append(page)
            return False

        taken: list[bytes] = []
        missed = self._queue.missed_by(batch.target)
        for part in batches(len(keys), nbytes, connection.limits):
            request = pb.PutRequest(
                namespace=group.digest,
                prefix_hashes=keys[part],
                page_nbytes=nbytes,
                ttl_ms=ttl_ms,
                durable=group.durable,
                wait_ms=max(1, int(900 * deadline.remaining())) if group.durable else 0,
                forwarded_by=self._membership.member,
                pages_missed=missed,
            )
            views = [(self._view(pages[key].offset, nbytes),) for key in keys[part]]
            try:
                verdicts = connection.wire.put(request, views, deadline, is_unchanged=is_unchanged)
            except REFUSED:
                if not taken and not any(map(_gone, pages.values())):
                    raise
                return taken
            if missed:
                missed = 0
                self.settle_missed(batch.target)
            there = (pb.WRITE, pb.EXISTS)
            taken += [
                key for key, verdict in zip(keys[part], verdicts, strict=True) if verdict in there
            ]
        return taken


def _gone(page: Page) -> bool:
    return page.state is not State.VISIBLE
