"""A client's calls carried out: at the one node there is, or spread over the members of a cluster.

alone      call --> the node
near       call --> the member that is near, which asks the others; if it fails:
cluster    call --> view: whose are the keys? --> members at the same time --> answers in the order of the keys
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvstore.cluster.nodes import Nodes
from kvstore.cluster.routing import ELSEWHERE, FIRST_SHARE, Away, everywhere, of_all, spread
from kvstore.cluster.view import View
from kvstore.config import MEMBERS_VERSION, ClientConfig
from kvstore.deadline import Deadline
from kvstore.errors import DeadlineExceeded, Exhausted, InvalidRequest, KVStoreError, Unavailable
from kvstore.keys import Namespace
from kvstore.log_rate import LogRate
from kvstore.transports.channel import NodeConnection
from kvstore.transports.parallel import ParallelTransfer

log = logging.getLogger(__name__)
log.addFilter(LogRate())
Result = TypeVar("Result")
Answer = TypeVar("Answer")
Item = TypeVar("Item")
Places = Sequence[int]  # of a call's keys
Ask = Callable[[NodeConnection, Deadline, Places], list[Answer]]
Whom = Callable[[View, Namespace, Sequence[bytes], Deadline], list[tuple[str, ...]]]

THREADS_MAX = 32  # beside the callers' own; members for which there is none are asked one after the other
ROUTED_AT_ONCE = 16  # keys: a few hundredths of a second with the most members


def chosen(items: Sequence[Item], places: Places) -> Sequence[Item]:
    """Those at the places; all of them as they are."""
    return items if len(places) == len(items) else [items[place] for place in places]


class FanOut:
    """Thread-safe. What is asked of a member gets a link to it, what is left of the call's time, and which keys."""

    def __init__(self, config: ClientConfig) -> None:
        self.nodes = Nodes(config)
        self._abreast = ParallelTransfer(THREADS_MAX, "kvstore-members")

    def close(self) -> None:
        self.nodes.close()
        self._abreast.close()

    def near(
        self, ask: Ask[Answer], namespace: Namespace, prefix_hashes: Sequence[bytes], deadline: Deadline
    ) -> list[Answer] | None:
        """What the near node answers for all keys. None: there is none, or it failed, and owners are to be asked."""
        link = self.nodes.near(deadline)
        if link is None:
            return None
        limit, every = deadline.sooner(deadline.remaining() * FIRST_SHARE), range(len(prefix_hashes))
        try:
            return link.run(lambda link, limit: ask(_asks_others(link), limit, every), namespace, limit)
        except ELSEWHERE as error:
            log.info("near node %s: %s; asking the owners", link.address, error)
            return None

    def per_key(
        self,
        ask: Ask[Answer],
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        lacks: Callable[[Answer], bool],
        absent: Answer,
        deadline: Deadline,
    ) -> list[Answer]:
        """Return an answer per key, from the first of its members that has one; see `spread`.

        A member that failed has nothing while another is well, also when it owns all keys of the call.
        """
        how = partial(spread, lacks=lacks, absent=absent, deadline=deadline)
        try:
            return self._put_together(how, ask, namespace, prefix_hashes, deadline)
        except (Unavailable, DeadlineExceeded):
            if not self.nodes.some_fail:
                raise
            return [absent] * len(prefix_hashes)

    def every_copy(
        self,
        ask: Ask[Answer],
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        combine: Callable[[Answer, Answer], Answer],
        absent: Answer,
        deadline: Deadline,
        away: Away | None = None,
    ) -> list[Answer]:
        """An answer per key, combined from those of all members, as `everywhere` says it: any may have a copy."""
        how = partial(everywhere, combine=combine, absent=absent, deadline=deadline, away=away)
        return self._put_together(how, ask, namespace, prefix_hashes, deadline, _everybody)

    def one(
        self,
        call: Callable[[NodeConnection, Deadline], Result],
        namespace: Namespace | None,
        deadline: Deadline,
        what: str,
    ) -> Result:
        """At the node that is alone. Raises InvalidRequest in a cluster."""
        if self.nodes.found(deadline) is not None:
            raise InvalidRequest(f"{what} is asked of one node; name a member of the cluster, with direct=True")
        return self.nodes.only.run(call, namespace, deadline)

    def open(self, namespace: Namespace, deadline: Deadline) -> None:
        """Connects to the node that is alone, or to the near one, and registers the namespace there. A near node that
        does not answer is no error: others do."""
        near = self.nodes.near(deadline)
        if near is not None:
            with contextlib.suppress(*ELSEWHERE):
                near.run(lambda link, _: None, namespace, deadline.sooner(deadline.remaining() * FIRST_SHARE))
        elif self.nodes.view is None:
            self.nodes.only.run(lambda link, _: None, namespace, deadline)

    def in_place(
        self, call: Callable[[NodeConnection, Deadline], Result], namespace: Namespace, deadline: Deadline, what: str
    ) -> Result:
        """At the node that is alone, or at the near one, which leaves time to ask the owners if it fails. Raises
        InvalidRequest if there is none."""
        link = self.nodes.near(deadline)
        if link is None:
            return self.one(call, namespace, deadline, what)
        limit = deadline.sooner(deadline.remaining() * FIRST_SHARE)
        return link.run(lambda link, limit: call(check_knows_members(link), limit), namespace, limit)

    def each(
        self, call: Callable[[NodeConnection, Deadline], Result], namespace: Namespace | None, deadline: Deadline
    ) -> dict[str, Result | KVStoreError]:
        """What each node returned or raised, by address."""
        if self.nodes.found(deadline) is None:
            return {self.nodes.only.address: self.nodes.only.run(call, namespace, deadline)}
        links = self.nodes.all()
        calls = [partial(link.run, call, namespace, deadline) for link in links.values()]
        return dict(zip(links, self._abreast.run(calls), strict=True))

    def all(
        self,
        call: Callable[[NodeConnection, Deadline], Result],
        namespace: Namespace | None,
        deadline: Deadline,
        away: Away | None = None,
    ) -> list[Result]:
        """What every node returned; raises as `of_all` does."""
        outcomes, view = self.each(call, namespace, deadline), self.nodes.view
        ids = {member.address: member.id for member in view.members} if view else {}
        return list(of_all({ids.get(at, at): outcome for at, outcome in outcomes.items()}, away).values())

    def _put_together(
        self,
        how: Callable[..., list[Answer]],
        ask: Ask[Answer],
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        deadline: Deadline,
        whom: Whom | None = None,
    ) -> list[Answer]:
        """Of the node that is alone, as it answers; of members as `how` does it with (routes, ask, together). `whom`:
        the routes, by default each key's owners."""
        view = self.nodes.found(deadline)
        if view is None:
            every = range(len(prefix_hashes))
            return self.nodes.only.run(lambda link, limit: ask(link, limit, every), namespace, deadline)

        def asked(member: str, places: list[int], limit: Deadline) -> list[Answer]:
            link = self.nodes.member(view, member)
            return link.run(lambda link, limit: ask(link, limit, places), namespace, limit)

        return how((whom or routes)(view, namespace, prefix_hashes, deadline), asked, self._abreast.run)


