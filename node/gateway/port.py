"""The gRPC port of a node: held all its life, whether or not a gateway listens there just then."""

import contextlib
import socket


class Port:
    """Two sockets that are bound and do not listen. Gateways of this user can listen beside them (SO_REUSEPORT).

    The first one is bound without SO_REUSEPORT, so that it fails while anybody has the port, and with SO_REUSEADDR,
    which connections of before that are in TIME_WAIT need. But with that alone another node could do the same while no
    gateway listens. The second one is bound without SO_REUSEADDR: it is in the way of whoever comes later.
    """

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError if somebody has it. `port` 0: a free one."""
        self._sockets: list[socket.socket] = []
        try:
            first = self._socket(host)
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            first.bind((host, port))
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self.numeric_host: str = first.getsockname()[0]
            self.number: int = first.getsockname()[1]
        except OSError as error:
            self.close()
            raise OSError(f"gRPC port {port} on {host} can not be bound; is another node running? ({error})") from error
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
