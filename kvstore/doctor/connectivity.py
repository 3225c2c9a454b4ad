"""Check the connection to one node step by step, and which transports work from here.

    name -> TCP -> TLS -> certificate -> gRPC -> the node's identity -> its status -> its clock

The first failed step ends the check, and later ones are skipped. For bulk:// addresses the framed
protocol replaces gRPC; for unix: addresses the network steps are skipped. Then `Wires` explains why
a transport does not work.
"""

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kvstore.client import Client
from kvstore.cluster.nodes import is_here
from kvstore.config import LOCAL, ClientConfig, is_loopback, local_file, parse_address
from kvstore.deadline import Deadline
from kvstore.doctor.checks import Finding, FindingState, fail, ok, remedy_of, skipped, warn
from kvstore.doctor.host import check_expiry
from kvstore.errors import ConfigError, DeadlineExceeded, Forbidden, KVStoreError, Unavailable
from kvstore.messages import result
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.negotiation import Addresses, Negotiated, Negotiation
from kvstore.transports.shm import socket_here
from kvstore.transports.tls import (
    PROBE_S,
    SPEAKS_TLS,
    client_tls,
    explain_handshake,
    fetch_certificate,
)

if TYPE_CHECKING:
    from kvstore.results.replies import NodeStatus

GRACE_S = 2.0  # for starting threads, beside what the steps themselves may take
NAMES = ("shm", "bulk", "grpc")  # the best transport first
IN_CONTAINERS = "docs/operations.md, Shared memory between containers"
_NO_ANSWER = (
    "the port is open but nothing answers: the node is starting, hangs or is stopped, or "
    "it is another program; see the log of kvstore-node there"
)
_NO_SOCKET = "no node serves that socket: start one with this --shm-socket, or see its log"


class Clock(NamedTuple):
    """The lead of a node's clock, within half the duration of the request."""

    ahead_s: float
    within_s: float


