"""A node that is killed and restarted: clients reconnect by themselves, on every wire."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ports import free_ports
from waiting import PATIENT

from kvstore import Client, ClientConfig, KVStoreError, Namespace, Unavailable, opaque_layout
from kvstore.tools.node_process import NodeProcess
from kvstore.tools.trace import page_content

PAGE = 4096
NAMESPACE = Namespace("reconnect", opaque_layout(PAGE))
FLAGS = ("--ram-bytes", "16MiB", "--extent-bytes", "1MiB")


class Restartable:
    """A node that restarts on its former ports."""

    def __init__(self) -> None:
        # No ephemeral ports: between two starts, an outgoing connection could take one
        port, bulk, metrics = map(str, free_ports(3))
        self._ports = ("--port", port, "--bulk-port", bulk, "--metrics-port", metrics)
        self.process = NodeProcess(*FLAGS, *self._ports)
        self.address = self.process.address

    def restart(self, *flags: str) -> None:
        self.process.kill()
        self.process = NodeProcess(*FLAGS, *self._ports, *flags)


@pytest.fixture(scope="module")
def node() -> Iterator[Restartable]:
    """Share one node; each test leaves it running."""
    node = Restartable()
    yield node
    node.process.kill()


def keys_of(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


def put(client: Client, keys: list[bytes]) -> Any:
    return client.put(NAMESPACE, keys, [page_content(NAMESPACE.digest, key, PAGE) for key in keys])


def get(client: Client, keys: list[bytes]) -> list[bool]:
    buffers = [bytearray(PAGE) for _ in keys]
    hits = client.get(NAMESPACE, keys, buffers)
    for key, hit, buffer in zip(keys, hits, buffers, strict=True):
        assert not hit or buffer == page_content(NAMESPACE.digest, key, PAGE)
    return hits


WIRES = ("shm", "bulk", "grpc")


@pytest.fixture
def clients(node: Restartable) -> Iterator[list[Client]]:
    """Connect a client over each wire."""
    with contextlib.ExitStack() as stack:
        configs = [
            ClientConfig(address=node.address, wire=wire, backoff_s_max=0.05, **PATIENT)
            for wire in WIRES
        ]
        yield [stack.enter_context(Client(config)) for config in configs]


def test_first_call_after_a_restart_works_and_misses(
    node: Restartable, clients: list[Client]
) -> None:
    """The first call reopens the namespace, too, and raises no error."""
    for number, client in enumerate(clients):
        put(client, keys_of(number, 10 + number))
        assert get(client, keys_of(number, 10 + number)) == [True, True]
    node.restart()
    for number, client in enumerate(clients):
        assert get(client, keys_of(number, 10 + number)) == [False, False], client.wire_name
        put(client, keys_of(number, 10 + number))
        assert get(client, keys_of(number, 10 + number)) == [True, True]
    assert tuple(client.wire_name for client in clients) == WIRES


def test_calls_fail_while_the_node_is_down_and_work_afterwards(
    node: Restartable, clients: list[Client]
) -> None:
    for number, client in enumerate(clients):
        put(client, keys_of(number))
    node.process.kill()
    for number, client in enumerate(clients):
        for _ in range(3):
            with pytest.raises(Unavailable):
                get(client, keys_of(number))
        assert client.wire_name == "none"
    node.restart()
    for number, client in enumerate(clients):
        assert eventually(lambda client=client, number=number: get(client, keys_of(number))) == [
            False
        ]
    assert tuple(client.wire_name for client in clients) == WIRES


def eventually(call: Callable[[], Any]) -> Any:
    """Repeat a call while the circuit breaker pauses; return its result."""
    end = time.monotonic() + 60.0
    while True:
        try:
            return call()
        except Unavailable:
            assert time.monotonic() < end
            threading.Event().wait(0.02)


def test_threads_sharing_a_client_survive_restarts(
    node: Restartable, clients: list[Client]
) -> None:
    """Two threads per wire see only kvstore errors and right bytes, and all work again."""
    stop = threading.Event()
    failures: list[BaseException] = []
    rounds = [0] * 2 * len(clients)

    def work(number: int) -> None:
        client = clients[number % len(clients)]
        while not stop.wait(0.2):  # a starting node needs the core, too
            keys = keys_of(*range(number * 10, number * 10 + 4))
            try:
                put(client, keys)
                get(client, keys)
                rounds[number] += 1
            except KVStoreError:
                pass
            except BaseException as error:  # noqa: BLE001 -- raised again below, in the test's thread
                failures.append(error)
                return

    def wait_for_more() -> None:
        wanted, end = [count + 3 for count in rounds], time.monotonic() + 60.0
        while (
            any(count < want for count, want in zip(rounds, wanted, strict=True)) and not failures
        ):
            assert time.monotonic() < end, "a thread does not recover"
            threading.Event().wait(0.01)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(rounds))]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            wait_for_more()
            node.restart()
        wait_for_more()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def test_long_log_does_not_block_the_node(node: Restartable) -> None:
    """A child's output is not read while it runs, so it must not fill a pipe."""
    process = node.process
    with Client(ClientConfig(address=process.address, timeout_s=30.0)) as client:
        put(client, keys_of(1))
        # Each connection's end logs a line of 120 bytes; a pipe takes 64 KiB
        for _ in range(700):
            with socket.create_connection(("127.0.0.1", process.bulk_port)) as sock:
                sock.settimeout(5.0)
                sock.sendall(b"this is no frame")
                assert sock.recv(1000)
        assert get(client, keys_of(1)) == [True]
