"""A pytest plugin (`make test-tls`) that runs tests over TLS.

All nodes in this process, clients and raw connections of tests use TLS, although the tests do not
mention it.
"""

import socket
import tempfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from authorities import HERE, client_context, pair

from kvstore.cli.authority import Authority
from kvstore.config import ClientConfig
from kvstore.transports.tls import TlsFrameSocket
from node.config import NodeConfig

FOLDER = tempfile.TemporaryDirectory()
AUTHORITY = Authority.found(Path(FOLDER.name), "ours", 2)
AUTHORITY.node("node", HERE, 2)
FILES = pair(AUTHORITY, "node")
ROOTS, KEY, CERTIFICATE = (
    Path(path).read_bytes() for path in (AUTHORITY.path, FILES["tls_key"], FILES["tls_cert"])
)


def always(config: Any, **settings: str) -> None:
    """Apply these settings to all instances of a configuration class."""
    check = config.__post_init__

    def made(self: Any) -> None:
        for name, value in settings.items():
            object.__setattr__(self, name, value)
        check(self)

    config.__post_init__ = made


def channel(target: str, options: Any = None) -> grpc.Channel:
    return grpc.secure_channel(
        target, grpc.ssl_channel_credentials(ROOTS, KEY, CERTIFICATE), options
    )


def over_tls(raw: Any) -> Any:
    """Return the class `Raw` of tests/node/conftest.py with a TLS connection."""

    def begin(self: Any, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        TlsFrameSocket.__init__(self, self.sock, client_context(AUTHORITY, **FILES), "localhost")
        self.arm(60.0)
        self.handshake()

    own = {
        name: what
        for name, what in vars(raw).items()
        if name in ("request", "reply", "ask", "ending")
    }
    return type("Raw", (TlsFrameSocket,), {**own, "__init__": begin})


def pytest_collection_finish(session: pytest.Session) -> None:
    for plugin in session.config.pluginmanager.get_plugins():
        if hasattr(plugin, "Raw"):
            plugin.Raw = over_tls(plugin.Raw)


always(ClientConfig, tls_ca=str(AUTHORITY.path), **FILES)
always(NodeConfig, tls_client_ca=str(AUTHORITY.path), **FILES)
grpc.insecure_channel = channel
