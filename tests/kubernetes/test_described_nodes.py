"""Nodes started as the manifests describe them, with the secrets of docs/kubernetes.md, the probes
of a kubelet, and an engine configured as in the example.
"""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_etcd import FakeEtcd
from fleets import etcd as etcd
from fleets import members
from manifests import DOCUMENT, FOLDER, Workload, overlay, read
from waiting import wait_until

from kvstore import Client, ClientConfig, Keep, PutOutcome, Unavailable, opaque_layout
from kvstore.config import load
from kvstore.keys import Namespace
from kvstore.results import ACK_ALL
from node.config import NodeConfig
from node.server import Node

PAGE_NBYTES = 4096
KEYS = [number.to_bytes(32, "big") for number in range(8)]
PAGES = [bytes([number]) * PAGE_NBYTES for number in range(8)]
SMALL = {
    "RAM_BYTES": "16MiB",
    "EXTENT_BYTES": "1MiB",
    "DISK_BYTES": "64MiB",
    "LOG_LEVEL": "ERROR",
    "DRAIN_S": "0.3",
}
# A fake kubectl that copies the files of a secret to secrets/NAME/KEY
KUBECTL = """#!/bin/bash
set -e
[[ " $* " == *" create secret generic "* ]] || exit 0
while [[ $1 != generic ]]; do shift; done
name=$2
mkdir -p "secrets/$name"
for word in "${@:3}"; do
    [[ $word == --from-file=*=* ]] || exit 9
    pair=${word#--from-file=}
    cp "${pair#*=}" "secrets/$name/${pair%%=*}"
done
"""
Start = Callable[..., Node]


def commands(*sections: str) -> str:
    """Return the commands in these sections of the document."""
    texts = (DOCUMENT.split(f"## {title}\n")[1].split("\n## ")[0] for title in sections)
    return "\n".join(
        line[4:] for text in texts for line in text.splitlines() if line.startswith("    k")
    )


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("operator")
    programs = folder / "bin"
    programs.mkdir()
    (programs / "kubectl").write_text(KUBECTL)
    code = "from kvstore.cli.app import main; main()"
    (programs / "kvstore").write_text(f'#!/bin/bash\nexec {sys.executable} -c "{code}" "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o700)
    path = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(FOLDER.parents[1])}
    script = f"umask 077\n{commands('From nothing to three nodes', 'Clients and engines')}"
    subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=folder,
        check=True,
        capture_output=True,
        env={**os.environ, **path},
    )
    return folder / "secrets"


class Host:
    """A fake host of pods: the files in their volumes and their environment variables."""

    def __init__(self, folder: Path, secrets: Path) -> None:
        self._folder, self._secrets = folder, secrets
        self.of_pod: dict[str, dict[str, str]] = {}  # environment variables by pod
        (folder / "run").mkdir()

    @property
    def socket_folder(self) -> str:
        return str(self._folder / "run")

    def variables(self, workload: Workload, pod: str, etcd: FakeEtcd | None) -> dict[str, str]:
        """Return the variables of a pod, with this machine's paths and ports."""
        home = self._folder / pod
        home.mkdir()
        fields = {
            "metadata.name": pod,
            "metadata.namespace": "kvstore",
            "status.podIP": "127.0.0.1",
        }
        found = workload.variables(fields) | {
            f"KVSTORE_NODE_{name}": value for name, value in SMALL.items()
        }
        for path, (secret, key) in workload.files.items():
            self.give(home / Path(path).name, secret, key)
        moved = {
            "/etc/kvstore": str(home),
            "/data": str(home / "data"),
            "/run/kvstore": self.socket_folder,
        }
        for name, value in found.items():
            for old, new in moved.items():
                if value.startswith(old + "/"):
                    found[name] = new + value.removeprefix(old)
        ports = dict.fromkeys(
            ("KVSTORE_NODE_PORT", "KVSTORE_NODE_BULK_PORT", "KVSTORE_NODE_METRICS_PORT"), "0"
        )
        here = {"KVSTORE_NODE_HOST": "127.0.0.1", **ports}
        if etcd is not None:
            here |= {
                "KVSTORE_NODE_CLUSTER": f"etcd://{etcd.endpoint}/fleet",
                "KVSTORE_NODE_ADVERTISE": "127.0.0.1",
            }
        self.of_pod[pod] = found | here
        return self.of_pod[pod]

    def give(self, path: Path, secret: str, key: str) -> None:
        """Copy a file of a secret to `path`, with the mode that fsGroup makes of 0400."""
        if (self._secrets / secret / key).exists():
            shutil.copy(self._secrets / secret / key, path)
            path.chmod(0o440)


