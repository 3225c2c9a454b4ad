"""Implement each request, the same for all transports.

Takes and returns the schema's messages; raises the errors of `kvstore.errors`.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic_ns
from typing import Any

import kvstore
from kvstore.checksum import LEAF_SUM_NBYTES, cuts, hashed_nbytes
from kvstore.config import GET_PIECES_MAX, MESSAGE_NBYTES_MAX, PROTOCOL_VERSION, speaks
from kvstore.deadline import Deadline
from kvstore.errors import InvalidRequest, KVStoreError, ProtocolError, Unavailable
from kvstore.keys import check_prefix_hashes, check_removal
from kvstore.layout import check_ranges
from kvstore.messages import lookup_reply, namespace_value
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results import Tier
from kvstore.tracing import current, named, within
from node.auth.access import EVERYBODY, THE_NODE, Caller
from node.auth.authorizer import Authorizer
from node.cluster.peers import Peers
from node.config import NodeConfig
from node.disk.durability import Durability
from node.disk.tier import DiskTier
from node.feed.feed import Feed
from node.feed.feed import Reply as FeedReply
from node.feed.models import Model
from node.feed.query import query
from node.hints.calls import Hints, ends_session
from node.memory.arena import Arena
from node.memory.inventory import Inventory
from node.memory.promotion import parts_wanted
from node.memory.removal import remove_namespace
from node.memory.tier import RamTier
from node.serving.admin_calls import ClusterCalls, DiskCalls, IdentityCalls, Listing, Verifying
from node.serving.erasure import Erasure
from node.serving.followers import Followers
from node.serving.hot_prefixes import HotPrefixes
from node.serving.limits import (
    DESCRIPTION_NBYTES_MAX,
    LONG_CALLS,
    REQUESTS_NBYTES_MAX,
    Budget,
    PerPeerQueue,
    Requests,
    make_limit,
)
from node.serving.recorder import Recorder
from node.serving.session import Content, ReadyRun, Session, Sessions, offsets_of, reply_about
from node.serving.status import Status, redact_for_tenant
from node.serving.write_acks import WriteAcks

log = logging.getLogger(__name__)
NEAR_S_MAX = 10.0  # for a near node's get or lookup without a time of its own, or with a longer one


class Service:
    """The requests of a node. Thread-safe.

    Unary requests go through `call`; put and get need a session, because slots stay reserved or
    held while bytes travel. A session that maps the arena gets offsets and needs no views.
    """

    def __init__(
        self,
        config: NodeConfig,
        arena: Arena,
        tier: RamTier,
        disk: DiskTier | None,
        sessions: Sessions,
        peers: Peers,
        gate: Authorizer,
    ) -> None:
        self._config = config
        self._arena, self._tier = arena, tier
        self.authorizer = gate
        self._inventory = Inventory(tier)
        self.content = Content(arena, tier)
        self.sessions = sessions
        self.tenants, self.traffic = sessions.tenants, sessions.traffic
        self.instance_id = os.urandom(8)
        self.bulk_port = self.metrics_port = 0
        self.shm_status: Callable[[], pb.ShmStatus] | None = None  # of a node with shared memory
        # of the processes that serve gRPC
        self.gateway_status: Callable[[], list[pb.GatewayStatus]] = list
        self.gateway_ends: Counter[str] = Counter()  # by why
        self.tls_status: Callable[[], pb.TlsStatus] | None = None  # of a node with TLS
        self.draining = False
        self.peers = peers
        self.membership = peers.membership
        self.cluster = ClusterCalls(peers)
        listing = Listing(self._inventory, self.cluster, config.batch_keys_max)
        self.recorder = Recorder(tier.namespace)
        self.hot_prefixes = HotPrefixes()
        self.hints = Hints(config, tier)
        # Called with a removed namespace, and the removal's id
        self.on_removed: Callable[[bytes, bytes], None] = lambda digest, removal: None
        self.durability = Durability(tier, disk, config.flush_s)
        self._identity_calls = IdentityCalls(gate)
        self._verifying = Verifying(tier, self.content, self.durability)
        disk_calls = DiskCalls(self.durability, peers.replicator, lambda: self.draining)
        self.erasure = Erasure(tier, disk, self.durability, peers.replicator, lambda: self.draining)
        self.write_acks = WriteAcks(self.durability, sessions, peers)
        remedy = "send smaller batches, or fewer at a time"
        self.requests = Budget(make_limit("bytes of large requests", REQUESTS_NBYTES_MAX, remedy))
        self.followers = Followers(peers.membership)
        self.feed = Feed(tier, lambda: self.draining, lambda: self.membership.in_cluster)
        self.peer_queue = PerPeerQueue()
        self.request_parser = Requests(config, self.requests, self.peer_queue)
        self._long_calls = {
            op: Budget(make_limit(f"{op} calls", count, "wait for those that run"))
            for op, count in LONG_CALLS.items()
        }
        self._status = Status(config, arena, tier, disk)
        self.limits = _limits(config)
        self._unary = self._handlers(listing, disk_calls)

    def _handlers(
        self, listing: Listing, disk_calls: DiskCalls
    ) -> dict[str, Callable[[Any, Caller], Any]]:
        """Return the handler of each unary operation."""
        return {
            "hello": self._hello,
            "open_namespace": self._open_namespace,
            "list_namespaces": self._list_namespaces,
            "lookup": self._lookup,
            "verify": self._verify,
            "remove": self._remove,
            "pin": self._pin,
            "unpin": self._unpin,
            "hint": self._hint,
            "list": listing.list_pages,
            "feed": self._feed,
            "query": self._query,
            "stat": listing.stat,
            "node_status": self._node_status,
            "remove_namespace": self._remove_namespace,
            "forget": self._forget,
            "flush": disk_calls.flush,
            "scrub": disk_calls.scrub,
            "recover": disk_calls.recover,
            "drain": self.cluster.drain,
            "sweep": self.cluster.sweep,
            "record": self.recorder.record,
            "events": self.cluster.list_events,
            "push_identities": self._identity_calls.push,
        }

    def call(self, op: str, request: Any, caller: Caller) -> Any:
        """Return the reply to a unary request.

        `op` is its field's name in BulkRequest.
        """
        try:  # as `_ErrorBoundary`, which costs half a microsecond
            principal = self.authorizer.admit(op, request, caller)
            if op != "hello":
                self.tenants.begin(principal, request)
            budget = self._long_calls.get(op)
            if budget is None or caller is THE_NODE:
                return self._unary[op](request, caller)
            with budget.lent(caller.peer):
                return self._unary[op](request, caller)
        except KVStoreError:
            raise
        except Exception as error:
            raise _unexpected(op, error) from error

    def close(self) -> None:
        """Close everything that is open."""
        self.hints.close()
        self._status.memory.close()
        self.followers.close()

    # ---- transfers -----------------------------------------------------------------------

    def begin_put(
        self, session: Session, request: pb.PutRequest
    ) -> tuple[pb.PutReply, list[memoryview]]:
        """Reserve slots.

        Return statuses and, for each WRITE, the memory that takes the page.
        """
        with _ErrorBoundary("put", session.abort):
            principal = self.authorizer.admit("put", request, session.caller)
            self.tenants.begin(principal, request)
            if self.draining:
                raise Unavailable("this node is draining and takes no new pages")
            # A list is faster to iterate
            hashes, page_nbytes = request.prefix_hashes[:], request.page_nbytes
            check_prefix_hashes(hashes, self._config.batch_keys_max, distinct=True)
            self._check_nbytes(len(hashes) * page_nbytes)
            self.write_acks.check(request)
            session.put_charge = self.tenants.charge(principal)
            # A page replicated by a member is this node's own, not a copy.
            copies = (
                ()
                if request.forwarded_by
                else self.peers.remote_pages.copies(request.namespace, hashes)
            )
            result = session.reserve(request.namespace, hashes, page_nbytes, copies)
            self.write_acks.begin(session, request, result)
            if self.recorder.on and not request.forwarded_by:
                self.recorder.note(request.namespace, hashes, stored=True)
            session.put_charge.add_transferred(len(result.pages) * page_nbytes)
            verdicts: Any = result.verdicts
            offsets = [page.offset for page in result.pages]
            if session.maps_arena:
                return pb.PutReply(verdicts=verdicts, offsets=offsets), []
            return pb.PutReply(verdicts=verdicts), self._arena.views(offsets, page_nbytes)

    def commit_put(self, session: Session, request: pb.CommitRequest) -> pb.CommitReply:
        """Make pages visible whose bytes are complete.

        An invalid commit aborts the put.
        """
        with _ErrorBoundary("commit", session.abort):
            pages, put, leaves = session.reserved, session.put_request, request.leaves[:]
            wanted = len(pages)
            nbytes = LEAF_SUM_NBYTES * len(cuts(put.page_nbytes))
            if not wanted or len(leaves) != wanted or {*map(len, leaves)} != {nbytes}:
                raise InvalidRequest(
                    f"a commit of the leaves of {len(leaves)} pages for {wanted} written ones; "
                    f"send {nbytes} bytes for each"
                )
            stored = session.commit(leaves, -(-put.ttl_ms // 1000))
            self.traffic.count_put(session.caller.wire, wanted * put.page_nbytes)
            self.write_acks.wait_for(session, pages)
            return pb.CommitReply(stored=stored)

    def begin_get(
        self,
        session: Session,
        request: pb.GetRequest,
        part: Callable[[pb.GetReply], None] | None = None,
    ) -> tuple[int, pb.GetReply, Iterator[memoryview]]:
        """Hold the pages until `session.release`.

        Return how many bytes to send, the reply, and the memory. `part` is called, by any thread,
        with replies about the first keys while pages of others are read; the last reply is about
        the rest.
        """
        with _ErrorBoundary("get", session.release):
            began_ns = monotonic_ns()
            principal = self.authorizer.admit("get", request, session.caller)
            self.tenants.begin(principal, request)
            hashes = request.prefix_hashes[:]  # a list, which is faster to iterate
            check_prefix_hashes(hashes, self._config.batch_keys_max, distinct=False)
            space = self._tier.namespace(request.namespace)
            page_nbytes = space.page_nbytes
            asked = request.ranges
            if len(hashes) * len(asked) > GET_PIECES_MAX:
                what = f"{len(asked)} ranges of {len(hashes)} keys"
                raise InvalidRequest(
                    f"{what} are more than {GET_PIECES_MAX} pieces; split the batch"
                )
            ranges = [(part.offset, part.nbytes) for part in asked] if asked else []
            wanted_nbytes = page_nbytes
            if ranges:
                check_ranges(ranges, page_nbytes)
                wanted_nbytes = sum(nbytes for _, nbytes in ranges)
            self._check_nbytes(len(hashes) * wanted_nbytes)
            if ranges:
                self._check_nbytes(len(set(hashes)) * hashed_nbytes(page_nbytes, ranges), "checks")
            parts = parts_wanted(space, ranges)
            near = _near_deadline(request) if request.near else None
            session.tenant, session.charge = principal.tenant, self.tenants.charge(principal)
            ready = ReadyRun(part, page_nbytes, self._tier.clock_s) if part and not ranges else None
            pages = session.acquire(
                request.namespace,
                hashes,
                request.prefix_only,
                wanted_nbytes,
                parts,
                near,
                ready.some_ready if ready else None,
            )
            found, sums = [page for page in pages if page is not None], None
            if ranges:
                sums = self.content.checksums(
                    found, ranges, session.charge, partial(self._check_there, session)
                )
                pages = [page if page in sums else None for page in pages]
                found = [page for page in found if page in sums]
            if ready and ready.count:
                reply = ready.reply(pages[ready.count :])
            else:
                reply = reply_about(pages, self._tier.clock_s, sums)
                if session.maps_arena:
                    reply.offsets.extend(offsets_of(found, ranges))
            session.charge.add_transferred(len(found) * wanted_nbytes)
            self.traffic.count_get(
                session.tier, session.caller.wire, len(found) * wanted_nbytes, began_ns
            )
            if session.maps_arena:
                return 0, reply, iter(())
            return len(found) * wanted_nbytes, reply, self.content.views(found, ranges)

    def _check_nbytes(self, nbytes: int, does: str = "moves") -> None:
        if nbytes > self._config.batch_nbytes_max:
            raise InvalidRequest(
                f"the batch {does} {nbytes} bytes, at most {self._config.batch_nbytes_max} "
                "(batch_nbytes_max); split it"
            )

    # ---- unary ---------------------------------------------------------------------------

    def _hello(self, request: pb.HelloRequest, caller: Caller) -> pb.HelloReply:
        if request.protocol_version and not speaks(request.protocol_version):
            raise ProtocolError(
                f"client speaks protocol {request.protocol_version}, this node {PROTOCOL_VERSION}; "
                "update the older one"
            )
        hello = pb.HelloReply(
            protocol_version=PROTOCOL_VERSION,
            version=kvstore.__version__,
            instance_id=self.instance_id,
            bulk_port=self.bulk_port,
            limits=self.limits,
        )
        principal = self.authorizer.principal_of(caller)
        if principal is not EVERYBODY:
            hello.tenant, hello.role = principal.tenant, principal.role.name.lower()
        if self.shm_status:
            hello.shm_refused = self.authorizer.access.why_no_arena(principal)
            if not hello.shm_refused:
                hello.shm_socket, hello.arena_nbytes = self.shm_status().socket, self._arena.nbytes
        # A node that joins checks its own address with a hello without a version
        if request.protocol_version or not self.membership.joining:
            self.membership.add_view(hello)
        return hello

    def _open_namespace(
        self, request: pb.OpenNamespaceRequest, caller: Caller
    ) -> pb.OpenNamespaceReply:
        nbytes = request.namespace.ByteSize()
        if nbytes > DESCRIPTION_NBYTES_MAX:  # before anything is computed from it
            raise InvalidRequest(
                f"the description of this namespace has {nbytes} bytes, allowed are "
                f"{DESCRIPTION_NBYTES_MAX}; shorten its names, or put layers of one shape into one "
                "group"
            )
        index, created = self._tier.open_namespace(
            namespace_value(request.namespace), request.digest, caller.peer
        )
        return pb.OpenNamespaceReply(page_nbytes=index.page_nbytes, created=created)

    def _list_namespaces(
        self, request: pb.ListNamespacesRequest, caller: Caller
    ) -> pb.ListNamespacesReply:
        principal, infos = self.authorizer.principal_of(caller), self._status.namespaces()[1]
        return pb.ListNamespacesReply(namespaces=self.authorizer.visible_to(principal, infos))

    def _lookup(self, request: pb.LookupRequest, caller: Caller) -> pb.LookupReply:
        digest, touch = request.namespace, request.touch
        prefix_hashes = request.prefix_hashes[:]  # a list is faster to iterate
        check_prefix_hashes(prefix_hashes, self._config.batch_keys_max, distinct=False)
        on_disk: list[int] = []
        present = self._tier.lookup(digest, prefix_hashes, touch, on_disk)
        tiers = _tiers(present, on_disk, Tier.DISK) if on_disk else b""
        if self.recorder.on:
            self.recorder.note(digest, prefix_hashes, touch)
        if request.near and caller.may_wait and (touch or False in present):
            further = self._look_further(request, prefix_hashes, present)
            if further and not touch:
                tiers = _tiers(tiers or present, further, Tier.PEER)
                with self._tier.lock:
                    self._tier.namespace(digest).counters.pages_hit_peer += len(further)
        if not touch:
            self.hot_prefixes.observe(digest, prefix_hashes, present)
        return lookup_reply(present, tiers)

    def _look_further(
        self, request: pb.LookupRequest, prefix_hashes: Sequence[bytes], present: list[bool]
    ) -> list[int]:
        """Add the pages that other members have; return their positions.

        A use of a copy counts at its owners, too: those of a chain that came here in parts, its end
        last, would evict its head first.
        """
        digest, deadline = request.namespace, _near_deadline(request)
        copies = self.peers.remote_pages.copies(digest, prefix_hashes) if request.touch else ()
        asked = dict.fromkeys(
            h for h, there in zip(prefix_hashes, present, strict=True) if not there or h in copies
        )
        namespace = self._tier.namespace(digest).value
        found = self._tier.promotion.lookup(namespace, list(asked), request.touch, deadline)
        further = [
            index
            for index, prefix_hash in enumerate(prefix_hashes)
            if not present[index] and prefix_hash in found
        ]
        for index in further:
            present[index] = True
        return further

    def _feed(self, request: pb.FeedRequest, caller: Caller) -> FeedReply:
        return self.feed.poll(request, caller, self._seen_by(caller))

    def _query(self, request: pb.QueryRequest, caller: Caller) -> pb.QueryReply:
        check_prefix_hashes(request.prefix_hashes, self._config.batch_keys_max, distinct=True)
        return query(self._tier, request, self._seen_by(caller))

    def _seen_by(self, caller: Caller) -> Callable[[Model], bool]:
        """Return a function that tells whether the caller may see a model."""
        principal, sees = self.authorizer.principal_of(caller), self.authorizer.access.sees
        return lambda model: sees(principal, model.value.tenant, model.value.model)

    def _verify(self, request: pb.VerifyRequest, caller: Caller) -> pb.VerifyReply:
        hashes = list(request.prefix_hashes)
        check_prefix_hashes(hashes, self._config.batch_keys_max, distinct=True)
        self._check_nbytes(len(hashes) * self._tier.namespace(request.namespace).page_nbytes)
        charge = self.tenants.charge(self.authorizer.principal_of(caller))
        return self._verifying.verify(
            request.namespace, hashes, charge, partial(self._check_waiting, caller)
        )

    def _check_waiting(self, caller: Caller) -> None:
        """Raise if the caller has left or the node stops, between the steps of a long call."""
        self._check_there(caller)
        if self.draining:
            raise Unavailable("this node is draining")

    def _check_there(self, caller: Caller | Session) -> None:
        if caller.has_left():
            raise Unavailable("the caller has left")

    def _remove(self, request: pb.RemoveRequest, caller: Caller) -> pb.RemoveReply:
        check_prefix_hashes(request.prefix_hashes, self._config.batch_keys_max, distinct=True)
        removed = self._tier.remove(request.namespace, request.prefix_hashes)
        # the current view: a member that joined before may have pages from here
        view = self.membership.view
        return pb.RemoveReply(removed=removed, view_number=view.number if view else 0)

    def _pin(self, request: pb.PinRequest, caller: Caller) -> pb.PinReply:
        check_prefix_hashes(request.prefix_hashes, self._config.batch_keys_max, distinct=True)
        if not 1 <= request.ttl_ms <= self._config.pin_ttl_ms_max:
            raise InvalidRequest(
                f"ttl_ms {request.ttl_ms} is not in 1..{self._config.pin_ttl_ms_max} "
                "(pin_ttl_ms_max)"
            )
        return pb.PinReply(
            pinned=self._tier.pin(request.namespace, request.prefix_hashes, request.ttl_ms)
        )

    def _unpin(self, request: pb.UnpinRequest, caller: Caller) -> pb.UnpinReply:
        check_prefix_hashes(request.prefix_hashes, self._config.batch_keys_max, distinct=True)
        return pb.UnpinReply(unpinned=self._tier.unpin(request.namespace, request.prefix_hashes))

    def _hint(self, request: pb.HintRequest, caller: Caller) -> pb.HintReply:
        if request.action == pb.HINT_PREFETCH and self.draining:
            raise Unavailable("this node is draining and fetches no pages")
        charge = self.tenants.charge(self.authorizer.principal_of(caller))
        reply = self.hints.hint(request, caller.peer, charge.add_processed)
        if self.recorder.on and request.session and request.prefix_hashes:
            self.recorder.note(
                request.namespace,
                request.prefix_hashes[:],
                stored=True,
                session=request.session,
                ended=ends_session(request),
            )
        return reply

    def _forget(self, request: pb.ForgetRequest, caller: Caller) -> pb.ForgetReply:
        self.hints.sessions.drop(request.tenant)
        return self.erasure.forget(request, caller)

    def _node_status(self, request: pb.NodeStatusRequest, caller: Caller) -> pb.NodeStatusReply:
        status = self._status.node(
            instance_id=self.instance_id,
            draining=self.draining,
            session_count=self.sessions.count,
            limits=self.limits,
            bulk_port=self.bulk_port,
            metrics_port=self.metrics_port,
            shm=self.shm_status() if self.shm_status else None,
            peers=self.peers.status(),
            refused_calls=self.authorizer.audit.refused_count,
            tls=self.tls_status() if self.tls_status else None,
            tenants=self.tenants.uses(),
            identities=self._identity_calls.status(),
            request_times=self.traffic.times(),
            hints=self.hints.status(),
            gateways=self.gateway_status(),
            gateway_ends=[
                pb.GatewayEnd(why=why, count=count)
                for why, count in self.gateway_ends.copy().items()
            ],
        )
        principal = self.authorizer.principal_of(caller)
        return (
            status
            if principal.of_all
            else redact_for_tenant(
                status, self.authorizer.visible_to(principal, status.namespaces), principal.tenant
            )
        )

    def _remove_namespace(
        self, request: pb.RemoveNamespaceRequest, caller: Caller
    ) -> pb.RemoveNamespaceReply:
        check_removal(request.removal)
        removed = remove_namespace(self._tier, request.namespace)
        with self._tier.lock:
            # Unless a page is put into it: the caller opens it again
            self._tier.namespaces.close(request.namespace)
        self.on_removed(request.namespace, request.removal)
        return pb.RemoveNamespaceReply(removed=removed)


def _limits(config: NodeConfig) -> pb.Limits:
    return pb.Limits(
        batch_keys_max=config.batch_keys_max,
        batch_nbytes_max=config.batch_nbytes_max,
        page_nbytes_max=config.extent_nbytes,
        message_nbytes_max=MESSAGE_NBYTES_MAX,
        pin_ttl_ms_max=config.pin_ttl_ms_max,
    )


def _tiers(known: Sequence[int], indices: Sequence[int], tier: Tier) -> bytes:
    """Return the tier of each key, with `tier` at these indices."""
    tiers = bytearray(known)
    for index in indices:
        tiers[index] = tier
    return bytes(tiers)


def _near_deadline(request: pb.GetRequest | pb.LookupRequest) -> Deadline:
    """Return the deadline for calls to other members."""
    return Deadline(min(request.wait_ms / 1000 or NEAR_S_MAX, NEAR_S_MAX))


class _ErrorBoundary:
    """Release what a failed request holds, and turn unexpected errors into one for the caller.

    It surrounds every request, on every transport: an error ends the request, not the connection.
    Unexpected errors are logged here and answered INTERNAL. `undo` releases what the session holds.
    """

    __slots__ = ("_op", "_undo")

    def __init__(self, op: str, undo: Callable[[], None] | None = None) -> None:
        self._op = op
        self._undo = undo

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if not isinstance(error, Exception):
            return
        if self._undo is not None:
            self._undo()
        if not isinstance(error, KVStoreError):
            raise _unexpected(self._op, error) from error


def _unexpected(op: str, error: Exception) -> KVStoreError:
    """Log an error that is the node's fault, and return the one for the caller."""
    # So that the log and the caller name the same id
    trace = current() or named(os.urandom(8).hex())
    with within(trace):
        log.error("%s failed", op, exc_info=error)
    what = f"{op} failed inside the node ({type(error).__name__})"
    return KVStoreError(f"{what}; see request {trace.request_id} in the node's log")
