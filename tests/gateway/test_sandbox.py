"""A gateway's process has no secrets and files of its node, and few rights on the host."""

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_people import Crew
from gateway_processes import gateways
from ports import free_ports

from kvstore import Client, ClientConfig
from kvstore.tools.node_process import NodeProcess
from node.gateway import sandbox
from node.gateway.main import NICENESS
from node.process import OOM_SCORE

SECRET = "not-for-gateways-7f3a"
LANDLOCK = sandbox._libc.syscall(
    sandbox._CREATE_RULESET, None, ctypes.c_size_t(0), sandbox._VERSION
)
landlocked = pytest.mark.skipif(
    LANDLOCK < 6, reason=f"Landlock {max(LANDLOCK, 0)} here; all of this needs version 6"
)


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Crew:
    made = Crew(tmp_path_factory.mktemp("sandbox") / "identities")
    made.join("operator", "*", "admin")
    return made


@pytest.fixture(scope="module")
def process(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    data = tmp_path_factory.mktemp("sandbox-data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORE_NODE_ETCD_PASSWORD", SECRET)
        patch.setenv("KVSTORE_TOKEN", SECRET)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        flags = ("--ram-bytes", "64MiB", "--identities", str(crew.path))
        with NodeProcess(*flags, "--data-dir", str(data), "--disk-bytes", "128MiB") as node:
            with Client(
                ClientConfig(node.address, token=crew.tokens["operator"], timeout_s=30.0)
            ) as client:
                client.node_status()  # so that there is a connection
            yield node


def links(pid: int) -> set[str]:
    """Return the targets of the process's open descriptors above 2."""
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            if int(fd) > 2:
                found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:  # closed since
            pass
    return found


def test_gateway_has_no_settings_and_secrets_of_its_node(process: NodeProcess) -> None:
    (pid,) = gateways(process.pid)
    assert SECRET in Path(f"/proc/{process.pid}/environ").read_text(), (
        "the node's environment lacks the secret"
    )
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert SECRET.encode() not in environment
    assert b"KVSTORE" not in environment
    assert b"PATH=" in environment
    assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_gateway_shares_no_file_with_its_node(process: NodeProcess, crew: Crew) -> None:
    """A gateway shares no open file with its node; each has its own ends of their sockets."""
    (pid,) = gateways(process.pid)
    nodes, own = links(process.pid), links(pid)
    assert any("memfd" in link for link in nodes), "the node has no memory file of pages"
    shared = {link for link in nodes & own if not link.startswith("anon_inode:")}
    assert shared == set()
    files = {link for link in own if link.startswith("/") and not link.startswith("/proc/")}
    assert not any(str(crew.path.parent.parent) in file for file in files)
    assert not any("memfd" in link for link in own)
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "memfd" not in maps
    assert "memfd" in Path(f"/proc/{process.pid}/maps").read_text()


@landlocked
def test_gateway_process_is_in_its_sandbox(process: NodeProcess) -> None:
    (pid,) = gateways(process.pid)
    for task in Path(f"/proc/{pid}/task").iterdir():
        assert "NoNewPrivs:\t1" in (task / "status").read_text()
        assert "Seccomp:\t2" in (task / "status").read_text()
    assert "NoNewPrivs:\t0" in Path(f"/proc/{process.pid}/status").read_text()
    assert "Max core file size        0" in Path(f"/proc/{pid}/limits").read_text()
    assert "of its user" not in process.log_text


def test_gateway_yields_cpu_and_memory_to_its_node(process: NodeProcess) -> None:
    """A gateway has a lower CPU priority than its node, and is killed first if memory is short."""
    (pid,) = gateways(process.pid)
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(
        19, os.getpriority(os.PRIO_PROCESS, process.pid) + NICENESS
    )
    assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == OOM_SCORE


# Attempts of a compromised gateway; the result of each is printed
TRIES = """
import ctypes, os, signal, socket, sys
from node.gateway import sandbox
from node.gateway.main import NICENESS
from node.process import OOM_SCORE

data, identities, node, port, bulk = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH = 16

def trace():
    if libc.ptrace(PTRACE_ATTACH, node, None, None) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    os.waitpid(node, 0)
    libc.ptrace(17, node, None, None)

def bind(number):
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", number))

def connect():
    socket.create_connection(("127.0.0.1", bulk), 20.0).close()

TRIES = {
    "list data": lambda: os.listdir(data),
    "read data": lambda: open(os.path.join(data, "file")).close(),
    "write data": lambda: open(os.path.join(data, "new"), "w").close(),
    "read identities": lambda: open(identities).close(),
    "read node's memory": lambda: open(f"/proc/{node}/mem", "rb").close(),
    "trace node": trace,
    "signal node": lambda: os.kill(node, 0),
    "connect": connect,
    "run a program": lambda: os.posix_spawn("/bin/sh", ["sh", "-c", "exit"], {}),
    "listen elsewhere": lambda: bind(0),
    "listen": lambda: bind(port),
    "read Python": lambda: __import__("xml.dom.minidom"),
    "random": lambda: open("/dev/urandom", "rb").close(),
}
if sys.argv[6] == "in":
    assert sandbox.enter(port) >= 6
for name, act in TRIES.items():
    try:
        act()
        print(name, "done", sep=": ")
    except OSError as error:
        print(name, type(error).__name__, sep=": ")
"""
ALLOWED = {"listen", "read Python", "random"}


def tried(where: str, tmp_path: Path, crew: Crew, port: int) -> dict[str, str]:
    """Run TRIES in the sandbox ("in") or outside ("out"); return the result of each."""
    (tmp_path / "file").write_text("a page")
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as node:
        with socket.create_server(("127.0.0.1", 0)) as bulk:
            numbers = map(str, (node.pid, port, bulk.getsockname()[1]))
            arguments = [str(tmp_path), str(crew.path), *numbers, where]
            done = subprocess.run(
                [sys.executable, "-c", TRIES, *arguments],
                capture_output=True,
                text=True,
                timeout=60.0,
                check=False,
            )
        assert node.stdin is not None
        node.stdin.close()
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ") for line in done.stdout.splitlines())


@landlocked
def test_sandbox_refuses_all_attempts_but_the_allowed(tmp_path: Path, crew: Crew) -> None:
    (port,) = free_ports(1)
    out, inside = tried("out", tmp_path, crew, port), tried("in", tmp_path, crew, port)
    assert out.keys() == inside.keys()
    assert {name for name, became in inside.items() if became == "done"} == ALLOWED
    assert {name for name, became in out.items() if became != "done"} <= {
        "trace node",
        "read node's memory",
    }, "an attempt outside the sandbox failed that should succeed"
    assert set(inside.values()) <= {"done", "PermissionError"}
