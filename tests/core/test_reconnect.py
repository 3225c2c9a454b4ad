"""A node that is killed and started again: clients find it by themselves, on every wire."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore import Client, ClientConfig, KVStoreError, Namespace, Unavailable, opaque_layout
from kvstore.tools.node_process import NodeProcess
from kvstore.tools.trace import page_content

PAGE = 4096
NAMESPACE = Namespace("reconnect", opaque_layout(PAGE))
FLAGS = ("--ram-bytes", "16MiB", "--extent-bytes", "1MiB")


class Restartable:
    """A node that comes back on the ports it had."""

    def __init__(self) -> None:
        self.process = NodeProcess(*FLAGS)
        port = self.process.address.rpartition(":")[2]
        bulk, metrics = str(self.process.bulk_port), str(self.process.metrics_port)
        self._ports = ("--port", port, "--bulk-port", bulk, "--metrics-port", metrics)
        self.address = self.process.address

    def restart(self, *flags: str) -> None:
        self.process.kill()
        self.process = NodeProcess(*FLAGS, *self._ports, *flags)


@pytest.fixture(scope="module")
def node() -> Iterator[Restartable]:
    """For all tests here: each leaves one that runs."""
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
    """One over each wire: a restart is the same for all."""
    with contextlib.ExitStack() as stack:
        configs = [
            ClientConfig(address=node.address, wire=wire, backoff_s_max=0.05) for wire in WIRES
        ]
        yield [stack.enter_context(Client(config)) for config in configs]


def test_after_a_restart_the_next_call_works_and_misses(
    node: Restartable, clients: list[Client]
) -> None:
    """The very next call, with no error in between: the namespace is opened again too."""
    for number, client in enumerate(clients):
        put(client, keys_of(number, 10 + number))
        assert get(client, keys_of(number, 10 + number)) == [True, True]
    node.restart()
    for number, client in enumerate(clients):
        assert get(client, keys_of(number, 10 + number)) == [False, False], client.wire_name
        put(client, keys_of(number, 10 + number))
        assert get(client, keys_of(number, 10 + number)) == [True, True]
    assert tuple(client.wire_name for client in clients) == WIRES


def test_while_the_node_is_down_calls_fail_and_afterwards_they_work(
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
    """The result of a call that may fail while a breaker's pause is not over."""
    end = time.monotonic() + 10.0
    while True:
        try:
            return call()
        except Unavailable:
            assert time.monotonic() < end
            threading.Event().wait(0.02)


def test_threads_that_share_a_client_get_over_a_restart(
    node: Restartable, clients: list[Client]
) -> None:
    """Only errors of ours, no wrong byte, and all threads work again afterwards: four for each
    wire.
    """
    stop = threading.Event()
    failures: list[BaseException] = []
    rounds = [0] * 4 * len(clients)

    def work(number: int) -> None:
        client = clients[number % len(clients)]
        while not stop.wait(0.02):  # a node that starts needs the core too
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
        wanted, end = [count + 3 for count in rounds], time.monotonic() + 30.0
        while (
            any(count < want for count, want in zip(rounds, wanted, strict=True)) and not failures
        ):
            assert time.monotonic() < end, "a thread does not get over it"
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


def test_a_node_that_talks_a_lot_is_not_stopped_by_it(node: Restartable) -> None:
    """Nobody reads a child's messages while it runs: they must not fill a pipe and block it."""
    process = node.process
    with Client(ClientConfig(address=process.address, timeout_s=30.0)) as client:
        put(client, keys_of(1))
        # The node logs a line of 120 bytes when each ends; a pipe takes 64 KiB
        for _ in range(800):
            with socket.create_connection(("127.0.0.1", process.bulk_port)) as sock:
                sock.settimeout(5.0)
                sock.sendall(b"this is no frame")
                assert sock.recv(1000)
        assert get(client, keys_of(1)) == [True]
