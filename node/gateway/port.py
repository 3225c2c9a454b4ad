"""Hold the gRPC port of a node all its life, whether or not a gateway listens just then."""

import contextlib
import errno
import socket
import time

# So long a node waits for a port that is taken: gateways of one that was killed just before end a moment after it.
TAKEN_S_MAX = 3.0
PAUSE_S = 0.05


class Port:
    """Two sockets that are bound and do not listen. Gateways of this user listen beside them (SO_REUSEPORT).

    The first is bound with SO_REUSEADDR, because of connections in TIME_WAIT, and without SO_REUSEPORT: binding fails
    while anybody listens. That is not enough while no gateway listens: a second node could bind the same way. So the
    second socket is bound without SO_REUSEADDR, and the kernel refuses the port to every later node.
    """

    def __init__(self, host: str, port: int) -> None:
        """Bind. Raise OSError if the port is taken. `port` 0: take a free one."""
        self._sockets: list[socket.socket] = []
        try:
            first = self._socket(host)
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _bind(first, host, port)
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self.numeric_host: str = first.getsockname()[0]
            self.number: int = first.getsockname()[1]
        except OSError as error:
            self.close()
            asked = "; is another node running?" if error.errno == errno.EADDRINUSE else ""
            raise OSError(f"gRPC port {port} on {host} can not be bound{asked} ({error})") from error
        second = self._socket(host)
        second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with contextlib.suppress(OSError):  # for a minute after another program that did not share the port
            second.bind((host, self.number))

    def _socket(self, host: str) -> socket.socket:
        made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._sockets.append(made)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        return made

    def close(self) -> None:
        for one in self._sockets:
            one.close()


def _bind(sock: socket.socket, host: str, port: int) -> None:
    end = time.monotonic() + TAKEN_S_MAX
    while True:
        try:
            return sock.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                raise
        time.sleep(PAUSE_S)
