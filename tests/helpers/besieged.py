"""A node under attack in its own process: its access mode, memory, gateways, attackers, a sink."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.security.identities import add, new_token, token_line
from kvstore.tools.node_process import NodeProcess
from node.config import NodeConfig

HERE = Path(__file__).parent
RAM_NBYTES = 256 << 20
# docs/operations.md, "Memory": what a node with pages of 64 KiB or more and one gateway needs.
LIMIT_NBYTES = RAM_NBYTES + RAM_NBYTES // 64 + (512 << 20) + NodeConfig.grpc_memory_nbytes
NODE_FLAGS = (
    "--ram-bytes",
    str(RAM_NBYTES),
    "--extent-bytes",
    str(16 << 20),
    "--log-level",
    "WARNING",
)
MODES = ("open", "token", "mtls")
SOURCES = {"one": "127.0.0.2", "many": "127.0.0.2-127.0.0.200"}
LOOK_S = 0.05
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Mode:
    """An access mode: node flags, settings of an authorized client and arguments of a sink."""

    name: str
    node: tuple[str, ...] = ()
    client: dict[str, Any] = field(default_factory=dict)
    sink: tuple[str, ...] = ()

    @property
    def tls(self) -> bool:
        return "--tls-cert" in self.node


def mode_of(name: str, folder: Path) -> Mode:
    """Return an access mode, with its files created in `folder`.

    open: neither TLS nor identities. token: TLS and identities. mtls: TLS with client certificates.
    """
    if name == "open":
        return Mode(name)
    # Needs the package cryptography, which the mode `open` does not
    from kvstore.cli.authority import (
        Authority,
    )

    authority = Authority.found(folder, "besieged", 10)
    cert, key = (str(path) for path in authority.node("node", ("localhost", "127.0.0.1"), 10))
    node: tuple[str, ...] = ("--tls-cert", cert, "--tls-key", key)
    sink = ("--cert", cert, "--key", key)
    client = {"tls_ca": str(authority.path)}
    if name == "token":
        token, identities = new_token("team-a"), folder / "identities"
        add(identities, token_line("innocent", token, tenant="team-a", role="write"))
        node += ("--identities", str(identities), "--shm-trust", "team-a")
        return Mode(name, node, {**client, "token": token, "tenant": "team-a"}, sink)
    shown = (str(path) for path in authority.client("client", "innocent", 10))
    client |= dict(zip(("tls_cert", "tls_key"), shown, strict=True))
    return Mode(
        name,
        (*node, "--tls-client-ca", str(authority.path)),
        client,
        (*sink, "--client-ca", client["tls_ca"]),
    )


# ---- memory ------------------------------------------------------------------------------


def memory(pid: int) -> dict[str, int]:
    """Return a process's memory in bytes by kind, or {} if it has exited.

    RssAnon is private, RssShmem is a node's arena, RssFile is mapped files.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {
        line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Rss")
    }


