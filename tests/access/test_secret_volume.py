"""Certificates, identities and tokens in a Kubernetes secret volume, whose links a kubelet replaces
all at once.
"""

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from authorities import client_context
from fleets import SMALL, Start, members
from fleets import etcd as etcd
from fleets import fleet as fleet
from people import PAGE_NBYTES, People, namespace
from waiting import wait_until

from kvstore import Client, ClientConfig, ConfigError, Keep, KVStoreError, PutOutcome
from kvstore.cli.authority import Authority
from kvstore.config import load
from kvstore.results import ACK_ALL
from kvstore.security.identities import ALL
from node.config import NodeConfig
from node.server import Node

KEYS = [number.to_bytes(32, "big") for number in range(8)]
PAGES = [bytes([number]) * PAGE_NBYTES for number in range(8)]
NAME = "fleet.example"  # in the certificates of all members, which have no addresses


class SecretVolume:
    """A folder with links `tls.crt` -> `..data/tls.crt` and `..data` -> `..N`.

    A change creates `..N+1` and replaces `..data`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        folder.mkdir()

    def __getitem__(self, name: str) -> str:
        return str(self._folder / name)

    def write(self, **files: bytes) -> None:
        """Replace all files by the given ones; `tls_crt` stands for tls.crt."""
        old, data = self._folder / f"..{self._number}", self._folder / "..data"
        self._number += 1
        new, turned = self._folder / f"..{self._number}", self._folder / "..data_tmp"
        new.mkdir()
        for name, content in files.items():
            path = new / name.replace("_", ".")
            path.touch(0o440)
            path.write_bytes(content)
        turned.symlink_to(new.name)
        os.rename(turned, data)
        for name in files:
            link = self._folder / name.replace("_", ".")
            if not link.is_symlink():
                link.symlink_to(f"..data/{link.name}")
        shutil.rmtree(old, ignore_errors=True)


class Deployment:
    """An operator's certificates and identities, and the volume in which nodes see them."""

    def __init__(self, folder: Path) -> None:
        self.volume = SecretVolume(folder / "volume")
        self.authority = Authority.found(folder / "certs", "ours", 10)
        self.people = People(folder / "identities")
        self.people.join("member", ALL, "node")
        self.people.join("engine", "team-a", "write")
        self.publish()

    def publish(self) -> None:
        """Write the files to the volume, with a new certificate."""
        certificate, key = self.authority.node("node", [NAME], 10, force=True)
        self.volume.write(
            tls_crt=certificate.read_bytes(),
            tls_key=key.read_bytes(),
            ca_crt=self.authority.path.read_bytes(),
            identities=self.people.path.read_bytes(),
            token=self.people.tokens["member"].encode(),
        )

    @property
    def settings(self) -> dict[str, Any]:
        files = {
            "tls_cert": "tls.crt",
            "tls_key": "tls.key",
            "tls_ca": "ca.crt",
            "identities": "identities",
        }
        named = {setting: self.volume[name] for setting, name in files.items()}
        return {**named, "token_file": self.volume["token"], "tls_name": NAME, "replicas": 2}

    def client(self, node: Node) -> Client:
        known: dict[str, Any] = {
            "tls_ca": str(self.authority.path),
            "tls_name": NAME,
            "token": self.people.tokens["engine"],
        }
        config = ClientConfig(
            f"127.0.0.1:{node.grpc.port}", timeout_s=60.0, connect_timeout_s=30.0, **known
        )
        return Client(config)

    def serial(self, port: int) -> str:
        """Return the serial number of the certificate that a port presents now."""
        dialled = socket.create_connection(("127.0.0.1", port), 20.0)
        with client_context(self.authority).wrap_socket(dialled, server_hostname=NAME) as greeted:
            return str((greeted.getpeercert() or {})["serialNumber"])


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return Deployment(tmp_path)


def test_nodes_reload_a_replaced_secret_volume(fleet: Start, deployment: Deployment) -> None:
    """Nodes reload all files of a replaced volume, and members go on replicating with new tokens.

    The certificates do not have the members' addresses.
    """
    one, two = fleet("n1", **deployment.settings), fleet("n2", **deployment.settings)
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])
    wait_until(lambda: all(node.membership.view.settled for node in (one, two)))  # type: ignore[union-attr]
    with deployment.client(one) as engine:
        assert engine.put(namespace(), KEYS, PAGES, Keep(ack=ACK_ALL)) == [PutOutcome.STORED] * len(
            KEYS
        )
    assert two.tier.lookup(namespace().digest, KEYS, touch=False) == [True] * len(KEYS)

    before = deployment.serial(one.metrics.port)
    for name, tenant, role in (("member", ALL, "node"), ("engine", "team-a", "write")):
        deployment.people.leave(name)
        deployment.people.join(name, tenant, role)
    deployment.publish()
    ports = [
        port for node in (one, two) for port in (node.metrics.port, node.bulk.port, node.grpc.port)
    ]
    wait_until(lambda: all(deployment.serial(port) != before for port in ports))
    known = deployment.people.tokens
    wait_until(
        lambda: all(
            lets_in(node, known["engine"]) and lets_in(node, known["member"]) for node in (one, two)
        )
    )
    with deployment.client(two) as engine:
        space = namespace(salt="after")
        assert engine.put(space, KEYS, PAGES, Keep(ack=ACK_ALL)) == [PutOutcome.STORED] * len(KEYS)
    assert one.tier.lookup(space.digest, KEYS, touch=False) == [True] * len(KEYS)


def lets_in(node: Node, token: str) -> bool:
    try:
        node.access.of_token(token)
    except KVStoreError:
        return False
    return True


def test_member_without_tls_name_does_not_join(fleet: Start, deployment: Deployment) -> None:
    with pytest.raises(ConfigError, match=r"does not name 127\.0\.0\.1"):
        fleet("n1", **{**deployment.settings, "tls_name": ""})


def test_tls_name_needs_a_certificate() -> None:
    with pytest.raises(
        ConfigError, match="tls_name, of the other members' certificates, needs tls_cert"
    ):
        Node(NodeConfig(**{**SMALL, "tls_name": NAME}))
    assert load(NodeConfig, "KVSTORE_NODE", {}, {"KVSTORE_NODE_TLS_NAME": NAME}).tls_name == NAME
