"""Commands about the disk tier, against a node with a data directory."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.cli.nodes import _disk_lines
from kvstore.results import DiskStatus
from kvstore.tools.node_process import NodeProcess
from node.disk.data_dir import LOCK_WAIT_S
from node.disk.tier import RECOVER_WAIT_S

Kvstore = Callable[..., Any]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node") / "data"


@pytest.fixture(scope="module")
def node(data_dir: Path) -> Iterator[NodeProcess]:
    """Yield a node with a disk for all tests here; each leaves it working and without pages."""
    flags = ("--ram-bytes", "16MiB", "--data-dir", str(data_dir), "--disk-bytes", "64MiB")
    with NodeProcess(*flags, "--disk-extent-bytes", "16MiB", "--scrub-bytes-per-s", "0") as node:
        yield node


@pytest.fixture
def on_disk(
    node: NodeProcess, kvstore: Kvstore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Kvstore]:
    """Yield a runner of commands on a node with one durable page of 8 KiB: model `m`, token 1."""
    monkeypatch.setenv("KVSTORE_ADDRESS", node.address)
    page = tmp_path / "page"
    page.write_bytes(bytes(range(256)) * 32)
    assert kvstore("put", str(page), "--create-opaque", "m", "--tokens", "1", "--durable").code == 0
    yield kvstore
    assert kvstore("rm", "-m", "m", "--all", "--yes").code == 0


def test_flush_scrub_and_recover_print_their_results(on_disk: Kvstore) -> None:
    assert on_disk("flush", "--json").json == {"pages_on_disk": 1}
    assert on_disk("scrub", "--json").json == {"intact": 1, "damaged": 0, "nbytes": 8192}
    assert on_disk("recover", "--json").json == {"recovered": True}
    assert "1 pages are on disk" in on_disk("flush").stdout
    assert "1 pages intact, 0 damaged" in on_disk("scrub").stdout
    assert on_disk("recover").code == 0


def test_status_ls_and_stat_show_the_tiers_of_pages(on_disk: Kvstore, data_dir: Path) -> None:
    status = on_disk("status").stdout
    assert "disk 8.0 KiB of 64.0 MiB" in status
    assert str(data_dir) in status
    assert "ram+disk" in on_disk("ls", "--model", "m").stdout
    stat = on_disk("stat", "--model", "m", "--tokens", "1", "--json").json["pages"]
    page = stat["pages"][0] if isinstance(stat, dict) else stat[0]
    assert (page["in_ram"], page["on_disk"]) == (True, True)


def test_scrub_finds_a_flipped_bit_and_exits_5(on_disk: Kvstore, data_dir: Path) -> None:
    extent = next(path for path in (data_dir / "extents").iterdir() if path.stat().st_blocks)
    with extent.open("r+b") as file:
        file.seek(4096 * 1 + 7)
        file.write(b"\xff")
    ran = on_disk("scrub", "--json")
    assert (ran.code, ran.json["intact"], ran.json["damaged"]) == (5, 0, 1)
    assert on_disk("status", "--json").json["disk"]["pages_corrupt"] == 1


def test_stat_shows_a_ttl(on_disk: Kvstore, tmp_path: Path) -> None:
    page = tmp_path / "page"
    assert on_disk("put", str(page), "-m", "m", "--tokens", "2", "--ttl", "1h").code == 0
    stat = on_disk("stat", "-m", "m", "--tokens", "2", "--json").json["pages"]
    page_stat = stat["pages"][0] if isinstance(stat, dict) else stat[0]
    assert 3_500_000 < page_stat["ttl_ms"] <= 3_600_000


def test_disk_commands_on_a_node_without_a_disk_are_refused(kvstore: Kvstore) -> None:
    for name in ("flush", "scrub", "recover"):
        ran = kvstore(name)
        assert ran.code == 2
        assert "--data-dir" in ran.stderr


def io_process_of(node_pid: int) -> int:
    """Return the process id of a node's I/O process."""
    found = [
        pid
        for path in Path(f"/proc/{node_pid}/task").glob("*/children")
        for pid in path.read_text().split()
    ]
    (io_process,) = (
        int(pid)
        for pid in found
        if b"node.disk.io_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return io_process


def test_commands_on_a_stopped_disk_name_the_reason_and_the_remedy(
    on_disk: Kvstore, data_dir: Path, tmp_path: Path
) -> None:
    """Commands on a stopped disk name the reason and the remedy.

    The I/O process is killed, and a directory in place of the test file of recover makes it fail.
    """
    obstacle = data_dir / "extents" / "trial"
    obstacle.mkdir()
    os.kill(io_process_of(json.loads(on_disk("status", "--json").stdout)["pid"]), signal.SIGKILL)
    page = tmp_path / "page"
    page.write_bytes(bytes(1 << 20))
    ran = on_disk("put", str(page), "--create-opaque", "stopped", "--tokens", "1", "--durable")
    assert ran.code == 4
    assert "durable" in ran.stderr or "safe" in ran.stderr
    assert on_disk("flush").code == 4
    status = on_disk("status")
    assert "DEGRADED" in status.stdout
    assert "kvstore recover" in status.stdout
    assert on_disk("recover").code == 4
    obstacle.rmdir()
    assert on_disk("recover").code == 0
    assert "SERVING" in on_disk("status").stdout


def test_recover_waits_as_long_as_a_node_may_take(
    kvstore: Kvstore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default timeout of recover covers the writer's current call and the lock of the old I/O
    process.
    """
    given: list[float] = []
    monkeypatch.setattr(Client, "recover", lambda client, timeout_s: given.append(timeout_s))
    assert kvstore("recover").code == kvstore("recover", "--timeout", "7").code == 0
    assert given[0] > RECOVER_WAIT_S + LOCK_WAIT_S
    assert given[1] == 7


@pytest.mark.parametrize(("direct", "reported"), [(True, False), (False, True)])
def test_status_reports_missing_direct_io(direct: bool, reported: bool) -> None:
    lines = _disk_lines(DiskStatus(state="SERVING", data_dir="/data", direct_io=direct))
    assert ("no O_DIRECT" in lines[0]) is reported
