"""Nodes as processes that are one cluster: for the demo, benchmarks and tests of faults.

static    a list of members on ports that were free a moment ago; a member may die, and come back
etcd      an etcd of their own beside them; members may come and go, too
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
ETCD_START_S = 20.0


@dataclass(frozen=True)
class Place:
    """Where a process runs.

    `inside`: a command that runs another there; without it, here.
    """

    host: str = "127.0.0.1"
    inside: tuple[str, ...] = ()

    def port(self, usual: int) -> int:
        """One that is free: a place of its own has all."""
        if self.inside:
            return usual
        return free_port(self.host)


HERE = Place()


class EtcdProcess:
    """An etcd with a directory of its own, which a restart finds again.

    Raises ConfigError if there is no etcd and Unavailable if it does not start.
    """

    def __init__(self, place: Place = HERE, program: str = "etcd") -> None:
        found = shutil.which(program)
        if found is None:
            raise ConfigError(f"there is no {program} here; on Debian: apt-get install etcd-server")
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

    `data`: each has a data directory below it.

    `flags` are all members'. They share no memory with anybody: each stands for a host.
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
        """Of all members, over the bulk wire unless `settings` say otherwise."""
        chosen = {"address": ",".join(self.addresses.values()), "wire": "bulk", **settings}
        return Client(client_config(**chosen))

    def start(self, member: str) -> NodeProcess:
        """Again, after it was killed or stopped: at the same address, with the same data
        directory.
        """
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
        flags += ["--insecure"]  # its hosts are namespaces of this one, or it is this one
        if self._etcd:
            flags += ["--advertise", f"{place.host}:{port}"]
        if self._data:
            flags += ["--data-dir", str(self._data / member)]
        self.nodes[member] = node = NodeProcess(*self._flags, *flags, inside=place.inside)
        return node

    def join(self, place: Place = HERE) -> str:
        """One more member, which etcd tells the others of; its id."""
        if self._etcd is None:
            raise ConfigError("a fixed list of members has no place for one more; this needs etcd")
        member = self._settle(place)
        self.start(member)
        return member

    def close(self) -> None:
        """Stops all; those that are paused go on for that."""
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
