"""Where a gateway runs: in a process of its own, or in a thread of the node's process.

The supervisor starts one, waits for its end, and asks why it ended.
"""

import os
import socket
import subprocess
import sys
import threading
from typing import Protocol

import node
from node.config import NodeConfig
from node.gateway.control import EXIT_MEMORY
from node.gateway.port import Port

# Why a gateway has ended, for people and as the label of a metric.
MEMORY, HUNG, KILLED, FAILED = "memory", "hung", "killed", "failed"
# What a gateway's process may know of the node's environment: no setting of kvstore, and nobody's secrets.
ENVIRONMENT = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD")
# Of glibc, for chunks of 1 MiB that come and go: without, each is taken from the kernel and given back, page by page.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20), "MALLOC_ARENA_MAX": "4"}


class Runner(Protocol):
    """A running gateway."""

    pid: int

    def wait(self, seconds: float) -> str | None:
        """Wait for its end. Return why it ended; None: it still runs."""

    def kill(self) -> None:
        """End it at once, where that is possible."""


def import_paths() -> list[str]:
    """Return the directories that a gateway imports from, and may read.

    The current directory is left out, though `python -m` searches it: it may hold the node's data.
    """
    own = os.path.dirname(os.path.dirname(node.__file__ or ""))
    paths = (os.path.abspath(path) for path in sys.path if path)
    return [path for path in paths if path != os.getcwd() or path == own]


class GatewayProcess:
    """A gateway in a process of its own, with two inherited sockets and few environment variables."""

    def __init__(self, control: socket.socket, door: socket.socket, config: NodeConfig, held: Port) -> None:
        fds = (control.fileno(), door.fileno())
        environment = {name: value for name, value in os.environ.items() if name in ENVIRONMENT or name[:3] == "LC_"}
        environment["PYTHONPATH"] = os.pathsep.join(import_paths())
        environment |= {"PYTHONSAFEPATH": "1", **MALLOC}
        command = [sys.executable, "-m", "node.gateway.main", "--control-fd", str(fds[0]), "--door-fd", str(fds[1])]
        command += ["--port", str(held.number), "--memory-bytes", str(config.grpc_memory_nbytes)]
        command += ["--ipv6"] if ":" in held.numeric_host else []
        command += ["--log-level", config.log_level, "--log-format", config.log_format]
        self._process = subprocess.Popen(command, pass_fds=fds, env=environment, stdin=subprocess.DEVNULL)
        self.pid = self._process.pid

    def wait(self, seconds: float) -> str | None:
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return MEMORY if code == EXIT_MEMORY else KILLED if code < 0 else FAILED

    def kill(self) -> None:
        self._process.kill()


class GatewayThread:
    """A gateway in a thread of the node's process. Only the node can end it: `kill` does nothing."""

    def __init__(self, control: socket.socket, door: socket.socket) -> None:
        from node.gateway.gateway import Gateway, serve

        self.pid = os.getpid()
        self.gateway = Gateway(control.dup(), door.dup())
        self._thread = threading.Thread(target=serve, args=(self.gateway,), name="grpc", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> str | None:
        self._thread.join(seconds)
        return None if self._thread.is_alive() else FAILED

    def kill(self) -> None:
        pass
