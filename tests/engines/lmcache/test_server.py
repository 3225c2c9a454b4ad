"""`lmcache server` end to end without a GPU.

Its CPU bench stores, its L1 is cleared, and the same requests load from the node with the same
checksums.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports
from stopping import stop

from kvstore.tools.node_process import NodeProcess

START_S = 120.0
REQUESTS = 2
ONE_GROUP = ("--kvcache-shape-spec", "(2,256,16,8,128):float16:8")
TWO_RANKS = (
    "--tp-size",
    "2",
    "--kvcache-shape-spec",
    "(2,256,16,8,128):float16:4;(2,256,16,4,64):uint8:4",
)
CHUNKS = 4
# From 0.5.7 on, the bench frees a request's blocks when the request ends. In sequential order all
# requests would then use the same blocks, and store the same bytes under different keys.
RANDOM_BLOCKS = (
    ("--block-allocation", "random")
    if importlib.util.find_spec("lmcache.cli.commands.bench.server_bench.allocator")
    else ()
)


class Server:
    """Run a server on free ports, and its CPU bench in a process of its own."""

    def __init__(self, adapter: dict[str, Any], environment: dict[str, str], folder: Path) -> None:
        self._folder, self._environment = folder, environment
        self._program = str(Path(sys.prefix) / "bin" / "lmcache")
        self.port, self.http_port = free_ports(2)
        ports = ("--port", str(self.port), "--http-port", str(self.http_port))
        memory = ("--l1-size-gb", "1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU")
        self.log_file = (folder / "server.log").open("w+")
        command = [self._program, "server", *ports, *memory, "--l2-adapter", json.dumps(adapter)]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=self.log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        end = time.monotonic() + START_S
        while not self._healthy():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < end, self.log()
            time.sleep(0.2)

    def log(self) -> str:
        return Path(self.log_file.name).read_text()[-5000:]

    def _healthy(self) -> bool:
        try:
            self.ask("/healthcheck")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True

    def ask(self, path: str, data: bytes | None = None) -> str:
        with urllib.request.urlopen(
            f"http://localhost:{self.http_port}{path}", data, timeout=60.0
        ) as reply:
            text: str = reply.read().decode()
            return text

    def bench(self, *shape: str) -> str:
        command = [self._program, "bench", "server", "--rpc-url", f"tcp://localhost:{self.port}"]
        command += [
            "--url",
            f"http://localhost:{self.http_port}",
            "--mode",
            "cpu",
            "--transfer-mode",
            "lmcache_driven",
        ]
        command += ["--num-tokens", "1024", "--num-blocks", "256", *RANDOM_BLOCKS]
        command += ["--start", "0", "--end", str(REQUESTS), *shape]
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + self.log()
        return done.stdout + done.stderr

    def hits(self) -> int:
        """Return the number of keys that lookups found in the node so far."""
        found = re.findall(
            r"^\S*lookup_hit_l2_keys_total\S* ([0-9.e+]+)", self.ask("/metrics"), re.MULTILINE
        )
        return int(sum(map(float, found)))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            self.log_file.close()


def checksums(output: str) -> list[tuple[str, str]]:
    """Return the (request, checksum) pairs that the bench printed, cold and warm.

    They are compared here, since the bench's own comparison misses bytes changed by the node.
    """
    return sorted(re.findall(r"\[seq (\S+)\] CHECKSUM: ([0-9a-f]{16})", output))


@pytest.fixture
def serve(
    environment: dict[str, str], tmp_path: Path
) -> Iterator[Callable[[dict[str, Any]], Server]]:
    servers: list[Server] = []

    def start(adapter: dict[str, Any]) -> Server:
        servers.append(Server(adapter, environment, tmp_path))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.stop()


@pytest.mark.parametrize(
    ("form", "shape"),
    [("native_plugin", ONE_GROUP), ("plugin", ONE_GROUP), ("plugin", TWO_RANKS)],
    ids=str,
)
def test_evicted_page_is_loaded_from_the_node(
    form: str,
    shape: tuple[str, ...],
    spec: Callable[..., dict[str, Any]],
    serve: Callable[[dict[str, Any]], Server],
    shared_node: NodeProcess,
) -> None:
    server = serve(spec(form, shared_node.address))
    first = server.bench(*shape)
    before = server.hits()
    server.ask("/cache/clear", b"")
    second = server.bench(*shape)
    assert len(checksums(first)) >= 2 * REQUESTS
    assert {checksum for _, checksum in checksums(second)} == {
        checksum for _, checksum in checksums(first)
    }
    assert len({checksum for _, checksum in checksums(first)}) >= REQUESTS
    assert second.count(f"/cold] LOOKUP: {CHUNKS}/{CHUNKS} ") == REQUESTS, second[-3000:]
    assert server.hits() > before
    status = json.loads(server.ask("/status"))
    assert '"is_healthy": true' in json.dumps(status)
    # Uvicorn exits by the signal that it received.
    assert server.stop() in (0, -signal.SIGTERM), server.log()


def test_server_with_the_address_local_starts_a_node(
    host: dict[str, str],
    spec: Callable[..., dict[str, Any]],
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    server = Server(spec("plugin", "local"), {**environment, **host}, tmp_path)
    try:
        first, hits = "", 0
        for _ in range(10):  # the node starts beside the server; what comes before is not stored
            first = server.bench(*ONE_GROUP)
            server.ask("/cache/clear", b"")
            if hits := server.hits():
                break
        second = server.bench(*ONE_GROUP)
        assert server.hits() > hits > 0, server.log()
        assert set(checksums(second)) == set(checksums(first))
    finally:
        server.stop()


def test_server_with_a_hung_node_keeps_serving(
    spec: Callable[..., dict[str, Any]],
    serve: Callable[[dict[str, Any]], Server],
    node: NodeProcess,
) -> None:
    """Requests to a server whose node hangs are misses and end in time."""
    server = serve(spec("plugin", node.address, load_timeout_s=2.0, save_timeout_s=2.0))
    first = server.bench(*ONE_GROUP)
    stop(node.pid)
    server.ask("/cache/clear", b"")
    hung = server.bench(*ONE_GROUP)
    os.kill(node.pid, signal.SIGCONT)
    assert hung.count(f"/cold] LOOKUP: 0/{CHUNKS} ") == REQUESTS, hung[-3000:]
    # Uvicorn exits by the signal that it received.
    assert server.stop() in (0, -signal.SIGTERM), server.log()
    assert checksums(first)
