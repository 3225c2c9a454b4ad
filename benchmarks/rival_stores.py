"""Start several stores with one interface: our nodes, Mooncake Store, Redis, bare sockets.

Servers:

    store.address             what a client of any process needs
    store.pids                the processes of its servers
    store.kill()              send SIGKILL to one server with pages; `kill_master()` where there is
                              a master
    store.close()             stop everything that was started

Clients, of pages of `page_nbytes`, which may be set between calls:

    store.put(keys, pages)    return for each page whether it was stored
    store.get(keys, buffers)  return for each page whether it was read
    store.lookup(keys)        return how many of the keys are there
    store.forget(keys)        make room, at once or later

`Ours`, `Mooncake` and `RedisCluster` are three servers and a client in one object. `rivals_missing`
names the packages that the rivals need beside this project.
"""

import contextlib
import ctypes
import functools
import importlib.util
import multiprocessing
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

from bulk import BareClient, Bytes, serve_bare
from node_fleet import HERE, Fleet
from ports import free_port, free_ports

from kvstore import Client, Namespace, client_config
from kvstore.layout import opaque_layout
from kvstore.results import PutOutcome
from kvstore.tools.node_process import NodeProcess

TIMEOUT_S = 1.0  # deadline of a call of three servers, where a store has one
LONG_S = 60.0  # the same of one server, which is not killed
START_S = 20.0
HERE_IP = "127.0.0.1"
# Mooncake's client logs every miss
os.environ.setdefault("GLOG_minloglevel", "3")


# ---- ours --------------------------------------------------------------------------------


@functools.cache
def namespace_of(page_nbytes: int) -> Namespace:
    """Return the namespace of all pages of a size."""
    return Namespace("kvstore-rivals", opaque_layout(page_nbytes))


class OurClient:
    """Our client, of one node or of several."""

    def __init__(self, client: Client, page_nbytes: int) -> None:
        self._client = client
        self.page_nbytes = page_nbytes

    @property
    def _namespace(self) -> Namespace:
        return namespace_of(self.page_nbytes)

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Put a batch."""
        return [
            outcome is PutOutcome.STORED
            for outcome in self._client.put(self._namespace, keys, pages)
        ]

    def get(self, keys: Sequence[bytes], buffers: Sequence[bytearray]) -> list[bool]:
        """Get a batch."""
        return self._client.get(self._namespace, keys, buffers)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Return how many keys are there, up to the first that is not."""
        return self._client.lookup(self._namespace, keys).prefix_pages

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove what was stored."""
        self._client.remove(self._namespace, keys)

    def close(self) -> None:
        """Stop everything that was started."""
        self._client.close()


class Ours(OurClient):
    """Three nodes with `replicas` owners for each page."""

    def __init__(self, page_nbytes: int, ram_nbytes: int, replicas: int = 1) -> None:
        flags = ("--ram-bytes", str(ram_nbytes), "--extent-bytes", "32MiB", "--log-level", "ERROR")
        self._fleet = Fleet([HERE] * 3, *flags, replicas=replicas)
        client = self._fleet.client(timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S)
        super().__init__(client, page_nbytes)

    def kill(self) -> None:
        """Kill one server."""
        self._fleet.nodes["n1"].kill()

    def close(self) -> None:
        """Stop everything that was started."""
        super().close()
        self._fleet.close()


class OurServer:
    """One node with the flags that its users have: no disk, checksums on.

    They raise `grpc_threads` where more than a dozen processes of one host use gRPC.
    """

    def __init__(self, ram_nbytes: int) -> None:
        flags = ("--ram-bytes", str(ram_nbytes), "--grpc-threads", "256", "--log-level", "WARNING")
        self._node = NodeProcess(*flags)
        self.address = self._node.address
        self.close = self._node.kill

    @property
    def pids(self) -> list[int]:
        """Return the node's process and its gateways."""
        return family(self._node.pid)


def our_client(address: str, wire: str) -> OurClient:
    """Return a client of one node over a wire."""
    return OurClient(Client(client_config(address=address, wire=wire, timeout_s=LONG_S)), 0)


