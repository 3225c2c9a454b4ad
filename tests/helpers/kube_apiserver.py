"""A kube-apiserver with its own etcd, as a cluster without nodes and controllers.

Objects go through its validation, defaults and admission (Pod Security among them). No pod starts.
"""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from node_fleet import HERE
from real_etcd import RealEtcd

START_S = 120.0
TOKEN = "operator-of-the-tests"
CONFIG = """\
apiVersion: v1
kind: Config
current-context: here
contexts: [{{name: here, context: {{cluster: here, user: here}}}}]
clusters: [{{name: here, cluster: {{server: "{url}", insecure-skip-tls-verify: true}}}}]
users: [{{name: here, user: {{token: {token}}}}}]
"""


class Cluster:
    """Commands of kubectl and helm at this API server."""

    def __init__(self, kubectl: str, helm: str, config: Path) -> None:
        self._programs = {"kubectl": kubectl, "helm": helm}
        self._config = config

    def run(self, program: str, *arguments: str, stdin: str = "") -> tuple[int, str]:
        """Run a command, and return (exit status, output)."""
        command = [self._programs[program], f"--kubeconfig={self._config}", *arguments]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def must(self, program: str, *arguments: str, stdin: str = "") -> str:
        """Run a command that has to succeed, and return its output."""
        status, output = self.run(program, *arguments, stdin=stdin)
        assert status == 0, output
        return output


@contextlib.contextmanager
def cluster(apiserver: str, kubectl: str, helm: str, folder: Path) -> Iterator[Cluster]:
    """Start both servers in `folder`, and end them."""
    port = HERE.port(0)
    _write_key(folder)
    (folder / "tokens.csv").write_text(f"{TOKEN},operator,operator,system:masters\n")
    (folder / "config").write_text(CONFIG.format(url=f"https://127.0.0.1:{port}", token=TOKEN))
    (folder / "config").chmod(0o600)
    etcd = RealEtcd(folder / "etcd")
    command = [
        apiserver,
        f"--etcd-servers=http://{etcd.endpoint}",
        *("--bind-address=127.0.0.1", f"--secure-port={port}", f"--cert-dir={folder}"),
        *(f"--token-auth-file={folder}/tokens.csv", "--authorization-mode=RBAC"),
        f"--service-account-key-file={folder}/key.pem",
        f"--service-account-signing-key-file={folder}/key.pem",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--allow-privileged=true",  # as clusters have it; Pod Security decides
        # No controller creates the account `default` of a namespace.
        "--disable-admission-plugins=ServiceAccount",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        found = Cluster(kubectl, helm, folder / "config")
        _await_ready(found, process, folder / "log")
        yield found
    finally:
        process.kill()
        process.wait()
        etcd.kill()


def _write_key(folder: Path) -> None:
    """Write the key that signs tokens of service accounts."""
    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    (folder / "key.pem").write_bytes(pem)


def _await_ready(found: Cluster, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        if found.run("kubectl", "get", "--raw=/readyz")[0] == 0:
            return
        time.sleep(0.5)
    raise AssertionError(f"kube-apiserver did not start: {log.read_text()[-4000:]}")
