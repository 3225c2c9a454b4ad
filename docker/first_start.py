"""Create the identities and certificates of a compose project, once.

    python first_start.py /secrets NAME...

It writes these files:

    ca.pem ca.key          an authority of its own
    node.pem node.key      certificate of the nodes, for each NAME (a host or an address), localhost
                           and 127.0.0.1
    client.pem client.key  certificate of all clients; it names no identity, tokens do
    operator.token         token of the operator: all tenants (*), role admin
    member.token           token of nodes at each other: all tenants, role node
    engine.token           token of engines: tenant default, role write
    identities             the tokens' identities, which nodes read

Existing files stay, so it may run before each start of a node. Each file is written atomically. The
certificate is written after its key, and the identities after the tokens. So a run that was killed
is completed by the next one, and a revoked token does not come back.
"""

import fcntl
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvstore.cli.authority import Authority, hosts_of
from kvstore.config import ClientConfig
from kvstore.errors import ConfigError
from kvstore.security import identities
from kvstore.security.identities import ALL
from kvstore.security.secrets import DEFAULT_TENANT, token_of, write_whole

CA_NAME, DAYS = "kvstore compose CA", 3650.0  # no process renews them
HERE = ("localhost", "127.0.0.1")
CLIENT = "client"
# (tenant, role)
WHO = {
    "operator": (ALL, "admin"),
    "member": (ALL, "node"),
    "engine": (DEFAULT_TENANT, "write"),
}


def main(arguments: Sequence[str]) -> int:
    """Run the command line."""
    if len(arguments) < 2 or not all(arguments):
        return _failed(
            "say which folder, and by which names clients reach the nodes: first_start.py /secrets "
            "NAME..."
        )
    folder, names = Path(arguments[0]), [name.strip("[]") for name in arguments[1:]]
    try:
        made = _make(folder, list(dict.fromkeys([*names, *HERE])))
    except ConfigError as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(
            f"{error.filename or folder}: {error.strerror}; user {os.geteuid()} must be able to "
            "write there"
        )
    if made:
        print(f"{folder}: made {', '.join(made)}")
        print(
            "clients need ca.pem, client.pem, client.key, engine.token: docker cp "
            f"CONTAINER:{folder}/ca.pem . , ..."
        )
    else:
        print(f"{folder}: all files exist already")
    return 0


def _make(folder: Path, hosts: list[str]) -> list[str]:
    """Make what is missing and return the names."""
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # excludes a second run, and `kvstore tokens`
        made = [] if (folder / "ca.pem").exists() else _found(folder)
        if (folder / "node.pem").exists():
            _compare(folder, hosts)
        else:
            Authority.open(folder).node("node", hosts, DAYS, force=True)
            made.append("node.pem")
        if not (folder / "client.pem").exists():
            made += _admit(folder)
        if not (folder / "identities").exists():
            made += _introduce(folder)
        return made
    finally:
        os.close(directory)


def _found(folder: Path) -> list[str]:
    Authority.found(folder, CA_NAME, DAYS, force=True)
    return ["ca.pem"]


def _admit(folder: Path) -> list[str]:
    """Make the client's certificate, if the authority's key exists."""
    if not (folder / "ca.key").exists():
        print(
            f"{folder} has no client.pem, and no ca.key to make it with: clients show one of "
            "ca.pem",
            file=sys.stderr,
        )
        return []
    Authority.open(folder).client(CLIENT, CLIENT, DAYS, force=True)
    return ["client.pem"]


def _introduce(folder: Path) -> list[str]:
    """Make a token for each role, or keep that of an earlier run."""
    made, lines = [], []
    for name, (tenant, role) in WHO.items():
        path = folder / f"{name}.token"
        if not path.exists():
            write_whole(path, f"{identities.new_token(tenant)}\n".encode(), 0o600)
            made.append(path.name)
        token = token_of(ClientConfig(token_file=str(path)))
        if not token:
            raise ConfigError(f"{path} is empty; remove it, and a token is made")
        lines.append(identities.token_line(name, token, tenant=tenant, role=role))
    write_whole(
        folder / "identities", "".join(f"{line}\n" for line in lines).encode(), identities.MODE_NEW
    )
    return [*made, "identities"]


def _compare(folder: Path, hosts: list[str]) -> None:
    missing = [host for host in hosts if host not in hosts_of(folder / "node.pem")]
    if missing:
        print(
            f"{folder}/node.pem stays as it is, and does not name {', '.join(missing)}, so clients "
            "that call a node by "
            f"that refuse it. For another one: kvstore certs node {' '.join(hosts)} --dir {folder} "
            "--file node --force",
            file=sys.stderr,
        )


def _failed(why: str) -> int:
    print(f"first_start: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
