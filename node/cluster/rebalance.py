"""Fetch the pages that this member owns and others have, the newest first.

    others --list of my pages--> those missing here, newest first --get--> RAM slots --> visible

They are stored like any other page, so that a lower disk tier takes them too. Pages that are here
are skipped: an interrupted rebalance continues where it was.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from kvstore.checksum import stored_leaves
from kvstore.cluster.calls import batches, check_goes_on, key_seeds
from kvstore.cluster.view import State, View
from kvstore.deadline import Deadline
from kvstore.errors import Exhausted, KVStoreError
from kvstore.keys import Namespace
from kvstore.messages import namespace_value
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.bulk import Arrived, BulkWire
from kvstore.transports.channel import NodeConnection
from node.cluster.membership import Membership
from node.cluster.remote_pages import PeerChannels
from node.memory.inventory import Inventory
from node.memory.page import Page, PageNamespace, PutStatus
from node.memory.page import State as PageState
from node.memory.tier import RamTier

log = logging.getLogger(__name__)

CALL_S = 10.0  # for a list of another member
TOGETHER_MAX = 16  # members that are asked for their namespaces in parallel
FETCH_S = 5.0  # for a batch of pages
BATCH_NBYTES = 64 << 20  # of one namespace, from one member
BATCH_KEYS = 256
LIST_LIMIT = 8192  # pages of one reply
MISSING_MAX = 1 << 20  # pages in one sweep: 200 bytes each
ROUND_PAGES = 4096  # of all members: within such a round the order is by member, not by age


Listed = pb.ListNamespacesReply
PageKey = tuple[bytes, bytes]  # digest of its namespace, prefix hash
RunParallel = Callable[[Sequence[Callable[[], Listed]]], Sequence[Listed | KVStoreError]]


class Missing(NamedTuple):
    """A page that another member has and this one lacks.

    `copies`: how many members have it as their own, so that it is not evicted first.
    """

    idle_ms: int
    member: str
    digest: bytes
    prefix_hash: bytes
    ttl_s: int
    pin_ttl_ms: int
    copies: int = 1


class Report(NamedTuple):
    """Counts of pages.

    `full`: no space for them; `failed`: could not be fetched; `away`: members that could not be
    asked for all of their pages; `thin`: still missing here, with fewer copies than replicas, and
    not because there is no space.
    """

    missing: int
    missing_nbytes: int
    fetched: int = 0
    fetched_nbytes: int = 0
    full: int = 0
    failed: int = 0
    away: tuple[str, ...] = ()
    thin: int = 0


class Rebalance:
    """Fetch pages that this member owns but lacks.

    `view(offset, nbytes)` returns arena memory. `room_below(namespace)`: whether the lower tier
    takes a page without losing another. `pause(nbytes)` waits according to the rate limit and
    returns False to end. `together` runs calls in parallel and returns what each returned or
    raised.
    """

    def __init__(
        self,
        channels: PeerChannels,
        tier: RamTier,
        view: Callable[[int, int], memoryview],
        room_below: Callable[[PageNamespace], bool],
        pause: Callable[[int], bool],
        together: RunParallel,
    ) -> None:
        self._channels = channels
        self._tier = tier
        self._inventory = Inventory(tier)
        self._view = view
        self._room_below = room_below
        self._pause = pause
        self._together = together

    def run(
        self,
        view: View,
        member: str,
        dry: bool = False,
        on_progress: Callable[[Report], None] = lambda report: None,
    ) -> Report:
        """Ask all other members of the view for the pages that `member`, this one, owns.

        Copies of pages that it owns now become its own, with their pins. With `dry`, only report
        missing pages. `on_progress` receives the progress.
        """
        owned = frozenset[PageKey]() if dry else self._own_copies(view, member)
        missing, away = self._missing_pages(view, member, owned)
        nbytes = sum(self._tier.namespace(page.digest).page_nbytes for page in missing)
        thin = _thin(missing, view.replicas)
        report = Report(len(missing), nbytes, away=away, thin=thin)
        return report if dry else self._fetched(missing, report, view.replicas, on_progress)

    def _own_copies(self, view: View, own: str) -> frozenset[PageKey]:
        """Make copies of pages that `own`, this member, owns in the view its own."""
        copies: dict[bytes, list[Page]] = {}

        def collect(pages: list[Page]) -> None:
            for page in pages:
                if page.is_copy and page.state is PageState.VISIBLE:
                    copies.setdefault(page.namespace.digest, []).append(page)

        self._tier.scan(None, collect)
        owned: list[Page] = []
        for digest, pages in copies.items():
            routes = view.owners.owners(digest, [page.prefix_hash for page in pages])
            owned += [page for page, route in zip(pages, routes, strict=True) if own in route]
        for start in range(0, len(owned), BATCH_KEYS):
            self._tier.own(owned[start : start + BATCH_KEYS])
        return frozenset((page.namespace.digest, page.prefix_hash) for page in owned)

    # ---- what is missing -----------------------------------------------------------------

    def _missing_pages(
        self, view: View, own: str, owned: frozenset[PageKey]
    ) -> tuple[list[Missing], tuple[str, ...]]:
        """Return each missing page once, the newest first, from the first member that has it.

        All members are asked in parallel, so that unreachable ones cost one timeout together.
        """
        found: dict[PageKey, Missing] = {}
        away: list[str] = []
        others = [member.id for member in view.members if member.id != own]
        asks = [
            partial(self._ask, member, "list_namespaces", pb.ListNamespacesRequest())
            for member in others
        ]
        for member, listed in zip(others, self._together(asks), strict=True):
            try:
                if isinstance(listed, KVStoreError):
                    raise listed
                for page in self._lacked(member, own, listed, owned):
                    key = page.digest, page.prefix_hash
                    if known := found.get(key):
                        page = known._replace(copies=known.copies + page.copies)
                    found[key] = page
                    if len(found) == MISSING_MAX or not self._pause(0):
                        return sorted(found.values()), tuple(away)
            except KVStoreError as error:
                log.warning("not all pages of %s are known: %s", member, error)
                away.append(member)
        return sorted(found.values()), tuple(away)

    def _lacked(
        self, member: str, own: str, listed: Listed, owned: frozenset[PageKey]
    ) -> Iterator[Missing]:
        for info in listed.namespaces:
            namespace = namespace_value(info.namespace)
            self._tier.open_namespace(namespace, info.digest)
            request = pb.ListRequest(namespace=info.digest, owner=own, limit=LIST_LIMIT)
            while True:
                reply = self._ask(member, "list", request, namespace)
                check_goes_on(request, reply)
                yield from self._absent(member, info.digest, reply.pages, owned)
                request.page_token = reply.next_page_token
                if not request.page_token:
                    break

    def _absent(
        self,
        member: str,
        digest: bytes,
        pages: Sequence[pb.PageStat],
        owned: frozenset[PageKey],
    ) -> Iterator[Missing]:
        here = self._inventory.stat(digest, [page.prefix_hash for page in pages])
        for page, known in zip(pages, here, strict=True):
            ttl_s = -(-page.ttl_ms // 1000)
            about = page.idle_ms, member, digest, page.prefix_hash, ttl_s, page.pin_ttl_ms
            there = Missing(*about, copies=not page.is_copy)
            if not (known.present or known.writing):
                yield there
            elif (digest, page.prefix_hash) in owned and not known.pin_ttl_ms:
                self._pin([there])

    def _ask(self, member: str, op: str, request: Any, namespace: Namespace | None = None) -> Any:
        def call(connection: NodeConnection, limit: Deadline) -> Any:
            return connection.wire.call(op, request, limit)

        return self._channels.channel(member).run(call, namespace, Deadline(CALL_S))

    # ---- fetching ------------------------------------------------------------------------

    def _fetched(
        self,
        missing: list[Missing],
        report: Report,
        replicas: int,
        on_progress: Callable[[Report], None],
    ) -> Report:
        on_progress(report)
        for start in range(0, len(missing), ROUND_PAGES):
            for batch in self._batches(missing[start : start + ROUND_PAGES]):
                nbytes = self._tier.namespace(batch[0].digest).page_nbytes
                wanted = self._worth_room(batch)
                count = self._fetch(wanted) if wanted else 0
                failed = min(_thin(wanted, replicas), len(wanted) - count)
                report = report._replace(
                    thin=report.thin - _thin(batch, replicas) + failed,
                    fetched=report.fetched + count,
                    fetched_nbytes=report.fetched_nbytes + count * nbytes,
                    full=report.full + len(batch) - len(wanted),
                    failed=report.failed + len(wanted) - count,
                )
                on_progress(report)
                if not self._pause(count * nbytes):
                    return report  # the rest is still missing
        return report

    def _batches(self, pages: list[Missing]) -> Iterator[list[Missing]]:
        """Split pages into batches of one namespace, member and time to live."""

        def kind(page: Missing) -> tuple[str, bytes, int]:
            return page.member, page.digest, page.ttl_s

        for (_, digest, _), group in itertools.groupby(sorted(pages, key=kind), key=kind):
            step = max(1, min(BATCH_KEYS, BATCH_NBYTES // self._tier.namespace(digest).page_nbytes))
            some = list(group)
            for start in range(0, len(some), step):
                yield some[start : start + step]

    def _worth_room(self, batch: list[Missing]) -> list[Missing]:
        """Return those pages of a batch for which no later used page would be evicted."""
        if self._room_below(self._tier.namespace(batch[0].digest)):
            return batch
        room = zip(batch, self._inventory.room(batch[0].digest, len(batch)), strict=False)
        return [
            page for page, _ in itertools.takewhile(lambda pair: pair[0].idle_ms < pair[1], room)
        ]

    def _fetch(self, pages: list[Missing]) -> int:
        """Fetch pages, return how many are here now; a second try omits pages lost meanwhile."""
        for _ in range(2):
            try:
                hits = self._fetch_all([page.prefix_hash for page in pages], pages[0])
            except KVStoreError as error:
                log.info("%d pages of %s were not fetched: %s", len(pages), pages[0].member, error)
                return 0
            if all(hits):
                self._pin(pages)
                return len(hits)
            pages = [page for page, hit in zip(pages, hits, strict=True) if hit]
            if not pages:
                return 0
        return 0

    def _fetch_all(self, prefix_hashes: list[bytes], like: Missing) -> list[bool]:
        """Fetch pages and return which hit; they are committed only if all hit.

        A reservation is committed completely or not at all.
        """
        index = self._tier.namespace(like.digest)
        began_s = self._tier.clock_s()
        reservation = self._tier.reserve(like.digest, prefix_hashes, index.page_nbytes)
        if not reservation.pages:
            return [verdict != PutStatus.FULL for verdict in reservation.verdicts]
        try:
            got = self._get(like.member, index.value, reservation.pages)
            ends_s = [began_s + page.ttl_ms // 1000 for page in got if page and page.ttl_ms]
            ttl_s = min(ends_s) - self._tier.clock_s() if ends_s else 0
            hits = iter(
                bool(page and page.leaves and (ttl_s > 0 or not page.ttl_ms)) for page in got
            )
            found = [
                next(hits) if verdict == PutStatus.WRITE else verdict != PutStatus.FULL
                for verdict in reservation.verdicts
            ]
            for page, arrived in zip(reservation.pages, got, strict=True):
                page.leaves = stored_leaves(arrived.leaves) if arrived else b""
                page.is_fetched = True
        except BaseException:
            self._tier.abort(reservation)
            raise
        if all(found):
            checksums = [arrived.checksum for arrived in got if arrived]
            self._tier.commit(reservation, checksums, ttl_s)
        else:
            self._tier.abort(reservation)
        return found

    def _pin(self, pages: list[Missing]) -> None:
        """Pin pages for as long as they are pinned at their source."""
        for page in pages:
            if page.pin_ttl_ms:
                with contextlib.suppress(Exhausted):  # too much is pinned here already
                    self._tier.pin(page.digest, [page.prefix_hash], page.pin_ttl_ms)

    def _get(
        self, member: str, namespace: Namespace, pages: Sequence[Page]
    ) -> list[Arrived | None]:
        """Get pages in as many requests as the member's limits require."""
        hashes, nbytes = [page.prefix_hash for page in pages], namespace.stored_nbytes
        views = [(self._view(page.offset, nbytes),) for page in pages]
        seeds = key_seeds(namespace, hashes)

        def call(connection: NodeConnection, limit: Deadline) -> list[Arrived | None]:
            arrived: list[Arrived | None] = []
            for part in batches(len(hashes), nbytes, connection.limits):
                request = pb.GetRequest(namespace=namespace.digest, prefix_hashes=hashes[part])
                arrived += cast(BulkWire, connection.wire).fetch(
                    request, views[part], seeds[part], limit
                )
            return arrived

        return self._channels.channel(member).run(call, namespace, Deadline(FETCH_S))


