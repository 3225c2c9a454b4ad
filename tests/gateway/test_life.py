"""The life of gateways and their node: ends, stops and signals."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator

import grpc
import pytest
from gateway_processes import gateways, is_running
from gateway_store import PAGE_NBYTES, SPACE, chunk, committed, content
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ports import free_port
from request_stream import RequestStream
from stopping import stop
from waiting import wait_until

from kvstore import Client, ClientConfig
from kvstore.messages import namespace_message
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from kvstore.tools.node_process import NodeProcess

FLAGS = ("--ram-bytes", "64MiB", "--log-level", "INFO")
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)


def channel_to(address: str) -> grpc.Channel:
    """Return a channel with a connection of its own."""
    return grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])


@pytest.fixture
def process() -> Iterator[NodeProcess]:
    with NodeProcess(*FLAGS, "--drain-s", "60") as node:
        yield node


# ---- the end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("hung", [False, True], ids=["lives", "hangs"])
def test_gateway_ends_with_its_node(process: NodeProcess, hung: bool) -> None:
    """A gateway ends with its node, and one that hung when the node died ends when it resumes."""
    (pid,) = gateways(process.pid)
    if hung:
        stop(pid)
    process.kill()
    if hung:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not is_running(pid))
    wait_until(lambda: _is_free(process.address))


def _is_free(address: str) -> bool:
    host, port = address.split(":")
    with contextlib.suppress(OSError), socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, int(port)))
        return True
    return False


@pytest.mark.parametrize("stopped", [pytest.param(False, marks=pytest.mark.long), True])
def test_killed_node_gets_its_port_again_at_once(stopped: bool) -> None:
    """Regression: the old gateway still held the port for a moment, or while it was suspended."""
    port = str(free_port())  # not an ephemeral one, which an outgoing connection could take
    with NodeProcess(*FLAGS, "--port", port) as node:
        if stopped:
            os.kill(gateways(node.pid)[0], signal.SIGSTOP)
        node.kill()
        with NodeProcess(*FLAGS, "--port", port) as again:
            assert again.address.endswith(port)


def test_stop_completes_running_calls_and_refuses_new_ones(
    process: NodeProcess, frames: RequestStream
) -> None:
    key = b"k" * 32
    with channel_to(process.address) as channel, channel_to(process.address) as other:
        stub = KVStoreStub(channel)
        opened = pb.OpenNamespaceRequest(namespace=namespace_message(SPACE), digest=SPACE.digest)
        stub.OpenNamespace(opened, timeout=30.0)
        request = pb.PutRequest(
            namespace=SPACE.digest, prefix_hashes=[key], page_nbytes=PAGE_NBYTES
        )
        frames.say(pb.PutFrame(begin=request))
        put = stub.Put(iter(frames), timeout=60.0)
        assert next(put).begin.verdicts == [pb.WRITE]
        watch = health_pb2_grpc.HealthStub(other).Watch(
            health_pb2.HealthCheckRequest(), timeout=60.0
        )
        assert next(watch).status == SERVING
        os.kill(process.pid, signal.SIGTERM)
        assert next(watch).status == NOT_SERVING
        wait_until(lambda: _refuses(process.address))
        frames.say(chunk(content(key)))
        frames.say(committed(key))
        frames.end()  # as the client does: the node closes the connection after its last call
        assert next(put).commit.stored == 1, "a call from before the stop failed"
        assert list(put) == []
    wait_until(lambda: not process.running)
    assert process.stop() == 0


def _refuses(address: str) -> bool:
    with channel_to(address) as channel:
        try:
            KVStoreStub(channel).Hello(pb.HelloRequest(), timeout=60.0)
        except grpc.RpcError as error:
            return bool(error.code() is UNAVAILABLE)
    return False


def test_calls_interrupted_by_a_stop_get_unavailable(frames: RequestStream) -> None:
    """A call that still runs `drain_s` after a stop began ends with UNAVAILABLE or CANCELLED."""
    with NodeProcess(*FLAGS, "--drain-s", "0.5") as node, channel_to(node.address) as channel:
        (pid,) = gateways(node.pid)
        begin = pb.PutRequest(
            namespace=SPACE.digest, prefix_hashes=[b"k" * 32], page_nbytes=PAGE_NBYTES
        )
        opened = pb.OpenNamespaceRequest(namespace=namespace_message(SPACE), digest=SPACE.digest)
        KVStoreStub(channel).OpenNamespace(opened, timeout=30.0)
        frames.say(pb.PutFrame(begin=begin).SerializeToString())
        put = channel.stream_stream("/kvstore.KVStore/Put")(iter(frames), timeout=60.0)
        next(put)
        assert node.stop() == 0
        with pytest.raises(grpc.RpcError) as caught:
            list(put)
        assert caught.value.code() in (UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert not is_running(pid)


def test_gateway_ignores_signals(process: NodeProcess) -> None:
    """A gateway ignores signals, which a terminal sends to all processes; its node ends it."""
    (pid,) = gateways(process.pid)
    with channel_to(process.address) as channel:
        stub = KVStoreStub(channel)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
            for _ in range(20):
                assert stub.Hello(pb.HelloRequest(), timeout=30.0).bulk_port == process.bulk_port
    assert gateways(process.pid) == [pid]
    with Client(ClientConfig(process.address, timeout_s=30.0)) as client:
        assert not sum(end.count for end in client.node_status().gateway_ends)
