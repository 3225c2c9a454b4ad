"""Identities of all kinds, and clients that have them."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waiting import wait_until

from kvstore import Client, ClientConfig, Namespace, opaque_layout
from kvstore.security.identities import add, new_token, revoke, token_line
from node.server import Node

PAGE_NBYTES = 4096
MODEL = "llama"


class People:
    """Tokens by name, and the identities file that a node reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokens: dict[str, str] = {"nobody": "", "wrong": "team-a." + "x" * 43}

    def join(self, name: str, tenant: str, role: str, **fields: str) -> str:
        token = self.tokens[name] = new_token(tenant)
        add(self.path, token_line(name, token, tenant=tenant, role=role, **fields))
        return token

    def leave(self, name: str) -> None:
        revoke(self.path, name)

    def change(self, name: str, tenant: str, role: str) -> None:
        """Change the tenant and role of a token."""
        revoke(self.path, name)
        add(self.path, token_line(name, self.tokens[name], tenant=tenant, role=role))

    def say(self, line: str) -> None:
        with self.path.open("a") as file:
            file.write(line + "\n")


def namespace(tenant: str = "team-a", model: str = MODEL, **fields: Any) -> Namespace:
    return Namespace(model, opaque_layout(PAGE_NBYTES), tenant, **fields)


def client(node: Node, token: str, **settings: Any) -> Client:
    values = {"timeout_s": 20.0, "connect_timeout_s": 10.0, "token": token, **settings}
    return Client(ClientConfig(f"127.0.0.1:{node.grpc.port}", **values))


def taken_up(node: Node, holds: Callable[[], bool]) -> None:
    """Wait until the node has read its files again and the condition holds."""

    def look() -> bool:
        node.access.poll()
        return holds()

    wait_until(look)


def soon_touched(path: Path) -> None:
    """Touch a file late enough that its modification time differs from the last one."""
    time.sleep(0.02)
    path.touch()
