"""Supervise a node's gateways: hold the port, start them, send state, restart ended ones.

    port (bound, not listening) --SO_REUSEPORT--> each gateway listens
    Gateways --> _Supervisor: a thread, which watches one process (or, embedded, one thread)

The node holds the port all its life, whether or not a gateway is listening. A gateway runs in its
own process, or in a thread of the node's process: a `Runner`, which the supervisor starts and waits
for.
"""

import contextlib
import dataclasses
import errno
import importlib.util
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import node
from kvstore.cluster.view import View
from kvstore.errors import ConfigError, ProtocolError
from kvstore.log_rate import LogRate
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.certificates import Pems
from node.cluster.membership import Membership
from node.config import NodeConfig, missing
from node.gateway.control import BEAT_S, EXIT_MEMORY, Control, SilenceTimer, pems_value, view_value
from node.serving.gateway import GatewayCalls, GatewayDoor
from node.serving.service import Service
from node.tls import Certificates

log = logging.getLogger(__name__)
log.addFilter(LogRate())

# name of the health service's main entry
SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["KVStore"].full_name
DISK_NAME = "kvstore.Disk"  # health of the disk tier alone; unknown on a node without one

# Time that a node waits for its port: gateways of a killed node end a moment after it.
TAKEN_S_MAX = 3.0
BIND_PAUSE_S = 0.05
READY_S_MAX = 120.0  # for a start, also on a very busy machine
# a gateway that is silent for so long hangs, and is killed; a busy machine may delay it
SILENT_S_MAX = 15.0
LEAVE_S = 1.0  # time to end after `stop`
# Pause before a restart; doubled while gateways end within STREAK_S
PAUSE_S, PAUSE_S_MAX = 0.05, 0.5
STREAK_S = 60.0
CONNECTIONS_MAX = 4096
# packages of the extra `node` that only a gateway imports
PACKAGES = ("cryptography", "grpc_health", "grpc_reflection")
# Why a gateway has ended, for log lines and as the label of a metric.
MEMORY, HUNG, KILLED, FAILED = "memory", "hung", "killed", "failed"
# Variables of the node's environment that a gateway's process gets: no setting of kvstore, and no
# secrets.
ENVIRONMENT = (
    *("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("GRPC_VERBOSITY", "GRPC_TRACE"),
)
# Of glibc, for chunks of 1 MiB that come and go. Without it each is taken from the kernel and
# returned page by page.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "MALLOC_ARENA_MAX": "4",
}


class Port:
    """Two sockets that are bound and do not listen.

    Gateways of this user listen beside them (SO_REUSEPORT).

    The first is bound with SO_REUSEADDR, because of connections in TIME_WAIT, and without
    SO_REUSEPORT: binding fails while another program listens. That is not enough while no gateway
    listens: a second node could bind the same way. So the second socket is bound without
    SO_REUSEADDR, and the kernel refuses the port to every later node.
    """

    def __init__(self, host: str, port: int, wait_s: float = TAKEN_S_MAX) -> None:
        """Bind.

        Raises OSError if the port is still taken after `wait_s`. `port` 0: take a free one.
        """
        self._sockets: list[socket.socket] = []
        try:
            first = self._socket(host)
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _bind(first, host, port, wait_s)
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self.numeric_host: str = first.getsockname()[0]
            self.number: int = first.getsockname()[1]
        except OSError as error:
            self.close()
            asked = "; is another node running?" if error.errno == errno.EADDRINUSE else ""
            raise OSError(
                f"gRPC port {port} on {host} can not be bound{asked} ({error})"
            ) from error
        second = self._socket(host)
        second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # For a minute after another program that did not share the port
        with contextlib.suppress(OSError):
            second.bind((host, self.number))

    def _socket(self, host: str) -> socket.socket:
        made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._sockets.append(made)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        return made

    def close(self) -> None:
        """Close the sockets."""
        for one in self._sockets:
            one.close()


def _bind(sock: socket.socket, host: str, port: int, wait_s: float) -> None:
    end = time.monotonic() + wait_s
    while True:
        try:
            return sock.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                raise
        time.sleep(BIND_PAUSE_S)


class Runner(Protocol):
    """A running gateway."""

    pid: int

    def wait(self, seconds: float) -> str | None:
        """Wait for its end.

        Return why it ended; None while it runs.
        """

    def kill(self) -> None:
        """End it at once, if that is possible."""


def import_paths() -> list[str]:
    """Return the directories from which a gateway imports, and which it may read.

    The current directory is left out, although `python -m` searches it: it may hold the node's
    data.
    """
    own = os.path.dirname(os.path.dirname(node.__file__ or ""))
    paths = (os.path.abspath(path) for path in sys.path if path)
    return [path for path in paths if path != os.getcwd() or path == own]


