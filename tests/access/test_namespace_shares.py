"""Each tenant's share of a node's open namespaces, before and after a restart."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fleets import checked_nodes
from people import PAGE_NBYTES, People, client, namespace

from kvstore import Client, Exhausted, PutOutcome
from kvstore.results import Keep
from node.memory.page import NamespaceIndex
from node.server import Node

SPACES = 32
HALF = SPACES // 2
KEY = b"k" * 32


class House:
    """A node with a disk and three tenants, which can be restarted."""

    def __init__(self, folder: Path, start: Callable[..., Node], stop: Callable[[], None]) -> None:
        self.people = People(folder / "identities")
        for tenant in ("loud", "quiet", "small"):
            self.people.join(tenant, tenant, "write")
        self.people.join("operator", "*", "admin")
        self._start, self._stop = start, stop
        self._settings: dict[str, Any] = {
            "data_dir": str(folder / "data"),
            "disk_nbytes": 16 << 20,
            "namespaces_max": SPACES,
            "identities": str(self.people.path),
        }
        self.clients: list[Client] = []
        self.restart()

    def restart(self, **settings: Any) -> None:
        self.leave()
        self._stop()
        self.node = self._start(**{**self._settings, **settings})

    def leave(self) -> None:
        for some in self.clients:
            some.close()
        self.clients.clear()

    def client(self, name: str) -> Client:
        self.clients.append(client(self.node, self.people.tokens.get(name, "")))
        return self.clients[-1]

    def fill(self, name: str, tenant: str, run: str, most: int = SPACES) -> int:
        """Put a page into new namespaces of a tenant until one is refused; return their number."""
        who = self.client(name)
        for number in range(most):
            try:
                put = who.put(
                    namespace(tenant, f"{run}-{number}"),
                    [KEY],
                    [bytes(PAGE_NBYTES)],
                    Keep(durable=True),
                )
            except Exhausted:
                return number
            assert put[0] in (PutOutcome.STORED, PutOutcome.EXISTS)
        return most

    def counts(self) -> Counter[str]:
        """Return the number of namespaces with pages on disk, by tenant."""
        who = self.node.service
        return Counter(
            index.value.tenant
            for index in self._spaces()
            if who.durability.disk.page_count(index.digest)
        )

    def _spaces(self) -> list[NamespaceIndex]:
        return self.node.tier.namespaces.all()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with contextlib.ExitStack() as running:

        def start(**settings: Any) -> Node:
            return running.enter_context(checked_nodes())(**settings)

        house = House(tmp_path, start, running.close)
        yield house
        house.leave()


def test_shares_of_namespaces_survive_restarts(house: House) -> None:
    assert house.fill("small", "small", "first", 3) == 3
    assert house.fill("loud", "loud", "first") == HALF
    for run in ("second", "third"):
        house.restart()
        assert house.fill("loud", "loud", run) == 0, (
            "restored namespaces do not count for their tenant"
        )
        assert house.fill("quiet", "quiet", run, 2) == 2
        assert house.fill("small", "small", run, 2) == 2
        assert house.fill("loud", "loud", "first", HALF) == HALF, "an open namespace was refused"
    assert house.counts() == {"loud": HALF, "quiet": 4, "small": 7}


def test_namespaces_opened_by_an_operator_count_for_their_tenant(house: House) -> None:
    """A namespace that an operator opens counts for its tenant.

    This also holds for other members of a cluster, whose role covers all tenants, too.
    """
    assert house.fill("operator", "loud", "first") == HALF
    assert house.fill("loud", "loud", "second") == 0
    assert house.fill("operator", "quiet", "first", 5) == 5


def test_shared_namespace_counts_for_its_reader_until_its_owner_opens_it(house: House) -> None:
    house.people.say("share loud models=* with=quiet")
    house.restart()
    assert house.fill("loud", "loud", "first", HALF - 1) == HALF - 1
    shared = namespace("loud", "shared")
    house.client("quiet").open(shared)
    assert house.fill("quiet", "quiet", "first") == HALF, "an empty namespace did not make room"
    house.client("quiet").open(
        namespace("loud", "first-0")
    )  # open already, so not counted for its reader
    house.restart()
    house.client("quiet").open(namespace("loud", "first-1"))
    assert house.client("loud").put(shared, [KEY], [bytes(PAGE_NBYTES)]) == [PutOutcome.STORED]
    assert house.fill("loud", "loud", "second") == 0
    assert house.counts()["quiet"] == HALF


def test_peer_of_an_open_node_leaves_namespaces_to_others_after_restarts(house: House) -> None:
    """A peer of an open node gets half of the free namespaces after each restart.

    The tenant of a restored namespace is unknown, so it counts for the peer that opens it again.
    """
    house.restart(identities="")
    assert house.fill("anybody", "default", "first") == HALF
    house.restart(identities="")
    assert house.fill("anybody", "default", "second") == HALF // 2
    house.restart(identities="")
    assert house.fill("anybody", "default", "third") == HALF // 4
    assert house.fill("anybody", "default", "first", HALF) == HALF, "an open namespace was refused"
    assert house.fill("anybody", "default", "fourth") == 0
