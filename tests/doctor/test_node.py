"""The doctor's checks of one node: healthy, dead or hanging, and without space, disk or shared
memory.
"""

import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from examined import Examined, examined
from local_nodes import StartNode
from waiting import wait_until

from kvstore import Client, ClientConfig, Namespace, opaque_layout
from kvstore.doctor.checks import FindingState, run_all
from kvstore.doctor.connectivity import Clock
from kvstore.doctor.members import clock, disk, version
from kvstore.doctor.pages import MODEL, Pages
from kvstore.doctor.runner import Runner
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results import DiskStatus, NodeStatus
from kvstore.tools.node_process import NodeProcess
from node.server import Node

Doctor = Callable[..., Examined]
WIRES = ("shm", "bulk", "grpc")


def names(node: Node) -> set[str]:
    with node.tier.lock:
        return {index.value.model for index in node.tier.namespaces.all()}


def test_healthy_node_passes_and_keeps_no_page(node: Node, doctor: Doctor) -> None:
    found = doctor(node)
    assert found.failed == set()
    for wire in WIRES:
        assert found.of(wire, group="wires").state is FindingState.OK
        assert "16 KiB came back equal" in found.of(wire, group="pages").found
    assert "wire shm" in found.of("as a client").found
    assert found.of("removed").found == "4 pages, and the namespace"
    assert node.tier.visible_count == 0
    assert names(node) == set()
    assert "this node has none" in found.of("disk", group="what").found
    assert found.of("disk", group="pages").state is FindingState.SKIPPED
    assert found.of("clock", group="what").state is FindingState.OK


def test_doctor_leaves_other_pages(node: Node, doctor: Doctor) -> None:
    other = Namespace("others", opaque_layout(64))
    with Client(
        ClientConfig(f"127.0.0.1:{node.grpc.port}", timeout_s=60.0, connect_timeout_s=30.0)
    ) as client:
        client.put(other, [bytes(16)], [bytes(64)])
        assert doctor(node).failed == set()
        assert client.lookup(other, [bytes(16)]).prefix_pages == 1
        client.remove_namespace(other)


def test_pages_of_another_doctor_stay(node: Node, doctor: Doctor) -> None:
    with Client(
        ClientConfig(f"127.0.0.1:{node.grpc.port}", timeout_s=60.0, connect_timeout_s=30.0)
    ) as client:
        space = Pages(client.config, pb.HelloReply(), None).namespace
        client.put(space, [bytes(16)], [bytes(space.layout.page_nbytes)])
        assert "its name stays" in doctor(node).of("removed").found
        assert client.lookup(space, [bytes(16)]).prefix_pages == 1
        client.remove_namespace(space)


def test_interrupt_leaves_no_page(node: Node) -> None:
    config = ClientConfig(f"127.0.0.1:{node.grpc.port}", timeout_s=60.0, connect_timeout_s=30.0)

    def tick(done: float) -> None:
        if MODEL in names(node) and node.tier.visible_count:
            raise KeyboardInterrupt

    def interrupted() -> None:
        with closing(Runner(config).groups()) as groups:
            for group in groups:
                run_all(group.checks, tick)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    wait_until(lambda: names(node) == set() and node.tier.visible_count == 0)


