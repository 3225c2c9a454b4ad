"""Connect a member to the others: membership, replication, remote pages, rebalance."""

import logging
import time
from collections.abc import Callable

from kvstore.cluster.view import View
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.parallel import ParallelTransfer
from node.cluster.drain import Drain
from node.cluster.membership import Membership
from node.cluster.rebalance import TOGETHER_MAX, Rebalance, Rebalancer
from node.cluster.remote_pages import CONNECTIONS_MAX, PeerLinks, RemotePages
from node.cluster.replicator import Replicator
from node.config import NodeConfig
from node.memory.page import Space
from node.memory.tier import RamTier

log = logging.getLogger(__name__)


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
        room_below: Callable[[Space], bool],
    ) -> None:
        self.membership = membership
        self._tier = tier
        tier.eviction.copy_nbytes_max = int(config.ram_nbytes * config.copies_share)
        self.links = links = PeerLinks(membership, config)
        self.replicator = Replicator(
            membership,
            links,
            tier,
            view,
            config.hand_over_queue_nbytes,
            config.hand_over_nbytes_per_s,
        )
        self.remote_pages = RemotePages(membership, links, view, tier.clock_s)
        tier.remote = (*tier.remote, self.remote_pages)
        self._abreast = ParallelTransfer(TOGETHER_MAX, "kvstore-sweep")
        self.rebalancer = Rebalancer(
            membership,
            lambda pause: Rebalance(links, tier, view, room_below, pause, self._abreast.run),
            config.sweep_nbytes_per_s,
            config.sweep_s,
        )
        self.draining = Drain(membership, links, tier)
        self._sessions_max = config.sessions_max
        self._are_many = False  # whether the members need so many connections that a warning is due
        membership.on_view(self._check_sessions)

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
        self._abreast.close()
        self.links.close()
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
        lost = self.membership.lost()
        weights = sum(some.weight for some in view.members) + sum(some.weight for some in lost)
        for member in lost:
            status.lost.add(
                id=member.id,
                address=member.address,
                since_unix_s=member.lost_s,
                share=member.weight / weights,
            )
        if swept is not None:
            status.sweep_pages_missing, status.sweep_pages_fetched = swept.missing, swept.fetched
            status.sweep_pages_full, status.sweep_pages_failed = swept.full, swept.failed
        if self.rebalancer.report is not None:
            status.sweep_age_ms = max(1, round(1000 * (time.monotonic() - self.rebalancer.ended_s)))
        self.replicator.status(status)
        return status

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        return self.replicator.check()