@pytest.fixture
def host(tmp_path: Path, secrets: Path) -> Host:
    return Host(tmp_path, secrets)


@pytest.fixture
def start(host: Host) -> Iterator[Start]:
    nodes: list[Node] = []

    def started(workload: Workload, pod: str, etcd: FakeEtcd | None = None) -> Node:
        node = Node(load(NodeConfig, "KVSTORE_NODE", {}, host.variables(workload, pod, etcd)))
        node.start()
        nodes.append(node)
        return node

    yield started
    for node in nodes:
        node.stop()


def workload(overlay_name: str, name: str) -> Workload:
    (found,) = (some for some in overlay(overlay_name).workloads if some.name == name)
    return found


def probe(node: Node, workload: Workload, kind: str, variables: dict[str, str]) -> int:
    """Run the command of a probe as a kubelet does, but with the node's actual ports.

    Return its exit status.
    """
    program = workload.container[kind]["exec"]["command"][1].rpartition("/")[2]
    ports = {"KVSTORE_NODE_METRICS_PORT": str(node.metrics.port)}
    command = [sys.executable, str(FOLDER.parents[1] / "docker" / program)]
    path = {"PATH": os.environ["PATH"], "PYTHONPATH": str(FOLDER.parents[1])}
    done = subprocess.run(
        command, env={**variables, **path, **ports}, capture_output=True, check=False
    )
    return done.returncode


def engine_variables(host: Host, tmp_path: Path, *addresses: str) -> dict[str, str]:
    """Return the engine's variables of examples/vllm.yaml, with paths of this machine."""
    (manifest,) = read(FOLDER / "examples" / "vllm.yaml")
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    found = {entry["name"]: entry["value"] for entry in container["env"]}
    for name in ("KVSTORE_TLS_CA", "KVSTORE_TLS_CERT", "KVSTORE_TLS_KEY", "KVSTORE_TOKEN_FILE"):
        key = Path(found[name]).name
        host.give(tmp_path / key, "kvstore-engine", key)
        found[name] = str(tmp_path / key)
    return found | {"KVSTORE_SHM_DIR": host.socket_folder, "KVSTORE_ADDRESS": ",".join(addresses)}


def test_documented_secrets_are_readable_by_their_owner_only(secrets: Path) -> None:
    names = sorted(
        path.relative_to(secrets).as_posix() for path in secrets.rglob("*") if path.is_file()
    )
    assert names == [
        "kvstore-engine/ca.crt",
        "kvstore-engine/tls.crt",
        "kvstore-engine/tls.key",
        "kvstore-engine/token",
        "kvstore-identities/identities",
        "kvstore-tls/ca.crt",
        "kvstore-tls/tls.crt",
        "kvstore-tls/tls.key",
        "kvstore-tokens/member",
        "kvstore-tokens/operator",
    ]
    assert not any(
        stat.S_IMODE(path.stat().st_mode) & 0o077 for path in secrets.rglob("*") if path.is_file()
    )


