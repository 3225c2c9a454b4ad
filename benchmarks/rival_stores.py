"""Start several stores with one interface: our nodes, Mooncake Store, Redis Cluster.

    store.put(keys, pages)    return for each page whether it was stored
    store.get(keys, buffers)  return for each page whether it was read
    store.forget(keys)        make room, at once or later
    store.kill()              send SIGKILL to one server with pages; `kill_master()` where there is
                              a master

`rivals_missing` names the packages that they need beside this project.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))

from node_fleet import HERE, Fleet
from ports import free_ports

from kvstore.results import PutOutcome
from kvstore.tools.replay import replay_namespace

TIMEOUT_S = 1.0  # deadline of a call, where a store has one
START_S = 20.0
HERE_IP = "127.0.0.1"
# Mooncake's client logs every miss
os.environ.setdefault("GLOG_minloglevel", "3")


class Ours:
    """Three nodes with `replicas` owners for each page."""

    def __init__(self, page_nbytes: int, ram_nbytes: int, replicas: int = 1) -> None:
        flags = ("--ram-bytes", str(ram_nbytes), "--extent-bytes", "32MiB", "--log-level", "ERROR")
        self._fleet = Fleet([HERE] * 3, *flags, replicas=replicas)
        self._client = self._fleet.client(timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S)
        self._namespace = replay_namespace(page_nbytes)

    def put(self, keys: Sequence[bytes], pages: Sequence[bytearray]) -> list[bool]:
        """Put a batch."""
        return [
            outcome is PutOutcome.STORED
            for outcome in self._client.put(self._namespace, keys, pages)
        ]

    def get(self, keys: Sequence[bytes], buffers: Sequence[bytearray]) -> list[bool]:
        """Get a batch."""
        return self._client.get(self._namespace, keys, buffers)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove what was stored."""
        self._client.remove(self._namespace, keys)

    def kill(self) -> None:
        """Kill one server."""
        self._fleet.nodes["n1"].kill()

    def close(self) -> None:
        """Stop everything that was started."""
        self._client.close()
        self._fleet.close()


