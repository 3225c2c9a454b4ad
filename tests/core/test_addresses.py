"""Resolving a node's name: the resolver hangs, fails or returns a new address.

A call does not wait beyond its deadline.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_node import FakeNode

from kvstore.config import PROTOCOL_VERSION
from kvstore.deadline import Deadline
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.grpc_wire import GrpcWire
from kvstore.transports.negotiation import FRESH_S, Addresses, grpc_target


class Resolver:
    """A replacement of the system's resolver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._system = socket.getaddrinfo
        self.go_on = threading.Event()
        self.go_on.set()
        self.answer: list[str] | OSError = ["192.0.2.1"]
        self.asked = 0
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, host: str, *args: Any, **options: Any) -> list[Any]:
        if host != "node.example" or options.get("flags"):
            return self._system(host, *args, **options)
        self.asked += 1
        self.go_on.wait(30.0)
        if isinstance(self.answer, OSError):
            raise self.answer
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in self.answer
        ]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    resolver = Resolver(monkeypatch)
    yield resolver
    resolver.go_on.set()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "2001:db8::1"])
def test_ip_address_needs_no_resolver(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        threading.Thread, "start", lambda thread: pytest.fail("an IP address must start no thread")
    )
    assert Addresses(host).resolve(Deadline(1)) == (host,)


def test_name_is_resolved_for_each_connection(resolver: Resolver) -> None:
    addresses = Addresses("node.example")
    assert addresses.resolve(Deadline(10)) == ("192.0.2.1",)
    resolver.answer = ["192.0.2.2", "192.0.2.3", "192.0.2.2"]
    assert eventually(lambda: addresses.resolve(Deadline(10)), ("192.0.2.2", "192.0.2.3"))


def eventually(ask: Callable[[], Any], wanted: Any) -> bool:
    """Repeat the call until it returns `wanted`.

    On a busy machine a lookup may take longer than FRESH_S, and then the old answer comes first.
    """
    end = Deadline(10)
    while ask() != wanted:
        end.remaining()
    return True


def test_hanging_resolver_costs_the_deadline_and_one_thread(
    resolver: Resolver, by_deadline: Callable[..., None]
) -> None:
    resolver.go_on.clear()
    addresses = Addresses("node.example")
    by_deadline(map(str, range(8)), 0.2, lambda _: lambda: addresses.resolve(Deadline(0.2)))
    assert resolver.asked == 1
    with pytest.raises(
        DeadlineExceeded, match=r"node\.example was not resolved in 0\.01 s: the resolver hangs"
    ):
        addresses.resolve(Deadline(0.01))
    resolver.go_on.set()
    assert addresses.resolve(Deadline(10)) == ("192.0.2.1",)


@pytest.mark.parametrize("trouble", ["hangs", "fails"])
def test_known_addresses_are_used_while_the_resolver_fails(
    resolver: Resolver, trouble: str
) -> None:
    addresses = Addresses("node.example")
    addresses.resolve(Deadline(10))
    if trouble == "hangs":
        resolver.go_on.clear()
    else:
        resolver.answer = socket.gaierror(socket.EAI_AGAIN, "try again")
    for _ in range(3):
        deadline = Deadline(FRESH_S * 100)
        assert addresses.resolve(deadline) == ("192.0.2.1",)
        assert deadline.remaining() > FRESH_S * 50
    resolver.answer = ["192.0.2.2"]
    resolver.go_on.set()
    assert eventually(lambda: addresses.resolve(Deadline(10)), ("192.0.2.2",))


def test_unknown_name_is_unavailable(resolver: Resolver) -> None:
    resolver.answer = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    with pytest.raises(Unavailable, match=r"node\.example can not be resolved: .*not known"):
        Addresses("node.example").resolve(Deadline(10))
    with pytest.raises(Unavailable, match="can not be resolved"):
        Addresses("a" * 300 + ".example").resolve(Deadline(10))


@pytest.mark.parametrize(
    ("found", "target"),
    [
        (["192.0.2.1"], "ipv4:192.0.2.1:7440"),
        (["192.0.2.1", "192.0.2.2"], "ipv4:192.0.2.1:7440,192.0.2.2:7440"),
        (["2001:db8::1"], "ipv6:[2001:db8::1]:7440"),
        (["::1", "127.0.0.1"], "ipv6:[::1]:7440,[::ffff:127.0.0.1]:7440"),
        (["fe80::1%eth0"], "ipv6:[fe80::1%25eth0]:7440"),
    ],
)
def test_grpc_target_has_the_syntax_of_grpc(found: list[str], target: str) -> None:
    assert grpc_target(found, 7440) == target


def test_name_with_ipv6_and_ipv4_is_reached(
    fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`localhost` often has both, and the node listens on one of them."""
    wire = GrpcWire(grpc_target(["::1", "127.0.0.1"], fake_node.port), "localhost")
    assert (
        wire.call(
            "hello", pb.HelloRequest(protocol_version=PROTOCOL_VERSION), Deadline(10)
        ).instance_id
        == b"fakenode"
    )
    wire.close()
