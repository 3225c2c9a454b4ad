"""A node holds its gRPC port against other nodes, whether or not a gateway listens."""

import contextlib
import socket

import pytest

from node.gateway.supervisor import Port

HOSTS = ["127.0.0.1", "0.0.0.0", "::"]


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens as a gateway does."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((host, port))
    sock.listen()
    return sock


def is_refused(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), contextlib.closing(Port(host, port, wait_s=0.1)):
        return False
    return True


@pytest.mark.parametrize("host", HOSTS)
def test_port_of_a_node_without_a_gateway_is_refused(host: str) -> None:
    with contextlib.closing(Port(host, 0)) as held:
        port = held.number
        assert all(is_refused(other, port) for other in HOSTS)  # before the first gateway listens
        with listening(host, port), listening(host, port):
            assert all(is_refused(other, port) for other in HOSTS)
        assert all(is_refused(other, port) for other in HOSTS)  # after the last gateway has ended


@pytest.mark.parametrize("host", HOSTS)
def test_restarted_node_gets_its_port_again(host: str) -> None:
    """A restarted node gets its port again while its old connections are in TIME_WAIT."""
    with contextlib.closing(Port(host, 0)) as held:
        port = held.number
        with listening(host, port) as gateway, socket.create_connection(("127.0.0.1", port)):
            gateway.accept()[0].close()  # the side that closes first has the TIME_WAIT
    with contextlib.closing(Port(host, port)), listening(host, port):
        pass