class Servers:
    """Processes of a rival, with a folder for their files."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvstore-rivals-"))
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, ready: Callable[[], bool]) -> subprocess.Popen[bytes]:
        """Start a server and wait until it is ready."""
        with (self.folder / f"{len(self.running)}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        self.running.append(process)
        end = time.monotonic() + START_S
        while not ready():
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{command[0]} does not start: {log.name}")
            time.sleep(0.05)
        return process

    def close(self) -> None:
        """Stop everything that was started."""
        for process in self.running:
            process.kill()
            process.wait()
        shutil.rmtree(self.folder)


def listens(port: int) -> bool:
    """Return whether a port listens."""
    with contextlib.suppress(OSError), socket.create_connection((HERE_IP, port), 1.0):
        return True
    return False


class Mooncake:
    """Mooncake's master and two segments over TCP, and a client without a segment."""

    SEGMENT = """
import pathlib, sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
segment, staging = int(sys.argv[2]), 64 << 20
failed = store.setup(sys.argv[1], "P2PHANDSHAKE", segment, staging, "tcp", "", sys.argv[3])
pathlib.Path(sys.argv[4]).write_text(str(failed))
time.sleep(86400)
"""

    def __init__(self, page_nbytes: int, ram_nbytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._page_nbytes = page_nbytes
        self._servers = Servers()
        rpc, metrics, *own = free_ports(5)
        master = f"{HERE_IP}:{rpc}"
        program = str(Path(sys.executable).with_name("mooncake_master"))
        ports = ("--rpc_port", str(rpc), "--metrics_port", str(metrics))
        self._master = self._servers.start(program, *ports, ready=lambda: listens(rpc))
        self._segments = [self._segment(port, ram_nbytes, master) for port in own[:2]]
        self._client = MooncakeDistributedStore()
        local = f"{HERE_IP}:{own[2]}"
        assert self._client.setup(local, "P2PHANDSHAKE", 0, 256 << 20, "tcp", "", master) == 0
        self._registered: dict[int, int] = {}
        self._old: list[bytes] = []

    def _segment(self, port: int, nbytes: int, master: str) -> subprocess.Popen[bytes]:
        ready = self._servers.folder / str(port)
        words = (f"{HERE_IP}:{port}", str(nbytes), master, str(ready))
        return self._servers.start(sys.executable, "-c", self.SEGMENT, *words, ready=ready.exists)

    def _places(self, buffers: Sequence[bytearray]) -> list[int]:
        """Return the buffers' addresses, registered with the transfer engine once."""
        found = []
        for buffer in buffers:
            place = self._registered.get(id(buffer))
            if place is None:
                place = ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))
                assert self._client.register_buffer(place, len(buffer)) == 0
                self._registered[id(buffer)] = place
            found.append(place)
        return found

    def put(self, keys: Sequence[bytes], pages: Sequence[bytearray]) -> list[bool]:
        """Put a batch."""
        sizes = [self._page_nbytes] * len(keys)
        return [
            code == 0
            for code in self._client.batch_put_from(names(keys), self._places(pages), sizes)
        ]

    def get(self, keys: Sequence[bytes], buffers: Sequence[bytearray]) -> list[bool]:
        """Get a batch."""
        sizes = [self._page_nbytes] * len(keys)
        found = self._client.batch_get_into(names(keys), self._places(buffers), sizes)
        return [nbytes == self._page_nbytes for nbytes in found]

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove keys; those read within 5 s are on lease and go later."""
        self._old += keys
        self._old = [key for key in self._old if self._client.remove(key.hex()) != 0]

    def kill(self) -> None:
        """Kill one server."""
        self._segments[0].kill()

    def kill_master(self) -> None:
        """Kill the master."""
        self._master.kill()

    def close(self) -> None:
        """Stop everything that was started."""
        self._servers.close()  # first, as the client's `close` would wait for the master


class RedisCluster:
    """Three servers without persistence, and redis-py.

    `whole`: Redis's default, by which no server answers while some of the slots are unavailable.
    """

    def __init__(self, page_nbytes: int, ram_nbytes: int, whole: bool = True) -> None:
        import redis

        self._servers = Servers()
        ports = free_ports(3)
        for port in ports:
            words = ["--port", str(port), "--bind", HERE_IP, "--save", "", "--appendonly", "no"]
            words += ["--cluster-enabled", "yes", "--cluster-config-file", f"{port}.conf"]
            words += ["--cluster-port", str(free_ports(1)[0]), "--maxmemory", str(ram_nbytes)]
            words += ["--cluster-require-full-coverage", "yes" if whole else "no"]
            self._servers.start("redis-server", *words, ready=lambda port=port: listens(port))
        every = [f"{HERE_IP}:{port}" for port in ports]
        subprocess.run(
            ["redis-cli", "--cluster", "create", *every, "--cluster-yes"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        nodes = [redis.cluster.ClusterNode(HERE_IP, port) for port in ports]
        self._client = self._settled(
            lambda: redis.RedisCluster(
                startup_nodes=nodes,
                socket_timeout=TIMEOUT_S,
                require_full_coverage=whole,
                cluster_error_retry_attempts=0,
            )
        )

    def _settled(self, connect: Callable[[], Any]) -> Any:
        end = time.monotonic() + START_S
        while True:
            try:
                client = connect()
                client.set(b"settled", b"")
                return client
            except Exception:  # it raises many kinds while the cluster is not ready
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def put(self, keys: Sequence[bytes], pages: Sequence[bytearray]) -> list[bool]:
        """Put a batch."""
        calls = [("SET", key, memoryview(page)) for key, page in zip(keys, pages, strict=True)]
        return [answer is True or answer == b"OK" for answer in self._all(calls)]

    def get(self, keys: Sequence[bytes], buffers: Sequence[bytearray]) -> list[bool]:
        """Get a batch."""
        answers = self._all([("GET", key) for key in keys])
        for answer, buffer in zip(answers, buffers, strict=True):
            if isinstance(answer, bytes):
                buffer[:] = answer
        return [isinstance(answer, bytes) for answer in answers]

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove what was stored."""
        self._all([("DEL", key) for key in keys])

    def _all(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run commands in one pipeline, or one by one if that raises.

        Raises if none of them is answered.
        """
        pipeline = self._client.pipeline()
        for call in calls:
            pipeline.execute_command(*call)
        try:
            return list(pipeline.execute(raise_on_error=False))
        except Exception as error:  # redis-py's errors have no common base
            answers = [self._one(call) for call in calls]
            if all(isinstance(answer, Exception) for answer in answers):
                raise error
            return answers

    def _one(self, call: tuple[Any, ...]) -> Any:
        try:
            return self._client.execute_command(*call)
        except Exception as error:  # noqa: BLE001 -- the caller tells of it
            return error

    def kill(self) -> None:
        """Kill one server."""
        self._servers.running[0].send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Stop everything that was started."""
        self._client.close()
        self._servers.close()


def names(keys: Sequence[bytes]) -> list[str]:
    """Return the keys as text."""
    return [key.hex() for key in keys]


def rivals_missing() -> dict[str, str]:
    """Return what is missing here for a rival, by its name."""
    lacking = {}
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        lacking["Mooncake"] = (
            "pip install mooncake-transfer-engine-non-cuda, on Debian apt-get install libibverbs1 "
            f"({error})"
        )
    try:
        import redis  # noqa: F401
    except ImportError:
        lacking["Redis Cluster"] = "pip install 'redis[hiredis]'"
    if shutil.which("redis-server") is None or shutil.which("redis-cli") is None:
        lacking["Redis Cluster"] = (
            "redis-server and redis-cli (Debian: apt-get install redis-server)"
        )
    return lacking
