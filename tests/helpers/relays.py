"""A relay between a client and a real node, which can tamper with the bytes of an answer."""

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore import Client, ClientConfig
from kvstore.tools.node_process import NodeProcess
from kvstore.transports.bulk import BulkConnector

STEP_NBYTES = 64 << 10
WAIT_S = 60.0
QUIET_S = 0.3  # an answer is complete when the node is silent for this long


class Relay:
    """A relay that forwards the bytes of client and node.

    `pass_on(nbytes, then)`: forward so many more bytes of the node, then `then`: "stall" (until
    `go_on`), "close", flip a bit of the next byte, or "more" to append bytes to the answer.
    """

    def __init__(self, node: tuple[str, int]) -> None:
        self._node = node
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._left, self._then = 0, ""
        self.stalled, self.go_on = threading.Event(), threading.Event()
        self.accepted = 0
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def pass_on(self, nbytes: int, then: str) -> None:
        self._left, self._then = nbytes, then

    def _start(self, work: Any, *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.accepted += 1
                node = socket.create_connection(self._node)
                self._sockets += [client, node]
                self._start(self._relay, client, node, False)
                self._start(self._relay, node, client, True)

    def _relay(self, source: socket.socket, target: socket.socket, tampering: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(STEP_NBYTES):
                target.sendall(
                    self._tampered(data, source, target) if tampering and self._then else data
                )
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _tampered(self, data: bytes, source: socket.socket, target: socket.socket) -> bytes:
        if len(data) < self._left:
            self._left -= len(data)
            return data
        then, left = self._then, self._left
        if then == "close":  # later connections are closed too
            target.sendall(data[:left])
            raise ConnectionResetError
        if then == "stall":
            target.sendall(data[:left])
            self.stalled.set()
            assert self.go_on.wait(WAIT_S)
            self._then = ""
            return data[left:]
        self._then = ""
        if then == "more":
            while select.select([source], [], [], QUIET_S)[0] and (
                rest := source.recv(STEP_NBYTES)
            ):
                data += rest  # an answer has frames besides the pages; wait for silence
            return data + b"more"
        return data[:left] + bytes([data[left] ^ 1]) + data[left + 1 :]

    def close(self) -> None:
        self.go_on.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()


@pytest.fixture
def relayed(
    shared_node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Client, Relay]]:
    """Yield a client whose page bytes come through a relay, and the relay."""
    relays: list[Relay] = []

    def connected(wire: BulkConnector, limit: Any) -> socket.socket:
        if not relays:
            relays.append(Relay(("127.0.0.1", wire._port)))
        return socket.create_connection(relays[0].address)

    monkeypatch.setattr(BulkConnector, "_connected", connected)
    with Client(
        ClientConfig(address=shared_node.address, wire="bulk", backoff_s_max=0.1)
    ) as client:
        client.namespaces()
        yield client, relays[0]
        relays[0].close()
