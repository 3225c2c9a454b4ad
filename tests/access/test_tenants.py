"""Data that a tenant can see, shares between tenants, and requests that only members may send."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import fields

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from people import PAGE_NBYTES, People, client, namespace, taken_up

from kvstore import Client, Forbidden, InvalidRequest, KVStoreError, PutOutcome, UnknownNamespace
from kvstore.deadline import Deadline
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.grpc_wire import GrpcWire
from node.server import Node

KEY = b"t" * 32
PAGE = bytes(range(256)) * (PAGE_NBYTES // 256)
OURS, THEIRS = namespace(salt="tenants"), namespace("team-b", "their-model", salt="tenants")


@pytest.fixture(scope="module")
def both(node: Node, people: People) -> Iterator[dict[str, Client]]:
    """Yield clients by identity, after each tenant has put a page."""
    clients = {
        name: client(node, people.tokens[name], wire="bulk")
        for name in ("read", "write", "other", "operator")
    }
    clients["write"].put(OURS, [KEY], [PAGE])
    clients["other"].put(THEIRS, [KEY], [PAGE])
    yield clients
    for some in clients.values():
        some.close()


def test_tenant_lists_its_own_namespaces_only(both: dict[str, Client]) -> None:
    def names(name: str) -> set[str]:
        return {space.tenant for space, _ in both[name].namespaces()}

    assert names("read") == {"team-a"}
    assert names("other") == {"team-b"}
    assert names("operator") >= {"team-a", "team-b"}


def test_status_has_no_data_of_other_tenants(both: dict[str, Client]) -> None:
    status, whole = both["other"].node_status(), both["operator"].node_status()
    assert "team-a" not in repr(status)
    assert {info.namespace.tenant for info in status.namespaces} == {"team-b"}
    assert status.totals.pages_put == sum(info.counters.pages_put for info in status.namespaces)
    shown = {field.name for field in fields(status) if getattr(status, field.name)}
    assert shown <= {
        *("version", "instance_id", "state", "uptime_ms", "namespaces", "totals", "limits"),
        *("bulk_port", "metrics_port", "tenants", "now_unix_ms"),
    }
    assert [use.tenant for use in status.tenants] == ["team-b"]
    assert whole.ram.page_count >= 2
    assert whole.pid


def metrics(node: Node, authorization: str = "") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{node.metrics.port}/metrics")
    if authorization:
        request.add_header("Authorization", authorization)
    with urllib.request.urlopen(request, timeout=20.0) as reply:
        return str(reply.read().decode())


def test_metrics_need_an_identity_and_show_its_tenant_only(
    node: Node, both: dict[str, Client], people: People
) -> None:
    their, all_of_it = (
        metrics(node, f"Bearer {people.tokens[name]}") for name in ("other", "operator")
    )
    assert 'model="their-model"' in their
    assert 'model="llama"' not in their
    assert "kvstore_ram_pages" not in their
    assert 'model="llama"' in all_of_it
    assert "kvstore_ram_pages" in all_of_it
    for authorization, code in (
        ("", 401),
        ("Bearer x", 401),
        ("Basic eA==", 401),
        (f"Bearer {'x' * 5000}", 401),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            metrics(node, authorization)
        assert caught.value.code == code
        caught.value.close()


def test_answer_for_one_tenant_is_not_given_to_another(
    node: Node, both: dict[str, Client], people: People
) -> None:
    """The cached metrics text of one tenant is not sent to another."""
    for name in ("operator", "other", "operator"):
        assert ("kvstore_ram_pages" in metrics(node, f"Bearer {people.tokens[name]}")) is (
            name == "operator"
        )


def test_equal_names_of_two_tenants_are_two_namespaces(both: dict[str, Client]) -> None:
    ours, theirs = namespace("team-a", salt="same"), namespace("team-b", salt="same")
    both["write"].put(ours, [KEY], [PAGE])
    both["other"].open(theirs)
    assert both["other"].lookup(theirs, [KEY]).prefix_pages == 0


def test_shared_namespace_is_readable_and_not_writable(
    node: Node, both: dict[str, Client], people: People
) -> None:
    prompts = namespace("team-a", "prompts-1")
    both["write"].put(prompts, [KEY], [PAGE])
    with pytest.raises(Forbidden):
        both["other"].lookup(prompts, [KEY])
    people.say("share team-a models=prompts-* with=team-b")
    taken_up(node, lambda: bool(node.access.identities.shares))
    into = bytearray(PAGE_NBYTES)
    assert both["other"].get(prompts, [KEY], [into]) == [True]
    assert into == PAGE
    assert both["other"].put(THEIRS, [KEY], [PAGE]) == [PutOutcome.EXISTS]
    for change in (
        lambda: both["other"].put(prompts, [b"n" * 32], [PAGE]),
        lambda: both["other"].remove(prompts, [KEY]),
        lambda: both["other"].pin(prompts, [KEY], 60.0),
        lambda: both["other"].remove_namespace(prompts),
    ):
        with pytest.raises(Forbidden, match="which team-a shares"):
            change()
    with pytest.raises((Forbidden, UnknownNamespace)):
        both["other"].lookup(OURS, [KEY])
    assert prompts in [space for space, _ in both["other"].namespaces()]


def test_forwarded_put_needs_a_member(node: Node, people: People) -> None:
    request = pb.PutRequest(
        namespace=OURS.digest, prefix_hashes=[b"f" * 32], page_nbytes=PAGE_NBYTES, forwarded_by="n1"
    )

    def forward(name: str) -> type[KVStoreError]:
        wire = GrpcWire(f"127.0.0.1:{node.grpc.port}", token=people.tokens[name])
        with pytest.raises(KVStoreError) as caught:
            wire.put(request, [(memoryview(PAGE),)], Deadline(20.0))
        wire.close()
        return caught.type

    assert forward("admin") is Forbidden
    assert forward("member") is InvalidRequest, "allowed, but this node is in no cluster"


def test_health_needs_no_identity(node: Node) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=20.0
        )
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
