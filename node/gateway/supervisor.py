"""The node's side of its gateways: holds the port, starts them, tells them what they need, starts anew what ends.

port (bound, not listening) --SO_REUSEPORT--> each gateway listens
Gateways --> _Gateway: a thread, which watches one process (or, embedded, one thread)
"""

import contextlib
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

from kvstore.certificates import Pems
from kvstore.cluster.view import View
from kvstore.errors import ConfigError, ProtocolError
from kvstore.log_rate import LogRate
from kvstore.pb import kvstore_pb2 as pb
from node.config import NodeConfig, missing
from node.gateway.control import BEAT_S, EXIT_MEMORY, Control, Silence, pems_value, view_value
from node.gateway.port import Port
from node.peers.membership import Membership
from node.serve.gateway import GatewayCalls, GatewayDoor
from node.serve.service import Service
from node.tls import Certificates

log = logging.getLogger(__name__)
log.addFilter(LogRate())

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["KVStore"].full_name  # of the health service
DISK_NAME = "kvstore.Disk"  # health of the disk tier alone; unknown on a node without one
READY_S_MAX = 30.0  # a start
SILENT_S_MAX = 15.0  # a gateway that says nothing for so long hangs, and is ended; on a busy machine it may wait
LEAVE_S = 1.0  # to end after it was told to
PAUSE_S, PAUSE_S_MAX = 0.05, 0.5  # before one is started anew; doubled while they end within STREAK_S
STREAK_S = 60.0
CONNECTIONS_MAX = 4096
PACKAGES = ("grpc_health", "grpc_reflection")  # of the extra `node`, which only a gateway imports
# Why a gateway has ended, for people and as the label of a metric.
MEMORY, HUNG, KILLED, FAILED = "memory", "hung", "killed", "failed"
# What a gateway's process may know of the node's environment: no setting of kvstore, and nobody's secrets.
ENVIRONMENT = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD")
# Of glibc, for chunks of 1 MiB that come and go: without, each is taken from the kernel and given back, page by page.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20), "MALLOC_ARENA_MAX": "4"}


class Runner(Protocol):
    """Where a gateway runs."""

    pid: int

    def wait(self, seconds: float) -> str | None:
        """Why it has ended; None: it has not."""

    def kill(self) -> None: ...


class _Process:
    def __init__(self, control: socket.socket, door: socket.socket, config: NodeConfig, port: int) -> None:
        fds = (control.fileno(), door.fileno())
        environment = {name: value for name, value in os.environ.items() if name in ENVIRONMENT or name[:3] == "LC_"}
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
        environment |= {"PYTHONSAFEPATH": "1", **MALLOC}
        command = [sys.executable, "-m", "node.gateway.main", "--control-fd", str(fds[0]), "--door-fd", str(fds[1])]
        command += ["--port", str(port), "--memory-bytes", str(config.grpc_memory_nbytes)]
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


class _Thread:
    """In the node's own process: nothing ends it but its node."""

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


class Gateways:
    """Takes the port in the constructor; `start` begins to serve. Thread-safe."""

    def __init__(
        self, config: NodeConfig, service: Service, certificates: Certificates | None, embedded: bool = False
    ) -> None:
        """`embedded`: in a thread of this process, instead of processes. Raises OSError if the port is taken, and
        ConfigError if a package is missing."""
        for package in PACKAGES:
            if importlib.util.find_spec(package) is None:
                raise ConfigError(missing(package))
        self._config = config
        self._service = service
        self._certificates = certificates
        self.membership: Membership = service.membership
        self.embedded = embedded
        self.host = config.grpc_host or config.host
        self._held = None if self.host == "none" else Port(self.host, config.port)
        self.port = self._held.number if self._held else 0  # 0: there is no gRPC
        self.calls = GatewayCalls(service, config.grpc_threads)
        self._lock = threading.RLock()  # around a change and its telling, so that what is told last is so
        self._health = {"": False, SERVICE_NAME: False}
        self._view: View | None = None
        self._stopping = threading.Event()
        self._serving = False
        self.ends = Counter(dict.fromkeys((MEMORY, HUNG, KILLED, FAILED), 0))
        count = 0 if self._held is None else 1 if embedded else config.grpc_processes
        self._gateways = [_Gateway(f"gateway-{number}", self) for number in range(count)]
        self.membership.on_view(self._heard)
        for gateway in self._gateways:
            gateway.begin()

    # ---- what gateways need --------------------------------------------------------------

    def run(self, control: socket.socket, door: socket.socket) -> Runner:
        if self.embedded:
            return _Thread(control, door)
        return _Process(control, door, self._config, self.port)

    def open_door(self, name: str, door: socket.socket) -> GatewayDoor:
        return GatewayDoor(name, door, self._service, self.calls, self._config.stall_s)

    @property
    def pems(self) -> Pems | None:
        return self._certificates.pems if self._certificates else None

    @property
    def settings(self) -> dict[str, Any]:
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
        """What a gateway that is ready has to know."""
        told: dict[str, Any] = {"health": dict(self._health), "view": self._told_view()}
        return {**told, "serve": True} if self._serving else told

    def brief(self, gateway: "_Gateway") -> None:
        """It is ready. Certificates may have changed while it started."""
        with self._lock:
            gateway.ready.set()
            gateway.tell(**self._state)
            gateway.renew()

    def _told_view(self) -> dict[str, Any]:
        alone = self._view is None and not self.membership.joining
        return view_value(self._view.message if self._view else None, alone)

    @property
    def nbytes_max(self) -> int:
        return 0 if self.embedded else self._config.grpc_memory_nbytes

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def pause(self, seconds: float) -> None:
        self._stopping.wait(seconds)

    # ---- what the node says --------------------------------------------------------------

    def start(self, pulse: Callable[[], None] = lambda: None) -> None:
        """Serve. Raise ConfigError if a gateway can not be started."""
        end = time.monotonic() + READY_S_MAX
        for gateway in self._gateways:
            while not gateway.ready.wait(0.05):
                pulse()
                if gateway.failed or time.monotonic() > end:
                    raise ConfigError(f"{gateway.name} does not start: {gateway.failed or 'it says nothing'}")
        with self._lock:
            self._serving = True
            self._health |= {"": True, SERVICE_NAME: True}
            self._tell(**self._state)

    def set_serving(self, serving: bool) -> None:
        """What the standard health service answers, for the whole server and for KVStore."""
        self._set_health({"": serving, SERVICE_NAME: serving})

    def set_disk_healthy(self, healthy: bool) -> None:
        """A failed disk does not make the node unhealthy: RAM serves on. It has a name of its own."""
        self._set_health({DISK_NAME: healthy})

    def _set_health(self, good: dict[str, bool]) -> None:
        with self._lock:
            self._health |= good
            self._tell(health=dict(self._health))

    @property
    def serving(self) -> bool:
        """What the health service says of the node."""
        return self._health[""]

    def _heard(self, view: View) -> None:
        with self._lock:
            self._view = view
            self._tell(view=self._told_view())

    def look(self) -> None:
        """Called now and then: certificates that have changed go to the gateways."""
        with self._lock:
            for gateway in self._gateways:
                gateway.renew()

    def _tell(self, **message: Any) -> None:
        for gateway in self._gateways:
            gateway.tell(**message)

    def status(self) -> list[pb.GatewayStatus]:
        return [gateway.status() for gateway in self._gateways]

    def stop(self, drain_s: float) -> None:
        """New calls are refused, running ones have `drain_s`."""
        self.membership.forget(self._heard)
        self._stopping.set()
        for gateway in self._gateways:
            gateway.tell(stop=drain_s)
        end = time.monotonic() + drain_s + 2 * LEAVE_S
        for gateway in self._gateways:
            gateway.finish(max(0.0, end - time.monotonic()))
        if self._held is not None:
            self._held.close()


