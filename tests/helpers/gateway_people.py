"""Identities for tests of the gateway, and the configuration of clients that have them."""

from pathlib import Path
from typing import Any

from kvstore import ClientConfig
from kvstore.security.identities import add, new_token, revoke, token_line
from node.server import Node

MODEL = "llama"


class Crew:
    """Tokens by name, and the identities file that a node reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokens: dict[str, str] = {}

    def join(self, name: str, tenant: str, role: str) -> str:
        token = self.tokens[name] = new_token(tenant)
        add(self.path, token_line(name, token, tenant=tenant, role=role))
        return token

    def leave(self, name: str) -> None:
        revoke(self.path, name)

    def change(self, name: str, tenant: str, role: str) -> None:
        self.leave(name)
        add(self.path, token_line(name, self.tokens[name], tenant=tenant, role=role))

    def say(self, line: str) -> None:
        with self.path.open("a") as file:
            file.write(line + "\n")


def known_by(node: Node, **known: Any) -> ClientConfig:
    return ClientConfig(
        f"127.0.0.1:{node.grpc.port}", timeout_s=30.0, connect_timeout_s=20.0, **known
    )
