"""Certificates and authorities replaced under load: no call fails, and old ones are refused."""

import shutil
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
from authorities import client_context, found, pair
from known_pages import Pages
from local_nodes import Connect, StartNode
from waiting import wait_until

from kvstore import Client, ClientConfig, Unavailable
from kvstore.cli.authority import Authority
from kvstore.transports.tls import ClientTls
from node.server import Node

PAUSE_S = 0.05


class Files:
    """The TLS files of a node and its clients, each replaced atomically."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self._folder = folder
        self.node = {"tls_cert": self._path("node.pem"), "tls_key": self._path("node.key")}
        self.client: dict[str, Any] = {
            "tls_cert": self._path("client.pem"),
            "tls_key": self._path("client.key"),
        }
        self.ca = self._path("ca.pem")
        self.trust(authority)
        self.show(authority)

    def _path(self, name: str) -> str:
        return str(self._folder / name)

    def trust(self, *authorities: Authority) -> None:
        """Trust the authorities on both sides."""
        self.put(self.ca, b"".join(authority.path.read_bytes() for authority in authorities))

    def show(self, authority: Authority) -> None:
        """Use certificates of this authority on both sides."""
        for name, side in (("node", self.node), ("client", self.client)):
            for source, target in zip(pair(authority, name).values(), side.values(), strict=True):
                self.put(target, Path(source).read_bytes())

    def put(self, path: str, content: bytes) -> None:
        new = Path(path + ".new")
        new.touch(0o600)
        new.write_bytes(content)
        new.replace(path)


@pytest.fixture
def files(tmp_path: Path, ours: Authority) -> Files:
    return Files(tmp_path, ours)


@pytest.fixture
def node(start_node: StartNode, files: Files) -> Node:
    return start_node(**files.node, tls_client_ca=files.ca)


class Load:
    """Verified puts and gets over kept and new connections, until the block ends.

    No call may fail.
    """

    def __init__(self, node: Node, wire: str, files: Files, make_pages: type[Pages]) -> None:
        config: dict[str, Any] = {
            "wire": wire,
            "tls_ca": files.ca,
            **files.client,
            "timeout_s": 30.0,
            "connect_timeout_s": 20.0,
        }
        self._config = ClientConfig(address=f"127.0.0.1:{node.grpc.port}", **config)
        self._pages = make_pages(f"load over {wire}")
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(fresh,)) for fresh in (True, False)
        ]
        self.rounds = [0, 0]
        self.failed: list[BaseException] = []

    def _run(self, fresh: bool) -> None:
        try:
            with Client(self._config) as kept:
                while not self._stop.wait(PAUSE_S):
                    client = Client(self._config) if fresh else kept
                    # Keys that the other thread does not write
                    keys = self._pages.keys(fresh, 2 + 100 * fresh + self.rounds[fresh] % 100)
                    self._pages.put(client, keys)
                    assert all(self._pages.get(client, keys))
                    self.rounds[fresh] += 1
                    if fresh:
                        client.close()
        except BaseException as error:  # noqa: BLE001 -- raised again in the test's thread
            self.failed.append(error)

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        self.go_on()
        return self

    def go_on(self) -> None:
        """Wait until both threads have done three more rounds, over connections made after this
        call.
        """
        wanted = [count + 3 for count in self.rounds]
        wait_until(
            lambda: self.failed or all(a >= b for a, b in zip(self.rounds, wanted, strict=True))
        )
        if self.failed:
            raise self.failed[0]

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self.failed:
            raise self.failed[0]


def serial_at(port: int, authority: Authority, files: Files) -> str:
    """Return the serial number of the certificate that a port of the node presents."""
    context = client_context(authority, **files.client)
    with context.wrap_socket(
        socket.create_connection(("127.0.0.1", port)), server_hostname="localhost"
    ) as greeted:
        return str((greeted.getpeercert() or {})["serialNumber"])


def in_use(node: Node) -> bytes:
    """Return the certificate that the node has read last."""
    assert node.certificates is not None
    return node.certificates.pems.chain


@pytest.mark.parametrize("wire", ["bulk", pytest.param("grpc", marks=pytest.mark.long)])
def test_node_certificate_is_renewed_under_load(
    node: Node, files: Files, ours: Authority, wire: str
) -> None:
    ports = (node.bulk.port, node.grpc.port, node.metrics.port)
    with Load(node, wire, files, Pages) as load:
        for _ in range(2):
            before = serial_at(ports[0], ours, files)
            ours.node("node", ["localhost", "127.0.0.1"], 10, force=True)
            files.show(ours)
            expected = Path(pair(ours, "node")["tls_cert"]).read_bytes().strip()
            wait_until(lambda expected=expected: in_use(node) == expected)
            wait_until(
                lambda before=before: all(serial_at(port, ours, files) != before for port in ports)
            )
            load.go_on()
        assert len({serial_at(port, ours, files) for port in ports}) == 1


@pytest.mark.parametrize("wire", ["grpc", pytest.param("bulk", marks=pytest.mark.long)])
def test_authority_is_replaced_under_load(
    node: Node, files: Files, ours: Authority, tmp_path: Path, wire: str
) -> None:
    """Both authorities are trusted for a while; then certificates of the old one are refused."""
    new = found(tmp_path / "new", "new")
    with Load(node, wire, files, Pages) as load:
        files.trust(ours, new)
        certificates = node.certificates
        assert certificates is not None
        wait_until(lambda: certificates.pems.roots.count(b"BEGIN") == 2)
        load.go_on()
        files.show(new)
        expected = Path(pair(new, "node")["tls_cert"]).read_bytes().strip()
        wait_until(lambda: in_use(node) == expected)
        load.go_on()
        files.trust(new)
        wait_until(lambda: certificates.pems.roots.count(b"BEGIN") == 1)
        load.go_on()
    old = ClientConfig(
        f"127.0.0.1:{node.grpc.port}", wire=wire, tls_ca=files.ca, **pair(ours, "client")
    )
    with (
        Client(old) as client,
        pytest.raises(Unavailable, match="not from an authority in its --tls-client-ca"),
    ):
        client.node_status()


def test_mismatched_key_is_refused_and_the_old_pair_stays(
    node: Node,
    files: Files,
    ours: Authority,
    strangers: Authority,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def problem() -> str:
        assert node.certificates is not None
        return node.certificates.status().problem

    before = serial_at(node.bulk.port, ours, files)
    with Load(node, "bulk", files, Pages) as load:
        shutil.copy(pair(strangers, "node")["tls_key"], files.node["tls_key"])
        wait_until(lambda: "is not the key of the certificate" in problem())
        load.go_on()
        assert serial_at(node.bulk.port, ours, files) == before
        wait_until(lambda: "the previous content stays in force" in caplog.text)
        files.show(ours)
        wait_until(lambda: not problem())
        load.go_on()


def test_open_connections_survive_a_renewal(
    node: Node, files: Files, ours: Authority, connect: Connect
) -> None:
    client = connect(node, "bulk", tls_ca=files.ca, **files.client)
    client.node_status()
    before = serial_at(node.bulk.port, ours, files)
    ours.node("node", ["localhost", "127.0.0.1"], 10, force=True)
    files.show(ours)
    wait_until(lambda: serial_at(node.bulk.port, ours, files) != before)
    client.node_status()
    assert client.stats.connects == 1


def test_client_uses_renewed_files_for_its_next_connection(files: Files, ours: Authority) -> None:
    tls = ClientTls(ClientConfig(tls_ca=files.ca, **files.client), "localhost")
    first = tls.context()
    assert tls.context() is first
    ours.client("client", "team-a", 10, force=True)
    files.show(ours)
    assert tls.context() is not first
    assert isinstance(first, ssl.SSLContext)
