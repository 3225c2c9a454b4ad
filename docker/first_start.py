"""Create the identities and certificates of a compose project, once.

    python first_start.py /secrets NAME...

ca.pem  ca.key        an authority of its own
node.pem  node.key    the nodes' certificate: for the NAMEs, hosts or addresses, and for localhost
                      and 127.0.0.1
client.pem client.key what all clients show: without it nobody gets as far as HTTP/2. It names
nobody: tokens do
operator.token        of all tenants (*), role admin
member.token          of all tenants, role node: what nodes show each other
engine.token          tenant default, role write: what engines show
identities            who has these tokens: what the nodes read

What is there stays as it is, so this may run before each start of a node. Each file is written
whole; of a pair the certificate, and of tokens and identities the latter, comes last and says that
all of it is there. So a run that is killed is gone on with by the next one, and a token that was
revoked or taken away does not come back.
"""

import fcntl
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvstore import identities
from kvstore.cli.authority import Authority, hosts_of
from kvstore.config import ClientConfig
from kvstore.errors import ConfigError
from kvstore.identities import ALL
from kvstore.secrets import DEFAULT_TENANT, token_of, write_whole

CA_NAME, DAYS = "kvstore compose CA", 3650.0  # nobody is there to renew them
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
        fcntl.flock(directory, fcntl.LOCK_EX)  # one at a time, and `kvstore tokens` not meanwhile
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
    """Make the client's certificate, if the authority's key is here."""
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
    """Make a token per role, or keep that of an earlier run."""
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