# ---- processes ---------------------------------------------------------------------------


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(FileNotFoundError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    found += map(int, (task / "children").read_text().split())
    return found


class Servers:
    """Processes of a rival, with a folder for their files."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvstore-rivals-"))
        self.running: list[subprocess.Popen[bytes]] = []
        self.address = ""

    @property
    def pids(self) -> list[int]:
        """Return the servers' processes."""
        return [process.pid for process in self.running]

    def start(self, *command: str, ready: Callable[[], bool]) -> subprocess.Popen[bytes]:
        """Start a server and wait until it is ready."""
        with (self.folder / f"{len(self.running)}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        self.running.append(process)
        end = time.monotonic() + START_S
        while not ready():
            if process.poll() is not None or time.monotonic() > end:
                said = Path(log.name).read_text(errors="replace")[-500:]
                self.close()
                raise RuntimeError(f"{command[0]} does not start: {said}")
            time.sleep(0.05)
        return process

    def kill(self) -> None:
        """Kill one server."""
        self.running[-1].kill()

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


# ---- bare sockets ------------------------------------------------------------------------


class BareServer:
    """A process for each client, which keeps its pages without keys or checksums."""

    def __init__(self) -> None:
        port = free_port()
        self.address = f"{HERE_IP}:{port}"
        self._process = multiprocessing.get_context("spawn").Process(
            target=self._serve, args=(port,)
        )
        self._process.start()
        end = time.monotonic() + START_S
        while not listens(port):
            assert time.monotonic() < end, "the bare server does not start"
            time.sleep(0.05)

    @staticmethod
    def _serve(port: int) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
        with socket.create_server((HERE_IP, port), backlog=128) as listener:
            while True:
                sock = listener.accept()[0]
                if os.fork() == 0:
                    listener.close()
                    serve_bare(sock)
                    os._exit(0)
                sock.close()

    @property
    def pids(self) -> list[int]:
        """Return the processes of all clients."""
        return family(self._process.pid or 0)

    def close(self) -> None:
        """Stop everything that was started."""
        for pid in reversed(self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.join()


class BarePages:
    """A client of bare sockets with the interface of a store."""

    def __init__(self, address: str) -> None:
        host, _, port = address.partition(":")
        self._client = BareClient(socket.create_connection((host, int(port))))
        self._places: dict[bytes, int] = {}
        self.page_nbytes = 0

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Put a batch."""
        place = self._places[keys[0]] = len(self._places)
        self._client.put(place, pages)
        return [True] * len(keys)

    def get(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> list[bool]:
        """Get a batch."""
        self._client.get(self._places[keys[0]], buffers)
        return [True] * len(keys)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Send as many bytes as a lookup has at least, and wait for an answer."""
        self._client.echo(b"".join(keys))
        return len(keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget a batch; when all are gone, the next put gets the first place again."""
        del self._places[keys[0]]


# ---- Mooncake ----------------------------------------------------------------------------


class MooncakeServers(Servers):
    """Mooncake's master and processes with a segment each, over TCP."""

    SEGMENT = """
import pathlib, sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
segment, staging = int(sys.argv[2]), 64 << 20
failed = store.setup(sys.argv[1], "P2PHANDSHAKE", segment, staging, "tcp", "", sys.argv[3])
pathlib.Path(sys.argv[4]).write_text(str(failed))
time.sleep(86400)
"""

    def __init__(self, ram_nbytes: int, segments: int = 1) -> None:
        super().__init__()
        rpc, metrics, *own = free_ports(2 + segments)
        self.address = f"{HERE_IP}:{rpc}"
        ports = ("--rpc_port", str(rpc), "--metrics_port", str(metrics))
        self._master = self.start(str(mooncake_master()), *ports, ready=lambda: listens(rpc))
        for port in own:
            self._segment(port, ram_nbytes)

    def _segment(self, port: int, nbytes: int) -> None:
        ready = self.folder / str(port)
        words = (f"{HERE_IP}:{port}", str(nbytes), self.address, str(ready))
        self.start(sys.executable, "-c", self.SEGMENT, *words, ready=ready.exists)

    def kill_master(self) -> None:
        """Kill the master."""
        self._master.kill()


class MooncakeClient:
    """A client without a segment. Pages and buffers are registered when they are first used."""

    def __init__(self, master: str, page_nbytes: int = 0) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.page_nbytes = page_nbytes
        self._client = MooncakeDistributedStore()
        local = f"{HERE_IP}:{free_port()}"
        failed = self._client.setup(local, "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", master)
        assert not failed, f"Mooncake's client is not set up: {failed}"
        self._registered: list[range] = []
        # With the buffers, so that no other gets their ids
        self._known: dict[int, tuple[int, Bytes]] = {}

    def register(self, buffer: bytearray) -> None:
        """Register a buffer, and with it all views of it, with the transfer engine."""
        place = ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))
        assert self._client.register_buffer(place, len(buffer)) == 0
        self._registered.append(range(place, place + len(buffer)))

    def _places(self, buffers: Sequence[Any]) -> list[int]:
        """Return the buffers' addresses."""
        found = []
        for buffer in buffers:
            place, _ = self._known.get(id(buffer), (0, None))
            if not place:
                place = ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))
                if not any(place in known for known in self._registered):
                    self.register(buffer)
                self._known[id(buffer)] = (place, buffer)
            found.append(place)
        return found

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Put a batch."""
        sizes = [self.page_nbytes] * len(keys)
        return [
            code == 0
            for code in self._client.batch_put_from(names(keys), self._places(pages), sizes)
        ]

    def get(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> list[bool]:
        """Get a batch."""
        sizes = [self.page_nbytes] * len(keys)
        found = self._client.batch_get_into(names(keys), self._places(buffers), sizes)
        return [nbytes == self.page_nbytes for nbytes in found]

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Return how many of the keys are there."""
        return list(self._client.batch_is_exist(names(keys))).count(1)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove what was stored, though it is on lease after a get."""
        self._client.batch_remove(names(keys), True)


class Mooncake(MooncakeClient):
    """Mooncake's master and two segments, and a client."""

    def __init__(self, page_nbytes: int, ram_nbytes: int) -> None:
        self._servers = MooncakeServers(ram_nbytes, segments=2)
        self.kill, self.kill_master = self._servers.kill, self._servers.kill_master
        super().__init__(self._servers.address, page_nbytes)

    def close(self) -> None:
        """Stop everything that was started."""
        self._servers.close()  # and not the client, whose `close` would wait for the master


