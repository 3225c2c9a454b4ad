"""Connect a member to the others: membership, replication, remote pages, rebalance."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from kvstore.cluster.view import Candidate, Member, Placement, State, View
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.parallel import ParallelTransfer
from node.cluster.drain import Drain, Progress
from node.cluster.membership import LostMember, Membership
from node.cluster.rebalance import TOGETHER_MAX, Rebalance, Rebalancer, Report
from node.cluster.remote_pages import CONNECTIONS_MAX, PeerChannels, RemotePages
from node.cluster.replicator import Replicator
from node.config import NodeConfig
from node.events import EventLog, Kind
from node.memory.page import PageNamespace
from node.memory.tier import RamTier

log = logging.getLogger(__name__)

SAMPLED_KEYS = 1 << 9  # 0.5 s with 1,000 members


def lost_shares(view: View, lost: Sequence[LostMember]) -> list[pb.LostMember]:
    """Return each lost member with its share of the keys and their owners that are left.

    The share of keys without an owner is estimated from a sample of keys.
    """
    there = [member for member in view.members if member.state is not State.DRAINING]
    weights = sum(member.weight for member in there) + sum(member.weight for member in lost)
    left, alone = min(view.replicas, len(there) + len(lost)) - len(lost), Counter[str]()
    if lost and left <= 0:
        candidates = [Candidate(member.id, member.weight, member.zone) for member in there]
        candidates += [Candidate(member.id, member.weight, member.zone) for member in lost]
        names = {member.id for member in lost}
        keys = [number.to_bytes(4, "little") for number in range(SAMPLED_KEYS)]
        for owners in Placement(candidates, view.replicas).owners(b"", keys):
            if names.issuperset(owners):
                alone.update(owners)
    return [
        pb.LostMember(
            id=member.id,
            address=member.address,
            since_unix_s=member.lost_s,
            share=member.weight / weights,
            owners_left=max(0, left),
            share_alone=alone[member.id] / SAMPLED_KEYS,
        )
        for member in lost
    ]


_KINDS = {
    State.JOINING: Kind.JOINED,
    State.SERVING: Kind.SERVING,
    State.DRAINING: Kind.DRAINING,
}


class MemberEvents:
    """Record changes of the view, and of the lost members, as events. Thread-safe."""

    def __init__(self, events: EventLog, membership: Membership) -> None:
        self._events = events
        self._membership = membership
        self._lock = threading.Lock()
        self._known: View | None = None
        self._lost: set[str] = set()
        self._returned: set[str] = set()  # reported, and not in the view yet

    def on_view(self, view: View) -> None:
        """Record what has changed since the last view."""
        with self._lock:
            self._compare(view)

    def _compare(self, view: View) -> None:
        known, self._known = self._known, view
        text = f"view {view.number}, members {len(view.members)}"
        if known is None:
            if self._membership.announcer is not None:  # a fixed list has always been there
                self._events.add(Kind.JOINED, self._membership.member, text)
            return
        lost = {member.id for member in self._membership.lost()}
        for name in sorted(view.by_id.keys() | known.by_id.keys()):
            before, now = known.by_id.get(name), view.by_id.get(name)
            if kind := self._change(before, now, name in lost):
                self._events.add(kind, name, text)
            elif now is None:
                self._events.add(Kind.VIEW, name, f"{text}, without {name}")
        if view.replicas != known.replicas:
            self._events.add(Kind.VIEW, "", f"{text}, replicas {view.replicas}")

    def _change(self, before: Member | None, now: Member | None, is_lost: bool) -> Kind | None:
        """Return the kind of a member's change; None for none, and for a loss (`on_lost`)."""
        if now is None:
            return None if is_lost or before is None else Kind.LEFT
        if before is None:
            if now.id in self._returned:
                self._returned.discard(now.id)
                return None
            if now.id in self._lost:
                self._lost.discard(now.id)
                return Kind.RETURNED
            return Kind.JOINED
        if before.state is not now.state:
            return _KINDS[now.state]
        return Kind.VIEW if replace(before, bulk_port=now.bulk_port) != now else None

    def on_lost(self, lost: Sequence[LostMember], registered: Collection[str]) -> None:
        """Record members that are lost now, or no longer. `registered`: members that are there."""
        now = {member.id: member for member in lost if member.lost_s}
        with self._lock:
            for name in sorted(now.keys() - self._lost):
                text = f"it left {now[name].address} without a drain"
                # The time is the registry's, so a restart records the loss only once
                self._events.add_once(Kind.LOST, name, text, 1000 * now[name].lost_s)
            for name in sorted(self._lost - now.keys()):
                if name in registered:
                    self._returned.add(name)
                    self._events.add(Kind.RETURNED, name, "it is registered again")
                else:
                    self._events.add(Kind.FORGOTTEN, name, "it is not missed any more")
            self._lost = set(now)


