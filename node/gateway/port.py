"""The gRPC port, which a node holds for its gateways, also while none of them listens."""

import contextlib
import socket


def reserved_port(host: str, port: int) -> socket.socket:
    """Return a socket that has the port and does not listen: gateways can share it, and other nodes can not have it.
    Raise OSError if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # A node that was here just now may have left connections in TIME_WAIT: with SO_REUSEADDR they do not count.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))  # refused while another node has it
        # Later such a bind is to be refused, also while no gateway listens: with SO_REUSEADDR on both sockets it is
        # not. From now on the port is shared by SO_REUSEPORT, with gateways and others of this user that set it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _bind_strictly(sock, family)
    except OSError as error:
        sock.close()
        raise OSError(f"gRPC port {port} on {host} can not be bound; is another node running?") from error
    return sock


def _bind_strictly(reserved: socket.socket, family: int) -> None:
    """Bind to the same port once more, without SO_REUSEADDR. Kernels remember for each port whether the sockets there
    were bound with it, and some ask no more than that."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as other:
        if family == socket.AF_INET6:
            other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(reserved.getsockname()[:2])
