"""A node on a file system that is smaller than its disk tier, or that others fill.

Reads never stop, no byte is wrong, and durable pages that were acknowledged survive `kill -9`.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from known_pages import Pages

from kvstore import Client, ClientConfig
from kvstore.errors import Exhausted
from kvstore.results import DiskStatus
from kvstore.tools.node_process import NodeProcess

MIB = 1 << 20
PAGE = 64 << 10
CAPACITY = 512 * MIB
EXTENT = 4 * MIB
FLAGS = (
    *("--ram-bytes", "8MiB", "--extent-bytes", "1MiB", "--flush-s", "20"),
    *("--disk-bytes", str(CAPACITY), "--disk-extent-bytes", str(EXTENT)),
)
BATCH = 32


def node_at(small: Path) -> NodeProcess:
    return NodeProcess(*FLAGS, "--data-dir", str(small / "data"))


@contextlib.contextmanager
def client_of(node: NodeProcess) -> Iterator[Client]:
    with Client(ClientConfig(node.address, timeout_s=60.0, connect_timeout_s=30.0)) as client:
        yield client


def fill(small: Path) -> None:
    """Take the rest of the file system, as another process would."""
    with open(small / "others", "ab", buffering=0) as file:
        for nbytes in (MIB, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(nbytes))


def put_durable(client: Client, pages: Pages, numbers: range) -> list[int]:
    """Put pages in batches; return the numbers of those that were acknowledged."""
    done: list[int] = []
    for start in range(numbers.start, numbers.stop, BATCH):
        some = range(start, min(start + BATCH, numbers.stop))
        with contextlib.suppress(Exhausted):
            pages.put(client, pages.keys(*some), durable=True)
            done += some
    return done


def read(client: Client, pages: Pages, numbers: list[int]) -> int:
    """Return how many of the pages are hits; each byte is compared."""
    return sum(
        sum(pages.get(client, pages.keys(*numbers[start : start + BATCH])))
        for start in range(0, len(numbers), BATCH)
    )


def wait_for(client: Client, holds: Callable[[DiskStatus], bool]) -> DiskStatus:
    end = time.monotonic() + 60.0
    while not holds(disk := client.node_status().disk):
        assert time.monotonic() < end, disk
        time.sleep(0.2)
    return disk


def assert_serving(client: Client) -> DiskStatus:
    disk = client.node_status().disk
    assert (disk.state, disk.reason, disk.pages_corrupt) == ("SERVING", "", 0)
    return disk


def test_disk_larger_than_its_file_system_is_limited_and_evicts(small: Path) -> None:
    pages = Pages("limited", PAGE)
    with node_at(small) as node, client_of(node) as client:
        assert "disk tier limited" in node.log_text, "no warning at the start"
        disk = assert_serving(client)
        assert disk.limit
        assert disk.usable_nbytes < disk.filesystem_nbytes < disk.capacity_nbytes == CAPACITY
        done = put_durable(client, pages, range(2600))
        assert len(done) == 2600, "a durable put failed although older pages could be evicted"
        disk = assert_serving(client)
        assert disk.pages_evicted
        assert disk.used_nbytes > disk.filesystem_nbytes // 2
        assert disk.filesystem_free_nbytes >= 4 * MIB, "nothing is left for the rows"
        assert read(client, pages, done[-800:]) == 800, "the newest pages were evicted"
        ran = subprocess.run(
            [sys.executable, "-m", "kvstore", "status", "--address", node.address, "--json"],
            capture_output=True,
            check=True,
        )
        assert "no space" in json.dumps(json.loads(ran.stdout))


def test_others_fill_and_free_the_file_system(small: Path) -> None:
    pages = Pages("others", PAGE)
    with node_at(small) as node, client_of(node) as client:
        done = put_durable(client, pages, range(640))
        assert len(done) == 640
        fill(small)
        later = put_durable(client, pages, range(640, 1600))
        assert later, "no page was stored on the full file system"
        assert_serving(client)
        assert read(client, pages, later[-200:]) == len(later[-200:])
        disk = wait_for(client, lambda disk: bool(disk.limit))
        limited_nbytes = disk.usable_nbytes
        (small / "others").unlink()
        wait_for(client, lambda disk: disk.usable_nbytes > limited_nbytes + 2 * EXTENT)
        assert len(put_durable(client, pages, range(1600, 1800))) == 200
        assert_serving(client)
        log = node.log_text
    assert "disk tier stopped" not in log


@pytest.mark.parametrize("signal", ["stop", "kill"])
def test_restart_on_a_full_file_system_keeps_pages(small: Path, signal: str) -> None:
    """The reserve opens the rows, so that a start empties no extent."""
    pages = Pages("restart", PAGE)
    with node_at(small) as node, client_of(node) as client:
        put_durable(client, pages, range(640))
        fill(small)
        done = put_durable(client, pages, range(640, 960))
        assert done
        node.kill() if signal == "kill" else node.stop()
    fill(small)
    for _ in range(3):
        with node_at(small) as node, client_of(node) as client:
            disk = client.node_status().disk
            assert disk.state == "SERVING", disk.reason
            assert disk.limit
            found = read(client, pages, done[-100:])
            assert_serving(client)
            assert "emptied extent" not in node.log_text
            wait_for(client, lambda disk: (small / "data" / "reserve").stat().st_size > 0)
            more = put_durable(client, pages, range(2000, 2200))
            assert more
            assert read(client, pages, more) == len(more)
            node.kill()
        assert found == len(done[-100:])
        fill(small)


def test_node_killed_again_and_again_while_others_fill(small: Path) -> None:
    """No byte is wrong, and the newest acknowledged pages are there after each `kill -9`."""
    pages = Pages("killed", PAGE)
    first = 0
    for _ in range(5):
        with node_at(small) as node, client_of(node) as client:
            put_durable(client, pages, range(first, first + 320))
            fill(small)
            done = put_durable(client, pages, range(first + 320, first + 640))
            (small / "others").unlink()
            done += put_durable(client, pages, range(first + 640, first + 800))
            assert done
            node.kill()
        with node_at(small) as node, client_of(node) as client:
            assert read(client, pages, done[-64:]) == 64
            read(client, pages, list(range(first + 800)))
            assert_serving(client)
            assert client.recover() is None, "recover of a disk that is not stopped"
            node.kill()
        first += 800


def test_start_on_a_file_system_without_any_space_names_the_remedy(small: Path) -> None:
    fill(small)
    with pytest.raises(Exception, match=r"No space left.*free some"):
        node_at(small)


def test_start_without_free_inodes_keeps_the_pages(small: Path) -> None:
    """Emptied extents would not help: they keep their inodes."""
    pages = Pages("inodes", PAGE)
    with node_at(small) as node, client_of(node) as client:
        done = put_durable(client, pages, range(400))
    subprocess.run(
        ["mount", "-o", "remount,nr_inodes=256", small], capture_output=True, check=False
    )
    with contextlib.suppress(OSError):
        for number in range(1 << 20):
            (small / f"empty{number}").touch()
    with pytest.raises(Exception, match="No space left"):
        node_at(small)
    for path in small.glob("empty*"):
        path.unlink()
    with node_at(small) as node, client_of(node) as client:
        assert read(client, pages, done) == len(done)
