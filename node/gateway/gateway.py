"""Run one gateway: a gRPC server that its node controls. It runs in a process, or in a thread of the node's process."""

import asyncio
import contextlib
import json
import logging
import socket
from typing import Any

import grpc

from kvstore.errors import ConfigError
from node.gateway.control import BEAT_S, LINE_NBYTES_MAX, line, pems_of, view_of
from node.gateway.health import NodeState
from node.gateway.memory import rss_nbytes
from node.gateway.options import check_grpcio, server_credentials, server_options, stopped
from node.gateway.server import Servicer

log = logging.getLogger(__name__)

STOP_S_MAX = 1.0  # what calls may take to end after they are cancelled
TELL_S = 0.05  # in which watchers of health hear of what the node has told just before


def _tells_no_header(record: logging.LogRecord) -> bool:
    """Return whether a log line of gRPC may pass. It would repeat headers that are not UTF-8, and with them tokens."""
    return not str(record.msg).startswith("Invalid encoding on")


logging.getLogger("grpc._cython.cygrpc").addFilter(_tells_no_header)


class Gateway:
    """A gRPC server and its control loop. `control` and `door` are the gateway's ends of the supervisor's sockets."""

    def __init__(self, control: socket.socket, door: socket.socket) -> None:
        control.setblocking(False)
        door.setblocking(False)
        self._control, self._door = control, door
        self._state = NodeState()
        self._server: Any = None
        self._serving = False

    def close(self) -> None:
        self._control.close()
        self._door.close()

    async def run(self) -> None:
        """Bind, report `ready`, and obey the node until it says `stop` or closes its end."""
        reader, self._writer = await asyncio.open_connection(sock=self._control, limit=LINE_NBYTES_MAX)
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
        """Create the gRPC server and return its port. Raise ConfigError or RuntimeError."""
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
        """Apply a message of the node. Return whether it was `stop`."""
        if "health" in message:
            self._state.set_health(message["health"])
        if "view" in message:
            self._state.set_view(*view_of(message["view"]))
        if "pems" in message:
            self._pems = pems_of(message["pems"])
        if "serve" in message and not self._serving:
            self._serving = True
            await self._server.start()
        if "stop" in message:
            await self._stop(message["stop"])
        return "stop" in message

    async def _stop(self, drain_s: float) -> None:
        """Give running calls `drain_s`, then cancel them. A call that ignores its cancellation is left behind."""
        await asyncio.sleep(TELL_S)
        self.servicer.end_idle()
        stopping = stopped(self._server, drain_s, lambda: self.servicer.call_count)
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(stopping, drain_s + STOP_S_MAX)
        log.warning("grpc: calls that were cancelled have not ended after %g s", STOP_S_MAX)

    async def _beat(self) -> None:
        """Report memory and calls every `BEAT_S`; close idle connections; check whether the node is silent."""
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
        loop.run_until_complete(asyncio.sleep(0))  # what was written last goes out
    finally:
        gateway.close()
        loop.close()
