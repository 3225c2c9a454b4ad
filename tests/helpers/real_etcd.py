"""A real etcd in its own process."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ports import free_ports
from waiting import wait_until

from kvstore.errors import Unavailable
from node.cluster.etcd import Etcd, EtcdCredentials

LEASE_S = 2


NO_CREDENTIALS = EtcdCredentials()


class RealEtcd:
    """A running etcd; `access`: credentials of the tests, `flags`: more flags of etcd."""

    def __init__(
        self, folder: Path, access: EtcdCredentials = NO_CREDENTIALS, flags: Sequence[str] = ()
    ) -> None:
        self._folder = folder
        self._access = access
        self.port, peer = free_ports(2)
        here = f"{'https' if access.ca else 'http'}://127.0.0.1:{self.port}"
        self._command = [
            "etcd",
            "--data-dir",
            str(folder),
            "--listen-client-urls",
            here,
            "--advertise-client-urls",
            here,
        ]
        self._command += ["--listen-peer-urls", f"http://127.0.0.1:{peer}"]
        self._command += ["--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"]
        self._command += [
            "--initial-cluster",
            f"default=http://127.0.0.1:{peer}",
            "--log-level",
            "error",
        ]
        self._command += flags
        self.start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(self._command, **quiet)  # type: ignore[call-overload]
        client = Etcd([self.endpoint], self._access)
        wait_until(lambda: _answers(client), 30.0)
        client.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wipe(self) -> None:
        shutil.rmtree(self._folder)

    def ctl(self, *words: str) -> str:
        command = ["etcdctl", "--endpoints", self.endpoint]
        if self._access.ca:
            command += [
                "--cacert",
                self._access.ca,
                "--cert",
                self._access.cert,
                "--key",
                self._access.key,
            ]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        return subprocess.run(
            [*command, *words], check=True, capture_output=True, text=True, env=environment
        ).stdout


def _answers(client: Etcd) -> bool:
    try:
        client.read("/kvstore/none/")
    except Unavailable:
        return False
    return True