def test_page_with_wrong_bytes_is_a_failure(
    node: Node, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Client.put

    def damaged(
        self: Client, namespace: Namespace, keys: Any, pages: Any, *rest: Any, **more: Any
    ) -> Any:
        return put(self, namespace, keys, [bytes(len(page)) for page in pages], *rest, **more)

    monkeypatch.setattr(Client, "put", damaged)
    found = doctor(node)
    assert found.failed == {"as a client", *WIRES}
    assert "take this node out of service" in found.of("bulk", group="pages").remedy


def test_full_node_is_a_failure(start_node: StartNode, doctor: Doctor) -> None:
    node = start_node(ram_nbytes=1 << 20, extent_nbytes=1 << 20)
    space = Namespace("pinned", opaque_layout(1 << 20))
    with Client(
        ClientConfig(f"127.0.0.1:{node.grpc.port}", timeout_s=60.0, connect_timeout_s=30.0)
    ) as client:
        client.put(space, [bytes(16)], [bytes(1 << 20)])
        with client.open_get(space, [bytes(16)]):  # a held page is not evicted
            found = doctor(node)
        assert {"as a client", "bulk"} <= found.failed
        assert found.of("bulk", group="wires").state is FindingState.OK


# ---- connection ------------------------------------------------------------------------------


def test_port_without_a_listener_fails(doctor: Doctor) -> None:
    found = doctor(address="127.0.0.1:1")
    assert found.failed == {"TCP"}
    assert "nothing listens there" in found.of("TCP").remedy
    assert {"gRPC", "status", "wires", "pages"} <= found.names(FindingState.SKIPPED)


def test_unknown_host_name_is_a_failure(doctor: Doctor) -> None:
    found = doctor(address="nobody.invalid:7440")
    assert found.failed == {"name"}


def test_firewall_that_drops_packets_is_a_failure(swallowing_port: int, doctor: Doctor) -> None:
    found = doctor(address=f"127.0.0.1:{swallowing_port}", connect_timeout_s=0.3)
    assert found.failed == {"TCP"}
    assert "a firewall" in found.of("TCP").remedy


def test_port_of_another_program_is_a_failure(doctor: Doctor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = doctor(address=f"127.0.0.1:{listener.getsockname()[1]}", connect_timeout_s=0.5)
    assert found.failed == {"gRPC"}
    assert "another program" in found.of("gRPC").remedy


def test_hanging_node_is_a_failure(doctor: Doctor) -> None:
    with NodeProcess("--ram-bytes", "16MiB") as process:
        process.pause()
        found = doctor(address=process.address, connect_timeout_s=0.5, timeout_s=1.0)
        process.resume()
    assert found.failed == {"gRPC"}
    assert "hangs or is stopped" in found.of("gRPC").remedy


def test_dead_address_of_two_is_reported(node: Node, doctor: Doctor) -> None:
    """A dead address is reported by itself, and the node at the other one is checked.

    Two addresses do not make a node without a cluster a member.
    """
    address = f"127.0.0.1:{node.grpc.port}"
    found = doctor(address=f"127.0.0.1:1,{address}")
    assert found.of("TCP", "127.0.0.1:1").state is FindingState.FAIL
    assert found.of("gRPC", address).state is FindingState.OK
    assert found.of("bulk", group="wires").state is FindingState.OK
    assert "is in no cluster" in found.of("as a client").found


# ---- wires -----------------------------------------------------------------------------------


def test_node_without_shared_memory_skips_its_check(start_node: StartNode, doctor: Doctor) -> None:
    node = start_node(shm_socket="none")
    assert doctor(node).of("shm", group="wires").state is FindingState.SKIPPED
    assert doctor(node, wire="shm").of("shm", group="wires").state is FindingState.FAIL


def test_missing_shm_socket_is_a_warning(node: Node, doctor: Doctor, tmp_path: Path) -> None:
    """A missing socket of a node on this host, perhaps in a container, is a warning."""
    found = doctor(node, shm_dir=str(tmp_path))
    assert found.of("shm", group="wires").state is FindingState.WARN
    assert "KVSTORE_SHM_DIR" in found.of("shm", group="wires").remedy
    assert found.failed == set()
    assert "wire bulk" in found.of("as a client").found
    wanted = doctor(node, shm_dir=str(tmp_path), wire="shm")
    assert {"shm", "as a client"} <= wanted.failed


def test_closed_bulk_port_is_a_failure(
    node: Node, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.service, "bulk_port", 1)
    found = doctor(node)
    assert found.failed == {"bulk"}
    assert "open TCP port 1 " in found.of("bulk").remedy
    assert found.of("grpc", group="pages").state is FindingState.OK


# ---- disk, clock, version --------------------------------------------------------------------


def test_doctor_checks_a_page_on_disk(tmp_path: Path) -> None:
    flags = ("--ram-bytes", "16MiB", "--data-dir", str(tmp_path / "data"), "--disk-bytes", "64MiB")
    with NodeProcess(*flags, "--disk-extent-bytes", "16MiB") as process:
        config = ClientConfig(process.address, timeout_s=60.0, connect_timeout_s=30.0)
        found = examined(config)
        assert found.failed == set()
        assert "its copy on disk is intact" in found.of("disk", group="pages").found
        with Client(config) as client:
            status = client.node_status()
        assert (status.disk.page_count, list(status.namespaces)) == (0, [])
        assert status.disk.pages_written == 5


def test_disk_findings() -> None:
    def state_of(**status: Any) -> FindingState:
        known = {
            "state": "SERVING",
            "data_dir": "/data",
            "direct_io": True,
            "queue_nbytes_max": 100,
        }
        return disk(NodeStatus(disk=DiskStatus(**{**known, **status}))).state

    assert state_of() is FindingState.OK
    assert state_of(direct_io=False) is FindingState.WARN
    assert state_of(queue_nbytes=95) is FindingState.WARN
    assert state_of(pages_corrupt=1) is FindingState.WARN
    assert state_of(limit="its file system has no space") is FindingState.WARN
    assert state_of(state="POISONED", reason="no space left") is FindingState.FAIL
    assert disk(NodeStatus()).state is FindingState.SKIPPED


@pytest.mark.parametrize(
    ("ahead_s", "within_s", "state"),
    [
        (0.5, 0.01, FindingState.OK),
        (-1.9, 0.01, FindingState.OK),
        (3.0, 0.01, FindingState.WARN),
        (3.0, 2.5, FindingState.OK),  # the difference may be below 2 s
        (-3.0, 0.01, FindingState.WARN),
        (-400.0, 0.01, FindingState.FAIL),
    ],
)
def test_differing_clock_is_reported(ahead_s: float, within_s: float, state: FindingState) -> None:
    found = clock(Clock(ahead_s, within_s))
    assert found.state is state
    assert ("ahead of" if ahead_s > 0 else "behind") in found.found


def test_clock_of_a_node_is_compared_with_the_clients(
    node: Node, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.serving.status.time.time_ns", lambda: 1_000_000_000)
    assert doctor(node).of("clock", group="what").state is FindingState.FAIL


def test_clock_of_an_older_node_is_skipped() -> None:
    assert clock(None).state is FindingState.SKIPPED


def test_differing_versions_are_a_warning() -> None:
    assert version(pb.HelloReply(version="0.0.1", protocol_version=4)).state is FindingState.WARN
    assert version(pb.HelloReply(version="0.1.0", protocol_version=3)).state is FindingState.WARN