def gateways(pid: int) -> list[int]:
    """Return the node's child processes that serve gRPC."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                if b"gateway" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
    return found


class Watch:
    """A thread that samples the memory of a node and its gateways 20 times a second."""

    def __init__(self, pid: int, limit_nbytes: int = LIMIT_NBYTES) -> None:
        self._pid, self._limit_nbytes = pid, limit_nbytes
        self._over, self._thread = threading.Event(), threading.Thread(target=self._run)
        self._known: set[int] = set()
        self.exceeded_at = 0.0  # monotonic time when the total first exceeded the limit
        self.begin()

    def begin(self) -> None:
        """Reset the peaks and the count of gateways that exited."""
        self.private = self.shared = self.highest = self.gateways = self.ends = 0
        self._look()

    def _look(self) -> None:
        node, there = memory(self._pid), set(gateways(self._pid))
        self.ends += len(self._known - there)
        self._known = there
        of_gateways = sum(memory(pid).get("RssAnon", 0) for pid in there)
        self.private = max(self.private, node.get("RssAnon", 0))
        self.shared = max(self.shared, node.get("RssShmem", 0))
        self.gateways = max(self.gateways, of_gateways)
        total = node.get("RssAnon", 0) + node.get("RssShmem", 0) + of_gateways
        self.highest = max(self.highest, total)
        if total > self._limit_nbytes and not self.exceeded_at:
            self.exceeded_at = time.monotonic()

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look()

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class MemoryGroup:
    """A control group (version 2) with a memory limit.

    `inside` is the command prefix that enters it. It is empty if this machine lets us create none.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self._path = CGROUPS / f"kvstore-besieged-{os.getpid()}"
        self.inside: tuple[str, ...] = ()
        self._made = False
        try:
            if "memory" not in (CGROUPS / "cgroup.subtree_control").read_text().split():
                return
            self._path.mkdir()
            self._made = True
            (self._path / "memory.max").write_text(str(limit_nbytes))
            with contextlib.suppress(OSError):  # without swap there is no such file
                (self._path / "memory.swap.max").write_text("0")
        except OSError:
            return
        enter = f'echo $$ > {self._path}/cgroup.procs && exec "$@"'
        self.inside = ("sh", "-c", enter, "sh")

    @property
    def kills(self) -> int:
        """Return the number of processes that the kernel killed for memory."""
        if not self.inside:
            return 0
        lines = (self._path / "memory.events").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def __enter__(self) -> "MemoryGroup":
        return self

    def __exit__(self, *_: object) -> None:
        if self._made:
            with contextlib.suppress(OSError):
                self._path.rmdir()


def start_node(mode: Mode, *flags: str, inside: Sequence[str] = ()) -> NodeProcess:
    return NodeProcess(*NODE_FLAGS, *mode.node, *flags, inside=inside)


# ---- attackers ---------------------------------------------------------------------------


class Attackers:
    """Processes that attack an address for the duration of the context.

    Each has a connection when the context begins. `counts` has their totals after it ends.
    """

    def __init__(
        self,
        attack: str,
        address: str,
        sources: str,
        tls: bool,
        processes: int = 1,
        divide: int = 1,
    ) -> None:
        from attacks import ATTACKS

        connections = max(1, ATTACKS[attack].connections // (processes * divide))
        command = [
            sys.executable,
            str(HERE / "strangers.py"),
            "attack",
            attack,
            address,
            "--sources",
            sources,
        ]
        command += ["--connections", str(connections), *(["--tls"] if tls else [])]
        self._command, self._count = command, processes
        self._processes: list[subprocess.Popen[str]] = []
        self.counts: Counter[str] = Counter()
        self.ended_at = 0.0  # monotonic

    def __enter__(self) -> "Attackers":
        for _ in range(self._count):
            self._processes.append(_spawn(self._command))
        for process in self._processes:
            if _stdout(process).readline() != "begun\n":
                raise RuntimeError(f"{process.args!r} did not begin")
        return self

    @property
    def running(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            _stdin(process).close()
        for process in self._processes:
            self.counts.update(_counts(process))
        self.ended_at = time.monotonic()


@contextlib.contextmanager
def sink(mode: Mode) -> Iterator[str]:
    """Start a process that accepts and discards all data; yield its address."""
    process = _spawn([sys.executable, str(HERE / "strangers.py"), "sink", *mode.sink])
    try:
        yield f"127.0.0.1:{int(_stdout(process).readline())}"
    finally:
        _stdin(process).close()
        _counts(process)


def _spawn(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _stdin(process: "subprocess.Popen[str]") -> Any:
    assert process.stdin is not None
    return process.stdin


def _stdout(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    return process.stdout


def _counts(process: "subprocess.Popen[str]") -> dict[str, float]:
    with _stdout(process) as output:
        line = output.readline()
    if process.wait(60.0) or not line:
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
    found: dict[str, float] = json.loads(line)
    return found
