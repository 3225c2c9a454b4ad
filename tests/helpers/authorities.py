"""Certificates for tests: one authority that both sides trust, and one that they do not."""

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    # Not importable in every engine's test environment
    from kvstore.cli.authority import (
        Authority,
    )

HERE = ("localhost", "127.0.0.1", "::1")


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> "Authority":
    """Create the trusted authority, with certificates `node` and `client`."""
    return found(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="session")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> "Authority":
    """Create an untrusted authority with the same certificates."""
    return found(tmp_path_factory.mktemp("strangers"), "strangers")


def found(folder: Path, name: str) -> "Authority":
    from kvstore.cli.authority import Authority

    made = Authority.found(folder, name, 10)
    made.node("node", HERE, 10)
    made.client("client", "team-a", 10)
    return made


def pair(authority: "Authority", name: str) -> dict[str, Any]:
    """Return the settings `tls_cert` and `tls_key` for a certificate."""
    folder = authority.path.parent
    return {"tls_cert": str(folder / f"{name}.pem"), "tls_key": str(folder / f"{name}.key")}


def of_node(authority: "Authority") -> dict[str, Any]:
    """Return the settings of a node that requires client certificates."""
    return {**pair(authority, "node"), "tls_client_ca": str(authority.path)}


def of_client(authority: "Authority") -> dict[str, Any]:
    """Return the settings of a client that shows its certificate."""
    return {**pair(authority, "client"), "tls_ca": str(authority.path)}


def server_context(authority: "Authority") -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(*pair(authority, "node").values())
    made.num_tickets = 0
    return made


def client_context(authority: "Authority", **shown: Any) -> ssl.SSLContext:
    """Return a TLS context that trusts the authority; `shown` comes from `pair`."""
    made = ssl.create_default_context(cafile=str(authority.path))
    if shown:
        made.load_cert_chain(shown["tls_cert"], shown["tls_key"])
    return made
