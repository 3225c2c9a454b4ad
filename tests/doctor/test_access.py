"""The doctor's checks of TLS, certificates and tokens, for clients with full, few or no rights."""

from collections.abc import Callable
from pathlib import Path

import pytest
from authorities import HERE, of_client, of_node, pair
from examined import Examined
from local_nodes import StartNode

from kvstore.cli.authority import Authority
from kvstore.doctor.checks import FindingState
from kvstore.security.identities import add, new_token, token_line
from node.server import Node

Doctor = Callable[..., Examined]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return tokens by name, and the `path` of their identities file.

    All are of tenant team-a except the operator's.
    """
    path = tmp_path_factory.mktemp("access") / "identities"
    made = {"path": str(path)}
    for name, tenant, fields in (
        ("read", "team-a", {"role": "read"}),
        ("write", "team-a", {"role": "write"}),
        ("admin", "team-a", {"role": "admin"}),
        ("narrow", "team-a", {"role": "write", "models": "qwen-*"}),
        ("operator", "*", {"role": "admin"}),
    ):
        made[name] = new_token(tenant)
        add(path, token_line(name, made[name], tenant=tenant, **fields))
    return made


@pytest.fixture(scope="module")
def node(start_node: StartNode, tokens: dict[str, str], ours: Authority) -> Node:
    """Return a node with TLS and authentication."""
    return start_node(identities=tokens["path"], shm_trust="team-a", **pair(ours, "node"))


# ---- tokens ----------------------------------------------------------------------------------


def test_doctor_of_an_operator_makes_all_checks(
    node: Node, doctor: Doctor, ours: Authority, tokens: dict[str, str]
) -> None:
    found = doctor(node, tls_ca=str(ours.path), token=tokens["operator"])
    assert found.failed == set()
    assert found.of("identity").found == "admin of all tenants there"
    assert "its certificate is trusted, and for localhost, 127.0.0.1, ::1" in found.of("TLS").found
    assert found.of("certificate").state is FindingState.OK
    assert found.of("tls_cert").state is FindingState.OK
    assert found.of("removed").found.endswith("and the namespace")


def test_doctor_of_a_writer_skips_the_tiers_and_leaves_no_page(
    node: Node, doctor: Doctor, ours: Authority, tokens: dict[str, str]
) -> None:
    found = doctor(node, tls_ca=str(ours.path), token=tokens["write"])
    assert found.failed == set()
    assert found.of("memory and disk").state is FindingState.SKIPPED
    assert found.of("clock", group="what").state is FindingState.OK
    # The node reports that it has no disk
    assert found.of("disk", group="pages").state is FindingState.SKIPPED
    assert "its name stays" in found.of("removed").found
    assert node.tier.visible_count == 0


def test_doctor_of_a_tenant_administrator_removes_the_namespace(
    node: Node, doctor: Doctor, ours: Authority, tokens: dict[str, str]
) -> None:
    found = doctor(node, tls_ca=str(ours.path), token=tokens["admin"])
    assert found.failed == set()
    assert found.of("removed").found.endswith("and the namespace")


def test_doctor_with_read_role_puts_nothing(
    node: Node, doctor: Doctor, ours: Authority, tokens: dict[str, str]
) -> None:
    found = doctor(node, tls_ca=str(ours.path), token=tokens["read"])
    assert found.failed == set()
    assert found.of("round trip").state is FindingState.SKIPPED
    assert "role read" in found.of("round trip").found
    assert found.of("bulk").state is FindingState.OK


def test_doctor_reports_an_identity_of_other_models(
    node: Node, doctor: Doctor, ours: Authority, tokens: dict[str, str]
) -> None:
    found = doctor(node, tls_ca=str(ours.path), token=tokens["narrow"])
    assert found.failed == set()
    assert found.of("as a client").state is FindingState.SKIPPED


@pytest.mark.parametrize("token", ["", "team-a." + "x" * 43])
def test_doctor_reports_an_unknown_token(
    node: Node, doctor: Doctor, ours: Authority, token: str
) -> None:
    found = doctor(node, tls_ca=str(ours.path), token=token)
    assert found.failed == {"gRPC"}
    assert "kvstore tokens list" in found.of("gRPC").remedy


def test_doctor_reports_an_unusable_token_file(
    node: Node, doctor: Doctor, ours: Authority, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    found = doctor(node, tls_ca=str(ours.path), token_file=str(path))
    assert found.failed == {"token", "gRPC"}
    assert "No such file" in found.of("token").found
    path.write_text("")
    path.chmod(0o600)
    assert "is empty" in doctor(node, tls_ca=str(ours.path), token_file=str(path)).of("token").found


# ---- TLS -------------------------------------------------------------------------------------


def test_doctor_without_tls_reports_a_node_with_tls(node: Node, doctor: Doctor) -> None:
    found = doctor(node)
    assert found.failed == {"TLS"}
    assert "KVSTORE_TLS_CA" in found.of("TLS").remedy
    assert found.of("gRPC").state is FindingState.SKIPPED


def test_doctor_with_tls_reports_a_node_without_tls(
    start_node: StartNode, doctor: Doctor, ours: Authority
) -> None:
    found = doctor(start_node(), tls_ca=str(ours.path))
    assert found.failed == {"TLS"}
    assert "does not use TLS" in found.of("TLS").found


def test_doctor_reports_a_certificate_of_another_authority(
    node: Node, doctor: Doctor, strangers: Authority, tokens: dict[str, str]
) -> None:
    found = doctor(node, tls_ca=str(strangers.path), token=tokens["operator"])
    assert found.failed == {"TLS"}
    assert f"not from an authority in tls_ca={strangers.path}" in found.of("TLS").found


def test_doctor_reports_a_name_not_in_the_certificate(
    node: Node, doctor: Doctor, ours: Authority
) -> None:
    """The doctor reports that a name is not in the certificate, and prints the names in it."""
    found = doctor(node, tls_ca=str(ours.path), tls_name="elsewhere")
    assert found.failed == {"TLS"}
    assert "does not name elsewhere" in found.of("TLS").found
    assert "is for localhost, 127.0.0.1, ::1" in found.of("TLS").found


def test_doctor_reports_an_expired_node_certificate(
    start_node: StartNode, doctor: Doctor, ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours.node("old", HERE, -0.5, force=True, since_days=1.0)
    monkeypatch.setattr("kvstore.security.x509.check_dates", lambda *_: None)
    found = doctor(start_node(**pair(ours, "old")), tls_ca=str(ours.path))
    assert found.failed == {"TLS", "certificate"}
    assert "has expired" in found.of("certificate").found


def test_doctor_warns_of_certificates_that_end_soon(
    start_node: StartNode, doctor: Doctor, ours: Authority
) -> None:
    ours.node("ending", HERE, 3.0, force=True)
    ours.client("ending-client", "team-a", 2.0, force=True)
    node = start_node(**pair(ours, "ending"), tls_client_ca=str(ours.path))
    found = doctor(node, tls_ca=str(ours.path), **pair(ours, "ending-client"))
    assert found.failed == set()
    assert {"certificate", "own certificate", "tls_cert"} <= found.names(FindingState.WARN)


def test_doctor_reports_a_missing_client_certificate(
    start_node: StartNode, doctor: Doctor, ours: Authority
) -> None:
    node = start_node(**of_node(ours))
    found = doctor(node, tls_ca=str(ours.path))
    assert found.failed == {"TLS"}
    assert "set tls_cert and tls_key" in found.of("TLS").found
    assert doctor(node, **of_client(ours)).failed == set()


def test_doctor_reports_an_expired_client_certificate(
    start_node: StartNode, doctor: Doctor, ours: Authority
) -> None:
    ours.node("late", HERE, -0.5, force=True, since_days=1.0)
    found = doctor(start_node(**of_node(ours)), tls_ca=str(ours.path), **pair(ours, "late"))
    assert {"own certificate", "TLS"} <= found.failed
    assert "expired on" in found.of("own certificate").found