class Connectivity:
    """The connection to the node at an address.

    Results are available after `findings` was consumed.
    """

    def __init__(self, address: str, config: ClientConfig) -> None:
        self.address = address
        # This node alone, even if it belongs to a cluster
        self.config = replace(config, address=address, direct=True)
        self.scheme, self.host, self.port, _ = parse_address(address)
        self.found: tuple[str, ...] = ()  # the node's IP addresses that answer
        self.hello: pb.HelloReply | None = None
        self.status: NodeStatus | None = None
        self.clock: Clock | None = None
        self._tls = client_tls(self.config, self.host)
        self._step_s = config.connect_timeout_s

    @property
    def limit_s(self) -> float:
        """Return the time limit for six steps that connect and one call."""
        return 6 * self._step_s + self.config.timeout_s + GRACE_S

    @property
    def is_here(self) -> bool:
        """Return whether the node's address is this host's."""
        return self.scheme == "unix" or any(map(is_here, self.found))

    def findings(self) -> Iterator[Finding]:
        """Yield the findings of each step until one fails."""
        steps: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
            ("name", self._resolve),
            ("TCP", self._connect),
            ("TLS", self._greet),
            (self._asks_over, self._ask),
            ("status", self._look),
        ]
        if self.scheme == "unix":
            del steps[:3]
        failed = ""
        for name, step in steps:
            if failed:
                yield skipped(name, f"because {failed} failed")
                continue
            for finding in step():
                failed = finding.name if finding.state is FindingState.FAIL else failed
                yield finding

    def _resolve(self) -> Iterator[Finding]:
        try:
            self.found = Addresses(self.host).resolve(Deadline(self._step_s))
        except (Unavailable, DeadlineExceeded) as error:
            yield fail("name", str(error), f"correct the address {self.address}, DNS or /etc/hosts")
            return
        if self.found != (self.host,):
            yield ok("name", f"{self.host} is {' and '.join(self.found)}")

    def _connect(self) -> Iterator[Finding]:
        answering, errors = dict[str, float](), dict[str, OSError]()
        for address in self.found:
            began = time.monotonic()
            try:
                with self._open(address):
                    answering[address] = time.monotonic() - began
            except OSError as error:
                errors[address] = error
        if not answering:
            address, first = next(iter(errors.items()))
            yield fail("TCP", f"{address}:{self.port}: {first}", _remedy_of_tcp(first))
            return
        self.found = tuple(answering)
        address, seconds = next(iter(answering.items()))
        also = f"; not {' and '.join(errors)}" if errors else ""
        yield ok("TCP", f"{address}:{self.port} in {1000 * seconds:.1f} ms{also}")

    def _open(self, address: str) -> socket.socket:
        return socket.create_connection((address, self.port), self._step_s / len(self.found))

    def _greet(self) -> Iterator[Finding]:
        certificate = b""
        with suppress(OSError), self._open(self.found[0]) as sock:
            certificate = fetch_certificate(sock)
        if self._tls is None:
            yield self._plain(bool(certificate))
            return
        try:
            with self._open(self.found[0]) as sock:
                if self.scheme == "bulk":  # a bulk server sends nothing before the first request
                    sock.settimeout(min(PROBE_S, self._step_s))
                problem = explain_handshake(sock, self._tls)
        except (OSError, KVStoreError) as error:
            problem = str(error)
        yield self._of_handshake(problem, certificate)
        if certificate:
            from kvstore.security import x509

            with suppress(ConfigError):
                yield check_expiry("certificate", "the node's", x509.validity(certificate)[1])

    def _plain(self, speaks_tls: bool) -> Finding:
        if speaks_tls:
            return fail(
                "TLS",
                SPEAKS_TLS,
                "set KVSTORE_TLS_CA to the file of the authority (ca.pem), or to system",
            )
        if all(map(is_loopback, self.found)):
            return ok("TLS", "none; the traffic stays on this host")
        remedy = (
            "give nodes --tls-cert and --tls-key and clients KVSTORE_TLS_CA: "
            "docs/operations.md, TLS"
        )
        return warn(
            "TLS", "none: anyone on the network path can read and change all traffic", remedy
        )

    def _of_handshake(self, problem: str, certificate: bytes) -> Finding:
        from kvstore.security import x509

        called = "no name"
        with suppress(ConfigError):
            called = ", ".join(x509.hosts(certificate)) or called if certificate else "unknown"
        if problem:
            remedy = (
                "renew or correct the files of KVSTORE_TLS_CA, KVSTORE_TLS_CERT, "
                "KVSTORE_TLS_NAME or the node's own"
            )
            return fail(
                "TLS",
                f"{problem}; its certificate is for {called}",
                f"{remedy}: docs/operations.md, TLS",
            )
        return ok("TLS", f"its certificate is trusted, and for {called}")

    def _ask(self) -> Iterator[Finding]:
        began = time.monotonic()
        try:
            connection = self._opened()
        except KVStoreError as error:
            yield fail(self._asks_over, str(error), remedy_of(error, self._no_answer))
            return
        self._wire, self.hello = connection.wire, connection.hello
        took_ms = 1000 * (time.monotonic() - began)
        yield ok(self._asks_over, f"node {connection.hello.version} answers in {took_ms:.1f} ms")
        who = (
            f"{connection.hello.role} of "
            f"{'all tenants' if connection.hello.tenant == '*' else connection.hello.tenant}"
        )
        yield ok(
            "identity",
            f"{who} there" if connection.hello.role else "the node has no authentication",
        )

    @property
    def _no_answer(self) -> str:
        if self.address == LOCAL:
            return (
                "engines of this user with KVSTORE_ADDRESS=local start it, and say why if they can "
                f"not; its log is {local_file('log')}"
            )
        return _NO_SOCKET if self.scheme == "unix" else _NO_ANSWER

    @property
    def _asks_over(self) -> str:
        return "gRPC" if self.scheme == "grpc" else "frames"

    def _opened(self) -> Negotiated:
        """Connect by the transport that this kind of address always has."""
        wire = {"unix": "shm"}.get(self.scheme, self.scheme)
        return Negotiation(self.address, replace(self.config, wire=wire)).open(
            Deadline(self.config.timeout_s)
        )

    def ask_again(self) -> None:
        """Say hello again and keep the new reply, or the old one if there is none."""
        with suppress(KVStoreError):
            connection = self._opened()
            connection.close()
            self.hello = connection.hello

    def _look(self) -> Iterator[Finding]:
        """Request the status once, timed to compare the clocks."""
        began, asked = time.time(), time.monotonic()
        try:
            deadline = Deadline(self.config.timeout_s)
            reply = self._wire.call("node_status", pb.NodeStatusRequest(), deadline)
            status: NodeStatus = result(reply)
        except Forbidden as error:
            yield skipped("status", str(error), remedy_of(error))
            return
        except KVStoreError as error:
            yield fail("status", str(error), remedy_of(error, self._no_answer))
            return
        finally:
            self._wire.close()
        within_s = (time.monotonic() - asked) / 2
        self.status = status
        if status.now_unix_ms:  # an older node does not report its clock
            self.clock = Clock(status.now_unix_ms / 1000 - (began + within_s), within_s)


