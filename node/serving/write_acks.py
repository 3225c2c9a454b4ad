"""Acknowledge puts: wait for the disk and for replicas, as the request asks.

put --> commit --> replicated to all other owners, unless a member forwarded it
                     +--> ack_all: the reply waits until they have the pages
                     +--> durable: on disk here, or at the first owner: the reply waits for it
"""

from collections.abc import Collection, Mapping, Sequence
from time import monotonic_ns
from typing import NamedTuple

from kvstore.errors import Exhausted, InvalidRequest
from kvstore.pb import kvstore_pb2 as pb
from node.auth.access import THE_NODE
from node.cluster.peers import Peers
from node.cluster.replication_queue import AckWaiter
from node.disk.durability import Durability
from node.memory.page import Page, PutStatus, Reservation
from node.serving.limits import NO_CHARGE, Charge
from node.serving.request_metrics import ACKS
from node.serving.session import Session, Sessions

Owners = Mapping[bytes, tuple[str, ...]]  # of each page


class _Recipients(NamedTuple):
    """The members that get each page, and when.

    The put waits for `awaited`; `at_once` get it without a wait. `after` get it once the put is
    acknowledged: if it fails, the client writes the page there itself.
    """

    awaited: list[set[str]]
    at_once: list[set[str]]
    after: list[set[str]]


class WriteAcks:
    """Acknowledge puts. Thread-safe."""

    def __init__(self, durability: Durability, sessions: Sessions, peers: Peers) -> None:
        self._durability = durability
        self._sessions = sessions
        self._membership = peers.membership
        self._replicator = peers.replicator
        self._rebalancer = peers.rebalancer

    def check(self, request: pb.PutRequest) -> None:
        """Raise InvalidRequest for acknowledgements that are impossible or not allowed."""
        if request.durable and any(
            self._membership.member in some for some in self._owners(request).values()
        ):
            self._durability.disk  # noqa: B018 raises if there is none
        view, sender = self._membership.view, request.forwarded_by
        if sender and (view is None or sender not in view.by_id):
            where = (
                f"view {view.number} of the cluster {view.cluster}"
                if view
                else "any cluster that this node is of"
            )
            raise InvalidRequest(
                f"a put forwarded by {sender!r}, which is no member of {where}; only members "
                "forward: start it with this cluster's name, or put without forwarded_by"
            )

    def begin(self, session: Session, request: pb.PutRequest, result: Reservation) -> None:
        """Begin a checked put; if all pages are stored already, acknowledge it now."""
        session.put_request = request
        session.must_ack = []
        if request.forwarded_by and request.pages_missed:
            self._rebalancer.expect(request.pages_missed)
        # Pages that are or will be stored; not another writer's, or refused ones
        if request.durable or request.ack_all:
            session.wait = self._durability.begin_wait(request.wait_ms, session.has_left)
            verdicts = zip(request.prefix_hashes, result.verdicts, strict=True)
            session.must_ack = [
                h for h, verdict in verdicts if verdict in (PutStatus.WRITE, PutStatus.EXISTS)
            ]
            if not result.pages:
                self.wait_for(session, [])

    def wait_for(self, session: Session, pages: Sequence[Page]) -> None:
        """Wait until committed pages are as safe as the put requires.

        Raises Exhausted if they are visible but not that safe.
        """
        began_ns = monotonic_ns() if session.must_ack else 0
        try:
            self._wait_for(session, pages)
        finally:
            if began_ns:
                self._sessions.traffic.slow.step(ACKS, began_ns)

    def _wait_for(self, session: Session, pages: Sequence[Page]) -> None:
        put, wait = session.put_request, session.wait
        if self._membership.view is None or put.forwarded_by:
            if put.durable:
                self._durability.keep(put.namespace, session.must_ack, wait)
            return
        owners = self._owners(put)
        recipients = self._recipients(put, [page.prefix_hash for page in pages], owners)
        self._replicator.offer(pages, recipients.at_once)
        waiters = self._awaited(session, pages, recipients, owners)
        own = [
            prefix_hash
            for prefix_hash in session.must_ack
            if self._membership.member in owners[prefix_hash]
        ]
        try:
            if put.durable and own:
                self._durability.keep(put.namespace, own, wait)
            must_ack = all(
                self._replicator.wait(some, wait.end, wait.has_left, patient=put.ack_all)
                for some in waiters
            )
        finally:
            # If a target failed, the client retries at another owner. Had that owner the page
            # already, it would answer EXISTS, and nobody would replicate it further.
            if not any(some.failed for some in waiters):
                self._replicator.offer(pages, recipients.after)
        if not must_ack:
            raise Exhausted(
                "pages are visible but not "
                f"{'at all owners' if put.ack_all else 'durable at their owners'}: one of them is "
                "unreachable, full or slow, its queue is full, or the deadline passed"
            )

    def _awaited(
        self, session: Session, pages: Sequence[Page], recipients: _Recipients, owners: Owners
    ) -> list[AckWaiter]:
        put, keys = session.put_request, [page.prefix_hash for page in pages]
        if not session.must_ack:
            return []
        waiters = [self._replicator.offer(pages, recipients.awaited, put.durable, whole=True)]
        if stored := set(session.must_ack).difference(keys):
            known = [prefix_hash for prefix_hash in session.must_ack if prefix_hash in stored]
            waiters.append(
                self.replicate(
                    put.namespace,
                    known,
                    self._recipients(put, known, owners).awaited,
                    put.durable,
                    session.put_charge,
                )
            )
        return waiters

    def replicate(
        self,
        digest: bytes,
        prefix_hashes: Sequence[bytes],
        targets: Sequence[Collection[str]],
        durable: bool = False,
        charge: Charge = NO_CHARGE,
    ) -> AckWaiter:
        """Queue pages for the members named for each; lost pages count as lost.

        Pages on disk are read into RAM for it, so pass few at a time.
        """
        wanted = [place for place, some in enumerate(targets) if some]
        with self._sessions.open(THE_NODE) as session:
            session.charge = charge
            found = session.acquire(digest, [prefix_hashes[place] for place in wanted], False, 0)
            there = [
                (page, targets[place])
                for place, page in zip(wanted, found, strict=True)
                if page is not None
            ]
            waiter = self._replicator.offer(
                [page for page, _ in there], [some for _, some in there], durable, True
            )
        waiter.lost_count += len(wanted) - len(there)
        return waiter

    def _recipients(
        self, put: pb.PutRequest, prefix_hashes: Sequence[bytes], owners: Owners
    ) -> _Recipients:
        recipients, own = _Recipients([], [], []), self._membership.member
        for some in (owners[prefix_hash] for prefix_hash in prefix_hashes):
            others = set(some) - {own}
            awaited = (
                others if put.ack_all else {some[0]} if put.durable and own not in some else set()
            )
            recipients.awaited.append(awaited)
            recipients.at_once.append(set() if awaited else others)
            recipients.after.append(others - awaited if awaited else set())
        return recipients

    def _owners(self, put: pb.PutRequest) -> Owners:
        """Return the owners of each key; this node if there is no other one.

        That is so without a cluster, for a put forwarded by a member, or if all members are
        drained.
        """
        view, keys, own = self._membership.view, put.prefix_hashes, (self._membership.member,)
        if view is None or put.forwarded_by:
            return dict.fromkeys(keys, own)
        return {
            key: some or own
            for key, some in zip(keys, view.owners.owners(put.namespace, keys), strict=True)
        }