class GatewayProcess:
    """A gateway in a process, with two inherited sockets and few variables."""

    def __init__(
        self, control: socket.socket, door: socket.socket, config: NodeConfig, held: Port
    ) -> None:
        fds = (control.fileno(), door.fileno())
        environment = {
            name: value
            for name, value in os.environ.items()
            if name in ENVIRONMENT or name[:3] == "LC_"
        }
        environment["PYTHONPATH"] = os.pathsep.join(import_paths())
        environment |= {"PYTHONSAFEPATH": "1", **MALLOC}
        command = [
            sys.executable,
            "-m",
            "node.gateway.main",
            "--control-fd",
            str(fds[0]),
            "--door-fd",
            str(fds[1]),
        ]
        command += ["--port", str(held.number), "--memory-bytes", str(config.grpc_memory_nbytes)]
        command += ["--ipv6"] if ":" in held.numeric_host else []
        command += ["--log-level", config.log_level, "--log-format", config.log_format]
        self._process = subprocess.Popen(
            command, pass_fds=fds, env=environment, stdin=subprocess.DEVNULL
        )
        self.pid = self._process.pid

    def wait(self, seconds: float) -> str | None:
        """Wait for the process and return how it ended; None while it runs."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return MEMORY if code == EXIT_MEMORY else KILLED if code < 0 else FAILED

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()


class GatewayThread:
    """A gateway in a thread of the node's process.

    Only the node can end it: `kill` does nothing.
    """

    def __init__(self, control: socket.socket, door: socket.socket) -> None:
        from node.gateway.gateway import Gateway, serve

        self.pid = os.getpid()
        self.gateway = Gateway(control.dup(), door.dup())
        self._thread = threading.Thread(
            target=serve, args=(self.gateway,), name="grpc", daemon=True
        )
        self._thread.start()

    def wait(self, seconds: float) -> str | None:
        """Wait for the thread; None while it runs."""
        self._thread.join(seconds)
        return None if self._thread.is_alive() else FAILED

    def kill(self) -> None:
        """Do nothing: a thread cannot be killed."""
        pass


class Gateways:
    """All gateways of a node.

    The constructor takes the port; `start` begins to serve. Thread-safe.
    """

    def __init__(
        self,
        config: NodeConfig,
        service: Service,
        certificates: Certificates | None,
        embedded: bool = False,
    ) -> None:
        """Prepare the gateways; `embedded` runs one in a thread of this process.

        Raises OSError if the port is taken, ConfigError if a package is missing.
        """
        self._config = config
        self._log_level = ""  # set since the start
        self._service = service
        self._certificates = certificates
        self.membership: Membership = service.membership
        self.embedded = embedded
        self.host = config.grpc_host or config.host
        for package in PACKAGES if self.host != "none" else ():
            if importlib.util.find_spec(package) is None:
                raise ConfigError(missing(package))
        self._held = None if self.host == "none" else Port(self.host, config.port)
        self.port = self._held.number if self._held else 0  # 0: there is no gRPC
        self.calls = GatewayCalls(service, config.grpc_threads)
        # Held during a change and its messages, so that the last message has the last state
        self._lock = threading.RLock()
        self._health = {"": False, SERVICE_NAME: False}
        self._view: View | None = None
        self._stopping = threading.Event()
        self._serving = False
        self.ends = Counter(dict.fromkeys((MEMORY, HUNG, KILLED, FAILED), 0))
        count = 0 if self._held is None else 1 if embedded else config.grpc_processes
        self._gateways = [_Supervisor(f"gateway-{number}", self) for number in range(count)]
        self.membership.on_view(self._on_view)
        for gateway in self._gateways:
            gateway.begin()

    # ---- for gateways --------------------------------------------------------------------------

    def run(self, control: socket.socket, door: socket.socket) -> Runner:
        """Start a gateway on these ends of its sockets."""
        if self.embedded:
            return GatewayThread(control, door)
        assert self._held is not None, "a node without gRPC starts no gateway"
        return GatewayProcess(control, door, self._config, self._held)

    def open_door(self, name: str, door: socket.socket) -> GatewayDoor:
        """Return the server for connections that the gateway makes through `door`."""
        return GatewayDoor(name, door, self._service, self.calls, self._config.stall_s)

    @property
    def pems(self) -> Pems | None:
        """Return the certificates in force; None without TLS."""
        return self._certificates.pems if self._certificates else None

    @property
    def settings(self) -> dict[str, Any]:
        """Return the first message to a gateway."""
        config = self._config
        return {
            "host": self._held.numeric_host if self._held else "",
            "port": self.port,
            "threads": config.grpc_threads,
            "stall_s": config.stall_s,
            "connections_max": CONNECTIONS_MAX,
            "pems": pems_value(self.pems),
        }

    @property
    def _state(self) -> dict[str, Any]:
        """Return the state to send to a gateway that has become ready."""
        told: dict[str, Any] = {"health": dict(self._health), "view": self._view_value()}
        if self._log_level:
            told["log_level"] = self._log_level
        return {**told, "serve": True} if self._serving else told

    def set_ready(self, gateway: "_Supervisor") -> None:
        """Mark a gateway as ready and send it the current state.

        Certificates may have changed while it started.
        """
        with self._lock:
            gateway.ready.set()
            gateway.tell(**self._state)
            gateway.renew()

    def _view_value(self) -> dict[str, Any]:
        alone = self._view is None and not self.membership.joining
        return view_value(self._view.message if self._view else None, alone)

    @property
    def nbytes_max(self) -> int:
        """Return the memory limit of a gateway process; 0 for none."""
        return 0 if self.embedded else self._config.grpc_memory_nbytes

    @property
    def stopping(self) -> bool:
        """Return whether the gateways are being stopped."""
        return self._stopping.is_set()

    def pause(self, seconds: float) -> None:
        """Wait, but not longer than until the stop."""
        self._stopping.wait(seconds)

    # ---- from the node -------------------------------------------------------------------------

    def start(self, pulse: Callable[[], None] = lambda: None) -> None:
        """Let gateways serve.

        Raises ConfigError if one can not be started.
        """
        end = time.monotonic() + READY_S_MAX
        for gateway in self._gateways:
            while not gateway.ready.wait(0.05):
                pulse()
                if gateway.failed or time.monotonic() > end:
                    raise ConfigError(
                        f"{gateway.name} does not start: {gateway.failed or 'it sends nothing'}"
                    )
        with self._lock:
            self._serving = True
            self._health |= {"": True, SERVICE_NAME: True}
            self._tell(**self._state)

    def set_serving(self, serving: bool) -> None:
        """Set the health status of the server and of KVStore."""
        self._set_health({"": serving, SERVICE_NAME: serving})

    def set_disk_healthy(self, healthy: bool) -> None:
        """Set the disk tier's health, reported separately from the node's."""
        self._set_health({DISK_NAME: healthy})

    def _set_health(self, good: dict[str, bool]) -> None:
        with self._lock:
            self._health |= good
            self._tell(health=dict(self._health))

    @property
    def serving(self) -> bool:
        """Return whether the health service reports the node as serving."""
        return self._health[""]

    def _on_view(self, view: View) -> None:
        with self._lock:
            self._view = view
            self._tell(view=self._view_value())

    def set_log_level(self, level: str) -> None:
        """Set the level of the gateways' logs."""
        with self._lock:
            self._log_level = level
            self._config = dataclasses.replace(self._config, log_level=level)
            self._tell(log_level=level)

    def look(self) -> None:
        """Send changed certificates to the gateways.

        Call it periodically.
        """
        with self._lock:
            for gateway in self._gateways:
                gateway.renew()

    def _tell(self, **message: Any) -> None:
        for gateway in self._gateways:
            gateway.tell(**message)

    def status(self) -> list[pb.GatewayStatus]:
        """Return the status of each gateway."""
        return [gateway.status() for gateway in self._gateways]

    def stop(self, drain_s: float) -> None:
        """Refuse new calls, give running ones `drain_s`, and end all gateways."""
        self.membership.forget(self._on_view)
        self._stopping.set()
        for gateway in self._gateways:
            gateway.tell(stop=drain_s)
        end = time.monotonic() + drain_s + 2 * LEAVE_S
        for gateway in self._gateways:
            gateway.finish(max(0.0, end - time.monotonic()))
        if self._held is not None:
            self._held.close()


