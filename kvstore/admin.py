"""Administer one node or all members of a cluster: list, verify, pin, remove, drain and status."""

import functools
import heapq
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import not_, or_
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.cluster.calls import check_goes_on, keyed_replies, per_key, wait_ms
from kvstore.cluster.fan_out import Ask, Call, FanOut, Indices, select
from kvstore.cluster.hints import end_session, send_hint
from kvstore.cluster.routing import FIRST_SHARE, Away
from kvstore.cluster.view import View
from kvstore.config import ClientConfig
from kvstore.deadline import Deadline
from kvstore.errors import KVStoreError
from kvstore.keys import REMOVAL_NBYTES, Namespace, check_prefix_hashes
from kvstore.log_rate import LogRate
from kvstore.messages import result, results
from kvstore.otel import set_up as set_up_spans
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results import VerifyResult
from kvstore.results.hints import Hint, HintAction, HintResult
from kvstore.transports.channel import NodeChannel, NodeConnection
from kvstore.transports.connections import check_process
from kvstore.transports.tls import check_tls

if TYPE_CHECKING:
    from kvstore.results.replies import (
        DrainProgress,
        Events,
        FeedEvent,
        ForgetResult,
        NamespaceInfo,
        NodeStatus,
        PageStat,
        PushedIdentities,
        QueryResult,
        Recorded,
        ScrubResult,
        SweepResult,
    )

log = logging.getLogger(__name__)
log.addFilter(LogRate())
Result = TypeVar("Result")

# keys of one call of this client; it splits them by the node's own limit
PREFIX_HASHES_MAX = 1 << 20
REMOVALS_MAX = 8  # rounds of removals while a tenant keeps putting pages
FORGET_TIMEOUT_S = 600.0  # a large disk's rows are rewritten and scanned at the disk's pace
_FORGOTTEN = ("namespaces", "pages", "ram_nbytes", "keys_destroyed", "left")
RECOVER_TIMEOUT_S = 45.0  # a node waits 30 s for a hanging disk, then reports it


