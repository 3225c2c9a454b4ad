"""Route calls to the single node, to the near node, or to the members of a cluster.

single     call --> the node
near       call --> the near member, which asks the others; if it fails:
cluster    call --> view: which members own the keys? --> members, in parallel --> answers by key
                    small lookups in this thread (kvstore.transports.polled_calls), others in
                    threads
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import kvstore.tracing as tracing
from kvstore.cluster.nodes import Nodes
from kvstore.cluster.routing import (
    FIRST_SHARE,
    TRY_NEXT,
    Away,
    answers_of_all,
    broadcast,
    in_parallel,
    try_owners,
)
from kvstore.cluster.view import View
from kvstore.config import ClientConfig
from kvstore.deadline import Deadline
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, Unavailable
from kvstore.keys import Namespace
from kvstore.log_rate import LogRate
from kvstore.steps import Stepwise
from kvstore.transports.channel import NodeConnection
from kvstore.transports.parallel import ParallelTransfer
from kvstore.transports.polled_calls import call_polled, may_ask

log = logging.getLogger(__name__)
log.addFilter(LogRate())
Result = TypeVar("Result")
Answer = TypeVar("Answer")
Item = TypeVar("Item")
Indices = Sequence[int]  # positions in a call's keys
# Calls one node for some of a call's keys.
Ask = Callable[[Indices, NodeConnection, Deadline], list[Answer]]
Call = Callable[[NodeConnection, Deadline], Result]

THREADS_MAX = 32  # besides the calling threads; further members are called one after the other
# Keys routed between two checks of the deadline: about 0.03 s in the largest cluster
ROUTED_AT_ONCE = 16
KEYS_ABREAST = 512  # of one member: 17 KiB of a request, which a socket's buffer takes


def select(items: Sequence[Item], indices: Indices) -> Sequence[Item]:
    """Return the items at these indices; the sequence itself if they are all."""
    return items if len(indices) == len(items) else [items[index] for index in indices]


class FanOut:
    """Route the calls of one client.

    Thread-safe.
    """

    def __init__(self, config: ClientConfig) -> None:
        self.nodes = Nodes(config)
        self._threads = ParallelTransfer(THREADS_MAX, "kvstore-members")

    def close(self) -> None:
        """Close the connections and end the threads."""
        self.nodes.close()
        self._threads.close()

    # ---- calls about keys ------------------------------------------------------------------

    def near(
        self,
        ask: Ask[Answer],
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        deadline: Deadline,
    ) -> list[Answer] | None:
        """Return the near node's answers for all keys; None if there is no near node, or it failed.

        `ask` begins with `NodeConnection.check_asks_others`.
        """
        channel = self.nodes.near(deadline)
        if channel is None:
            return None
        limit = deadline.sooner(deadline.remaining() * FIRST_SHARE)
        try:
            return channel.run(partial(ask, range(len(prefix_hashes))), namespace, limit)
        except TRY_NEXT as error:
            log.info("near node %s: %s; asking the owners", channel.address, error)
            return None

    def route(
        self,
        ask: Ask[Answer],
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        deadline: Deadline,
        is_miss: Callable[[Answer], bool],
        default: Answer,
    ) -> list[Answer]:
        """Return an answer per key, from the single node or from the first owner that has one.

        While any member is healthy, an unreachable owner is a miss and no error, even if it owns
        every key of the call. Otherwise as `try_owners`.
        """
        try:
            view = self.nodes.found(deadline)
            if view is None:
                return self.nodes.only.run(
                    partial(ask, range(len(prefix_hashes))), namespace, deadline
                )
            owners = routes(view, namespace, prefix_hashes, deadline)
            ask_all = partial(self._ask_all, view, ask, namespace)
            return try_owners(owners, ask_all, is_miss, default, deadline)
        except (Unavailable, DeadlineExceeded):
            if not self.nodes.some_fail:
                raise
            return [default] * len(prefix_hashes)

    def broadcast(
        self,
        ask: Ask[Answer],
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        deadline: Deadline,
        combine: Callable[[Answer, Answer], Answer],
        default: Answer,
        away: Away | None = None,
    ) -> list[Answer]:
        """Return an answer per key, combined from those of all members: any may have a copy."""
        view = self.nodes.found(deadline)
        if view is None:
            return self.nodes.only.run(partial(ask, range(len(prefix_hashes))), namespace, deadline)
        everyone = [tuple(view.by_id)] * len(prefix_hashes)
        ask_all = in_parallel(partial(self._ask_member, view, ask, namespace), self._threads.run)
        return broadcast(everyone, ask_all, combine, default, deadline, away)

    def _ask_all(
        self,
        view: View,
        ask: Ask[Answer],
        namespace: Namespace,
        groups: Mapping[str, list[int]],
        limit: Deadline,
    ) -> Sequence[list[Answer] | KVStoreError]:
        """Ask members for their indices: small calls of steps in this thread, others in threads."""
        ask_member = partial(self._ask_member, view, ask, namespace)
        calls = [partial(ask_member, *group, limit) for group in groups.items()]
        if isinstance(ask, Stepwise) and _are_small(groups) and tracing.tracer is None:
            channels = [self.nodes.member(view, member) for member in groups]
            if all(may_ask(channel, namespace) for channel in channels):
                steps = [partial(ask.steps, indices) for indices in groups.values()]
                small_calls = list(zip(channels, steps, calls, strict=True))
                return call_polled(small_calls, self._threads.run, namespace, limit)
        return self._threads.run(calls)

    def _ask_member(
        self,
        view: View,
        ask: Ask[Answer],
        namespace: Namespace,
        member: str,
        indices: list[int],
        limit: Deadline,
    ) -> list[Answer]:
        return self.nodes.member(view, member).run(partial(ask, indices), namespace, limit)

    # ---- other calls -----------------------------------------------------------------------

    def one(
        self, call: Call[Result], namespace: Namespace | None, deadline: Deadline, what: str
    ) -> Result:
        """Call the single node.

        Raises InvalidRequest in a cluster.
        """
        if self.nodes.found(deadline) is not None:
            raise InvalidRequest(
                f"{what} needs one node; name a member of the cluster, with direct=True"
            )
        return self.nodes.only.run(call, namespace, deadline)

    def open(self, namespace: Namespace, deadline: Deadline) -> None:
        """Connect to the single node, or to the near one, and register the namespace there.

        A near node that does not answer is no error: the owners still do.
        """
        near = self.nodes.near(deadline)
        if near is not None:
            with contextlib.suppress(*TRY_NEXT):
                near.open(namespace, deadline.sooner(deadline.remaining() * FIRST_SHARE))
        elif self.nodes.view is None:
            self.nodes.only.open(namespace, deadline)

    def in_place(
        self, call: Call[Result], namespace: Namespace, deadline: Deadline, what: str
    ) -> Result:
        """Call the single node, or the near one, and leave time to call the owners afterwards.

        Raises InvalidRequest if there is none.
        """
        near = self.nodes.near(deadline)
        if near is None:
            return self.one(call, namespace, deadline, what)

        def ask(connection: NodeConnection, limit: Deadline) -> Result:
            connection.check_knows_members()
            return call(connection, limit)

        return near.run(ask, namespace, deadline.sooner(deadline.remaining() * FIRST_SHARE))

    def each(
        self, call: Call[Result], namespace: Namespace | None, deadline: Deadline
    ) -> dict[str, Result | KVStoreError]:
        """Return what each node returned or raised, by address."""
        if self.nodes.found(deadline) is None:
            return {self.nodes.only.address: self.nodes.only.run(call, namespace, deadline)}
        channels = self.nodes.all()
        calls = [partial(channel.run, call, namespace, deadline) for channel in channels.values()]
        return dict(zip(channels, self._threads.run(calls), strict=True))

    def all(
        self,
        call: Call[Result],
        namespace: Namespace | None,
        deadline: Deadline,
        away: Away | None = None,
    ) -> list[Result]:
        """Return what every node returned; raises as `answers_of_all` does."""
        outcomes, view = self.each(call, namespace, deadline), self.nodes.view
        ids = {member.address: member.id for member in view.members} if view else {}
        return list(
            answers_of_all(
                {ids.get(at, at): outcome for at, outcome in outcomes.items()}, away
            ).values()
        )


def _are_small(groups: Mapping[str, list[int]]) -> bool:
    """Return whether the requests for these keys can be sent without a wait."""
    return len(groups) > 1 and max(map(len, groups.values())) <= KEYS_ABREAST


def routes(
    view: View, namespace: Namespace, prefix_hashes: Sequence[bytes], deadline: Deadline
) -> list[tuple[str, ...]]:
    """Return the members to ask for each key, in order.

    Raises DeadlineExceeded: the first use of a slot costs microseconds per member. Slots computed
    by then are cached.
    """
    found: list[tuple[str, ...]] = []
    for start in range(0, len(prefix_hashes), ROUTED_AT_ONCE):
        deadline.remaining()
        found += _some_routes(view, namespace, prefix_hashes[start : start + ROUTED_AT_ONCE])
    return found


def _some_routes(
    view: View, namespace: Namespace, prefix_hashes: Sequence[bytes]
) -> list[tuple[str, ...]]:
    """Return each key's owners, then members that owned it before others joined or were drained."""
    owners = view.owners.owners(namespace.digest, prefix_hashes)
    if view.settled:
        return owners
    holders = view.holders.owners(namespace.digest, prefix_hashes)
    return [
        (*own, *(some for some in held if some not in own))
        for own, held in zip(owners, holders, strict=True)
    ]
