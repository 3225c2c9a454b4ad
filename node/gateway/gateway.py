"""Run one gateway: a gRPC server that its node controls.

It runs in a process, or in a thread of the node's process.
"""

import asyncio
import contextlib
import functools
import json
import logging
import os
import re
import socket
from collections.abc import Callable
from typing import Any

import grpc

from kvstore.config import MESSAGE_NBYTES_MAX
from kvstore.errors import ConfigError
from kvstore.security.certificates import Pems
from node.gateway.control import BEAT_S, LINE_NBYTES_MAX, line, pems_of, view_of
from node.gateway.server import NodeState, Servicer
from node.serving.limits import REQUEST_S_MAX

log = logging.getLogger(__name__)

_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")

STREAMS_OF_CONNECTION_MAX = 32  # concurrent calls of one connection; more wait at the client
# Bytes that a caller may send on a stream before they are read. Otherwise gRPC would measure the
# connection's capacity by pings, and a caller that answers them late would get half a GiB.
STREAM_NBYTES_MAX = MESSAGE_NBYTES_MAX
METADATA_NBYTES_MAX = 8 << 10
# No compression: decompressing would cost time and memory for unauthenticated clients. All releases
# since 1.62.3 refuse a call with compressed messages by its headers (UNIMPLEMENTED).
IDENTITY_ONLY = 1
# The first release that stops decompressing at the message limit (found by sending it 60 MiB in 59
# KiB). Older ones decompress everything, up to 2 GiB from 2 MB, and then compare. 1.83.0 was
# released without that change.
GRPCIO_MIN = (1, 82, 2)
GRPCIO_WITHOUT = ((1, 83, 0),)
LOOK_S = 0.5
STOP_S_MAX = 1.0  # time for calls to end after they are cancelled
TELL_S = 0.05  # time for health watchers to receive the node's last state


def _tells_no_header(record: logging.LogRecord) -> bool:
    """Return whether a log line of gRPC may pass.

    gRPC logs headers that are not UTF-8, which may contain tokens.
    """
    return not str(record.msg).startswith("Invalid encoding on")


logging.getLogger("grpc._cython.cygrpc").addFilter(_tells_no_header)


class Gateway:
    """A gRPC server and its control loop.

    `control` and `door` are the gateway's ends of the supervisor's sockets.
    """

    def __init__(self, control: socket.socket, door: socket.socket) -> None:
        control.setblocking(False)
        door.setblocking(False)
        self._control, self._door = control, door
        self._state = NodeState()
        self._server: Any = None
        self._serving = False

    def close(self) -> None:
        """Close the sockets."""
        self._control.close()
        self._door.close()

    async def run(self) -> None:
        """Bind, report `ready`, and obey the node until it sends `stop` or closes its end."""
        reader, self._writer = await asyncio.open_connection(
            sock=self._control, limit=LINE_NBYTES_MAX
        )
        first = await reader.readline()
        if not first:
            return
        settings = json.loads(first)["settings"]
        self.servicer = Servicer(self._door, self._state, settings["threads"], settings["stall_s"])
        try:
            port = await self._bind(settings)
        except ConfigError as error:
            return self._tell(failed=str(error))
        except (RuntimeError, grpc.aio.BaseError) as error:
            return self._tell(failed=f"gRPC can not listen there: {error}")
        self._tell(ready=port)
        beats = asyncio.ensure_future(self._beat())
        try:
            while text := await reader.readline():
                self._state.heard()
                if await self._obey(json.loads(text)):
                    return
        except ConnectionError:
            pass  # the node is gone
        finally:
            beats.cancel()
            self.servicer.upstream.close()
            self._writer.close()

    async def _bind(self, settings: dict[str, Any]) -> int:
        """Create the gRPC server and return its port.

        Raises ConfigError or RuntimeError.
        """
        check_grpcio()
        self._server = grpc.aio.server(options=server_options(settings["connections_max"]))
        self._server.add_generic_rpc_handlers(self.servicer.handlers())
        host, port = settings["host"], settings["port"]
        where = f"{'[' + host + ']' if ':' in host else host}:{port}"
        if settings["pems"] is None:
            return int(self._server.add_insecure_port(where))
        self._pems = pems_of(settings["pems"])
        return int(self._server.add_secure_port(where, server_credentials(lambda: self._pems)))

    async def _obey(self, message: dict[str, Any]) -> bool:
        """Apply a message of the node.

        Return whether it was `stop`.
        """
        if "health" in message:
            self._state.set_health(message["health"])
        if "view" in message:
            self._state.set_view(*view_of(message["view"]))
        if "pems" in message:
            self._pems = pems_of(message["pems"])
        if "log_level" in message:
            logging.getLogger().setLevel(message["log_level"])
        if "serve" in message and not self._serving:
            self._serving = True
            await self._server.start()
        if "stop" in message:
            await self._stop(message["stop"])
        return "stop" in message

    async def _stop(self, drain_s: float) -> None:
        """Give running calls `drain_s`, then cancel them.

        A call that ignores its cancellation is left behind.
        """
        await asyncio.sleep(TELL_S)
        self.servicer.end_idle()
        stopping = stopped(self._server, drain_s, lambda: self.servicer.call_count)
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(stopping, drain_s + STOP_S_MAX)
        log.warning("grpc: calls that were cancelled have not ended after %g s", STOP_S_MAX)

    async def _beat(self) -> None:
        """Report memory and calls every `BEAT_S`, close idle connections, notice a silent node."""
        while True:
            self._tell(beat={"rss_nbytes": rss_nbytes(), "call_count": self.servicer.call_count})
            await asyncio.sleep(BEAT_S)
            self.servicer.upstream.trim()
            self._state.look()

    def _tell(self, **message: Any) -> None:
        self._writer.write(line(message))


