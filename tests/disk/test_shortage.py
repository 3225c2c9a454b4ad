"""A shortage of descriptors, memory or threads does not stop the disk tier, which works again
without a recover.
"""

import contextlib
import errno
import os
import resource
import socket
from pathlib import Path
from typing import Any

import pytest
from disk_nodes import FaultyLayer, Nodes, Pages

from kvstore import Client, ClientConfig, PutOutcome
from kvstore.errors import Exhausted
from kvstore.tools.node_process import NodeProcess
from node.disk.rows import _DiskErrors, is_full, is_shortage

STORED = PutOutcome.STORED

SHORT = [errno.EMFILE, errno.ENFILE, errno.ENOMEM]


def assert_disk_serves(client: Client) -> None:
    status = client.node_status()
    assert (status.state, status.disk.state, status.disk.reason) == ("SERVING", "SERVING", "")


@pytest.mark.parametrize("code", SHORT, ids=map(os.strerror, SHORT))
def test_write_short_of_resources_keeps_the_page_in_ram_and_the_disk_serving(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, code: int
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    layer.fail["write"] = code
    with pytest.raises(Exhausted, match="memory or descriptors"):
        pages.put(client, pages.keys(*range(4)), durable=True)
    assert_disk_serves(client)
    assert pages.get(client, pages.keys(*range(4))) == [True] * 4
    assert node.disk.records.slots.used_nbytes == 0
    layer.heal()
    assert client.flush() == 4, "the tier needs a recover"
    pages.drop_from_ram(node)
    assert pages.get(client, pages.keys(*range(4))) == [True] * 4


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")], ids=repr)
def test_writer_short_of_memory_or_threads_keeps_the_disk_serving(
    nodes: Nodes, pages: Pages, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    node = nodes.start()
    client = nodes.connect(node)

    def fail(*_: object) -> None:
        raise error

    for part, call in (
        (node.disk.files, "write_all"),
        (node.disk.rows, "write"),
        (node.disk.files, "sync"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(part, call, fail)
            with pytest.raises(Exhausted, match="memory or descriptors"):
                pages.put(client, pages.keys(1), durable=True)
            assert_disk_serves(client)
    assert client.flush() == 1


def test_sync_short_of_memory_leaves_its_files_for_the_next_sync(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    sync = layer.sync

    def fail(fd: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(layer, "sync", fail)
        with pytest.raises(Exhausted):
            pages.put(client, pages.keys(1), durable=True)
    synced: list[int] = []
    monkeypatch.setattr(layer, "sync", lambda fd: (synced.append(fd), sync(fd)))
    pages.put(client, pages.keys(1), durable=True)
    assert synced, "the later sync left out the extent"


@pytest.mark.parametrize("code", SHORT, ids=map(os.strerror, SHORT))
def test_read_short_of_resources_is_a_miss_and_keeps_the_page(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, code: int
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1, 2), durable=True)
    pages.drop_from_ram(node)
    layer.fail["read"] = code
    assert pages.get(client, pages.keys(1, 2)) == [False, False]
    with pytest.raises(Exhausted, match="not all pages were read"):
        client.scrub()
    assert_disk_serves(client)
    assert client.node_status().disk.pages_corrupt == 0
    layer.heal()
    assert pages.get(client, pages.keys(1, 2)) == [True, True]
    assert client.scrub().intact == 2


def test_list_short_of_descriptors_is_an_error(
    nodes: Nodes, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    pages.put(client, pages.keys(*range(4)), durable=True)
    pages.drop_from_ram(node)
    rows = node.disk.rows.pages

    def break_off(*args: Any) -> Any:
        yield next(iter(rows(*args)))
        raise OSError(errno.EMFILE, "rows: too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(node.disk.rows, "pages", break_off)
        with pytest.raises(Exhausted, match="not all rows could be read"):
            list(client.list_pages(pages.namespace))
        assert_disk_serves(client)
    assert [page.prefix_hash for page in client.list_pages(pages.namespace)] == sorted(
        pages.keys(*range(4))
    )


def test_background_scrub_short_of_memory_goes_on_later(
    nodes: Nodes, layer: FaultyLayer, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.disk.scrub.ROUND_PAUSE_S", 0.01)
    monkeypatch.setattr("node.disk.scrub.STEP_S", 0.01)
    node = nodes.start(scrub_nbytes_per_s=1 << 30)
    client = nodes.connect(node)
    layer.fail["read"] = errno.ENOMEM
    pages.put(client, pages.keys(1), durable=True)
    begun = layer.calls["read"]
    while layer.calls["read"] < begun + 3:
        client.node_status()
    assert_disk_serves(client)
    layer.heal()
    while not client.node_status().disk.pages_scrubbed:
        pass


def test_sync_failing_with_enomem_stops_the_tier(
    nodes: Nodes, layer: FaultyLayer, pages: Pages
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    layer.fail["sync"] = errno.ENOMEM
    with pytest.raises(Exhausted):
        pages.put(client, pages.keys(1), durable=True)
    assert client.node_status().disk.state == "POISONED"
    layer.heal()
    client.recover()
    assert pages.on_disk(node, pages.keys(1)) == [False]
    assert client.flush() == 1


@pytest.mark.parametrize("code", SHORT, ids=map(os.strerror, SHORT))
def test_rocksdb_shortage_errors_are_recognized(code: int) -> None:
    with pytest.raises(OSError, match=os.strerror(code)) as caught, _DiskErrors():
        raise Exception(
            f"IO error: {os.strerror(code)}: While open a file for appending: rows/000012.log"
        )
    assert is_shortage(caught.value)
    with pytest.raises(OSError, match=r"rows: IO error: No space") as other, _DiskErrors():
        raise Exception(
            "IO error: No space left on device: While appending to file: rows/000012.log"
        )
    assert not is_shortage(other.value)
    assert is_full(other.value)


def test_idle_connections_on_all_descriptors_do_not_stop_the_disk(tmp_path: Path) -> None:
    """Idle connections that use up all descriptors do not stop the disk tier.

    Each page here needs an extent file of its own.
    """
    pages = Pages("large", 64 << 10)
    sizes = (
        "--ram-bytes",
        "8MiB",
        "--extent-bytes",
        "64KiB",
        "--disk-bytes",
        "4MiB",
        "--disk-extent-bytes",
        "64KiB",
    )
    idle: list[socket.socket] = []
    with (
        NodeProcess(*sizes, "--data-dir", str(tmp_path)) as node,
        Client(ClientConfig(node.address, timeout_s=60.0, connect_timeout_s=30.0)) as client,
    ):
        pages.put(client, pages.keys(0), durable=True)
        wanted = len(os.listdir(f"/proc/{node.pid}/fd")) + 20
        limits = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (wanted, limits[1]))
        try:
            for _ in range(60):
                idle.append(socket.create_connection(("127.0.0.1", node.bulk_port), timeout=60.0))
            for number in range(1, 40):
                pages.put(client, pages.keys(number))
            with contextlib.suppress(Exhausted):  # fails unless all files are open already
                client.flush()
        finally:
            for connection in idle:
                connection.close()
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, limits)
        assert_disk_serves(client)
        assert client.flush() == 40
