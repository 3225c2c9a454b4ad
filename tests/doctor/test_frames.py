"""The doctor at frame addresses (bulk:// and unix:): its steps and failures."""

from collections.abc import Callable

import pytest
from authorities import of_client, of_node, pair
from examined import Examined
from local_nodes import StartNode

from kvstore.cli.authority import Authority
from kvstore.doctor.checks import FindingState
from node.server import Node


def at_bulk(node: Node) -> dict[str, str]:
    return {"address": f"bulk://127.0.0.1:{node.bulk.port}"}


def test_doctor_at_a_bulk_address_skips_grpc(node: Node, doctor: Callable[..., Examined]) -> None:
    found = doctor(**at_bulk(node))
    assert not found.failed
    assert "answers in" in found.of("frames").found
    assert "gRPC" not in {finding.name for _, finding in found.found}
    assert found.of("grpc", group="wires").state is FindingState.SKIPPED
    assert {found.of(name, group="wires").state for name in ("shm", "bulk")} == {FindingState.OK}


def test_doctor_at_a_unix_socket_skips_tcp_and_grpc(
    node: Node, doctor: Callable[..., Examined]
) -> None:
    assert node.shm is not None
    found = doctor(address=f"unix:{node.shm.path}")
    assert not found.failed
    assert found.of("frames").state is found.of("shm", group="wires").state is FindingState.OK
    assert {found.of(name, group="wires").state for name in ("bulk", "grpc")} == {
        FindingState.SKIPPED
    }
    assert not {"name", "TCP", "TLS"} & {finding.name for _, finding in found.found}


@pytest.mark.parametrize(
    ("address", "remedy"),
    [("unix:/tmp/no-kvstore-is-here.sock", "no node serves that socket"), ("local", "start it")],
)
def test_doctor_reports_a_missing_socket(
    doctor: Callable[..., Examined], address: str, remedy: str
) -> None:
    found = doctor(address=address)
    assert "frames" in found.failed
    assert "does not exist here" in found.of("frames").found
    assert remedy in found.of("frames").remedy


def test_doctor_checks_tls_at_a_bulk_address(
    start_node: StartNode, doctor: Callable[..., Examined], ours: Authority
) -> None:
    secured = start_node(**of_node(ours))
    found = doctor(**at_bulk(secured), **of_client(ours))
    assert not found.failed
    assert "is trusted" in found.of("TLS").found
    plain = doctor(**at_bulk(secured))
    assert "uses TLS" in plain.of("TLS").found
    asked_for = doctor(**at_bulk(secured), tls_ca=str(ours.path))
    assert "client certificate" in asked_for.of("TLS").found
    nobody_asked = doctor(**at_bulk(start_node(**pair(ours, "node"))), tls_ca=str(ours.path))
    assert not nobody_asked.failed