def serve(gateway: Gateway) -> None:
    """Run a gateway in this thread until its end."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(gateway.run())
        loop.run_until_complete(asyncio.sleep(0))  # sends the last output
    finally:
        gateway.close()
        loop.close()


async def stopped(server: Any, drain_s: float, call_count: Callable[[], int]) -> None:
    """Stop a gRPC server.

    Running calls have `drain_s`, then they are cancelled.

    `call_count` counts the calls with running handlers. gRPC may accept a call while it stops,
    start no handler for it, and wait for it all the time: such calls are cancelled once no handler
    has run for `LOOK_S`.
    """
    stopping = asyncio.ensure_future(server.stop(drain_s))
    left = True
    while not (await asyncio.wait([stopping], timeout=LOOK_S))[0]:
        if not left and not call_count():
            await server.stop(None)
        left = call_count() > 0
    await stopping


def check_grpcio(version: str = grpc.__version__) -> None:
    """Raise ConfigError for a grpcio that decompresses messages without a limit."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    numbers = tuple(map(int, found.groups())) if found else ()
    if numbers >= GRPCIO_MIN and numbers not in GRPCIO_WITHOUT:
        return
    oldest, without = ".".join(map(str, GRPCIO_MIN)), ".".join(map(str, GRPCIO_WITHOUT[0]))
    raise ConfigError(
        f"grpcio {version} decompresses messages without a size limit; a node needs grpcio "
        f"{oldest} or newer, not {without}: pip install 'grpcio>={oldest},!={without}'. "
        "Where an engine needs an older one, run the node in an environment of its own"
    )


def server_options(connections_max: int) -> list[tuple[str, int]]:
    """Return the gRPC server's options; further connections are closed."""
    return [
        ("grpc.max_receive_message_length", MESSAGE_NBYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_NBYTES_MAX),
        ("grpc.compression_enabled_algorithms_bitset", IDENTITY_ONLY),
        ("grpc.so_reuseport", 1),  # the node holds the port, and all its gateways listen there
        ("grpc.max_concurrent_streams", STREAMS_OF_CONNECTION_MAX),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", STREAM_NBYTES_MAX),
        ("grpc.max_metadata_size", METADATA_NBYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_NBYTES_MAX),
        # A chunk comes in one HTTP/2 frame: in 64, a put takes a sixth more CPU time.
        ("grpc.http2.max_frame_size", MESSAGE_NBYTES_MAX),
        # For a connection that sends nothing, or half of HTTP/2's greeting.
        ("grpc.server_handshake_timeout_ms", int(REQUEST_S_MAX * 1000)),
        ("grpc.http2.settings_timeout", int(REQUEST_S_MAX * 1000)),
        ("grpc.max_allowed_incoming_connections", connections_max),
    ]


def server_credentials(pems: Callable[[], Pems]) -> grpc.ServerCredentials:
    """Return credentials that take the certificates in force from `pems` at each handshake.

    Python's gRPC either requires a client certificate or requests none, and has no setting for the
    TLS version: between our own sides it is 1.3 (`tests/node/test_tls.py`).
    """
    given = pems()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Return the certificates in force; None if unchanged since the last handshake."""
        nonlocal given
        if pems() is given:
            return None
        given = pems()
        return _configuration(given)

    return grpc.dynamic_ssl_server_credentials(_configuration(given), fetch, bool(given.roots))


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.chain)], pems.roots or None)


@functools.cache
def _file(pid: int) -> int:
    """Open the file once: in the sandbox it can not be opened later."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def rss_nbytes() -> int:
    """Return the resident memory of this process."""
    return int(os.pread(_file(os.getpid()), 200, 0).split()[1]) * _PAGE_NBYTES
