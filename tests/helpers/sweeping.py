"""Three members of a cluster whose pages are planted, rebalanced and compared."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fleet import tell as tell_all
from fleet import view_of
from known_pages import Pages
from local_nodes import StartNode
from waiting import wait_until

from kvstore import Client, ClientConfig
from kvstore.cluster.view import State, View
from node.server import Node

NUMBERS = range(60)
ATTEMPTS = 10


@pytest.fixture
def fleet(start_node: StartNode) -> list[Node]:
    return [start_node() for _ in range(3)]


@pytest.fixture
def tell(fleet: list[Node]) -> Callable[..., View]:
    """Return a function that gives all nodes a view: `tell(n2=State.JOINING)`; None: no member."""
    numbers = iter(range(1, 100))

    def tell(replicas: int = 1, **states: State | None) -> View:
        view = view_of(fleet, replicas, next(numbers), None, **states)
        tell_all(fleet, view)
        return view

    return tell


def named(fleet: list[Node]) -> dict[str, Node]:
    return {f"n{number}": node for number, node in enumerate(fleet)}


@pytest.fixture
def alone() -> Iterator[Callable[[Node], Client]]:
    """Return a function that connects a client to one member only."""
    clients: list[Client] = []

    def connect(node: Node) -> Client:
        clients.append(
            Client(ClientConfig(address=f"127.0.0.1:{node.grpc.port}", direct=True, wire="bulk"))
        )
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def of(view: View, pages: Pages, member: str) -> set[bytes]:
    keys = pages.keys(*NUMBERS)
    owners = view.owners.owners(pages.namespace.digest, keys)
    return {key for key, some in zip(keys, owners, strict=True) if member in some}


def sweep(node: Node) -> Any:
    before = node.peers.rebalancer.report
    node.peers.rebalancer.schedule_in(0.0)
    wait_until(
        lambda: node.peers.rebalancer.report is not before and not node.peers.rebalancer.running
    )
    return node.peers.rebalancer.report


def sweep_all(node: Node) -> Any:
    """Sweep until all members answered: on a busy machine one may miss its deadline."""
    reports = [sweep(node)]
    while reports[-1].away and len(reports) < ATTEMPTS:
        reports.append(sweep(node))
    return reports[-1]


def there(client: Client, pages: Pages) -> set[bytes]:
    """Return the keys of the pages that a client gets, comparing every byte."""
    keys = pages.keys(*NUMBERS)
    return {key for key, hit in zip(keys, pages.get(client, keys), strict=True) if hit}