def mooncake_master() -> Path:
    """Return the program of Mooncake's master, which is a file of its package."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    return Path(str(spec.origin)).with_name("mooncake_master")


def names(keys: Sequence[bytes]) -> list[str]:
    """Return the keys as text."""
    return [key.hex() for key in keys]


# ---- Redis -------------------------------------------------------------------------------


class RedisServer(Servers):
    """One server without persistence."""

    def __init__(self, ram_nbytes: int = 0, io_threads: int = 1) -> None:
        super().__init__()
        port = free_port()
        self.address = f"{HERE_IP}:{port}"
        words = ["--port", str(port), "--bind", HERE_IP, "--save", "", "--appendonly", "no"]
        words += ["--maxmemory", str(ram_nbytes), "--io-threads", str(io_threads)]
        words += ["--io-threads-do-reads", "yes"]
        self.start("redis-server", *words, ready=lambda: listens(port))

    @staticmethod
    def version() -> str:
        """Return the versions of server and client."""
        import redis

        command = ["redis-server", "--version"]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        hiredis = "with" if redis.utils.HIREDIS_AVAILABLE else "without"
        server = said.stdout.split("v=")[-1].split()[0]
        return f"redis-server {server}, redis-py {redis.__version__} {hiredis} hiredis"


class RedisClient:
    """redis-py, with a batch in a pipeline.

    `copies`: whether the objects that it returns are copied into the buffers.
    """

    def __init__(self, client: Any, copies: bool = True) -> None:
        self._client = client
        self.copies = copies
        self.page_nbytes = 0

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Put a batch."""
        calls = [("SET", key, memoryview(page)) for key, page in zip(keys, pages, strict=True)]
        return [answer is True or answer == b"OK" for answer in self._all(calls)]

    def get(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> list[bool]:
        """Get a batch."""
        answers = self._all([("GET", key) for key in keys])
        if self.copies:
            for answer, buffer in zip(answers, buffers, strict=True):
                if isinstance(answer, bytes):
                    buffer[:] = answer
        return [isinstance(answer, bytes) for answer in answers]

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Return how many of the keys are there."""
        return int(self._client.exists(*keys))

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove what was stored."""
        self._all([("DEL", key) for key in keys])

    def clear(self) -> None:
        """Remove everything."""
        self._client.flushdb()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _all(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run commands in one pipeline, or one by one if that raises.

        Raises if none of them is answered.
        """
        pipeline = self._client.pipeline(transaction=False)
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


def redis_client(address: str) -> RedisClient:
    """Return a client of one server."""
    import redis

    host, _, port = address.partition(":")
    return RedisClient(redis.Redis(host, int(port), socket_timeout=LONG_S), copies=False)


class RedisCluster(RedisClient):
    """Three servers without persistence, and a client.

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
        client = self._settled(
            lambda: redis.RedisCluster(
                startup_nodes=nodes,
                socket_timeout=TIMEOUT_S,
                require_full_coverage=whole,
                cluster_error_retry_attempts=0,
            )
        )
        super().__init__(client)

    @staticmethod
    def _settled(connect: Callable[[], Any]) -> Any:
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

    def kill(self) -> None:
        """Kill one server."""
        self._servers.running[0].send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Stop everything that was started."""
        self._client.close()
        self._servers.close()


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
        lacking["Redis"] = "pip install 'redis[hiredis]'"
    if shutil.which("redis-server") is None or shutil.which("redis-cli") is None:
        lacking["Redis"] = "redis-server and redis-cli (Debian: apt-get install redis-server)"
    return lacking