def _remedy_of_tcp(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return (
            "nothing listens there: is kvstore-node running, with this --port, and with a "
            "--host that is reachable from here (the default is loopback)? In a container: "
            "is the port published?"
        )
    if isinstance(error, TimeoutError):
        return (
            "nothing answers: the host is down, or a firewall, a security group or a "
            "NetworkPolicy drops it"
        )
    return "no route to that address from here: correct the address, or the network"


class Wires:
    """The transports to a node that said hello.

    `clients`: by name, those of the transports that work; the caller closes them. `keep`: they stay
    open until then, with some seven descriptors.
    """

    def __init__(self, node: Connectivity, keep: bool = True) -> None:
        self.node = node
        self.keep = keep
        self.clients: dict[str, Client] = {}

    def findings(self) -> Iterator[Finding]:
        """Yield a finding per transport."""
        yield self._shm()
        yield self._bulk()
        yield self._grpc()
        if not self.keep:
            self.close()

    def close(self) -> None:
        """Close all clients."""
        for client in self.clients.values():
            client.close()

    def _shm(self) -> Finding:
        hello, config = self.node.hello, self.node.config
        assert hello is not None
        wrong = fail if config.wire == "shm" else warn
        if not hello.shm_socket:
            if hello.shm_refused and (self.node.is_here or config.wire == "shm"):
                return wrong(
                    "shm",
                    hello.shm_refused,
                    "--shm-trust of the node names tenants that may: SECURITY.md",
                )
            if config.wire == "shm":
                return fail(
                    "shm",
                    "the node serves none",
                    "start it without --shm-socket none, or use another transport",
                )
            return skipped("shm", hello.shm_refused or "the node serves none (--shm-socket none)")
        named = self.node.scheme == "unix"
        path = (
            parse_address(self.node.address).path
            if named
            else socket_here(hello.shm_socket, config)
        )
        try:
            os.stat(path)
        except FileNotFoundError:
            said = f"its socket {path} is not on this host"
            remedy = (
                "if the node runs in a container here, mount its socket and set "
                f"KVSTORE_SHM_DIR: {IN_CONTAINERS}"
            )
            if self.node.is_here or config.wire == "shm":
                return wrong("shm", said, remedy)
            return skipped("shm", f"{said}: the node is on another, or in a container")
        except OSError:
            pass  # connecting reports why
        remedy = (
            "run as the node's user or root, or set KVSTORE_SHM_DIR; clients take TCP "
            f"meanwhile: {IN_CONTAINERS}"
        )
        problem = self._try("shm")
        return wrong("shm", problem, remedy) if problem else ok("shm", f"works, through {path}")

    def _bulk(self) -> Finding:
        hello = self.node.hello
        assert hello is not None
        if self.node.scheme == "unix":
            return skipped("bulk", "the address is that of a Unix socket")
        problem = self._try("bulk")
        if problem:
            remedy = (
                f"open TCP port {hello.bulk_port} (--bulk-port) from here to the node; gRPC "
                "is slower"
            )
            return fail("bulk", problem, remedy)
        return ok("bulk", f"works, at port {hello.bulk_port}")

    def _grpc(self) -> Finding:
        if self.node.scheme != "grpc":
            return skipped("grpc", "not used by bulk:// and unix: addresses")
        problem = self._try("grpc")
        return (
            fail("grpc", problem, "look at the log of kvstore-node")
            if problem
            else ok("grpc", "works")
        )

    def _try(self, wire: str) -> str:
        """Try a transport; return why it fails, or an empty string."""
        config = replace(
            self.node.config, wire=wire, connections_max=1, page_key="", page_key_file=""
        )
        client = Client(config)
        try:
            client.view()
        except KVStoreError as error:
            client.close()
            remedy = remedy_of(error)
            return f"{error}{'; ' * bool(remedy)}{remedy}"
        self.clients[wire] = client
        return ""