def _thin(pages: Sequence[Missing], replicas: int) -> int:
    """Count the pages with fewer copies than replicas."""
    return sum(page.copies < replicas for page in pages)


# When a member rebalances: after each change of the view, periodically, and on request.
#
# A joining member serves after its first rebalance. Members beside a drained one rebalance, because
# they now own its pages. A member that restarted without its pages, or was away during puts,
# rebalances when it starts.


SETTLE_S = 1.0  # after a change of the view: several members often join or leave together
AGAIN_S = 10.0  # after a rebalance that did not get all pages
# After another member could not hand pages to this one: more pages may be missed meanwhile
MISSED_S = 60.0


class Rebalancer:
    """Runs rebalances on a thread. `make(pause)` returns a `Rebalance`."""

    def __init__(
        self,
        membership: Membership,
        make: Callable[[Callable[[int], bool]], Rebalance],
        nbytes_per_s: int,
        period_s: float,
    ) -> None:
        self._membership = membership
        self._sweep = make(self._pause)
        self._nbytes_per_s = nbytes_per_s
        self._period_s = period_s
        self._turn = threading.Condition()
        self._due_s = float("inf")  # when the next run is due, by the clock
        self._stopped = False
        self._began_s = self._moved_nbytes = 0.0
        self.settle_s, self.missed_s = SETTLE_S, MISSED_S
        self._missed = 0  # pages that other members could not hand to this one, by their word
        self.running = False
        self.report: Report | None = None  # of the last run
        self.on_progress: Callable[[Report], None] = lambda report: None
        self.ended_s = 0.0  # end of the last run, by the clock
        self._so_far: Report | None = None  # of the current run, once it knows what is missing
        self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._membership.on_view(lambda view: self.schedule_in(self.settle_s))
        self._thread.start()

    def schedule_in(self, seconds: float) -> None:
        """Schedule a run in some seconds, unless one is due sooner."""
        with self._turn:
            self._due_s = min(self._due_s, time.monotonic() + seconds)
            self._turn.notify()

    def expect(self, pages: int) -> None:
        """Note pages that another member could not hand to this one; they are fetched soon."""
        self._missed = min(self._missed + pages, MISSING_MAX)
        self.schedule_in(self.missed_s)

    @property
    def under_replicated(self) -> int:
        """Return how many pages are missing here that have fewer copies than replicas."""
        last = (self._so_far if self.running else None) or self.report
        return self._missed + (last.thin if last else 0)

    @property
    def progress(self) -> Report | None:
        """Return the progress of the current run, or the report of the last one."""
        return self._so_far if self.running else self.report

    def dry(self) -> Report:
        """Return what a run would fetch."""
        view = self._membership.view
        if view is None:
            return Report(0, 0)
        report = self._sweep.run(view, self._membership.member, dry=True)
        if report.thin:  # the others take the comparison for the begin of a repair
            self._missed = max(self._missed, report.thin)
            self.schedule_in(self.missed_s)
        return report

    def _run(self) -> None:
        while self._wait():
            view = self._membership.view
            if view is None or self._membership.member not in view.by_id:
                continue
            self._so_far, self.running = None, True
            try:
                self._once(view)
            except Exception:  # a failed run; the next one may succeed
                log.exception("a rebalance failed")
                self.schedule_in(AGAIN_S)
            finally:
                self.running = False

    def _wait(self) -> bool:
        """Wait until a run is due; return False when the node stops."""
        with self._turn:
            while not self._stopped and (left_s := self._due_s - time.monotonic()) > 0:
                self._turn.wait(min(left_s, threading.TIMEOUT_MAX))
            self._due_s = time.monotonic() + self._period_s if self._period_s else float("inf")
            return not self._stopped

    def _once(self, view: View) -> None:
        self._began_s, self._moved_nbytes = time.monotonic(), 0
        report = self._sweep.run(view, self._membership.member, on_progress=self._note_progress)
        if self._stopped:
            return
        self.report, self.ended_s = report, time.monotonic()
        if report.missing or report.away:
            log.info("swept: %s", report)
        if report.away or report.failed or report.missing == MISSING_MAX:
            self.schedule_in(AGAIN_S)
        if view.by_id[self._membership.member].state is State.JOINING:
            self._membership.joined()

    def _note_progress(self, report: Report) -> None:
        if self._so_far is None:
            self._missed = 0  # now they are among the missing pages
        self._so_far = report
        self.on_progress(report)

    def _pause(self, nbytes: int) -> bool:
        """Wait as the rate limit requires for so many bytes; return False to end the run."""
        self._moved_nbytes += nbytes
        with self._turn:
            if self._nbytes_per_s and nbytes:
                end_s = self._began_s + self._moved_nbytes / self._nbytes_per_s
                self._turn.wait_for(lambda: self._stopped, max(0.0, end_s - time.monotonic()))
            return not self._stopped

    def stop(self, timeout_s: float = 0.0) -> None:
        """Stop after the current call, and wait at most that long: the other member may hang."""
        with self._turn:
            self._stopped = True
            self._turn.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