class Peers:
    """The parts of a node that work with other members; they cost a single node nothing.

    `view(offset, nbytes)` is the arena's memory, `room_below(namespace)` whether the lower tier
    takes a page without losing another.
    """

    def __init__(
        self,
        config: NodeConfig,
        membership: Membership,
        tier: RamTier,
        view: Callable[[int, int], memoryview],
        room_below: Callable[[PageNamespace], bool],
        events: EventLog,
    ) -> None:
        self.membership = membership
        self.events = events
        self._tier = tier
        tier.eviction.copy_nbytes_max = int(config.ram_nbytes * config.copies_share)
        self.channels = channels = PeerChannels(membership, config)
        self.replicator = Replicator(
            membership,
            channels,
            tier,
            view,
            config.hand_over_queue_nbytes,
            config.hand_over_nbytes_per_s,
        )
        self.remote_pages = RemotePages(membership, channels, view, tier.clock_s)
        tier.remote = (*tier.remote, self.remote_pages)
        self._threads = ParallelTransfer(TOGETHER_MAX, "kvstore-sweep")
        self.rebalancer = Rebalancer(
            membership,
            lambda pause: Rebalance(channels, tier, view, room_below, pause, self._threads.run),
            config.sweep_nbytes_per_s,
            config.sweep_s,
        )
        self._thin = 0  # of the last report
        self.rebalancer.on_progress = self._note_copies
        self.draining = Drain(membership, channels, tier)
        self.draining.on_over = self._note_drained
        self._sessions_max = config.sessions_max
        self._are_many = False  # whether the members need so many connections that a warning is due
        # The last result of `lost_shares`, and its arguments
        self._lost_shares: tuple[object, list[pb.LostMember]] = (None, [])
        membership.on_view(self._check_sessions)
        self.member_events = MemberEvents(events, membership)
        membership.on_view(self.member_events.on_view)
        membership.on_lost = self.member_events.on_lost

    def _check_sessions(self, view: View) -> None:
        """Warn if the members' connections leave too few sessions for clients."""
        were_many, self._are_many = self._are_many, 2 * len(view.members) > self._sessions_max
        if self._are_many and not were_many:
            log.warning(
                "%d members and sessions_max=%d: connections between them may leave none to "
                "clients; start all nodes with --sessions-max %d or more",
                len(view.members),
                self._sessions_max,
                CONNECTIONS_MAX * len(view.members),
            )

    def _note_drained(self, progress: Progress) -> None:
        text = f"{progress.handed} pages are with their owners, {progress.left} are not"
        self.events.add(Kind.DRAINED, "", text)

    def _note_copies(self, report: Report) -> None:
        """Record when pages have too few copies, and when they have enough again."""
        before, self._thin = self._thin, report.thin
        if report.thin and not before:
            text = f"{report.thin} pages have too few copies; this member fetches them"
            self.events.add(Kind.UNDER_REPLICATED, "", text)
        elif before and not report.thin:
            text = f"{report.fetched} pages fetched; none has too few copies here"
            self.events.add(Kind.REPAIRED, "", text)

    def start(self) -> None:
        """Start the background work."""
        self.rebalancer.start()

    def stop(self, timeout_s: float) -> None:
        """Hand queued pages to members that answer, within the time, and end the threads."""
        end = time.monotonic() + timeout_s
        self.draining.stop()
        self.rebalancer.stop()
        self.replicator.stop(max(0.0, end - time.monotonic()))
        self.remote_pages.close()
        self._threads.close()
        self.channels.close()
        self.rebalancer.stop(max(0.0, end - time.monotonic()))

    def status(self) -> pb.PeersStatus | None:
        """Return the peers' part of the status; None for a node without a cluster."""
        view = self.membership.view
        if view is None:
            return None
        eviction, remote, swept = self._tier.eviction, self.remote_pages, self.rebalancer.progress
        registry, apart = self.membership.registry()
        status = pb.PeersStatus(
            cluster=view.cluster,
            view_number=view.number,
            member_id=self.membership.member,
            member_count=len(view.members),
            replicas=view.replicas,
            registry=registry,
            apart=apart,
            copy_count=eviction.copy_count,
            copy_nbytes=eviction.copy_nbytes,
            pages_fetched=remote.pages_fetched,
            nbytes_fetched=remote.nbytes_fetched,
            pages_fetch_failed=remote.pages_fetch_failed,
            sweeping=self.rebalancer.running,
        )
        status.lost.extend(self._lost_status(view))
        if swept is not None:
            status.sweep_pages_missing, status.sweep_pages_fetched = swept.missing, swept.fetched
            status.sweep_pages_full, status.sweep_pages_failed = swept.full, swept.failed
        if self.rebalancer.report is not None:
            status.sweep_age_ms = max(1, round(1000 * (time.monotonic() - self.rebalancer.ended_s)))
        status.pages_under_replicated = self.rebalancer.under_replicated
        self.replicator.status(status)
        return status

    def _lost_status(self, view: View) -> Sequence[pb.LostMember]:
        """Return the lost members' part of the status; it is computed once per change."""
        lost = tuple(self.membership.lost())
        key = (view.members, view.replicas, lost)
        if self._lost_shares[0] != key:
            self._lost_shares = key, lost_shares(view, lost)
        return self._lost_shares[1]

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        return self.replicator.check()
