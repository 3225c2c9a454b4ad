"""The cluster of `make demo-operate`, and the commands of its operator.

    Operator   runs `kvstore` as a person would type it, and records each command
    Cluster    etcd and three nodes with TLS and tokens, in one folder
    Load       demo_load.py in a process of its own
    Alerts     Prometheus with the rules of deploy/monitoring, where it is installed

Everything listens on loopback, at free ports.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import measure  # noqa: F401 -- puts tests/helpers on the path
from chromium import Chromium
from node_fleet import EtcdProcess
from ports import free_ports

from kvstore.tools.node_process import NodeProcess

Result = TypeVar("Result")
HERE = Path(__file__).resolve().parent
RULES = HERE.parent / "deploy" / "monitoring" / "alerts.yaml"
MEMBERS = ("n1", "n2", "n3")
HOST = "127.0.0.1"
COMMAND_S = 120.0
WAIT_S = 40.0
RAM, DISK = "64MiB", "512MiB"
LEASE_S = 2
PICTURE_S = 4.0  # until the console has asked all members
HTTP_S = 10.0


class StepFailed(Exception):
    """A step did not show what it should have shown."""


@dataclass
class Command:
    """A command as it was typed, its exit status and outputs."""

    words: str
    status: int
    output: str
    errors: str
    seconds: float

    def as_json(self) -> Any:
        """Return the JSON value that it printed; raises StepFailed if it printed none."""
        try:
            return json.loads(self.output)
        except ValueError as error:
            raise StepFailed(f"{self.words} printed no JSON: {self.errors[-400:]}") from error


def until(what: str, look: Callable[[], Result], wait_s: float = WAIT_S) -> Result:
    """Call `look` until it returns something true, and return that.

    Raises StepFailed with `what` after `wait_s`.
    """
    end = time.monotonic() + wait_s
    while not (found := look()):
        if time.monotonic() > end:
            raise StepFailed(f"not seen within {wait_s:g} s: {what}")
        time.sleep(0.2)
    return found


class Operator:
    """A shell in `folder`: commands, their environment and a record of what was typed.

    `show` gets each command before it runs.
    """

    def __init__(self, folder: Path, show: Callable[[str], None]) -> None:
        self.folder = folder
        self.commands: list[Command] = []
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")
        }
        self._show = show

    def export(self, **variables: str) -> None:
        """Set variables for later commands."""
        self.environment |= variables
        self._show("export " + " ".join(f"{name}={value}" for name, value in variables.items()))

    def type(self, words: str, *, expect: int | None = 0, **variables: str) -> Command:
        """Run a `kvstore` command line, with `variables` before it.

        `expect`: its exit status; another one raises StepFailed. None: any.
        """
        shown = " ".join([*(f"{key}={value}" for key, value in variables.items()), words])
        self._show(shown)
        program, *arguments = words.split()
        assert program == "kvstore"
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "kvstore.cli.app", *arguments],
            cwd=self.folder,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        seconds = time.monotonic() - start
        found = Command(shown, done.returncode, done.stdout, done.stderr, seconds)
        self.commands.append(found)
        if expect is not None and done.returncode != expect:
            words_last = (done.stderr or done.stdout).strip()[-600:]
            raise StepFailed(f"{shown}: exit status {done.returncode}: {words_last}")
        return found

    def note(self, words: str) -> None:
        """Record and show an action that is no `kvstore` command."""
        self._show(words)
        self.commands.append(Command(words, 0, "", "", 0.0))

    def token(self, file: str) -> str:
        """Return the token in a file."""
        return (self.folder / file).read_text().strip()


class Cluster:
    """etcd and the members, with certificates and tokens of the operator's folder."""

    def __init__(self, operator: Operator, etcd: EtcdProcess) -> None:
        self.operator = operator
        self.etcd = etcd
        self.nodes: dict[str, NodeProcess] = {}
        ports = free_ports(3 * len(MEMBERS), HOST)
        self.ports = {
            member: tuple(ports[3 * index : 3 * index + 3]) for index, member in enumerate(MEMBERS)
        }

    @property
    def addresses(self) -> str:
        """Return the addresses of all members, as KVSTORE_ADDRESS takes them."""
        return ",".join(f"{HOST}:{ports[0]}" for ports in self.ports.values())

    def start(self, member: str) -> NodeProcess:
        """Start a member, or restart it at its ports with its data directory."""
        folder, (port, bulk, metrics) = self.operator.folder, self.ports[member]
        own = f"--member {member} --port {port} --bulk-port {bulk} --metrics-port {metrics}"
        shared = f"--ram-bytes {RAM} --disk-bytes {DISK} --replicas 2 --shm-socket none"
        shared += f" --cluster etcd://{self.etcd.address}/demo --lease-s {LEASE_S}"
        files = {
            "data-dir": f"data/{member}",
            "identities": "identities",
            "token-file": "member.token",
            "tls-cert": f"certs/{member}.pem",
            "tls-key": f"certs/{member}.key",
            "tls-ca": "certs/ca.pem",
        }
        self.operator.note(
            " ".join(["kvstore-node", own, shared, *(f"--{k} {v}" for k, v in files.items())])
        )
        flags = [*own.split(), *shared.split()]
        for name, file in files.items():
            flags += [f"--{name}", str(folder / file)]
        self.nodes[member] = node = NodeProcess(*flags)
        return node

    def stop(self, member: str) -> None:
        """Stop a member with SIGTERM; raises StepFailed if it does not exit with 0."""
        node = self.nodes[member]
        self.operator.note(f"kill -TERM {node.pid}")
        if status := node.stop(WAIT_S):
            raise StepFailed(f"{member} exited with {status}: {node.log_text[-600:]}")

    def fetch(self, member: str, path: str) -> Any:
        """Return an open response of a member's HTTP port."""
        operator, port = self.operator, self.ports[member][2]
        console = path.startswith("/console/")
        context = ssl.create_default_context(cafile=str(operator.folder / "certs" / "ca.pem"))
        headers = {
            "Authorization": f"Bearer {operator.token('operator.token')}",
            "X-KVStore-Console": "1",
        }
        request = urllib.request.Request(
            f"https://{HOST}:{port}{path}", headers=headers, data=b"{}" if console else None
        )
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        return opener.open(request, timeout=HTTP_S)

    def metrics(self, member: str, name: str) -> dict[str, float]:
        """Return a metric of a member by its labels, as Prometheus reads it."""
        with self.fetch(member, "/metrics") as response:
            text = response.read().decode()
        found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
        return {labels: float(value) for labels, value in found}

    def console(self, member: str) -> dict[str, Any]:
        """Return the first message that a member's console sends to a browser."""
        with self.fetch(member, "/console/events") as response:
            for line in response:
                if line.startswith(b"data: "):
                    message: dict[str, Any] = json.loads(line[len(b"data: ") :])
                    return message
        raise StepFailed(f"the console of {member} sent nothing")

    def take_picture(self, member: str, path: Path) -> bool:
        """Take a picture of a member's console; return False where Chromium is not installed."""
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        if program is None:
            return False
        browser = Chromium(program, "--ignore-certificate-errors")
        try:
            browser.size(1600, 900)
            browser.open(f"https://{HOST}:{self.ports[member][2]}/console/")
            browser.until("document.activeElement.id === 'token'")
            browser.type(self.operator.token("operator.token"))
            browser.press("Enter")
            browser.until("document.getElementById('link').textContent === 'live'")
            browser.until("document.querySelectorAll('#map .member').length > 0")
            time.sleep(PICTURE_S)
            browser.picture(path)
        finally:
            browser.close()
        return True

    def close(self) -> None:
        """Stop all nodes and etcd."""
        for node in self.nodes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.stop()
        self.etcd.close()