def test_single_node_serves_a_client_and_passes_its_probes(
    start: Start, host: Host, tmp_path: Path
) -> None:
    alone = workload("one", "kvstore")
    node = start(alone, "kvstore-0")
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert probe(node, alone, kind, host.of_pod["kvstore-0"]) == 0
    known = engine_variables(host, tmp_path, f"127.0.0.1:{node.grpc.port}")
    config = load(ClientConfig, "KVSTORE", {"timeout_s": 60.0, "connect_timeout_s": 30.0}, known)
    space = Namespace("llama", opaque_layout(PAGE_NBYTES))
    with Client(config) as engine:
        assert engine.put(space, KEYS, PAGES, Keep(durable=True)) == [PutOutcome.STORED] * len(KEYS)
        assert engine.wire_name == "bulk", "a storage node shares its memory"
    assert (tmp_path / "kvstore-0" / "data" / "pages").is_dir()
    node.grpc.set_serving(False)
    assert probe(node, alone, "readinessProbe", host.of_pod["kvstore-0"]) == 1


@pytest.mark.long
def test_client_without_certificate_is_refused_and_invalid_files_stop_no_node(
    start: Start, host: Host, tmp_path: Path
) -> None:
    alone = workload("one", "kvstore")
    node = start(alone, "kvstore-0")
    known = engine_variables(host, tmp_path, f"127.0.0.1:{node.grpc.port}")
    del known["KVSTORE_TLS_CERT"], known["KVSTORE_TLS_KEY"]
    config = load(ClientConfig, "KVSTORE", {"timeout_s": 60.0, "connect_timeout_s": 30.0}, known)
    with (
        Client(config) as stranger,
        pytest.raises(Unavailable, match="requires client certificates"),
    ):
        stranger.node_status()
    variables = host.of_pod["kvstore-0"]
    for spoiled in (b"", Path(variables["KVSTORE_NODE_IDENTITIES"]).read_bytes()):
        Path(variables["KVSTORE_NODE_TLS_CERT"]).chmod(0o600)
        Path(variables["KVSTORE_NODE_TLS_CERT"]).write_bytes(spoiled)
        assert probe(node, alone, "livenessProbe", variables) == 0
    node.metrics.stop()
    assert probe(node, alone, "livenessProbe", variables) == 1


@pytest.mark.long
def test_engine_uses_its_near_node_and_pages_are_on_storage_nodes(
    start: Start, host: Host, tmp_path: Path, etcd: FakeEtcd
) -> None:
    """An engine uses its near node's shared memory, and its pages are replicated to storage nodes.

    Names of pods and certificate are those of the manifests; addresses are this machine's.
    """
    storage, near_pod = workload("gpu", "kvstore"), workload("gpu", "kvstore-near")
    nodes = [start(storage, f"kvstore-{number}", etcd) for number in range(2)]
    near = start(near_pod, "kvstore-near-x7k2p", etcd)
    wait_until(lambda: all(len(members(node)) == 3 for node in [*nodes, near]))
    wait_until(lambda: all(node.membership.view.settled for node in [*nodes, near]))  # type: ignore[union-attr]
    known = engine_variables(
        host, tmp_path, *(f"127.0.0.1:{node.grpc.port}" for node in (near, nodes[0]))
    )
    config = load(ClientConfig, "KVSTORE", {"timeout_s": 60.0, "connect_timeout_s": 30.0}, known)
    space = Namespace("llama", opaque_layout(PAGE_NBYTES))
    with Client(config) as engine:
        outcomes = engine.put(space, KEYS, PAGES, Keep(ack=ACK_ALL), timeout_s=60.0)
        assert outcomes == [PutOutcome.STORED] * len(KEYS)
        assert engine.maps_arena
        into = [bytearray(PAGE_NBYTES) for _ in KEYS]
        assert all(engine.get(space, KEYS, into))
        assert list(map(bytes, into)) == PAGES
    for node in nodes:
        assert node.tier.lookup(space.digest, KEYS, touch=False) == [True] * len(KEYS), (
            "a storage node lacks a replica"
        )
    assert near.disk is None
    assert probe(near, near_pod, "livenessProbe", host.of_pod["kvstore-near-x7k2p"]) == 0
