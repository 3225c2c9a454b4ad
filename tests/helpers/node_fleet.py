"""A cluster of node processes, for the demo, benchmarks and fault tests.

static    a fixed list of members on free ports; members may die and come back
etcd      a private etcd; members may also join and leave
"""

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ports import free_port

from kvstore.client import Client
from kvstore.config import GRPC_PORT, client_config
from kvstore.errors import ConfigError, Unavailable
from kvstore.tools.node_process import NodeProcess

NAME = "fleet"
ETCD_PORT = 2379
ETCD_START_S = 60.0


@dataclass(frozen=True)
class Place:
    """Where a process runs; `inside` is a command prefix that runs another command there."""

    host: str = "127.0.0.1"
    inside: tuple[str, ...] = ()

    def port(self, usual: int) -> int:
        """Return a free port; in a place with a network of its own, the usual one."""
        if self.inside:
            return usual
        return free_port(self.host)


HERE = Place()


class EtcdProcess:
    """An etcd with its own directory, which it keeps across restarts.

    Raises ConfigError if etcd is not installed and Unavailable if it does not start.
    """

    def __init__(self, place: Place = HERE, program: str = "etcd") -> None:
        found = shutil.which(program)
        if found is None:
            raise ConfigError(f"{program} is not installed; on Debian: apt-get install etcd-server")
        self.address = f"{place.host}:{place.port(ETCD_PORT)}"
        url, peers = f"http://{self.address}", f"http://{place.host}:{place.port(ETCD_PORT + 1)}"
        self._directory = tempfile.TemporaryDirectory(prefix="kvstore-etcd-")
        self._command = [*place.inside, found, "--name", NAME, "--data-dir", self._directory.name]
        self._command += [
            "--listen-client-urls",
            url,
            "--advertise-client-urls",
            url,
            "--listen-peer-urls",
            peers,
        ]
        self._command += [
            "--initial-advertise-peer-urls",
            peers,
            "--initial-cluster",
            f"{NAME}={peers}",
        ]
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        quiet = subprocess.DEVNULL
        self._process = process = subprocess.Popen(self._command, stdout=quiet, stderr=quiet)
        host, _, port = self.address.rpartition(":")
        end = time.monotonic() + ETCD_START_S
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
                return
            time.sleep(0.05)
        raise Unavailable(f"etcd did not start on {self.address}")

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        self.kill()
        self._directory.cleanup()


class Fleet:
    """Members n1, n2, ... of one cluster, one at each place.

    `flags` apply to all members. `data`: the parent of their data directories. No client shares
    memory with them, because each member stands for another host.
    """

    def __init__(
        self,
        places: Sequence[Place],
        *flags: str,
        replicas: int = 1,
        etcd: EtcdProcess | None = None,
        data: Path | None = None,
    ) -> None:
        self.nodes: dict[str, NodeProcess] = {}
        self._places: dict[str, tuple[Place, int]] = {}
        self._flags = (
            *flags,
            "--shm-socket",
            "none",
            *(("--replicas", str(replicas)) if replicas > 1 else ()),
        )
        self.replicas = replicas
        self._etcd = etcd
        self._data = data
        for place in places:
            self._settle(place)
        with contextlib.ExitStack() as started:
            started.callback(self.close)
            for member in self._places:
                self.start(member)
            started.pop_all()

    @property
    def addresses(self) -> dict[str, str]:
        return {member: f"{place.host}:{port}" for member, (place, port) in self._places.items()}

    def client(self, **settings: object) -> Client:
        """Return a client of all members, over the bulk wire unless `settings` say otherwise."""
        chosen = {"address": ",".join(self.addresses.values()), "wire": "bulk", **settings}
        return Client(client_config(**chosen))

    def start(self, member: str) -> NodeProcess:
        """Start a member, or restart it at the same address with the same data directory."""
        place, port = self._places[member]
        flags = [
            "--member",
            member,
            "--cluster",
            self._cluster(),
            "--host",
            place.host,
            "--port",
            str(port),
        ]
        flags += ["--insecure"]  # all places are on this host
        if self._etcd:
            flags += ["--advertise", f"{place.host}:{port}"]
        if self._data:
            flags += ["--data-dir", str(self._data / member)]
        self.nodes[member] = node = NodeProcess(*self._flags, *flags, inside=place.inside)
        return node

    def join(self, place: Place = HERE) -> str:
        """Start one more member, which the others find in etcd, and return its id."""
        if self._etcd is None:
            raise ConfigError("a static cluster cannot grow; joining needs etcd")
        member = self._settle(place)
        self.start(member)
        return member

    def close(self) -> None:
        """Resume paused nodes, and stop all."""
        for node in self.nodes.values():
            node.resume()
        for node in self.nodes.values():
            node.stop()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self, place: Place) -> str:
        member = f"n{len(self._places) + 1}"
        self._places[member] = (place, place.port(GRPC_PORT))
        return member

    def _cluster(self) -> str:
        if self._etcd:
            return f"etcd://{self._etcd.address}/{NAME}"
        return f"static:{NAME}/" + ",".join(
            f"{member}={address}" for member, address in self.addresses.items()
        )
