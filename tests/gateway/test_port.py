"""The gRPC port of a node: nobody else has it, whatever its gateways do just then."""

import contextlib
import socket

import pytest

from node.gateway.supervisor import Port

HOSTS = ["127.0.0.1", "0.0.0.0", "::"]


def listening(host: str, port: int) -> socket.socket:
    """As a gateway does."""
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
def test_a_node_that_comes_while_no_gateway_listens_is_refused_the_port(host: str) -> None:
    with contextlib.closing(Port(host, 0)) as held:
        port = held.number
        assert all(is_refused(other, port) for other in HOSTS)  # the first gateway has not come yet
        with listening(host, port), listening(host, port):
            assert all(is_refused(other, port) for other in HOSTS)
        assert all(is_refused(other, port) for other in HOSTS)  # the last one has ended


@pytest.mark.parametrize("host", HOSTS)
def test_a_node_that_comes_again_has_the_port_that_it_had(host: str) -> None:
    """Also while connections of before are in TIME_WAIT at its side."""
    with contextlib.closing(Port(host, 0)) as held:
        port = held.number
        with listening(host, port) as gateway, socket.create_connection(("127.0.0.1", port)):
            gateway.accept()[0].close()  # closes first
    with contextlib.closing(Port(host, port)), listening(host, port):
        pass