class _Gateway:
    """One of them, in its several lives. The thread belongs to it."""

    def __init__(self, name: str, house: Gateways) -> None:
        self.name = name
        self._house = house
        self.ready = threading.Event()
        self.failed = ""
        self._was_ready = False  # ever
        self._control: Control | None = None
        self._runner: Runner | None = None
        self._pems: Pems | None = None
        self._beat: dict[str, Any] = {}
        self._began_s = 0.0
        self._recent: list[float] = []  # when it ended, of the last STREAK_S
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def tell(self, **message: Any) -> None:
        control = self._control
        if control is not None and (self.ready.is_set() or "stop" in message):
            with contextlib.suppress(OSError):  # it has ended: the thread finds out
                control.send(**message)

    def renew(self) -> None:
        pems = self._house.pems
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
            nbytes_max=self._house.nbytes_max,
            **self._beat,
        )

    def finish(self, seconds: float) -> None:
        """It was told to stop, and has so long."""
        self._thread.join(seconds)
        if self._thread.is_alive() and self._runner is not None:
            self._runner.kill()
            self._thread.join(LEAVE_S)

    def _run(self) -> None:
        while not self._house.stopping:
            try:
                why = self._live()
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
            self._ended(why)

    def _ended(self, why: str) -> None:
        """Counts and tells, and waits before the next life."""
        if self._house.stopping:
            return
        self._house.ends[why] += 1
        now = time.monotonic()
        self._recent = [at for at in self._recent if now - at < STREAK_S] + [now]
        count, pause_s = len(self._recent), min(PAUSE_S_MAX, PAUSE_S * 2 ** (len(self._recent) - 1))
        log.warning("%s has ended (%s), %d times in %g s; it is back in %g s", self.name, why, count, STREAK_S, pause_s)
        self._house.pause(pause_s)

    def _live(self) -> str:
        """One life. Returns why it ended."""
        with contextlib.ExitStack() as sockets:
            ours, theirs = map(sockets.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
            door, their_door = map(sockets.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            control = Control(ours)
            self._pems = self._house.pems
            control.send(settings=self._house.settings)
            connections = self._house.open_door(self.name, door)
            runner: Runner | None = None
            try:
                connections.start()
                self._runner = runner = self._house.run(theirs, their_door)
                theirs.close()
                their_door.close()
                self._control = control
                return self._watch(control, runner)
            finally:
                self._control = None
                self._beat = {}
                if runner is not None:  # or it would go on to listen beside the next one
                    runner.kill()
                    runner.wait(LEAVE_S)
                connections.stop(0.0)

    def _watch(self, control: Control, runner: Runner) -> str:
        """Return why it has ended, or is to be ended."""
        unheard, untaken, beat_s = Silence(), Silence(), 0.0
        while not (self._house.stopping and not self.ready.is_set()):  # one that starts has no calls
            try:
                messages = control.receive(BEAT_S / 2)
            except ProtocolError as error:
                log.warning("%s is ended: it says %s", self.name, error)
                return FAILED
            if messages is None:
                return runner.wait(LEAVE_S) or HUNG  # it has closed its end
            for message in messages:
                self._hear(message)
            silent_s = max(unheard.look(bool(messages)), untaken.look(self._takes(control)))
            if silent_s > (SILENT_S_MAX if self.ready.is_set() else READY_S_MAX):
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

    def _hear(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._was_ready = True
            self._house.brief(self)
        if "beat" in message:
            self._beat = message["beat"]
        self.failed = message.get("failed", self.failed)
