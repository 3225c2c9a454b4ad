"""System calls that a gateway's sandbox refuses, tried by a process before and after it enters."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from node.gateway.sandbox import _ARCHITECTURES
from node.gateway.supervisor import import_paths

pytestmark = pytest.mark.skipif(
    os.uname().machine not in _ARCHITECTURES,
    reason="the sandbox does not support this architecture",
)

# Prints the result of each attempt: "done", or the number of the error
TRIES = """
import ctypes, json, os, resource, signal, socket, subprocess, sys, threading
from node.gateway import sandbox

file, path, port, victim = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
FASTOPEN, MPTCP = 0x20000000, 262
libc = ctypes.CDLL(None, use_errno=True)
ours, theirs = socket.socketpair()

def called(number):
    if number < 0:
        raise OSError(ctypes.get_errno(), "")

def on(sock, act):
    with sock:
        sock.settimeout(20.0)
        act(sock)

def thread():
    ran = threading.Event()
    threading.Thread(target=ran.set).start()
    assert ran.wait(60.0)

to = ("127.0.0.1", port)
REFUSED = {
    "TCP": lambda: on(socket.socket(), lambda sock: sock.connect(to)),
    "TCP, fast": lambda: on(socket.socket(), lambda sock: sock.sendto(b"x", FASTOPEN, to)),
    "TCP, fast, message": lambda: on(
        socket.socket(), lambda sock: sock.sendmsg([b"x"], (), FASTOPEN, to)
    ),
    "MPTCP": lambda: on(
        socket.socket(type=socket.SOCK_STREAM, proto=MPTCP), lambda sock: sock.connect(to)
    ),
    "UDP": lambda: on(socket.socket(type=socket.SOCK_DGRAM), lambda sock: sock.sendto(b"x", to)),
    "Unix": lambda: on(socket.socket(socket.AF_UNIX), lambda sock: sock.connect(path)),
    "signal": lambda: os.kill(victim, 0),
    "signal to a thread": lambda: called(libc.tgkill(victim, victim, 0)),
    "limits": lambda: resource.prlimit(victim, resource.RLIMIT_NOFILE, (64, 64)),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, victim, 19),
    "processors": lambda: os.sched_setaffinity(victim, os.sched_getaffinity(victim)),
    "program": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "mode": lambda: os.chmod(file, 0o666),
    "times": lambda: os.utime(file),
}
ALLOWED = {
    "listen": lambda: on(
        socket.socket(), lambda sock: (sock.bind(("127.0.0.1", 0)), sock.listen())
    ),
    "listen to IPv6": lambda: on(socket.socket(socket.AF_INET6), lambda sock: None),
    "talk": lambda: (ours.sendmsg([b"x"]), ours.send(b"x"), theirs.recv(2)),
    "thread": thread,
    "own limits": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
    "signal to itself": lambda: called(libc.tgkill(os.getpid(), threading.get_native_id(), 0)),
}

def tried():
    became = {}
    for name, act in (REFUSED | ALLOWED).items():
        try:
            act()
            became[name] = "done"
        except OSError as error:
            became[name] = error.errno
    return became

before = tried()
called(libc.prctl(38, 1, 0, 0, 0))
assert sandbox.refuse_others()
print(json.dumps([before, tried(), list(REFUSED)]))
"""


def test_sandbox_refuses_unneeded_system_calls(tmp_path: Path) -> None:
    file = tmp_path / "identities"
    file.touch()
    path = str(tmp_path / "socket")
    sleeps = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with (
        socket.socket(socket.AF_UNIX) as at_path,
        socket.create_server(("127.0.0.1", 0)) as listener,
        subprocess.Popen(sleeps, stdin=subprocess.PIPE) as victim,
    ):
        at_path.bind(path)
        at_path.listen()
        port = str(listener.getsockname()[1])
        command = [sys.executable, "-c", TRIES, str(file), path, port, str(victim.pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
        assert victim.stdin is not None
        victim.stdin.close()
    assert done.returncode == 0, done.stderr
    before, after, refused = json.loads(done.stdout)
    # Calls that a system may lack
    hard_here = {
        "MPTCP",
        "TCP, fast",
        "TCP, fast, message",
        "listen to IPv6",
    }
    assert {name for name, became in before.items() if became != "done"} <= hard_here
    assert {name for name, became in after.items() if became == 1} == set(refused)
    assert all(after[name] == before[name] for name in after if name not in refused)


def test_import_paths_exclude_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox does not let a gateway read the current directory.

    `python -m node.main` puts it on the import path, and it may hold the data.
    """
    before = import_paths()  # without the directory in which pytest was started
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", *before])
    assert import_paths() == before