class Load:
    """demo_load.py with one token; its sums so far, and its end."""

    def __init__(self, operator: Operator, token: str, *flags: str) -> None:
        self._file = operator.folder / f"load-{token}.jsonl"
        command = [sys.executable, str(HERE / "demo_load.py"), *flags]
        environment = {**operator.environment, "KVSTORE_TOKEN_FILE": token}
        with self._file.open("wb") as output, self._file.with_suffix(".log").open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=operator.folder, env=environment, stdout=output, stderr=log
            )

    @property
    def sums(self) -> dict[str, Any]:
        """Return the sums that it printed last; raises StepFailed if it has ended by an error."""
        if self._process.poll():
            log = self._file.with_suffix(".log").read_text()[-600:]
            raise StepFailed(f"the clients ended with {self._process.returncode}: {log}")
        lines = self._file.read_text().rpartition("\n")[0].splitlines()
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        return found

    def stop(self) -> dict[str, Any]:
        """End it and return its sums."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._process.wait(WAIT_S)
        return self.sums

    def wait(self) -> dict[str, Any]:
        """Wait for the end that its flags give it, and return its sums."""
        self._process.wait(COMMAND_S)
        return self.sums

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()


class Alerts:
    """A Prometheus that scrapes the members each second and evaluates the project's alerts.

    An alert fires here after a second instead of its minutes.
    """

    def __init__(self, cluster: Cluster, program: str) -> None:
        folder = cluster.operator.folder / "prometheus"
        folder.mkdir()
        rules = re.sub(r"^( +for:) .*$", r"\1 1s", RULES.read_text(), flags=re.MULTILINE)
        (folder / "alerts.yaml").write_text(rules)
        targets = [f"{HOST}:{ports[2]}" for ports in cluster.ports.values()]
        job = {
            "job_name": "kvstore",
            "scheme": "https",
            "tls_config": {"ca_file": "../certs/ca.pem"},
            "authorization": {"credentials_file": "../prometheus.token"},
            "static_configs": [{"targets": targets}],
        }
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["alerts.yaml"],
            "scrape_configs": [job],
        }
        (folder / "prometheus.yaml").write_text(json.dumps(config))  # JSON is YAML
        self._url = f"http://{HOST}:{free_ports(1, HOST)[0]}"
        command = [program, "--config.file=prometheus.yaml", "--storage.tsdb.path=data"]
        command += [f"--web.listen-address={self._url.removeprefix('http://')}"]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def firing(self) -> list[str]:
        """Return the names of the firing alerts; empty while Prometheus starts."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self._url}/api/v1/alerts", timeout=HTTP_S) as response:
                alerts = json.load(response)["data"]["alerts"]
        except OSError:
            return []
        return sorted({one["labels"]["alertname"] for one in alerts if one["state"] == "firing"})

    def close(self) -> None:
        """Stop it."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[bool]:
    """Mount a small file system at `folder`, and yield whether that was allowed.

    `in_private_mounts` makes it invisible outside, and the kernel removes it with this process.
    """
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=700", "kvstore-demo", str(folder)]
    mounted = not subprocess.run(command, capture_output=True, check=False).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


PRIVATE = "KVSTORE_DEMO_PRIVATE_MOUNTS"


def in_private_mounts() -> None:
    """Run this program again in a mount namespace of its own, where the system allows that.

    Mounts of the demo are then invisible to others, and end with it, even if it is killed.
    """
    unshare = shutil.which("unshare")
    if unshare is None or os.environ.get(PRIVATE):
        return
    flags = ["--mount"] if os.geteuid() == 0 else ["--mount", "--map-root-user"]
    if subprocess.run([unshare, *flags, "true"], capture_output=True, check=False).returncode:
        return
    os.environ[PRIVATE] = "1"
    os.execv(unshare, [unshare, *flags, sys.executable, *sys.argv])


def private_mounts() -> bool:
    """Return whether this process has a mount namespace of its own."""
    return bool(os.environ.pop(PRIVATE, ""))
