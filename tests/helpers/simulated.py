"""A cluster in one process and virtual time.

It uses the real views, placement, routing, RAM tiers, replication queues and rebalancing. The
network loses, delays and duplicates messages.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from virtual import Network, World

from kvstore.buffers import Pieces
from kvstore.checksum import checksum, leaves, root, stored_leaves
from kvstore.cluster.calls import key_seeds
from kvstore.cluster.fan_out import _some_routes
from kvstore.cluster.routing import broadcast, in_parallel, try_owners
from kvstore.cluster.view import Member, State, View
from kvstore.deadline import Deadline
from kvstore.errors import Exhausted, KVStoreError, Unavailable
from kvstore.keys import Namespace
from kvstore.layout import opaque_layout
from kvstore.messages import namespace_message
from kvstore.pb import kvstore_pb2 as pb
from kvstore.tools.trace import page_content
from kvstore.transports.bulk import Arrived
from node.cluster.membership import Membership
from node.cluster.rebalance import Rebalance
from node.cluster.replication_queue import AckWaiter, Batch, Group, ReplicationQueue
from node.memory.inventory import Inventory
from node.memory.page import Namespaces, Page, PutStatus, Reservation
from node.memory.page import State as PageState
from node.memory.tier import RamTier
from node.slab import SlotAllocator

PAGE_NBYTES = 64
RAM_NBYTES, EXTENT_NBYTES = 1 << 20, 1 << 18
SPACE = Namespace(model="simulated", layout=opaque_layout(PAGE_NBYTES))
CALL_S = 2.0
STALL_S = 5.0
TICK_S = 0.05
KEPT = (PutStatus.WRITE, PutStatus.EXISTS, PutStatus.BUSY)


def content(key: bytes) -> bytes:
    return page_content(SPACE.digest, key, PAGE_NBYTES)


class SimNode:
    """One life of a member, whose memory is empty at the start."""

    def __init__(self, cluster: "SimCluster", name: str) -> None:
        self.cluster, self.name, self.world = cluster, name, cluster.world
        self.arena = bytearray(RAM_NBYTES)
        self.tier = RamTier(
            Namespaces(16, EXTENT_NBYTES),
            SlotAllocator(RAM_NBYTES, EXTENT_NBYTES),
            self._copy,
            self._zero,
            lambda: int(self.world.now * 1000),
            lambda: int(self.world.now),
        )
        self.tier.open_namespace(SPACE, SPACE.digest)
        self.queue: ReplicationQueue[Page] = ReplicationQueue(
            RAM_NBYTES // 8, lambda page: page.state is not PageState.VISIBLE
        )
        self.membership = Membership("", "")
        self.membership.become(cluster.view, name)
        self.membership.on_view(
            lambda view: self.queue.follow({m.id for m in view.members} - {name})
        )
        self.sweep = Rebalance(
            SimChannels(self),  # type: ignore[arg-type]
            self.tier,
            self.memory,
            lambda slot: False,
            lambda nbytes: self.up,
            partial(self.world.together, f"{name} asks"),
        )
        self.sessions: dict[int, Reservation] = {}
        self.inventory = Inventory(self.tier)
        self.up = True
        self.swept_view = 0

    def _copy(self, source: int, target: int, nbytes: int) -> None:
        self.arena[target : target + nbytes] = self.arena[source : source + nbytes]

    def _zero(self, offset: int, nbytes: int) -> None:
        self.arena[offset : offset + nbytes] = bytes(nbytes)

    def memory(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.arena)[offset : offset + nbytes]

    @property
    def view(self) -> View:
        assert self.membership.view is not None
        return self.membership.view

    # ---- requests that it serves ----------------------------------------------------------------

    def reserve(self, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """Return a new session and a verdict per key.

        The session is aborted after STALL_S without a commit.
        """
        reservation = self.tier.reserve(SPACE.digest, keys, PAGE_NBYTES)
        session = next(self.cluster.numbers)
        self.sessions[session] = reservation
        self.world.at(STALL_S, partial(self.abort, session))
        return session, list(reservation.verdicts)

    def abort(self, session: int) -> None:
        """End a session without a commit, unless it has ended already."""
        if reservation := self.sessions.pop(session, None):
            self.tier.abort(reservation)

    def commit(
        self,
        session: int,
        pages: dict[bytes, bytes],
        forwarded: bool,
        ack_all: bool,
        limit: Deadline,
    ) -> None:
        if session not in self.sessions:
            raise Unavailable("the session was committed already, or has expired")
        reservation, sums = self.sessions.pop(session), []
        for page in reservation.pages:
            self.memory(page.offset, PAGE_NBYTES)[:] = pages[page.prefix_hash]
            of_leaves = leaves(pages[page.prefix_hash])
            page.leaves = stored_leaves(of_leaves)
            sums.append(root(of_leaves, page.namespace.seed(page.prefix_hash)))
        if reservation.pages:
            self.tier.commit(reservation, sums)
        if not forwarded:
            known = list(pages) if ack_all else [page.prefix_hash for page in reservation.pages]
            self._hand_on(known, ack_all, limit)

    def _hand_on(self, keys: list[bytes], ack_all: bool, deadline: Deadline) -> None:
        """Replicate pages as `node.serving.write_acks` does."""
        waiter, space = AckWaiter(), self.tier.namespace(SPACE.digest)
        for key, owners in zip(keys, self.view.owners.owners(SPACE.digest, keys), strict=True):
            page, targets = space.pages.get(key), set(owners) - {self.name}
            if page is None or not self.tier.hold_visible([page]):
                waiter.lost_count += bool(targets)
                continue
            group = Group(SPACE.digest, 0, False)
            self.queue.offer(page, key, space.slot_nbytes, group, targets, self.world.now, waiter)
        while ack_all and waiter.open_count and not deadline.passed:
            self.world.sleep(TICK_S)
        if ack_all and (waiter.open_count or waiter.lost_count):
            raise Exhausted("visible but not at all owners")

    def get(self, keys: Sequence[bytes]) -> list[tuple[bytes, bytes] | None]:
        """Return (bytes, checksum) of each page, or None if it is not here."""
        acquired = self.tier.acquire(SPACE.digest, keys, False, PAGE_NBYTES)
        found = [
            (bytes(self.memory(p.offset, PAGE_NBYTES)), p.checksum) if p else None
            for p in acquired.pages
        ]
        self.tier.release([page for page in acquired.pages if page is not None])
        return found

    def list_pages(self, request: pb.ListRequest) -> pb.ListReply:
        keys = sorted(self.keys)
        owners = self.view.owners.owners(SPACE.digest, keys)
        wanted = [key for key, some in zip(keys, owners, strict=True) if request.owner in some]
        found = self.inventory.stat(SPACE.digest, wanted)
        return pb.ListReply(
            pages=[pb.PageStat(prefix_hash=f.prefix_hash, idle_ms=f.idle_ms) for f in found]
        )

    @property
    def keys(self) -> set[bytes]:
        pages = self.tier.namespace(SPACE.digest).pages.values()
        return {page.prefix_hash for page in pages if page.state is PageState.VISIBLE}

    # ---- background work ----------------------------------------------------------

    def live(self) -> None:
        """Start the background processes."""
        self.world.spawn(f"{self.name} hands over", self._hand_over)
        self.world.spawn(f"{self.name} sweeps", self._sweep)

    def _hand_over(self) -> None:
        while self.up:
            while (batch := self.queue.next(self.world.now)) is not None:
                self.world.spawn(f"replicator of {self.name}", partial(self._send, batch))
            self._release()
            self.world.sleep(TICK_S)

    def _release(self) -> None:
        freed, self.queue.freed = self.queue.freed, []
        unsent, self.queue.unsent = self.queue.unsent, []
        self.tier.own(unsent)
        self.tier.release(freed)

    def _send(self, batch: Batch[Page]) -> None:
        limit = Deadline(CALL_S)
        try:
            pages = {
                p.prefix_hash: bytes(self.memory(p.page.offset, PAGE_NBYTES))
                for p in batch.queued_pages
            }
            session, verdicts = self._ask(
                batch.target, lambda node: node.reserve(list(pages)), limit
            )
            taken = [k for k, verdict in zip(pages, verdicts, strict=True) if verdict in KEPT[:2]]
            # As in `node.cluster.replicator`
            if any(p.page.state is not PageState.VISIBLE for p in batch.queued_pages):
                taken = []
                # The connection is closed without a commit, which ends the session there
                self._ask(batch.target, lambda node: node.abort(session), limit)
            else:
                self._ask(
                    batch.target,
                    lambda node: node.commit(session, pages, True, False, limit),
                    limit,
                )
        except KVStoreError:
            self.queue.failed(batch, self.world.now)
        else:
            self.queue.done(batch, taken, self.world.now)
        self._release()

    def _ask(self, target: str, serve: Callable[["SimNode"], Any], limit: Deadline) -> Any:
        return self.cluster.ask(self.name, target, serve, limit)

    def _sweep(self) -> None:
        while self.up:
            view = self.view
            if self.swept_view != view.number and self.name in view.by_id:
                report = self.sweep.run(view, self.name)
                if self.up and not (report.away or report.failed):
                    self.swept_view = view.number
                    if view.by_id[self.name].state is State.JOINING:
                        self.cluster.announce(self.name, State.SERVING)
            self.world.sleep(1.0)


class SimChannels:
    """The part of `node.cluster.remote_pages.PeerChannels` that rebalancing uses."""

    def __init__(self, node: SimNode) -> None:
        self._node = node

    def channel(self, member: str) -> "SimChannel":
        return SimChannel(self._node, member)


class SimChannel:
    """A channel, its connection and its wire."""

    def __init__(self, node: SimNode, member: str) -> None:
        self._node, self._member = node, member
        self.wire = self
        self.limits = pb.Limits(batch_keys_max=16, batch_nbytes_max=16 * PAGE_NBYTES)

    def run(self, call: Callable[..., Any], namespace: object, deadline: Deadline) -> Any:
        return call(self, deadline)

    def call(self, op: str, request: Any, deadline: Deadline) -> Any:
        if op == "list_namespaces":
            info = pb.NamespaceInfo(digest=SPACE.digest, namespace=namespace_message(SPACE))
            return pb.ListNamespacesReply(namespaces=[info])
        return self._node.cluster.ask(
            self._node.name, self._member, lambda node: node.list_pages(request), deadline
        )

    def fetch(
        self,
        request: pb.GetRequest,
        views: Sequence[Pieces],
        seeds: Sequence[int],
        deadline: Deadline,
    ) -> list[Arrived | None]:
        keys = list(request.prefix_hashes)
        found = self._node.cluster.ask(
            self._node.name, self._member, lambda node: node.get(keys), deadline
        )
        hits = [
            page is not None and checksum(page[0], seed) == page[1]
            for page, seed in zip(found, seeds, strict=True)
        ]
        for (view,), page, hit in zip(views, found, hits, strict=True):
            if hit:
                view[:] = page[0]
        return [
            Arrived(leaves(p[0]), p[1], 0) if hit else None
            for p, hit in zip(found, hits, strict=True)
        ]


class SimCluster:
    """The members, the control of membership, and the network."""

    def __init__(
        self, rng: random.Random, world: World, network: Network, members: int, replicas: int
    ) -> None:
        self.rng, self.world, self.network = rng, world, network
        names = [f"m{number}" for number in range(members)]
        self.view = View(
            "fleet", 1, tuple(Member(name, f"{name}:7440") for name in names), replicas
        )
        self.nodes: dict[str, SimNode] = {}
        self.numbers = itertools.count(1)
        for name in names:
            self.start(name)

    # ---- members -------------------------------------------------------------------------

    def start(self, name: str) -> None:
        self.network.lives[name] = next(self.numbers)
        self.nodes[name] = SimNode(self, name)
        self.nodes[name].live()

    def kill(self, name: str) -> None:
        del self.network.lives[name]
        self.nodes.pop(name).up = False

    def announce(self, name: str, state: State | None) -> None:
        """Publish a new view, which each node receives after a random delay.

        `state`: None removes the member.
        """
        members = {member.id: member for member in self.view.members}
        if state is None:
            members.pop(name, None)
        else:
            members[name] = replace(members.get(name, Member(name, f"{name}:7440")), state=state)
        if tuple(members.values()) == self.view.members:
            return
        self.view = replace(self.view, number=self.view.number + 1, members=tuple(members.values()))
        for node in self.nodes.values():
            self.world.at(self.rng.uniform(0.0, 1.0), partial(self._tell, node, self.view))

    def _tell(self, node: SimNode, view: View) -> None:
        if node.view.number < view.number:
            node.membership.become(view)

    def ask(
        self, source: str, target: str, serve: Callable[[SimNode], Any], limit: Deadline
    ) -> Any:
        return self.network.call(source, target, lambda: serve(self.nodes[target]), limit)

    @property
    def settled(self) -> bool:
        """Return whether all members are up, have the view and hold what they own."""
        view = self.view
        return view.settled and all(
            member.id in self.nodes
            and self.nodes[member.id].view == view
            and self.nodes[member.id].swept_view == view.number
            and not self.nodes[member.id].queue.page_count
            for member in view.members
        )


class SimClient:
    """A client with its own view, which may be outdated."""

    def __init__(self, cluster: SimCluster, name: str) -> None:
        self.cluster, self.name, self.world = cluster, name, cluster.world
        self.view = cluster.view
        self.together = partial(self.world.together, f"{name} asks")
        cluster.network.lives[name] = 0

    def put(self, keys: Sequence[bytes], ack_all: bool) -> list[int]:
        def ask(member: str, places: list[int], limit: Deadline) -> list[int]:
            pages = {keys[place]: content(keys[place]) for place in places}
            session, verdicts = self._ask(member, lambda node: node.reserve(list(pages)), limit)
            self._ask(
                member, lambda node: node.commit(session, pages, False, ack_all, limit), limit
            )
            return verdicts  # type: ignore[no-any-return]

        return self._spread(keys, ask, lambda verdict: False, 0)

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        def ask(member: str, places: list[int], limit: Deadline) -> list[bytes | None]:
            some = [keys[place] for place in places]
            found = self._ask(member, lambda node: node.get(some), limit)
            seeds = key_seeds(SPACE, some)
            return [
                f[0] if f and checksum(f[0], seed) == f[1] else None
                for f, seed in zip(found, seeds, strict=True)
            ]

        return self._spread(keys, ask, lambda page: page is None, None)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove pages as `kvstore.admin` does."""
        deadline = Deadline(CALL_S)
        removed = self._remove(keys, deadline)
        self._remove([key for key, was in zip(keys, removed, strict=True) if was], deadline)

    def _remove(self, keys: Sequence[bytes], deadline: Deadline) -> list[bool]:
        def ask(member: str, places: list[int], limit: Deadline) -> list[bool]:
            some = [keys[place] for place in places]
            return self._ask(member, lambda node: node.tier.remove(SPACE.digest, some), limit)  # type: ignore[no-any-return]

        routes = [tuple(self.view.by_id)] * len(keys)
        ask_all = in_parallel(ask, self.together)
        return broadcast(routes, ask_all, lambda a, b: a or b, False, deadline)

    def _spread(
        self, keys: Sequence[bytes], ask: Any, lacks: Callable[[Any], bool], absent: Any
    ) -> list[Any]:
        routes = _some_routes(self.view, SPACE, keys)
        ask_all = in_parallel(ask, self.together)
        return try_owners(routes, ask_all, lacks, absent, Deadline(CALL_S))

    def _ask(self, member: str, serve: Callable[[SimNode], Any], limit: Deadline) -> Any:
        def served(node: SimNode) -> Any:
            self._learn(node.view)
            return serve(node)

        return self.cluster.ask(self.name, member, served, limit)

    def _learn(self, view: View) -> None:
        if view.number > self.view.number:
            self.view = view
