"""Certificates for tests: an authority that both sides believe, and one that they do not know."""

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    # Which not every environment of an engine's tests can import
    from kvstore.cli.authority import (
        Authority,
    )

HERE = ("localhost", "127.0.0.1", "::1")


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> "Authority":
    """With a node's certificate, `node`, and a client's, `client`."""
    return found(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="session")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> "Authority":
    """The same of another authority."""
    return found(tmp_path_factory.mktemp("strangers"), "strangers")


def found(folder: Path, name: str) -> "Authority":
    from kvstore.cli.authority import Authority

    made = Authority.found(folder, name, 10)
    made.node("node", HERE, 10)
    made.client("client", "team-a", 10)
    return made


def pair(authority: "Authority", name: str) -> dict[str, Any]:
    """Settings `tls_cert` and `tls_key`."""
    folder = authority.path.parent
    return {"tls_cert": str(folder / f"{name}.pem"), "tls_key": str(folder / f"{name}.key")}


def of_node(authority: "Authority") -> dict[str, Any]:
    """Settings of a node that requires client certificates."""
    return {**pair(authority, "node"), "tls_client_ca": str(authority.path)}


def of_client(authority: "Authority") -> dict[str, Any]:
    return {**pair(authority, "client"), "tls_ca": str(authority.path)}


def server_context(authority: "Authority") -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(*pair(authority, "node").values())
    made.num_tickets = 0
    return made


def client_context(authority: "Authority", **shown: Any) -> ssl.SSLContext:
    """`shown`: what `pair` gives."""
    made = ssl.create_default_context(cafile=str(authority.path))
    if shown:
        made.load_cert_chain(shown["tls_cert"], shown["tls_key"])
    return made