class Admin:
    """Administer one node, or all members of a cluster.

    `kvstore.Client` inherits from it.

    A call to all members raises the error of one member after the others have finished. With
    `away`, members that could not be reached are recorded there by id, and the call returns the
    answers of the others. If no member answered, it raises.
    """

    def __init__(self, config: ClientConfig) -> None:
        """Check the TLS files and open nothing yet. Raises ConfigError for unusable files."""
        check_tls(config)
        set_up_spans()
        self.config = config
        self._pid = os.getpid()
        self._fan_out = FanOut(config)

    def open(self, namespace: Namespace, timeout_s: float | None = None) -> None:
        """Register the namespace now, at the single node or at the near node.

        Every other call registers it on demand.
        """
        self._fan_out.open(namespace, self._deadline(timeout_s))

    def verify(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        timeout_s: float | None = None,
        away: Away | None = None,
    ) -> VerifyResult:
        """Make nodes verify their copies of these pages and drop corrupt ones."""
        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=True)

        def ask(indices: Indices, connection: NodeConnection, deadline: Deadline) -> list[int]:
            hashes = select(prefix_hashes, indices)
            replies = keyed_replies(
                connection, "verify", pb.VerifyRequest, namespace, hashes, deadline
            )
            return [health for reply in replies for health in _healths(reply)]

        deadline = self._deadline(timeout_s)
        found = self._fan_out.broadcast(
            ask, namespace, prefix_hashes, deadline, max, int(pb.PAGE_ABSENT), away
        )
        return VerifyResult(*map(found.count, (pb.PAGE_INTACT, pb.PAGE_DROPPED, pb.PAGE_ABSENT)))

    def remove(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        timeout_s: float | None = None,
        away: Away | None = None,
    ) -> list[bool]:
        """Remove pages, pinned ones too.

        Return True for each page that existed.

        All members of a cluster are called, also members of a view that arrives meanwhile. Removals
        are repeated until no page is found: a member may have replicated a page just before it
        removed it.
        """
        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=True)
        deadline, nodes = self._deadline(timeout_s), self._fan_out.nodes
        view, every = nodes.found(deadline), list(range(len(prefix_hashes)))
        # A member that hangs costs the first round its time; it is left out of the others.
        limit = (
            deadline
            if view is None or away is None
            else deadline.sooner(deadline.remaining() * FIRST_SHARE)
        )
        removed, asked = [False] * len(prefix_hashes), every
        while asked:
            said = self._removed(namespace, select(prefix_hashes, asked), limit, away)
            there = [index for index, was in zip(asked, said, strict=True) if was]
            for index in there:
                removed[index] = True
            if view is None:
                break
            asked = there if nodes.view is view else every
            view, limit = nodes.view, deadline
        return removed

    def _removed(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        deadline: Deadline,
        away: Away | None,
    ) -> list[bool]:
        """Remove pages at all members, with one call to each."""

        def ask(indices: Indices, connection: NodeConnection, deadline: Deadline) -> list[bool]:
            hashes = select(prefix_hashes, indices)
            replies = keyed_replies(
                connection, "remove", pb.RemoveRequest, namespace, hashes, deadline
            )
            self._fan_out.nodes.update_view_if_newer(
                connection, max((reply.view_number for reply in replies), default=0), deadline
            )
            return per_key(replies, "removed", hashes)

        return self._fan_out.broadcast(ask, namespace, prefix_hashes, deadline, or_, False, away)

    def pin(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        ttl_s: float,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Protect pages from eviction for `ttl_s` seconds.

        Return True for each page that `get` would find.
        """
        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=True)
        message = functools.partial(pb.PinRequest, ttl_ms=max(0, round(ttl_s * 1000)))
        ask = _asks("pin", "pinned", message, namespace, prefix_hashes)
        return self._fan_out.route(
            ask, namespace, prefix_hashes, self._deadline(timeout_s), not_, False
        )

    def unpin(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        timeout_s: float | None = None,
        away: Away | None = None,
    ) -> list[bool]:
        """Unpin all copies of pages.

        Return True for each page that was pinned.
        """
        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=True)
        ask = _asks("unpin", "unpinned", pb.UnpinRequest, namespace, prefix_hashes)
        return self._fan_out.broadcast(
            ask, namespace, prefix_hashes, self._deadline(timeout_s), or_, False, away
        )

    def hint(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        hint: Hint,
        timeout_s: float | None = None,
    ) -> HintResult:
        """Tell the store what is known of pages' future; return what became of it.

        `prefix_hashes`: a chain, head first; empty for `DELETE`.
        """
        deadline = self._deadline(timeout_s)
        if hint.action is not HintAction.DELETE:
            check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=True)
            return send_hint(self._fan_out, namespace, prefix_hashes, hint, deadline)
        deleted = end_session(self._fan_out, namespace, hint, deadline)
        if deleted and self._fan_out.nodes.view is not None:  # copies of others
            self.remove(namespace, deleted, deadline.remaining())
        return HintResult(deleted=len(deleted))

    def stat(
        self, namespace: Namespace, prefix_hashes: Sequence[bytes], timeout_s: float | None = None
    ) -> "list[PageStat]":
        """Return one PageStat per key; `present` is False for a miss."""

        def ask(
            indices: Indices, connection: NodeConnection, deadline: Deadline
        ) -> list[pb.PageStat]:
            hashes = select(prefix_hashes, indices)
            return per_key(
                keyed_replies(connection, "stat", pb.StatRequest, namespace, hashes, deadline),
                "pages",
                hashes,
            )

        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=False)
        absent, deadline = pb.PageStat(), self._deadline(timeout_s)
        found = self._fan_out.route(ask, namespace, prefix_hashes, deadline, _not_present, absent)
        return [
            result(page) if page.prefix_hash else result(pb.PageStat(prefix_hash=prefix_hash))
            for page, prefix_hash in zip(found, prefix_hashes, strict=True)
        ]

    def list_pages(
        self, namespace: Namespace, key_prefix: bytes = b"", limit: int = 0, after: bytes = b""
    ) -> "Iterator[PageStat]":
        """Yield a namespace's pages, ordered by prefix hash, in chunks from the nodes.

        `limit` 0 yields all; `after` skips hashes up to that one. The lists of a cluster's members
        are merged; a page with several copies is yielded once.
        """
        first = pb.ListRequest(
            namespace=namespace.digest, key_prefix=key_prefix, page_token=after, limit=limit
        )
        replies = answered(
            self._fan_out.each(_calls("list", first), namespace, self._deadline(None))
        )
        channels = self._fan_out.nodes.all()
        parts = [
            self._list_of(channels[address], namespace, first, reply)
            for address, reply in replies.items()
            if address in channels
        ]
        merged = heapq.merge(*parts, key=lambda page: page.prefix_hash)
        distinct = (
            next(copies)
            for _, copies in itertools.groupby(merged, key=lambda page: page.prefix_hash)
        )
        yield from map(result, itertools.islice(distinct, limit or None))

    def _list_of(
        self, channel: NodeChannel, namespace: Namespace, first: pb.ListRequest, reply: pb.ListReply
    ) -> Iterator[pb.PageStat]:
        """Yield the pages of a node's first reply, then those of its further replies."""
        request, limit, count = pb.ListRequest(), first.limit, 0
        request.CopyFrom(first)
        while True:
            check_goes_on(request, reply)
            yield from reply.pages
            request.page_token, count = reply.next_page_token, count + len(reply.pages)
            if not request.page_token or (limit and count >= limit):
                return
            request.limit = limit - count if limit else 0
            reply = channel.run(_calls("list", request), namespace, self._deadline(None))

    def namespaces(self, timeout_s: float | None = None) -> "list[tuple[Namespace, NamespaceInfo]]":
        """Return all namespaces and their counters, summed over the members that answer."""
        request, deadline = pb.ListNamespacesRequest(), self._deadline(timeout_s)
        replies = answered(self._fan_out.each(_calls("list_namespaces", request), None, deadline))
        return summed(info for reply in replies.values() for info in results(reply.namespaces))

    def view(self, timeout_s: float | None = None) -> View | None:
        """Return the newest view of the cluster; None for a node without a cluster."""
        return self._fan_out.nodes.found(self._deadline(timeout_s))

    def node_status(self, timeout_s: float | None = None) -> "NodeStatus":
        """Return the node's own status: state, memory, namespaces, counters, limits."""
        found: NodeStatus = self._result("node_status", pb.NodeStatusRequest(), timeout_s)
        return found

    def statuses(self, timeout_s: float | None = None) -> "dict[str, NodeStatus | KVStoreError]":
        """Return each node's own status, or the error of the call, by address."""
        return self._each_result("node_status", pb.NodeStatusRequest(), timeout_s)

    def remove_namespace(self, namespace: Namespace, timeout_s: float | None = None) -> int:
        """Remove a namespace and all its pages from every tier.

        Return how many entries were removed.
        """
        request = pb.RemoveNamespaceRequest(
            namespace=namespace.digest, removal=os.urandom(REMOVAL_NBYTES)
        )
        deadline = self._deadline(timeout_s)
        removed = 0
        while True:  # as in `remove`
            count = sum(
                int(reply.removed)
                for reply in self._all("remove_namespace", request, namespace, deadline)
            )
            removed = removed or count
            if not count or self._fan_out.nodes.view is None:
                return removed

    def forget(
        self, tenant: str, timeout_s: float = FORGET_TIMEOUT_S, away: Away | None = None
    ) -> "ForgetResult":
        """Erase everything that a tenant stores, in RAM and on disk.

        Return sums over the nodes.

        `left` is 0 if nothing is left; `why` gives the reason otherwise. `plain_disk`: bytes on an
        unencrypted disk may stay on the medium until other pages overwrite them. Pages that the
        tenant puts meanwhile are new pages and may stay.
        """
        deadline = self._deadline(timeout_s)
        request = pb.ForgetRequest(tenant=tenant, removal=os.urandom(REMOVAL_NBYTES))
        request.remove_only = self.view(timeout_s) is not None
        total = pb.ForgetReply()
        for _ in range(REMOVALS_MAX if request.remove_only else 0):
            # As in `remove`: a member may replicate a page meanwhile.
            replies = self._all("forget", request, None, deadline, away)
            total.pages += (count := sum(int(reply.pages) for reply in replies))
            total.ram_nbytes += sum(int(reply.ram_nbytes) for reply in replies)
            if not count:
                break
        request.remove_only = False
        request.wait_ms = wait_ms(deadline)
        for reply in self._all("forget", request, None, deadline, away):
            for field in _FORGOTTEN:
                setattr(total, field, getattr(total, field) + getattr(reply, field))
            total.plain_disk |= reply.plain_disk
            total.why.extend(reply.why)
        forgotten: ForgetResult = result(total)
        return forgotten

    def flush(self, timeout_s: float | None = None, away: Away | None = None) -> int:
        """Wait until all visible pages survive power loss.

        In a cluster, pages that were put at a near node are replicated to their owners first.
        Return the number of pages on disk.
        """

        def run(connection: NodeConnection, deadline: Deadline) -> pb.FlushReply:
            reply: pb.FlushReply = connection.wire.call(
                "flush", pb.FlushRequest(wait_ms=wait_ms(deadline)), deadline
            )
            return reply

        deadline = self._deadline(timeout_s)
        replies = self._fan_out.all(run, None, deadline, away)
        if any(reply.pages_replicated for reply in replies):
            # An owner may have been flushed before the pages of a near node reached it
            replies = self._fan_out.all(run, None, deadline, away)
        return sum(int(reply.pages_on_disk) for reply in replies)

    def scrub(
        self, cursor: bytes = b"", nbytes_max: int = 0, timeout_s: float | None = None
    ) -> "ScrubResult":
        """Make the node verify a part of its disk.

        Continue with `next_cursor` until it is empty.
        """
        request = pb.ScrubRequest(cursor=cursor, nbytes_max=nbytes_max)
        found: ScrubResult = self._result("scrub", request, timeout_s)
        return found

    def recover(self, timeout_s: float = RECOVER_TIMEOUT_S) -> None:
        """Make the node use its failed disk again.

        Raises Exhausted if it still fails, or hangs for 30 s.
        """
        self._only("recover", pb.RecoverRequest(), timeout_s)

    def drain(self, end: bool = False, timeout_s: float | None = None) -> "DrainProgress":
        """Drain the named member: it hands its pages to the members that own them without it.

        Return the progress. `end` cancels the drain: the member serves again.

        Raises InvalidRequest at a node without a cluster, or in a cluster with a fixed list of
        members.
        """
        found: DrainProgress = self._result("drain", pb.DrainRequest(end=end), timeout_s)
        return found

    def forget_member(self, member: str, timeout_s: float | None = None) -> None:
        """Stop reporting a lost member, which will not return.

        Any member takes the call. Raises InvalidRequest if it is not lost, or if the cluster has a
        fixed list.
        """
        self._only("drain", pb.DrainRequest(forget=member), timeout_s)

    def sweep(self, dry: bool = False, timeout_s: float | None = None) -> "SweepResult":
        """Make the named member fetch owned pages that it lacks; `dry` only lists them."""
        found: SweepResult = self._result("sweep", pb.SweepRequest(dry=dry), timeout_s)
        return found

    def events(
        self, since_unix_ms: int = 0, limit: int = 0, timeout_s: float | None = None
    ) -> "dict[str, Events | KVStoreError]":
        """Return the newest events that each node keeps, or the error of the call, by address.

        Events are ordered by time. `limit` 0 returns all that are kept.
        """
        request = pb.EventsRequest(since_unix_ms=max(0, since_unix_ms), limit=max(0, limit))
        return self._each_result("events", request, timeout_s)

    def feed(
        self, model: str = "", idle_s: float = 5.0, timeout_s: float | None = None
    ) -> "Iterator[FeedEvent]":
        """Yield which blocks are stored, and then what is stored and removed, without end.

        `model`: only that model's. It reconnects by itself: after a gap, a restart of a node or a
        change of the cluster comes a reset, and then a new snapshot. Without news it yields an idle
        event at least every `idle_s`. In a cluster the members' feeds are merged: a block counts
        once, and as long as an owner that can be reached has each of its pages.
        """
        from kvstore.cluster.feed import feed  # with the replies' dataclasses, which take 35 ms

        timeout_s = self._deadline(timeout_s).seconds
        return feed(self._fan_out.nodes, model, idle_s, timeout_s)

    def query(
        self,
        model: str,
        prefix_hashes: Sequence[bytes],
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> "list[QueryResult]":
        """Return how many leading blocks of a prompt are stored, for each KV of this model's name.

        It is neither a use nor a lookup of the pages. `tenant`: empty for all that the caller may
        see. A KV is what engines with equal settings share; those without the first block are left
        out. In a cluster all members are asked; those that do not answer count
        as empty.
        """
        from kvstore.cluster.query import query  # as in `feed`

        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=True)
        about = pb.QueryRequest(model=model, tenant=tenant)
        return query(self._fan_out, answered, about, prefix_hashes, self._deadline(timeout_s))

    def push_identities(
        self,
        content: bytes,
        force: bool = False,
        check: bool = False,
        timeout_s: float | None = None,
    ) -> "PushedIdentities":
        """Replace the identities file of the named member; `check` only validates the content.

        Return its digest, and the names of identities that it adds and removes. Raises
        InvalidRequest at a node that does not allow it, for an invalid file, or, without `force`,
        for one that takes rights from this client or from members.
        """
        request = pb.PushIdentitiesRequest(content=content, force=force, check=check)
        found: PushedIdentities = self._result("push_identities", request, timeout_s)
        return found

    def record(
        self,
        seconds: float = 0.0,
        recording: bytes = b"",
        end: bool = False,
        timeout_s: float | None = None,
    ) -> "Recorded":
        """Record the node's requests for some seconds, or fetch the newly recorded ones.

        Raises Exhausted while another client records there.
        """
        request = pb.RecordRequest(ms=round(seconds * 1000), recording=recording, end=end)
        found: Recorded = self._result("record", request, timeout_s)
        return found

    # ---- one call ------------------------------------------------------------------------

    def _all(
        self,
        op: str,
        request: Any,
        namespace: Namespace | None,
        deadline: Deadline,
        away: Away | None = None,
    ) -> list[Any]:
        return self._fan_out.all(_calls(op, request), namespace, deadline, away)

    def _only(self, op: str, request: Any, timeout_s: float | None) -> Any:
        return self._fan_out.one(_calls(op, request), None, self._deadline(timeout_s), op)

    def _result(self, op: str, request: Any, timeout_s: float | None) -> Any:
        return result(self._only(op, request, timeout_s))

    def _each_result(self, op: str, request: Any, timeout_s: float | None) -> dict[str, Any]:
        replies = self._fan_out.each(_calls(op, request), None, self._deadline(timeout_s))
        return {
            address: reply if isinstance(reply, KVStoreError) else result(reply)
            for address, reply in replies.items()
        }

    def _single_node(self, deadline: Deadline | None = None) -> NodeChannel | None:
        """Return the channel to the only node; None for a cluster.

        Without a connection yet, make one within the deadline; without that, return the channel
        that has none.
        """
        nodes = self._fan_out.nodes
        if deadline is not None and nodes.found(deadline) is None and nodes.only.connection is None:
            nodes.only.open(None, deadline)
        return nodes.only if nodes.view is None else None

    def _deadline(self, timeout_s: float | None) -> Deadline:
        # Checked before any lock: after a fork, a thread of the parent may hold it for ever.
        check_process(self._pid)
        return Deadline(self.config.timeout_s if timeout_s is None else timeout_s)


def summed(infos: "Iterable[NamespaceInfo]") -> "list[tuple[Namespace, NamespaceInfo]]":
    """Return each namespace once, with the sums of its counters."""
    found: dict[bytes, NamespaceInfo] = {}
    for info in infos:
        found[info.digest] = found[info.digest] + info if info.digest in found else info
    return [(info.namespace, info) for info in found.values()]


def answered(outcomes: Mapping[str, Result | KVStoreError]) -> dict[str, Result]:
    """Return the answers of the nodes that answered.

    Raises the error of one of them if none did.
    """
    found = {
        address: outcome
        for address, outcome in outcomes.items()
        if not isinstance(outcome, KVStoreError)
    }
    failed = {
        address: outcome
        for address, outcome in outcomes.items()
        if isinstance(outcome, KVStoreError)
    }
    if failed and not found:
        raise next(iter(failed.values()))
    for address, error in failed.items():
        log.warning("without %s: %s", address, error)
    return found


def _calls(op: str, request: Any) -> Call[Any]:
    """Return a function that makes this call at a node."""
    return lambda connection, limit: connection.wire.call(op, request, limit)


def _asks(
    op: str, field: str, message: Any, namespace: Namespace, prefix_hashes: Sequence[bytes]
) -> Ask[bool]:
    """Return a function that sends a call about keys and reads `field` of the replies."""

    def ask(indices: Indices, connection: NodeConnection, deadline: Deadline) -> list[bool]:
        hashes = select(prefix_hashes, indices)
        return per_key(
            keyed_replies(connection, op, message, namespace, hashes, deadline), field, hashes
        )

    return ask


def _healths(reply: pb.VerifyReply) -> Sequence[int]:
    """Return the health of each page. Older nodes do not report copies elsewhere."""
    counted = (
        [pb.PAGE_INTACT] * reply.intact
        + [pb.PAGE_DROPPED] * reply.dropped
        + [pb.PAGE_ABSENT] * reply.absent
    )
    return list(reply.pages) or counted


def _not_present(page: pb.PageStat) -> bool:
    return not page.present
