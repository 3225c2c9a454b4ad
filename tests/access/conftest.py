"""Fixtures for nodes with authentication."""

from collections.abc import Iterator

import pytest
from fleets import checked_nodes
from local_nodes import StartNode
from people import People

from kvstore.security.identities import ALL
from node.server import Node


@pytest.fixture(scope="session")
def people(tmp_path_factory: pytest.TempPathFactory) -> People:
    """Return identities: one of each role in team-a, an administrator `other` of team-b, an
    administrator `operator` of all tenants, and invalid ones.
    """
    people = People(tmp_path_factory.mktemp("access") / "identities")
    people.join("revoked", "team-a", "admin")
    people.leave("revoked")
    people.join("expired", "team-a", "admin", expires="2020-01-01T00:00:00Z")
    for role in ("read", "write", "admin"):
        people.join(role, "team-a", role)
    people.join("other", "team-b", "admin")
    people.join("narrow", "team-a", "admin", models="qwen-*")
    people.join("operator", ALL, "admin")
    people.join("modeller", ALL, "admin", models="qwen-*")
    people.join("watcher", ALL, "read")
    people.join("member", ALL, "node")
    return people


@pytest.fixture(scope="module")
def start_node() -> Iterator[StartNode]:
    with checked_nodes() as start:
        yield start


@pytest.fixture(scope="module")
def node(start_node: StartNode, people: People) -> Node:
    return start_node(identities=str(people.path), shm_trust="team-a")