def _asks_others(link: NodeConnection) -> NodeConnection:
    """Raises Exhausted for a near node that does not: it is older, or reached by gRPC only, where it may not wait."""
    if link.wire.name == "grpc":
        raise Exhausted("the near node is reached by gRPC only")
    return check_knows_members(link)


def check_knows_members(link: NodeConnection) -> NodeConnection:
    """Raises Exhausted for a node that does not see what is asked of it about other members."""
    if not link.knows_members:
        error = Exhausted(
            f"a member speaks protocol {link.way.hello.protocol_version}, in which nothing is asked of others (a near "
            f"node, ack=all); update it to {MEMBERS_VERSION} or later"
        )
        error.answered = True  # what it is
        raise error
    return link


def routes(
    view: View, namespace: Namespace, prefix_hashes: Sequence[bytes], deadline: Deadline
) -> list[tuple[str, ...]]:
    """Whom to ask for each key. Raises DeadlineExceeded: a slot that is asked for first costs microseconds for each
    member. What was worked out by then need not be again."""
    found: list[tuple[str, ...]] = []
    for start in range(0, len(prefix_hashes), ROUTED_AT_ONCE):
        deadline.remaining()
        found += _some_routes(view, namespace, prefix_hashes[start : start + ROUTED_AT_ONCE])
    return found


def _everybody(
    view: View, namespace: Namespace, prefix_hashes: Sequence[bytes], deadline: Deadline
) -> list[tuple[str, ...]]:
    return [tuple(view.by_id)] * len(prefix_hashes)


def _some_routes(view: View, namespace: Namespace, prefix_hashes: Sequence[bytes]) -> list[tuple[str, ...]]:
    """Its owners; then who held it before members joined or were drained."""
    owners = view.owners.owners(namespace.digest, prefix_hashes)
    if view.settled:
        return owners
    holders = view.holders.owners(namespace.digest, prefix_hashes)
    return [(*own, *(some for some in held if some not in own)) for own, held in zip(owners, holders, strict=True)]
