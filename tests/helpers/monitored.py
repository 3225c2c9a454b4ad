"""Three members with the credentials of docker/first_start.py, and traffic for the dashboard.

The traffic covers every kind that the dashboard has panels for.
"""

import contextlib
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deployed import program
from node_fleet import HERE

from kvstore import (
    Client,
    ClientConfig,
    Exhausted,
    Forbidden,
    Keep,
    Namespace,
    PutOutcome,
    opaque_layout,
)
from kvstore.security.identities import add, new_token, token_line
from kvstore.tools.node_process import NodeProcess

MEMBERS = ("n1", "n2", "n3")
NBYTES = 32 << 10
# Each member has RAM for 256 pages and disk for 512. With two replicas, about the newest 380 pages
# are in RAM and the newest 760 on disk.
SIZES = (
    "--ram-bytes",
    "8MiB",
    "--extent-bytes",
    "1MiB",
    "--disk-bytes",
    "16MiB",
    "--disk-extent-bytes",
    "1MiB",
)
BATCH = 20
FIRST = range(50 * BATCH)
ON_DISK = range(-30 * BATCH, -27 * BATCH)  # relative to the next page
ENGINES = Namespace("llama", opaque_layout(NBYTES), "default")
LIMITED = Namespace("llama", opaque_layout(NBYTES), "team-b")


class Monitored:
    """The cluster; `known` is the folder of credentials of the nodes and Prometheus."""

    def __init__(self, folder: Path) -> None:
        self.known = folder / "secrets"
        self.known.mkdir()
        assert program("first_start").main([str(self.known), "n1", "n2", "n3"]) == 0
        self._limited = new_token("team-b")
        add(
            self.known / "identities",
            token_line("limited", self._limited, tenant="team-b", role="write"),
        )
        with (self.known / "identities").open("a") as file:
            file.write("tenant team-b pins=1\n")
        self.ports = {member: HERE.port(0) for member in MEMBERS}
        with ThreadPoolExecutor() as pool:
            nodes = pool.map(lambda member: self._start(folder, member), MEMBERS)
            self.nodes = dict(zip(MEMBERS, nodes, strict=True))
        self._next = len(FIRST)

    @property
    def scraped(self) -> list[str]:
        return [f"127.0.0.1:{node.metrics_port}" for node in self.nodes.values()]

    def fill(self) -> None:
        """Put more pages than fit in RAM and, with replicas, on disk."""
        with self._client() as client:
            for first in range(0, len(FIRST), BATCH):
                self._put(client, ENGINES, FIRST[first : first + BATCH])

    def traffic(self) -> None:
        new = range(self._next, self._next + 3 * BATCH)
        for part, wire in enumerate(("bulk", "grpc", "shm")):
            with self._client(wire=wire) as client:
                mine = new[part * BATCH : (part + 1) * BATCH]
                self._put(client, ENGINES, mine)
                assert client.lookup(ENGINES, keys([*mine, -1])).prefix_pages == BATCH
                self._get(client, [*mine, -1])
        with self._client() as client:
            self._get(client, range(self._next + ON_DISK.start, self._next + ON_DISK.stop))
        self._next = new.stop
        with self._client(near="n1") as client:
            self._get(client, new)
        with self._client(token=self._limited) as client:
            self._put(client, LIMITED, range(3))
            with contextlib.suppress(Exhausted):  # each member grants one pin
                client.pin(LIMITED, keys(range(3)), 60.0)
            with pytest.raises(Forbidden):
                client.flush()

    def look(self) -> None:
        """Look up pages near n1 and n2, which ask the members that own them."""
        for near in MEMBERS[:2]:
            with self._client(near=near) as client:
                client.lookup(ENGINES, keys(range(-BATCH, 0)))

    def close(self) -> None:
        for node in self.nodes.values():
            node.kill()

    def _start(self, folder: Path, member: str) -> NodeProcess:
        files = {
            "tls-cert": "node.pem",
            "tls-key": "node.key",
            "tls-ca": "ca.pem",
            "token-file": "member.token",
        }
        files["tls-client-ca"] = "ca.pem"
        flags = [
            word for flag, name in files.items() for word in (f"--{flag}", str(self.known / name))
        ]
        flags += ["--identities", str(self.known / "identities"), "--shm-trust", "default"]
        list_ = ",".join(f"{some}=127.0.0.1:{port}" for some, port in self.ports.items())
        flags += [
            "--cluster",
            f"static:fleet/{list_}",
            "--member",
            member,
            "--port",
            str(self.ports[member]),
        ]
        return NodeProcess(
            *SIZES,
            *flags,
            "--replicas",
            "2",
            "--data-dir",
            str(folder / member),
            "--log-level",
            "ERROR",
        )

    def _client(self, **settings: Any) -> Client:
        token = {} if "token" in settings else {"token_file": str(self.known / "engine.token")}
        address = ",".join(f"127.0.0.1:{port}" for port in self.ports.values())
        files = {"tls_ca": "ca.pem", "tls_cert": "client.pem", "tls_key": "client.key"}
        shown = {name: str(self.known / file) for name, file in files.items()}
        known: dict[str, Any] = {"timeout_s": 30.0, "connect_timeout_s": 20.0, **shown, **token}
        return Client(ClientConfig(address, **known, **settings))

    def _put(self, client: Client, space: Namespace, numbers: range) -> None:
        outcomes = client.put(
            space, keys(numbers), [page(number) for number in numbers], Keep(ack="all")
        )
        assert set(outcomes) <= {PutOutcome.STORED, PutOutcome.EXISTS}

    def _get(self, client: Client, numbers: "range | list[int]") -> None:
        buffers = [bytearray(NBYTES) for _ in numbers]
        hits = client.get(ENGINES, keys(numbers), buffers)
        for number, buffer, hit in zip(numbers, buffers, hits, strict=True):
            assert not hit or bytes(buffer) == page(number)


def keys(numbers: "range | list[int]") -> list[bytes]:
    return [hashlib.sha256(str(number).encode()).digest() for number in numbers]


def page(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest() * (NBYTES // 32)
