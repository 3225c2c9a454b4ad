"""The life of gateways and their node: ends and stops, the gRPC port, and several gateways."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest
from fleets import SMALL
from gateway_processes import gateways, is_running
from gateway_store import PAGE_NBYTES, SPACE, Store, chunk, committed, content
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ports import free_port
from request_stream import RequestStream
from stopping import stop
from waiting import wait_until

from kvstore import Client, ClientConfig
from kvstore.deadline import Deadline
from kvstore.errors import ConfigError
from kvstore.messages import namespace_message
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from kvstore.tools.node_process import NodeProcess
from kvstore.transports.bulk import BulkWire
from node.config import NodeConfig
from node.server import Node

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


# ---- the port --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(start_store: Callable[..., Store]) -> Store:
    made: Store = start_store()
    made.watch()
    return made


@pytest.mark.parametrize("restarting", [False, True], ids=["serves", "while its gateway is away"])
def test_second_node_on_a_port_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch, restarting: bool
) -> None:
    """A second node on one port is refused, even while the first one's gateway restarts.

    Both could share the port (SO_REUSEPORT), and calls would go to either node at random.
    """
    if restarting:
        monkeypatch.setattr("node.gateway.supervisor.PAUSE_S", 3600.0)
        monkeypatch.setattr("node.gateway.supervisor.PAUSE_S_MAX", 3600.0)
        pauses, pause = threading.Event(), store.node.grpc.pause
        again = threading.Event()
        monkeypatch.setattr(
            store.node.grpc, "pause", lambda seconds: (pauses.set(), again.wait(120.0), pause(0.0))
        )
        os.kill(store.pid, signal.SIGKILL)
        wait_until(pauses.is_set)
    port = store.node.grpc.port
    with pytest.raises(
        ConfigError,
        match=f"gRPC port {port} on 127.0.0.1 can not be bound; is another node running",
    ):
        Node(NodeConfig(**{**SMALL, "port": port}), gateway_processes=True)
    if restarting:
        again.set()
    else:
        command = [sys.executable, "-m", "node.main", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--bulk-port", "0", "--metrics-port", "0", "--ram-bytes", "64MiB"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120.0, check=False)
        assert done.returncode == 2
        assert "is another node running?" in done.stderr
    store.serves()


def test_port_of_another_process_is_an_error_at_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"gRPC port {port} on 127.0.0.1 can not be bound"):
            Node(NodeConfig(**{**SMALL, "port": port}))


def test_node_without_grpc_serves_frames_and_starts_no_gateway() -> None:
    with NodeProcess(*FLAGS, "--grpc-host", "none") as node:
        assert node.address == "none"
        assert gateways(node.pid) == []
        wire = BulkWire("127.0.0.1", node.bulk_port, ClientConfig(timeout_s=30.0))
        try:
            assert wire.call("hello", pb.HelloRequest(), Deadline(30.0)).bulk_port == node.bulk_port
            assert not wire.call("node_status", pb.NodeStatusRequest(), Deadline(30.0)).gateways
        finally:
            wire.close()
        assert node.stop() == 0


@pytest.mark.long
def test_grpc_can_have_its_own_interface() -> None:
    with NodeProcess(*FLAGS, "--grpc-host", "127.0.0.2") as node:
        host, _, port = node.address.partition(":")
        assert host == "127.0.0.2"
        with channel_to(node.address) as channel:
            assert (
                KVStoreStub(channel).Hello(pb.HelloRequest(), timeout=30.0).bulk_port
                == node.bulk_port
            )
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)), 20.0).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", node.bulk_port), 20.0).close()


@pytest.mark.parametrize("host", [pytest.param("::1", marks=pytest.mark.long), "::"])
def test_grpc_is_served_on_ipv6_addresses(host: str) -> None:
    """gRPC binds a port to probe for IPv6, which the gateway's sandbox must allow."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this host has no IPv6")
    with NodeProcess(*FLAGS, "--grpc-host", host, "--insecure") as node:
        with grpc.insecure_channel(f"[::1]:{node.address.rpartition(':')[2]}") as channel:
            assert (
                KVStoreStub(channel).Hello(pb.HelloRequest(), timeout=30.0).bulk_port
                == node.bulk_port
            )
        assert node.stop() == 0


def test_several_gateways_share_a_port_and_all_are_used() -> None:
    with NodeProcess(*FLAGS, "--grpc-processes", "3") as node:
        pids = gateways(node.pid)
        assert len(pids) == 3
        watches = []  # kept, to keep their connections open
        with Client(ClientConfig(node.address, timeout_s=30.0, connect_timeout_s=20.0)) as client:
            for _ in range(40):  # the kernel chooses the gateway by the client's address and port
                watches.append(channel_to(node.address))
                stub = health_pb2_grpc.HealthStub(watches[-1])
                watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=120.0)
                assert next(watch).status == SERVING
                watches.append(watch)
            wait_until(lambda: all(one.call_count for one in client.node_status().gateways))
            status = client.node_status().gateways
        assert sorted(one.pid for one in status) == pids
        assert [one.name for one in status] == ["gateway-0", "gateway-1", "gateway-2"]
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: len(gateways(node.pid)) == 3 and pids[0] not in gateways(node.pid))
        assert set(pids[1:]) <= set(gateways(node.pid)), "other gateways were restarted, too"
        for one in watches[::2]:
            one.close()
