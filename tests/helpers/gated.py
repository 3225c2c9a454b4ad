"""A node with identities, for tests of what a token allows and what a node refuses."""

from collections.abc import Callable
from pathlib import Path

from fleets import SMALL
from people import taken_up

from kvstore.security.identities import add, new_token, token_line
from node.config import NodeConfig
from node.server import Node

TENANT = "team-a"


class Gated:
    """A node with authentication; `knocks` counts the calls that it refused."""

    def __init__(self, folder: Path) -> None:
        self.path, self.folder = folder / "identities", folder
        self.path.touch()
        self.node = Node(NodeConfig(**SMALL, identities=str(self.path), shm_trust=TENANT))
        self.knocks = 0
        refused = self.node.audit.refused

        def counted(*about: str) -> None:
            self.knocks += 1
            refused(*about)

        self.node.audit.refused = counted  # type: ignore[assignment, method-assign]
        self.node.start()

    def token(self, name: str, role: str = "write", tenant: str = TENANT) -> str:
        token = new_token(tenant)
        add(self.path, token_line(name, token, tenant=tenant, role=role))
        self.taken_up(
            lambda: name in {who.name for who in self.node.access.identities.tokens.values()}
        )
        return token

    def taken_up(self, holds: Callable[[], bool]) -> None:
        taken_up(self.node, holds)

    def file(self, token: str) -> Path:
        path = self.folder / "token"
        path.write_text(token)
        path.chmod(0o600)
        return path
