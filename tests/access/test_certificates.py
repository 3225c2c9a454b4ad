"""Identities of client certificates, on every port."""

import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from authorities import client_context, of_client, of_node, pair
from local_nodes import StartNode
from people import PAGE_NBYTES, People, namespace

from kvstore import Client, ClientConfig, Forbidden, PutOutcome, Unauthenticated, Unavailable
from kvstore.cli.authority import Authority
from kvstore.security.identities import ALL
from node.server import Node

KEY = b"c" * 32
PAGE = bytes(PAGE_NBYTES)


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> People:
    people = People(tmp_path_factory.mktemp("certificates") / "identities")
    people.join("operator", ALL, "admin")
    people.join("engine", "team-a", "write")
    # The name in the client certificate of `authorities`
    people.say("certificate team-a tenant=team-a role=write")
    people.say("certificate fd00::1 tenant=team-a role=read")
    return people


@pytest.fixture(scope="module")
def node(start_node: StartNode, crew: People, ours: Authority) -> Node:
    return start_node(identities=str(crew.path), shm_trust="team-a", **of_node(ours))


def client(node: Node, wire: str, **settings: Any) -> Client:
    return Client(
        ClientConfig(
            f"127.0.0.1:{node.grpc.port}",
            wire=wire,
            timeout_s=20.0,
            connect_timeout_s=10.0,
            **settings,
        )
    )


@pytest.mark.parametrize("wire", ["grpc", "bulk"])
def test_certificate_is_an_identity(node: Node, ours: Authority, wire: str) -> None:
    with client(node, wire, **of_client(ours)) as engine:
        assert engine.put(namespace(salt=wire), [KEY], [PAGE]) == [PutOutcome.STORED]
        with pytest.raises(Forbidden):
            engine.lookup(namespace("team-b"), [KEY])
        with pytest.raises(Forbidden, match="has the role write"):
            engine.flush()


@pytest.mark.parametrize("wire", ["grpc", "bulk"])
def test_certificate_not_in_the_identities_file_is_refused(
    node: Node, ours: Authority, wire: str
) -> None:
    settings = {**pair(ours, "node"), "tls_ca": str(ours.path)}
    with (
        client(node, wire, **settings) as other,
        pytest.raises((Unauthenticated, Unavailable), match="certificate"),
    ):
        other.lookup(namespace(), [KEY])


@pytest.mark.parametrize("wire", ["grpc", "bulk"])
@pytest.mark.parametrize("where", ["common name", "alternative name"])
def test_name_in_a_certificate_is_not_cut_at_a_nul(
    node: Node, ours: Authority, wire: str, where: str
) -> None:
    """A name with a NUL is not cut at the NUL.

    Python's gRPC cuts it to `team-a`. An authority might issue any name that ends in `.example`.
    """
    name, file = "team-a\0.example", f"cut-{where[:6]}-{wire}"
    if where == "common name":
        ours.client(file, name, 10)
    else:
        ours.node(file, ["elsewhere", name], 10)
    settings = {**pair(ours, file), "tls_ca": str(ours.path)}
    with (
        client(node, wire, **settings) as other,
        pytest.raises((Unauthenticated, Unavailable), match="certificate"),
    ):
        other.lookup(namespace(), [KEY])


@pytest.mark.parametrize("wire", ["grpc", "bulk"])
def test_address_in_a_certificate_is_known_in_any_notation(
    node: Node, ours: Authority, wire: str
) -> None:
    ours.node(f"address-{wire}", ["elsewhere", "fd00::1"], 10)
    with client(node, wire, **pair(ours, f"address-{wire}"), tls_ca=str(ours.path)) as engine:
        assert engine.lookup(namespace(), [KEY]).prefix_pages == 0


def test_token_takes_precedence_over_a_certificate(
    node: Node, ours: Authority, crew: People
) -> None:
    with client(node, "bulk", token=crew.tokens["operator"], **of_client(ours)) as operator:
        assert operator.node_status().ram


def test_client_without_a_token_uses_tcp_instead_of_shm(
    node: Node, ours: Authority, crew: People
) -> None:
    with client(node, "auto", **of_client(ours)) as engine:
        engine.lookup(namespace(), [KEY])
        assert engine.wire_name == "bulk"
    with (
        client(node, "shm", **of_client(ours)) as engine,
        pytest.raises(Unavailable, match="to this client"),
    ):
        engine.lookup(namespace(), [KEY])
    with client(node, "auto", token=crew.tokens["engine"], **of_client(ours)) as engine:
        engine.lookup(namespace(), [KEY])
        assert engine.wire_name == "shm"


def test_metrics_need_a_known_certificate(node: Node, ours: Authority) -> None:
    def scraped(name: str) -> str:
        context = client_context(ours, **pair(ours, name))
        with urllib.request.urlopen(
            f"https://127.0.0.1:{node.metrics.port}/metrics", context=context, timeout=20
        ) as got:
            return str(got.read().decode())

    assert "kvstore_serving" in scraped("client")
    with pytest.raises(urllib.error.HTTPError) as caught:
        scraped("node")
    assert caught.value.code == 401
    caught.value.close()


def test_certificate_of_another_authority_fails_the_tls_handshake(
    node: Node, strangers: Authority, ours: Authority, tmp_path: Path
) -> None:
    settings = {**pair(strangers, "client"), "tls_ca": str(ours.path)}
    with (
        client(node, "bulk", **settings) as stranger,
        pytest.raises(Unavailable, match="tls_cert="),
    ):
        stranger.lookup(namespace(), [KEY])
