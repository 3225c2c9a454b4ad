"""Compressed gRPC messages, of which a few bytes can become gigabytes.

Nodes and clients refuse them before they decompress them.
"""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from http2 import GREETING, bomb

from kvstore import Client, ClientConfig
from kvstore.deadline import Deadline
from kvstore.errors import ConfigError, KVStoreError, Unavailable
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from kvstore.tools.node_process import NodeProcess
from kvstore.transports.grpc_wire import GrpcWire
from node.cluster.etcd import Etcd, EtcdCredentials
from node.gateway.gateway import GRPCIO_MIN, GRPCIO_WITHOUT, check_grpcio
from node.pb import etcd_pb2 as etcd_pb

ROOT = Path(__file__).parent.parent.parent
BOMB_MIB = 60  # compressed to 59 KiB, which fits the initial window of a stream
GROWTH_MIB_MAX = 40  # less than one of the eight bombs


def answer(port: int, sent: bytes) -> bytes:
    """Send bytes to the node; return its reply up to the status of the call."""
    with socket.create_connection(("127.0.0.1", port), 60.0) as sock:
        sock.sendall(sent)
        reply = b""
        while b"grpc-status" not in reply or b"is disabled" not in reply:
            some = sock.recv(1 << 16)
            assert some, f"the node closed after {reply!r}"
            reply += some
    return reply


def peak_mib(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) >> 10


def test_compressed_bomb_is_refused_without_using_memory() -> None:
    with NodeProcess("--ram-bytes", "4MiB") as process:
        port = int(process.address.rpartition(":")[2])
        before = peak_mib(process.pid)
        for encoding in ("gzip", "deflate"):
            for path in (
                "/kvstore.KVStore/Put",
                "/kvstore.KVStore/Hello",
                "/grpc.health.v1.Health/Check",
                "/any/thing",
            ):
                answered = answer(port, GREETING + bomb(path, encoding, BOMB_MIB))
                assert f"Compression algorithm '{encoding}' is disabled".encode() in answered
        assert peak_mib(process.pid) - before < GROWTH_MIB_MAX
        with Client(ClientConfig(address=process.address, wire="grpc", timeout_s=20.0)) as client:
            assert client.node_status().state == "SERVING"
        process.stop()
        assert "Compression" not in process.log_text, (
            "a log line for each such call could fill a disk"
        )


def test_compressed_call_is_refused_as_unimplemented(shared_node: NodeProcess) -> None:
    with grpc.insecure_channel(shared_node.address, compression=grpc.Compression.Gzip) as channel:
        stub: Any = KVStoreStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as raised:
            stub.Lookup(
                pb.LookupRequest(namespace=bytes(32), prefix_hashes=[bytes(16)] * 64), timeout=20.0
            )
        assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert "disabled" in raised.value.details()


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], str]]:
    """Return a function that starts a server with one compressed answer to every call.

    It returns the address of the server.
    """
    servers: list[grpc.Server] = []

    def start(answer: bytes) -> str:
        class Same(grpc.GenericRpcHandler):
            def service(self, details: Any) -> Any:
                return grpc.unary_unary_rpc_method_handler(
                    lambda request, context: answer, None, None
                )

        server = grpc.server(futures.ThreadPoolExecutor(2), compression=grpc.Compression.Gzip)
        server.add_generic_rpc_handlers((Same(),))
        port = server.add_insecure_port("127.0.0.1:0")
        servers.append(server)
        server.start()
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None)


def test_client_refuses_compressed_answers(answering: Callable[[bytes], str]) -> None:
    wire = GrpcWire(answering(bytes(8 << 20)))
    try:
        # The error is "... is disabled", or one of protobuf: gRPC may deliver the compressed
        # bytes before it ends the call.
        with pytest.raises(KVStoreError) as raised:
            wire.call("hello", pb.HelloRequest(), Deadline(60.0))
        assert "larger than max" not in str(raised.value), "the answer was decompressed"
    finally:
        wire.close()


def test_node_refuses_compressed_answers_of_etcd(answering: Callable[[bytes], str]) -> None:
    """The answer is valid but for its compression."""
    reply = etcd_pb.RangeResponse(kvs=[etcd_pb.KeyValue(key=b"/fleet/a", value=bytes(1 << 16))])
    etcd = Etcd([answering(reply.SerializeToString())], EtcdCredentials())
    try:
        with pytest.raises(Unavailable):
            etcd.read("/fleet/")
    finally:
        etcd.close()


@pytest.mark.parametrize(
    "version", ["1.62.3", "1.81.2", "1.82.1", "1.83.0", "1.83.0rc1", "unknown"]
)
def test_grpcio_without_a_decompression_limit_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"grpcio {version} decompresses")) as raised:
        check_grpcio(version)
    assert "pip install 'grpcio>=1.82.2,!=1.83.0'" in str(raised.value)


@pytest.mark.parametrize(
    "version", ["1.82.2", "1.82.3", "1.83.1", "1.84.0", "1.85.1", "2.0.0", grpc.__version__]
)
def test_grpcio_with_a_decompression_limit_is_accepted(version: str) -> None:
    check_grpcio(version)


def test_node_with_an_old_grpcio_names_both_versions(tmp_path: Path) -> None:
    """The gateway process imports grpcio, and its error ends the node."""
    (tmp_path / "sitecustomize.py").write_text("import grpc; grpc.__version__ = '1.62.3'\n")
    command = [
        sys.executable,
        "-m",
        "node.main",
        *("--port", "0", "--bulk-port", "0", "--metrics-port", "0", "--ram-bytes", "4MiB"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode == 2
    *log, line = done.stderr.splitlines()
    assert all(" INFO " in entry for entry in log)
    assert line.startswith("kvstore-node: gateway-0 does not start: grpcio 1.62.3 decompresses")
    assert "a node needs grpcio 1.82.2 or newer" in line


def test_extra_node_requires_a_safe_grpcio() -> None:
    oldest, without = (".".join(map(str, numbers)) for numbers in (GRPCIO_MIN, GRPCIO_WITHOUT[0]))
    assert f'"grpcio>={oldest},!={without}"' in (ROOT / "pyproject.toml").read_text()
