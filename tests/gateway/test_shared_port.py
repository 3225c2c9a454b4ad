"""The gRPC port of a node: interfaces, other owners, and gateways that share it."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import grpc
import pytest
from fleets import SMALL
from gateway_processes import gateways
from gateway_store import Store
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waiting import wait_until

from kvstore import Client, ClientConfig
from kvstore.deadline import Deadline
from kvstore.errors import ConfigError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from kvstore.tools.node_process import NodeProcess
from kvstore.transports.bulk import BulkWire
from node.config import NodeConfig
from node.server import Node

FLAGS = ("--ram-bytes", "64MiB", "--log-level", "INFO")
SERVING = health_pb2.HealthCheckResponse.SERVING


def channel_to(address: str) -> grpc.Channel:
    """Return a channel with a connection of its own."""
    return grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])


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
    if restarting:
        with pytest.raises(
            ConfigError,
            match=f"gRPC port {port} on 127.0.0.1 can not be bound; is another node running",
        ):
            Node(NodeConfig(**{**SMALL, "port": port}), gateway_processes=True)
        again.set()
    else:
        command = [sys.executable, "-m", "node.main", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--bulk-port", "0", "--metrics-port", "0", "--ram-bytes", "64MiB"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120.0, check=False)
        assert done.returncode == 2
        assert f"gRPC port {port} on 127.0.0.1 can not be bound" in done.stderr
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
