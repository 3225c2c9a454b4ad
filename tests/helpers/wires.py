"""Record the gRPC messages and shared-memory frames between client and node: golden/wires-N.json.

    client --- proxies, which copy every message and frame --- node

N is the protocol version. Both ends are real code, so the requests are the bytes of a real client.
Run it by hand after PROTOCOL_VERSION was raised. It uses only names that older releases also have:

    PYTHONPATH=CHECKOUT python tests/helpers/wires.py
"""

import array
import concurrent.futures
import contextlib
import json
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import grpc

from kvstore import Client, ClientConfig, Namespace, opaque_layout
from kvstore.config import PROTOCOL_VERSION
from node.config import NodeConfig
from node.server import Node

PAGE_NBYTES = 256
SPACE = Namespace(model="golden-wires", layout=opaque_layout(PAGE_NBYTES))
KEYS = [bytes([number]) * 32 for number in (1, 2)]
PAGES = [bytes((i * 3 + number) % 251 for i in range(PAGE_NBYTES)) for number in range(2)]
SETTINGS: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 0,
    "bulk_port": 0,
    "metrics_port": 0,
    "ram_nbytes": 32 << 20,
}
FIXED = struct.Struct("<2sBBIQ")
CALL_S = 30.0


def talk(client: Any) -> None:
    """Make one call of each kind that clients of all recorded protocols support."""
    assert [outcome.name for outcome in client.put(SPACE, KEYS, PAGES)] == ["STORED"] * 2
    assert client.lookup(SPACE, [*KEYS, bytes(32)]).prefix_pages == 2
    buffers = [bytearray(PAGE_NBYTES) for _ in KEYS]
    assert list(client.get(SPACE, KEYS, buffers)) == [True] * 2
    assert buffers == PAGES
    assert [stat.nbytes for stat in client.stat(SPACE, KEYS)] == [PAGE_NBYTES] * 2
    client.verify(SPACE, KEYS)
    client.pin(SPACE, KEYS, ttl_s=60.0)
    client.remove(SPACE, KEYS[1:])
    assert client.lookup(SPACE, KEYS).prefix_pages == 1


class GrpcProxy(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Forward calls to the node and record them as [method, requests, replies], in hex."""

    def __init__(self, node: str) -> None:
        self.calls: list[tuple[str, list[str], list[str]]] = []
        self._channel = grpc.insecure_channel(node)
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(8))
        self._server.add_generic_rpc_handlers((self,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method

        def forward(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            asked: list[str] = []
            answered: list[str] = []
            self.calls.append((method.rpartition("/")[2], asked, answered))

            def noted() -> Iterator[bytes]:
                for request in requests:
                    asked.append(request.hex())
                    yield request

            for reply in cast("Callable[..., Any]", self._channel.stream_stream(method))(
                noted(), timeout=CALL_S
            ):
                answered.append(reply.hex())
                yield reply

        return grpc.stream_stream_rpc_method_handler(forward)

    def close(self) -> None:
        self._server.stop(0.0).wait()
        self._channel.close()


class ShmProxy:
    """Take the place of the node's socket and forward frames and descriptors.

    `frames`: [sender, number of descriptors, hex].
    """

    def __init__(self, path: str) -> None:
        self.frames: list[tuple[str, int, str]] = []
        self._node_path = path + ".node"
        os.rename(path, self._node_path)  # a bound socket is found under its new name
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        node = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        node.connect(self._node_path)
        back = threading.Thread(target=self._forward, args=("node", node, client), daemon=True)
        back.start()
        self._forward("client", client, node)
        back.join(CALL_S)

    def _forward(self, name: str, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while frame := receive_frame(source):
                data, fds = frame
                self.frames.append((name, len(fds), data.hex()))
                send_frame(target, data, fds)
                for fd in fds:
                    os.close(fd)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._thread.join(CALL_S)
        self._listener.close()


def receive_frame(sock: socket.socket) -> tuple[bytes, list[int]] | None:
    """Return a frame and its file descriptors, or None at the end of the connection."""
    data, rights, _, _ = sock.recvmsg(FIXED.size, socket.CMSG_SPACE(2 * array.array("i").itemsize))
    if not data:
        return None
    fds = array.array("i")
    for _, _, content in rights:
        fds.frombytes(content)
    data += _receive(sock, FIXED.size - len(data))
    _, _, _, header_nbytes, payload_nbytes = FIXED.unpack(data)
    return data + _receive(sock, header_nbytes + payload_nbytes), list(fds)


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        some = sock.recv(nbytes - len(data))
        assert some, "the connection ended within a frame"
        data += some
    return data


def send_frame(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    assert sock.sendmsg([data], rights) == len(data)


def recorded() -> dict[str, Any]:
    """Return what was recorded on each wire, each with its own node."""
    return {wire: _recorded(wire) for wire in ("grpc", "shm")}


def _recorded(wire: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as ends:
        path = os.path.join(work, "node.sock")
        node = Node(NodeConfig(**SETTINGS, shm_socket=path))
        node.start()
        ends.callback(node.stop)
        messages = GrpcProxy(f"127.0.0.1:{node.grpc.port}")
        ends.callback(messages.close)
        frames = ShmProxy(path) if wire == "shm" else None
        config = ClientConfig(address=f"127.0.0.1:{messages.port}", wire=wire, timeout_s=CALL_S)
        with Client(config) as client:
            talk(client)
        if frames:
            frames.close()
        return {"calls": messages.calls, "frames": frames.frames if frames else []}


if __name__ == "__main__":
    target = Path(__file__).parents[1] / "golden" / f"wires-{PROTOCOL_VERSION}.json"
    target.write_text(json.dumps(recorded(), indent=1) + "\n")
    print(target)
