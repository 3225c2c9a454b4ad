"""A client's calls carried out: at the one node there is, or spread over the members of a cluster.

alone      call --> the node
cluster    call --> view: whose are the keys? --> members at the same time --> answers in the order of the keys
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvstore.cluster.nodes import Nodes
from kvstore.cluster.spread import everywhere, spread
from kvstore.cluster.view import View
from kvstore.config import ClientConfig
from kvstore.deadline import Deadline
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.keys import Namespace
from kvstore.link import Link
from kvstore.wires.abreast import Abreast

Result = TypeVar("Result")
Answer = TypeVar("Answer")
Item = TypeVar("Item")
Places = Sequence[int]  # of a call's keys
Ask = Callable[[Link, Deadline, Places], list[Answer]]

THREADS_MAX = 32  # beside the callers' own; members for which there is none are asked one after the other
ROUTED_AT_ONCE = 16  # keys: a few hundredths of a second with the most members


def chosen(items: Sequence[Item], places: Places) -> Sequence[Item]:
    """Those at the places; all of them as they are."""
    return items if len(places) == len(items) else [items[place] for place in places]


class FanOut:
    """Thread-safe. What is asked of a member gets a link to it, what is left of the call's time, and which keys."""

    def __init__(self, config: ClientConfig) -> None:
        self.nodes = Nodes(config)
        self._abreast = Abreast(THREADS_MAX, "kvstore-members")

    def close(self) -> None:
        self.nodes.close()
        self._abreast.close()

    def per_key(
        self,
        ask: Ask[Answer],
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        lacks: Callable[[Answer], bool],
        absent: Answer,
        deadline: Deadline,
    ) -> list[Answer]:
        """An answer per key: its first member's that has one, as `spread` says it."""
        view = self.nodes.found(deadline)
        if view is None:
            return self._alone(ask, namespace, len(prefix_hashes), deadline)
        routes = _routes(view, namespace, prefix_hashes, deadline)
        return spread(routes, self._asked(ask, namespace, view), self._abreast.run, lacks, absent, deadline)

    def every_copy(
        self,
        ask: Ask[Answer],
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        combine: Callable[[Answer, Answer], Answer],
        absent: Answer,
        deadline: Deadline,
    ) -> list[Answer]:
        """An answer per key, combined from those of all who may have it, as `everywhere` says it."""
        view = self.nodes.found(deadline)
        if view is None:
            return self._alone(ask, namespace, len(prefix_hashes), deadline)
        routes = _routes(view, namespace, prefix_hashes, deadline)
        return everywhere(routes, self._asked(ask, namespace, view), self._abreast.run, combine, absent, deadline)

    def one(
        self, call: Callable[[Link, Deadline], Result], namespace: Namespace | None, deadline: Deadline, what: str
    ) -> Result:
        """At the node that is alone. Raises InvalidRequest in a cluster."""
        if self.nodes.found(deadline) is not None:
            raise InvalidRequest(f"{what} is asked of one node; name a member of the cluster, with direct=True")
        return self.nodes.only.run(call, namespace, deadline)

    def each(
        self, call: Callable[[Link, Deadline], Result], namespace: Namespace | None, deadline: Deadline
    ) -> dict[str, Result | KVStoreError]:
        """What each node returned or raised, by address."""
        if self.nodes.found(deadline) is None:
            return {self.nodes.only.address: self.nodes.only.run(call, namespace, deadline)}
        links = self.nodes.all()
        calls = [partial(link.run, call, namespace, deadline) for link in links.values()]
        return dict(zip(links, self._abreast.run(calls), strict=True))

    def all(
        self, call: Callable[[Link, Deadline], Result], namespace: Namespace | None, deadline: Deadline
    ) -> list[Result]:
        """What every node returned. Raises what one of them raised; the others have done it then."""
        found: list[Result] = []
        for outcome in self.each(call, namespace, deadline).values():
            if isinstance(outcome, KVStoreError):
                raise outcome
            found.append(outcome)
        return found

    def _alone(self, ask: Ask[Answer], namespace: Namespace, count: int, deadline: Deadline) -> list[Answer]:
        return self.nodes.only.run(lambda link, limit: ask(link, limit, range(count)), namespace, deadline)

    def _asked(
        self, ask: Ask[Answer], namespace: Namespace, view: View
    ) -> Callable[[str, list[int], Deadline], list[Answer]]:
        def asked(member: str, places: list[int], deadline: Deadline) -> list[Answer]:
            link = self.nodes.member(view, member)
            return link.run(lambda link, limit: ask(link, limit, places), namespace, deadline)

        return asked


def _routes(
    view: View, namespace: Namespace, prefix_hashes: Sequence[bytes], deadline: Deadline
) -> list[tuple[str, ...]]:
    """Whom to ask for each key. Raises DeadlineExceeded: a slot that is asked for first costs microseconds for each
    member. What was worked out by then need not be again."""
    routes: list[tuple[str, ...]] = []
    for start in range(0, len(prefix_hashes), ROUTED_AT_ONCE):
        deadline.remaining()
        routes += _some_routes(view, namespace, prefix_hashes[start : start + ROUTED_AT_ONCE])
    return routes


def _some_routes(view: View, namespace: Namespace, prefix_hashes: Sequence[bytes]) -> list[tuple[str, ...]]:
    """Its owners; then who held it before members joined or were drained."""
    owners = view.owners.owners(namespace.digest, prefix_hashes)
    if view.settled:
        return owners
    holders = view.holders.owners(namespace.digest, prefix_hashes)
    return [(*own, *(some for some in held if some not in own)) for own, held in zip(owners, holders, strict=True)]
