"""The node of a host's engines: one for all of a user, whoever starts it and whoever ends."""

import contextlib
import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_until

from gpu_agent.options import read_options
from kvstore import (
    Client,
    ClientConfig,
    KVStoreError,
    Namespace,
    PutOutcome,
    Unavailable,
    opaque_layout,
    programs,
)
from kvstore.config import local_file, parse_address, runtime_dir
from kvstore.errors import ConfigError, ProtocolError
from kvstore.tools import local_node
from kvstore.tools.local_node import _Keeper
from kvstore.transports.unix_sockets import Peer, private_directory
from node import local
from node.process import OOM_SCORE

SPACE = Namespace("local", opaque_layout(4096))
KEY, PAGE = b"k" * 32, bytes(range(256)) * 16
PATIENT: dict[str, Any] = {"timeout_s": 30.0, "connect_timeout_s": 20.0, "backoff_s_max": 0.1}
# Some engines of one host, of which none waits for another
RANKS = """
import os, sys
from kvstore.tools.local_node import _Keeper
from node.process import OOM_SCORE
for _ in range(7):
    if not os.fork():
        break
keeper = _Keeper()
keeper.look()
print(keeper.started, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give this test a runtime directory, and end the node in it afterwards."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("KVSTORE_NODE_RAM_BYTES", "16MiB")
    monkeypatch.setenv("KVSTORE_NODE_EXTENT_BYTES", "1MiB")
    yield tmp_path / "kvstore"
    for pid in nodes():
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def nodes() -> list[int]:
    """Return the processes of nodes that have the lock of this test's directory."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"node.local" in (folder / "cmdline").read_bytes() and any(
                os.readlink(fd).startswith(local_file("lock")) for fd in (folder / "fd").iterdir()
            ):
                found.append(int(folder.name))
    return found


def is_free() -> bool:
    """Return whether no node has the lock."""
    with open(local_file("lock")) as lock, contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def parents(pid: int) -> Iterator[int]:
    """Yield the processes above one."""
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


@pytest.fixture
def keeper(runtime: Path) -> Iterator[_Keeper]:
    made = _Keeper()
    yield made
    with contextlib.suppress(OSError):
        os.close(made._users)


def serves() -> bool:
    with Client(ClientConfig(address="local", **PATIENT)) as client:
        try:
            return client.put(SPACE, [KEY], [PAGE])[0] in (PutOutcome.STORED, PutOutcome.EXISTS)
        except KVStoreError:
            return False