class _Supervisor:
    """Start one gateway again and again, in a thread of its own, until the node stops."""

    def __init__(self, name: str, gateways: Gateways) -> None:
        self.name = name
        self._all = gateways
        self.ready = threading.Event()
        self.failed = ""
        self._was_ready = False  # at least once
        self._control: Control | None = None
        self._runner: Runner | None = None
        self._pems: Pems | None = None
        self._beat = pb.GatewayStatus()  # its last status
        self._recent: list[float] = []  # times of its ends in the last STREAK_S
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def tell(self, **message: Any) -> None:
        """Send a message to a gateway that is ready.

        Ignore failures: the watching thread notices the end.
        """
        control = self._control
        if control is not None and (self.ready.is_set() or "stop" in message):
            with contextlib.suppress(OSError):  # it has ended: the thread notices
                control.send(**message)

    def renew(self) -> None:
        """Send the certificates if they have changed."""
        pems = self._all.pems
        if pems is not None and pems is not self._pems and self.ready.is_set():
            self._pems = pems
            self.tell(pems=pems_value(pems))

    def status(self) -> pb.GatewayStatus:
        runner, now = self._runner, time.monotonic()
        return pb.GatewayStatus(
            name=self.name,
            pid=runner.pid if runner else 0,
            ready=self.ready.is_set(),
            recent_ends=sum(now - at < STREAK_S for at in self._recent),
            nbytes_max=self._all.nbytes_max,
            rss_nbytes=self._beat.rss_nbytes,
            call_count=self._beat.call_count,
        )

    def finish(self, seconds: float) -> None:
        """Wait for the end of a gateway that was told to stop, then kill it."""
        self._thread.join(seconds)
        if self._thread.is_alive() and self._runner is not None:
            self._runner.kill()
            self._thread.join(LEAVE_S)

    def _run(self) -> None:
        while not self._all.stopping:
            try:
                why = self._run_once()
            except OSError as error:
                log.warning("%s can not be started: %s", self.name, error)
                why = FAILED
            except Exception:
                log.exception("%s failed", self.name)
                why = FAILED
            self.ready.clear()
            if not self._was_ready:  # the node's start fails with it
                self.failed = self.failed or f"it ends at once ({why})"
                return
            self._record_end(why)

    def _record_end(self, why: str) -> None:
        """Count and log an end, and wait before the next start."""
        if self._all.stopping:
            return
        self._all.ends[why] += 1
        now = time.monotonic()
        self._recent = [at for at in self._recent if now - at < STREAK_S] + [now]
        count, pause_s = len(self._recent), min(PAUSE_S_MAX, PAUSE_S * 2 ** (len(self._recent) - 1))
        log.warning(
            "%s has ended (%s), %d times in %g s; the next is started in %g s",
            self.name,
            why,
            count,
            STREAK_S,
            pause_s,
        )
        self._all.pause(pause_s)

    def _run_once(self) -> str:
        """Start a gateway and watch it until it ends.

        Return why it ended.
        """
        with contextlib.ExitStack() as sockets:
            ours, theirs = map(
                sockets.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            )
            door, their_door = map(
                sockets.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            )
            control = Control(ours)
            self._pems = self._all.pems
            control.send(settings=self._all.settings)
            connections = self._all.open_door(self.name, door)
            runner: Runner | None = None
            try:
                connections.start()
                self._runner = runner = self._all.run(theirs, their_door)
                theirs.close()
                their_door.close()
                self._control = control
                return self._watch(control, runner)
            finally:
                self._control = None
                self._beat = pb.GatewayStatus()
                if runner is not None:  # otherwise it would listen beside the next one
                    runner.kill()
                    runner.wait(LEAVE_S)
                connections.stop(0.0)

    def _watch(self, control: Control, runner: Runner) -> str:
        """Exchange messages until the gateway ends, or must be ended.

        Return why.
        """
        unheard, untaken, beat_s = SilenceTimer(), SilenceTimer(), 0.0
        # a starting gateway has no calls
        while not (self._all.stopping and not self.ready.is_set()):
            try:
                messages = control.receive(BEAT_S / 2)
            except ProtocolError as error:
                log.warning("%s is ended: it sent %s", self.name, error)
                return FAILED
            if messages is None:
                return runner.wait(LEAVE_S) or HUNG  # it has closed its end
            for message in messages:
                self._on_message(message)
            silent_s = max(unheard.poll(bool(messages)), untaken.poll(self._takes(control)))
            silent_s_max = SILENT_S_MAX if self.ready.is_set() else READY_S_MAX
            if silent_s > silent_s_max and not self._all.embedded:  # a thread can not be killed
                return HUNG
            if time.monotonic() - beat_s >= BEAT_S:
                beat_s = time.monotonic()
                self.tell(beat=1)
        return KILLED

    def _takes(self, control: Control) -> bool:
        try:
            return control.flush()
        except OSError:
            return True  # it has ended

    def _on_message(self, message: dict[str, Any]) -> None:
        """Apply a message of the gateway, which `Control` has checked."""
        if "ready" in message:
            self._was_ready = True
            self._all.set_ready(self)
        if "beat" in message:
            beat = message["beat"]
            self._beat = pb.GatewayStatus(
                rss_nbytes=beat["rss_nbytes"], call_count=beat["call_count"]
            )
        self.failed = message.get("failed", self.failed)
