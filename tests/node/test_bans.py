"""Addresses whose connections the kernel does not take: others connect, and connections that are there go on."""

import ipaddress
import socket
import struct
from collections.abc import Iterator

import pytest
from node.serve.bans import BAN_S, BANNED_MAX, Bans, filter_of

REFUSED_S = 0.3  # in which nobody who is not banned is late: the kernel answers
PATIENT_S = 20.0


@pytest.fixture(params=["127.0.0.1", "::"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        listener = socket.create_server((request.param, 0), family=family, dualstack_ipv6=family == socket.AF_INET6)
    except OSError:
        pytest.skip("this host has no IPv6")
    with listener:
        yield listener


def connect(listener: socket.socket, source: str, target: str = "127.0.0.1", wait_s: float = PATIENT_S) -> bool:
    port = listener.getsockname()[1]
    try:
        with socket.create_connection((target, port), wait_s, (source, 0)):
            return True
    except TimeoutError:
        return False


def test_who_is_banned_can_not_connect_for_a_time_and_others_can(listener: socket.socket) -> None:
    now = [0.0]
    bans = Bans(lambda: [listener.dup()], lambda: now[0])
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port), PATIENT_S, ("127.0.0.2", 0)) as there:
        mine, _ = listener.accept()
        bans.ban("127.0.0.2")
        assert not connect(listener, "127.0.0.2", wait_s=REFUSED_S)
        assert connect(listener, "127.0.0.3")
        bans.ban("127.0.0.3")
        assert not connect(listener, "127.0.0.2", wait_s=REFUSED_S)
        assert not connect(listener, "127.0.0.3", wait_s=REFUSED_S)
        assert connect(listener, "127.0.0.4")
        there.sendall(b"hello")
        mine.settimeout(PATIENT_S)
        assert mine.recv(5) == b"hello", "it was there before"
        mine.close()
    now[0] = BAN_S
    bans.look()
    assert connect(listener, "127.0.0.2")


def test_a_listener_that_is_found_twice_is_freed_once(
    listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    """A descriptor under which the directory of descriptors was read may be a listener's duplicate a moment later."""
    now = [0.0]
    bans = Bans(lambda: [listener.dup(), listener.dup()], lambda: now[0])
    bans.ban("127.0.0.2")
    now[0] = BAN_S
    caplog.clear()
    bans.look()
    assert caplog.messages == []
    assert connect(listener, "127.0.0.2")


def test_of_ipv6_the_network_of_a_host_is_banned() -> None:
    try:
        listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError:
        pytest.skip("this host has no IPv6")
    with listener:
        bans = Bans(lambda: [listener.dup()])
        bans.ban("2001:db8:7f00:2::/64")  # whose bytes are elsewhere those of 127.0.0.2
        assert connect(listener, "::1", "::1")
        assert connect(listener, "127.0.0.2")
        bans.ban("::/64")
        assert not connect(listener, "::1", "::1", REFUSED_S)
        assert connect(listener, "127.0.0.2")


def passes(program: list[bytes], source: str) -> bool:
    """What the kernel makes of it, for a packet from there."""
    address = ipaddress.ip_address(source)
    header = bytes([address.version << 4]) + bytes(11 if address.version == 4 else 7) + address.packed
    value = at = 0
    while True:
        operation, if_so, if_not, operand = struct.unpack("=HBBI", program[at])
        at += 1
        offset = operand - 0xFFF00000 & 0xFFFFFFFF
        if operation == 0x30:
            value = header[offset]
        elif operation == 0x20:
            (value,) = struct.unpack_from(">I", header, offset)
        elif operation == 0x54:
            value &= operand
        elif operation == 0x05:
            at += operand
        elif operation == 0x15:
            at += if_so if value == operand else if_not
        else:
            assert operation == 0x06
            return operand != 0


def test_a_filter_drops_those_networks_and_no_others() -> None:
    four = [f"10.0.{n}.7" for n in range(20)]
    six = [f"2001:db8:{high:x}:{low:x}" for high in (1, 2) for low in range(10)]
    program = filter_of(map(ipaddress.ip_network, [*four, *(f"{some}::/64" for some in six)]))
    assert not any(passes(program, some) for some in four)
    assert not any(passes(program, f"{some}::{host}") for some in six for host in ("", "1", "c:d"))
    others = ["10.0.0.8", "10.1.0.7", "0.0.0.7", "2001:db8:1:a::1", "2001:db8:3:1::1", "2002:db8:1:1::1", "::1"]
    assert all(passes(program, some) for some in others)


def test_who_goes_on_is_banned_no_longer_for_it() -> None:
    now = [0.0]
    bans = Bans(list, lambda: now[0])
    bans.ban("10.0.0.1")
    now[0] = BAN_S / 2
    bans.ban("10.0.0.1")
    bans.ban("unix:")
    assert bans._ends == {"10.0.0.1": BAN_S}


def test_as_many_as_may_be_banned_are_one_filter() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        bans = Bans(lambda: [listener.dup()])
        for number in range(BANNED_MAX + 1):
            bans.ban(f"2001:db8:0:{number:x}::/64")
        for number in range(2, BANNED_MAX + 2):
            bans.ban(f"127.0.1.{number}")
        assert not connect(listener, "127.0.1.2", wait_s=REFUSED_S)
        bans.ban("127.0.2.1")
        assert connect(listener, "127.0.1.2"), "it was the first, and made room"
        assert len(filter_of([ipaddress.ip_network(f"2001:db8:0:{n:x}::/64") for n in range(BANNED_MAX)])) < 4096


def test_who_is_no_address_is_not_banned_and_a_socket_that_takes_no_filter_harms_nobody() -> None:
    closed = socket.socket()
    closed.close()
    bans = Bans(lambda: [closed])
    bans.ban("unix:")
    bans.look()
    bans.ban("10.0.0.1")
    bans.look()


def test_without_a_descriptor_to_find_the_socket_it_is_tried_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found: list[socket.socket] = []
        bans = Bans(lambda: found)
        bans.ban("127.0.0.2")
        assert connect(listener, "127.0.0.2")
        found.append(listener.dup())
        bans.look()
        assert not connect(listener, "127.0.0.2", wait_s=REFUSED_S)
