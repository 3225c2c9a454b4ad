"""Serve administration: list pages, flush, scrub, recover, drain, rebalance."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore.errors import ConfigError, Exhausted, InvalidRequest
from kvstore.keys import check_prefix_hashes
from kvstore.pb import kvstore_pb2 as pb
from node.auth.access import Caller
from node.auth.authorizer import Authorizer
from node.cluster.peers import Peers
from node.cluster.replicator import Replicator
from node.disk.durability import Durability
from node.disk.scrub import scrub
from node.events import KEPT
from node.memory.inventory import Inventory, PageInfo
from node.memory.tier import RamTier
from node.serving.limits import SCRUB_NBYTES_MAX, SCRUB_S_MAX, Charge
from node.serving.session import Content
from node.serving.status import clamp_to_field

NAMES_MAX = 100  # names of identities in one reply

# Verify pages: compare all copies of a page on this node with its checksum.

_HEALTH = {True: pb.PAGE_INTACT, False: pb.PAGE_DROPPED, None: pb.PAGE_ABSENT}


class Verifying:
    """Verify pages in place: reading a copy on disk evicts nothing from RAM.

    Thread-safe.
    """

    def __init__(self, tier: RamTier, content: Content, durability: Durability) -> None:
        self._tier = tier
        self._inventory = Inventory(tier)
        self._content = content
        self._durability = durability

    def verify(
        self,
        digest: bytes,
        prefix_hashes: Sequence[bytes],
        charge: Charge,
        check: Callable[[], None],
    ) -> pb.VerifyReply:
        """Return the state of each page.

        An unreadable page is an error, not absent. `check` is called before each page and may
        raise.
        """
        good = []
        for prefix_hash in prefix_hashes:
            check()
            good.append(self._verified(digest, prefix_hash, charge))
        pages = [_HEALTH[some] for some in good]
        return pb.VerifyReply(
            intact=good.count(True), dropped=good.count(False), absent=good.count(None), pages=pages
        )

    def _verified(self, digest: bytes, prefix_hash: bytes, charge: Charge) -> bool | None:
        """Return whether all copies of a page are intact, None if there is none.

        Drop bad ones.
        """
        page_nbytes, in_ram = self._tier.namespace(digest).page_nbytes, None
        with self._inventory.inspected(digest, prefix_hash) as page:
            if page is not None:
                charge.add_processed(page_nbytes)
                in_ram = self._content.intact(page)
        on_disk = self._durability.verify(
            digest, prefix_hash, lambda: charge.add_processed(page_nbytes)
        )
        return on_disk if in_ram is None else in_ram and on_disk is not False


class ClusterCalls:
    """Serve calls about owners, rebalancing and draining. Thread-safe.

    Each but `list_events` raises InvalidRequest at a node without a cluster.
    """

    def __init__(self, peers: Peers) -> None:
        self._membership = peers.membership
        self._rebalancer = peers.rebalancer
        self._draining = peers.draining
        self._replicator = peers.replicator
        self._events = peers.events

    def list_events(self, request: pb.EventsRequest, caller: object) -> pb.EventsReply:
        """List events, also at a node without a cluster."""
        events = self._events.since(request.since_unix_ms, request.limit or KEPT)
        return pb.EventsReply(
            events=[pb.Event(**event._asdict()) for event in events],
            member_id=self._membership.member,
            kept=self._events.kept,
        )

    def drain(self, request: pb.DrainRequest, caller: object) -> pb.DrainReply:
        """Begin or end a drain, or forget a lost member."""
        self._check("drained")
        if request.forget:
            if self._membership.forget_lost is None:
                raise InvalidRequest(
                    "members of a fixed list are not forgotten; restart the nodes with a list "
                    "without it"
                )
            self._membership.forget_lost(request.forget)
            return pb.DrainReply(over=True)
        progress = self._draining.end() if request.end else self._draining.begin()
        return pb.DrainReply(
            over=progress.over, pages_left=progress.left, pages_handed=progress.handed
        )

    def sweep(self, request: pb.SweepRequest, caller: object) -> pb.SweepReply:
        """Begin a rebalance, or return what it would fetch."""
        self._check("filled by others")
        if not request.dry:
            self._rebalancer.schedule_in(0.0)
            return pb.SweepReply()
        report = self._rebalancer.dry()
        return pb.SweepReply(
            pages_missing=report.missing, nbytes_missing=report.missing_nbytes, away=report.away
        )

    def owned(self, request: pb.ListRequest) -> Callable[[list[bytes]], list[bytes]]:
        """Return a filter for the hashes of a list: all, or those that a member owns."""
        if not request.owner:
            return list
        view = self._membership.view
        if view is None or request.owner not in view.by_id:
            raise InvalidRequest(
                f"{request.owner!r} is no member that this node knows of; see `kvstore cluster`"
            )

        if not request.page_token:
            self._replicator.settle_missed(request.owner)  # it compares its pages now

        def owned(hashes: list[bytes]) -> list[bytes]:
            owners = view.owners.owners(request.namespace, hashes)
            return [
                prefix_hash
                for prefix_hash, some in zip(hashes, owners, strict=True)
                if request.owner in some
            ]

        return owned

    def _check(self, what: str) -> None:
        if self._membership.view is None:
            raise InvalidRequest(
                f"a node that is in no cluster can not be {what}; start it with --cluster"
            )


class IdentityCalls:
    """Serve the replacement of the identities file. Thread-safe."""

    def __init__(self, authorizer: Authorizer) -> None:
        self._authorizer = authorizer

    def push(self, request: pb.PushIdentitiesRequest, caller: Caller) -> pb.PushIdentitiesReply:
        """Validate the content, and replace the file unless the caller only checks it."""
        access, principal = self._authorizer.access, self._authorizer.principal_of(caller)
        try:
            new, added, removed = access.push(
                request.content, principal, request.force, request.check
            )
        except ConfigError as error:  # it ends a start, and is never sent
            raise InvalidRequest(str(error)) from error
        return pb.PushIdentitiesReply(
            digest=new.digest,
            added=sorted(added)[:NAMES_MAX],
            removed=sorted(removed)[:NAMES_MAX],
        )

    def status(self) -> pb.IdentitiesStatus | None:
        """Return the state of the file; None if the node admits everybody."""
        access = self._authorizer.access
        if access.open:
            return None
        known = access.identities
        return pb.IdentitiesStatus(
            digest=known.digest,
            identity_count=known.count,
            problem_count=len(known.problems),
            writable=access.writable,
        )


# List pages of a namespace, and describe pages by key.

LIST_LIMIT_MAX = 8192  # pages in one List reply: about 160 bytes each, well below a message
LIST_LIMIT = 1000
REPLICATED_SHARE = 0.5  # of the time of a flush: to replicate what is queued


class Listing:
    """Serve list and stat. Thread-safe."""

    def __init__(self, inventory: Inventory, cluster: ClusterCalls, batch_keys_max: int) -> None:
        self._inventory = inventory
        self._cluster = cluster
        self._batch_keys_max = batch_keys_max

    def list_pages(self, request: pb.ListRequest, caller: object) -> pb.ListReply:
        """List pages."""
        limit = min(request.limit or LIST_LIMIT, LIST_LIMIT_MAX)
        infos, rest_after = self._inventory.list_pages(
            request.namespace,
            request.key_prefix,
            request.page_token,
            limit,
            self._cluster.owned(request),
        )
        return pb.ListReply(pages=[_message(info) for info in infos], next_page_token=rest_after)

    def stat(self, request: pb.StatRequest, caller: object) -> pb.StatReply:
        """Describe pages."""
        check_prefix_hashes(request.prefix_hashes, self._batch_keys_max, distinct=False)
        infos = self._inventory.stat(request.namespace, request.prefix_hashes)
        return pb.StatReply(pages=[_message(info) for info in infos])


def _message(info: PageInfo) -> pb.PageStat:
    return clamp_to_field(pb.PageStat, **info._asdict())


class Waiting(Protocol):
    """A caller; `has_left`: it has left."""

    @property
    def has_left(self) -> Callable[[], bool]:
        """Return a function that tells whether the caller has gone."""


class DiskCalls:
    """Serve calls about the disk. Thread-safe.

    Each raises InvalidRequest at a node without a disk.
    """

    def __init__(
        self, durability: Durability, replicator: Replicator, stops: Callable[[], bool]
    ) -> None:
        """Serve calls about the disk; `stops` tells whether the node stops."""
        self._durability = durability
        self._replicator = replicator
        self._stops = stops

    def flush(self, request: pb.FlushRequest, caller: Waiting) -> pb.FlushReply:
        """Make all pages durable: here, or at their owners if they are copies."""
        wait = self._durability.begin_wait(request.wait_ms, caller.has_left)
        disk = self._durability.disk
        end = time.monotonic() + REPLICATED_SHARE * wait.left_s
        replicated = self._replicator.settle_copies(end, wait.has_left)
        self._durability.flush(wait)
        return pb.FlushReply(pages_on_disk=disk.records.count, pages_replicated=replicated)

    def scrub(self, request: pb.ScrubRequest, caller: Waiting) -> pb.ScrubReply:
        """Verify pages within limits of bytes and time; the caller continues from the cursor."""
        nbytes_max = min(request.nbytes_max or SCRUB_NBYTES_MAX, SCRUB_NBYTES_MAX)
        end = time.monotonic() + SCRUB_S_MAX

        def enough() -> bool:
            return time.monotonic() >= end or caller.has_left() or self._stops()

        try:
            result = scrub(self._durability.disk, request.cursor, nbytes_max, enough)
        except OSError as error:
            self._durability.disk.on_error("scrubbing", error)
            raise Exhausted(f"not all pages were read: {error}") from error
        return pb.ScrubReply(**result._asdict())

    def recover(self, request: pb.RecoverRequest, caller: Waiting) -> pb.RecoverReply:
        """Recover a stopped disk tier."""
        try:
            self._durability.disk.recover()
        except OSError as error:
            raise Exhausted(f"the disk still fails, pages are served from RAM: {error}") from error
        return pb.RecoverReply()
