"""Connections to a node's bulk port, each greeted with a hello: plain or over TLS, at the addresses of its name."""

import contextlib
import socket
import ssl
from collections.abc import Iterator, Sequence

from kvstore.config import PROTOCOL_VERSION, ClientConfig
from kvstore.credentials import token_of
from kvstore.deadline import Deadline
from kvstore.errors import Exhausted, Unavailable
from kvstore.pb import kvstore_pb2 as pb
from kvstore.wires.connections import exchange, greeting
from kvstore.wires.frames import FrameSocket
from kvstore.wires.tls import ClientTls, client_tls
from kvstore.wires.tls_frames import TlsFrameSocket, means_no_place


class BulkConnector:
    """Thread-safe. `where` names the peer in messages, `version` is that of the protocol in which it begins."""

    def __init__(
        self, host: str, port: int, config: ClientConfig, found: Sequence[str] = (), tls: ClientTls | None = None
    ) -> None:
        """`found`: the addresses of `host`, in the order in which they are tried; none: it is an address. `tls`: what
        `config` asks for, where it was made already."""
        self.where = f"{host}:{port} (bulk)"
        self.version = PROTOCOL_VERSION
        self._found = found or (host,)
        self._port = port
        self._config = config
        self._tls = tls or client_tls(config, host)

    def connect(self, limit: Deadline, only_asks: bool = False) -> tuple[FrameSocket, pb.HelloReply]:
        """A connection, and what the node said of itself. `only_asks`: of any version, and of a node that joins its
        cluster just now, too. Raises OSError or `Refused` for what `ConnectionPool.raise_named` names."""
        connection = self._socket(limit)
        with greeting(connection, self.where, limit), self._meant():
            connection.handshake()
            version = 0 if only_asks else self.version
            request = pb.HelloRequest(protocol_version=version, token=token_of(self._config))
            hello: pb.HelloReply = exchange(connection, "hello", request)[0]
        return connection, hello

    def _socket(self, limit: Deadline) -> FrameSocket:
        if self._tls is None:
            return FrameSocket(self._connected(limit), self.version)
        context = self._tls.context()
        return TlsFrameSocket(self._connected(limit), context, self._tls.name, self.version)

    @contextlib.contextmanager
    def _meant(self) -> Iterator[None]:
        """Around a greeting: what fails in TLS, in plain words."""
        try:
            yield
        except ssl.SSLError as error:
            if means_no_place(error):
                raise Exhausted(
                    f"{self.where}: the node refuses one more connection; most likely all that it has are in "
                    "use, or all of this host's: use fewer per client, or raise its sessions_max (its log says which)"
                ) from error
            raise Unavailable(self._tls.meaning(error) if self._tls else str(error)) from error

    def _connected(self, limit: Deadline) -> socket.socket:
        """Each address has its share of the time, so that one that swallows packets leaves some for the next."""
        for number, address in enumerate(self._found):
            share_s = limit.remaining() / (len(self._found) - number)
            try:
                return socket.create_connection((address, self._port), timeout=share_s)
            except OSError as error:
                failed = error
        if isinstance(failed, TimeoutError):
            raise Unavailable(f"no connection to {self.where} in {limit.seconds:.3g} s") from failed
        raise failed