def test_engines_that_start_together_have_one_private_node(runtime: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RANKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as ranks:
        assert ranks.stdin is not None
        assert ranks.stdout is not None
        started = sorted(ranks.stdout.readline() for _ in range(8))
        wait_until(serves)
        (node,) = nodes()
        assert started == ["False\n"] * 7 + ["True\n"]
        modes = {path.name: path.stat().st_mode & 0o777 for path in runtime.iterdir()}
        assert modes == dict.fromkeys(
            ("local.lock", "local.log", "local.sock", "local.users"), 0o600
        )
        assert runtime.stat().st_mode & 0o777 == 0o700
        assert os.getsid(node) != os.getsid(0)
        assert all(pid != ranks.pid for pid in parents(node)), "vLLM kills what is below it"
        ranks.stdin.close()
    assert serves(), "the node outlives its engines"


def test_killed_node_is_started_again(
    runtime: Path, keeper: _Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_node, "RETRY_S", 600.0)
    keeper.look()
    wait_until(serves)
    (node,) = nodes()
    keeper.look()
    assert nodes() == [node]
    os.kill(node, signal.SIGKILL)
    os.unlink(local_file("log"))  # as from /tmp after ten days
    wait_until(keeper.look)
    assert nodes() == [], "it was started just now, and may not be able to run"
    os.utime(local_file("lock"), (0.0, 0.0))
    keeper.look()
    wait_until(serves)
    assert nodes() != [node]


def test_child_that_the_engine_forks_meanwhile_keeps_no_lock(
    runtime: Path, keeper: _Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, (end, other_end) = local_node.taken, os.pipe()
    children = []

    def forks(lock: int) -> bool:
        found = taken(lock)
        if not (child := os.fork()):
            os.close(other_end)
            os.read(end, 1)
            os._exit(0)
        children.append(child)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(local_node, "taken", forks)
        keeper.look()
    wait_until(serves)
    (node,) = nodes()
    os.kill(node, signal.SIGKILL)
    wait_until(is_free)
    os.close(other_end)
    for child in children:
        os.waitpid(child, 0)
    os.close(end)


def test_engine_shares_the_lock_anew_when_its_file_was_removed(
    runtime: Path, keeper: _Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Keeper, "_start", lambda self: None)
    keeper.look()
    os.unlink(local_file("users"))
    keeper.look()
    with open(local_file("users")) as users, pytest.raises(BlockingIOError):
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_node_leaves_the_engine_its_cores_and_its_life(runtime: Path, keeper: _Keeper) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        keeper.look()
    finally:
        os.sched_setaffinity(0, cores)
    wait_until(serves)
    (node,) = nodes()
    assert os.sched_getaffinity(node) >= cores
    assert Path(f"/proc/{node}/oom_score_adj").read_text().strip() == OOM_SCORE


@pytest.mark.parametrize("way", ["unused", "lock", "users", "sock"])
def test_node_ends_when_unused_or_when_its_files_are_gone(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """No engine's supervisor hears of it, and its output takes any path."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"{runtime.parent}/é")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    supervisor = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    supervisor.bind(f"{runtime.parent}/notify")
    monkeypatch.setenv("NOTIFY_SOCKET", f"{runtime.parent}/notify")
    os.makedirs(runtime_dir(), 0o700)
    with open(local_file("users"), "w") as users, open(local_file("lock"), "w") as lock:
        lock.write("tried")
        lock.flush()
        fcntl.flock(users, fcntl.LOCK_SH)
        for one in (users, lock):
            os.utime(one.fileno(), (0.0, 0.0))
        idle_s = "0.2" if way == "unused" else "3600"
        command = ["-m", "kvstore.programs", "node.local", "--stay", "--idle-s", idle_s]
        with subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as node:
            assert node.stdout is not None
            assert b"ready" in node.stdout.readline()
            wait_until(lambda: all(os.fstat(one.fileno()).st_mtime for one in (users, lock)))
            if way == "unused":
                time.sleep(0.5)
                assert node.poll() is None
                users.close()
            else:
                os.unlink(local_file(way))
            assert node.wait(60) == 0
            with supervisor, pytest.raises(BlockingIOError):
                supervisor.recv(1, socket.MSG_DONTWAIT)
            assert os.fstat(lock.fileno()).st_size == 0
    assert not os.path.exists(local_file("sock"))


def test_node_that_stops_already_gets_no_second_signal(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end at once, in the middle of its drain."""
    runtime.mkdir(0o700)
    files = [os.open(local_file(name), os.O_RDWR | os.O_CREAT) for name in ("lock", "users")]
    for name in ("listening", "stopping"):  # and its socket is gone
        event = threading.Event()
        event.set()
        monkeypatch.setattr(local, name, event)
    sent: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, number: sent.append(number))
        local._end_unused(files[0], files[1], 3600.0)
    assert sent == []
    for file in files:
        os.close(file)


def test_node_that_can_not_start_is_one_warning_and_tried_by_one_engine(
    runtime: Path,
    keeper: _Keeper,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("KVSTORE_NODE_RAM_BYTES", "much")
    monkeypatch.setattr(local_node, "RETRY_S", 1000.0)
    monkeypatch.setattr(local_node, "RETRY_S_MAX", 1e6)
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise KeyboardInterrupt
        wait_until(is_free)
        assert os.stat(local_file("lock")).st_size == looks
        os.utime(local_file("lock"), (0.0, 0.0))

    monkeypatch.setattr(local_node, "time", SimpleNamespace(sleep=sleep, time=time.time))
    with pytest.raises(KeyboardInterrupt):
        keeper.run()
    (warning,) = (entry.getMessage() for entry in caplog.records)
    assert warning.startswith(
        "no node on this host, the engine recomputes: the last one ended, its log with: "
        "kvstore-node: KVSTORE_NODE_RAM_BYTES"
    )
    assert warning.endswith(f" ({local_file('log')})")
    assert Path(local_file("log") + ".1").exists()
    wait_until(is_free)
    three_tries, other = 3 * b".", _Keeper()
    assert Path(local_file("lock")).read_bytes() == three_tries
    for age_s, tries in ((3000.0, False), (4001.0, True)):
        os.utime(local_file("lock"), (0.0, time.time() - age_s))
        other.look()
        assert other.started == tries
    os.close(other._users)


def test_starter_collects_a_node_that_fails(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_NODE_RAM_BYTES", "much")
    runtime.mkdir(0o700)
    for name in ("lock", "users"):
        Path(local_file(name)).touch()
    command = [sys.executable, "-m", "kvstore.programs", "node.local"]
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as some engines have it
    try:
        with subprocess.Popen(command, stderr=subprocess.PIPE) as starter:
            assert starter.stderr is not None
            (said,) = starter.stderr.readlines()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert b"much" in said


def test_directory_of_another_user_is_a_warning_and_not_used(
    runtime: Path,
    keeper: _Keeper,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime.mkdir()
    runtime.chmod(0o777)

    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local_node, "time", SimpleNamespace(sleep=sleep, time=time.time))
    with pytest.raises(KeyboardInterrupt):
        keeper.run()
    (warning,) = (entry.getMessage() for entry in caplog.records)
    assert warning == (
        f"no node on this host, the engine recomputes: {runtime} is not a directory that only "
        f"uid {os.geteuid()} may write to: remove it, or set XDG_RUNTIME_DIR to another"
    )
    assert list(runtime.iterdir()) == []


def test_full_file_system_is_named(
    keeper: _Keeper,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> None:
        monkeypatch.setattr(local_node, "time", SimpleNamespace(sleep=sleep, time=time.time))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(KeyboardInterrupt):
            keeper.run()
    (warning,) = (entry.getMessage() for entry in caplog.records)
    assert warning.endswith(f"No space left on device: '{runtime}/local.lock'")


def test_node_of_an_older_version_is_refused_with_the_way_to_replace_it(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines keep it alive, so it would never end by itself."""

    def greet(*_: object) -> None:
        raise ProtocolError("the peer speaks protocol 2, this side 4; update the older one")

    monkeypatch.setattr("kvstore.transports.shm.ShmWire.greet", greet)
    with (
        Client(ClientConfig(address="local", **PATIENT)) as client,
        pytest.raises(ProtocolError, match=r"older one; `pkill .* node\.local` ends"),
    ):
        client.lookup(SPACE, [KEY])


def test_nothing_is_made_in_the_runtime_directory_of_another_user(
    keeper: _Keeper, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `su`; that user's own engines would find a directory that is not theirs."""
    with monkeypatch.context() as patch:
        if os.geteuid():
            patch.setattr(os, "geteuid", lambda: 10001)
        else:
            os.chown(runtime.parent, 10002, -1)
        with pytest.raises(PermissionError, match=r"belongs to uid .*unset XDG_RUNTIME_DIR"):
            keeper.look()
        assert not runtime.exists()
        runtime.parent.chmod(0o1777)  # as /tmp, which may be nobody's in a container
        assert private_directory() == str(runtime)


def test_node_of_another_user_is_refused_even_with_shm_dir(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For `local` nothing says that another user's node is meant."""
    runtime.mkdir(0o700)
    monkeypatch.setattr("kvstore.transports.unix_sockets.peer_of", lambda sock: Peer(1, 10001))
    monkeypatch.setenv("KVSTORE_SHM_DIR", str(runtime))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(local_file("sock"))
        listener.listen()
        with (
            Client(ClientConfig(address="local", **PATIENT)) as client,
            pytest.raises(Unavailable, match="is served by uid 10001"),
        ):
            client.lookup(SPACE, [KEY])


def test_runtime_directory_that_can_not_be_used_is_named(
    keeper: _Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"/{tmp_path}")
    assert parse_address("local").path == f"/{tmp_path}/kvstore/local.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"{tmp_path}/none")
    with pytest.raises(OSError, match=f"{tmp_path}/none does not exist: .* XDG_RUNTIME_DIR"):
        keeper.look()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"{tmp_path}/file")
    with pytest.raises(OSError, match=r"file/kvstore can not be made: Not a dir.*: unset XDG_RUN"):
        keeper.look()
    for wrong, why in (("run", "no absolute path"), (f"/tmp/{'x' * 100}", "at most 107 bytes")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", wrong)
        with pytest.raises(ConfigError, match=f"needs another XDG_RUNTIME_DIR: .*{why}"):
            parse_address("local")


def test_removed_working_directory_starts_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert programs.python()[0] == sys.executable


def test_options_begin_to_keep_a_node_once_and_say_where_the_address_was_found(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(local_node, "_keeper", 0)
    monkeypatch.setattr(local_node, "start_thread", lambda work, name: begun.append(name))
    here = "localhost:7440 (default: a node on this host)"
    assert read_options({}).store == here
    monkeypatch.setenv("KVSTORE_ADDRESS", "store:7440")
    assert read_options({}).store == "store:7440 (KVSTORE_ADDRESS)"
    assert read_options({"address": "other:1"}).store == "other:1 (option address)"
    assert begun == []
    monkeypatch.setenv("KVSTORE_ADDRESS", "local")
    where = f"local (KVSTORE_ADDRESS, unix:{runtime}/local.sock)"
    assert [read_options({}).store for _ in range(2)] == [where] * 2
    assert begun == ["kvstore-local"]


def test_process_without_a_thread_for_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(local_node, "_keeper", 0)
    monkeypatch.setattr(local_node, "start_thread", refuse)
    with caplog.at_level(logging.WARNING):
        local_node.keep()
    assert "can't start new thread" in caplog.text
