"""Create the credentials of Prometheus and Grafana for docker/compose.monitoring.yaml.

    python first_scrape.py /secrets /prometheus /grafana HOST:PORT...

It writes these files:

    /prometheus/prometheus.token  token of the identity compose-prometheus: all tenants, role read
    /prometheus/ca.pem            copy of the authority that Prometheus trusts
    /prometheus/client.pem .key   copies of the clients' certificate and key
    /prometheus/nodes.json        scrape targets: each HOST:PORT with HOST in the nodes' certificate
    /grafana/admin.password       password of Grafana's user admin

It runs before each start of Prometheus, after first_start.py. An existing token or password stays,
so a revoked token is not replaced; the other files are rewritten. A HOST that the certificate does
not name could not be scraped and is left out, so one list serves several compose files. The two
containers read the files through their owner's group.
"""

import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from kvstore.cli.authority import hosts_of
from kvstore.config import split_address
from kvstore.errors import ConfigError
from kvstore.security import identities as identity_file
from kvstore.security.identities import ALL
from kvstore.security.secrets import write_whole

NAME = "compose-prometheus"
MODE = 0o640
PASSWORD_NBYTES = 18


def main(arguments: Sequence[str]) -> int:
    """Run the command line."""
    if len(arguments) < 4 or not all(arguments):
        return _failed(
            "say which folders and nodes: first_scrape.py /secrets /prometheus /grafana "
            "HOST:PORT..."
        )
    known, prometheus, grafana = map(Path, arguments[:3])
    try:
        there = _scraped(known / "node.pem", arguments[3:])
        for name in ("ca.pem", "client.key", "client.pem"):
            write_whole(prometheus / name, (known / name).read_bytes(), MODE)
        write_whole(prometheus / "nodes.json", json.dumps([{"targets": there}]).encode(), MODE)
        _introduce(known / "identities", prometheus / "prometheus.token")
        if not (grafana / "admin.password").exists():
            write_whole(
                grafana / "admin.password", secrets.token_urlsafe(PASSWORD_NBYTES).encode(), MODE
            )
    except ConfigError as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"{error.filename}: {error.strerror}")
    print(
        f"Prometheus scrapes {', '.join(there)}; the password of Grafana's admin is in "
        f"{grafana}/admin.password"
    )
    return 0


def _scraped(certificate: Path, nodes: Sequence[str]) -> list[str]:
    hosts = hosts_of(certificate)
    for node in nodes:
        if not node.endswith(f":{split_address(node)[1]}"):
            raise ConfigError(
                f"{node} is not HOST:PORT; the port is that of the node's metrics, 7442 by default"
            )
    there = [node for node in nodes if split_address(node)[0] in hosts]
    if not there:
        raise ConfigError(
            f"{certificate} names {', '.join(hosts)}, and none of {', '.join(nodes)}; in "
            "KVSTORE_SCRAPED say by which "
            "of its names Prometheus reaches the nodes, as HOST:PORT with spaces between"
        )
    return there


def _introduce(identities: Path, token_file: Path) -> None:
    """Create the token of Prometheus; an identity without its token file is replaced.

    An earlier run that was killed may have left an identity whose token is lost.
    """
    if token_file.exists():
        return
    token = identity_file.new_token(ALL)
    identity_file.revoke(identities, NAME)
    identity_file.add(identities, identity_file.token_line(NAME, token, tenant=ALL, role="read"))
    write_whole(token_file, f"{token}\n".encode(), MODE)


def _failed(why: str) -> int:
    print(f"first_scrape: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
