"""R14: a data directory is all it takes to have a disk tier, and the status shows its bytes."""

import hashlib
from pathlib import Path

from cli_runner import CliRunner
from known_pages import Pages
from local_nodes import Connect, StartNode

from kvstore.cli.commands import build

KEYS = [hashlib.sha256(b"%d" % number).digest() for number in range(4)]


def test_r14_data_dir_alone_turns_the_disk_tier_on(
    tmp_path: Path, start_node: StartNode, connect: Connect
) -> None:
    """A data directory alone turns the disk tier on, as each wire shows.

    RAM is small here because touching the default size takes seconds.
    """
    node = start_node(data_dir=str(tmp_path / "new" / "data"), ram_nbytes=4 << 20, extent_nbytes=0)
    clients = [connect(node, wire) for wire in ("shm", "bulk", "grpc")]
    for client in clients:
        before = client.node_status().disk
        assert (before.state, before.used_nbytes, before.page_count) == ("SERVING", 0, 0)
        assert before.capacity_nbytes > 0
    chain = Pages("chain", 100_000)
    chain.put(clients[0], KEYS)
    for client in clients:
        assert client.flush() == 4
        disk = client.node_status().disk
        assert (disk.page_count, disk.pages_written, disk.nbytes_written) == (4, 4, 400_000)
        assert disk.used_nbytes == 4 * 102_400  # slots of 4 KiB
        assert disk.queue_nbytes == 0
    address = f"127.0.0.1:{node.grpc.port}"
    shown = CliRunner().invoke(build(), ["--address", address, "status"], prog_name="kvstore")
    assert shown.exit_code == 0, shown.output
    assert "disk" in shown.stdout
    assert str(tmp_path / "new" / "data") in shown.stdout.replace("\n", "")


def test_r14_node_without_data_dir_has_no_disk_tier(
    start_node: StartNode, connect: Connect
) -> None:
    assert not connect(start_node()).node_status().disk
