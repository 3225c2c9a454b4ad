"""An encrypted disk returns the stored bytes and holds none of them in the clear."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from disk_nodes import Nodes, Pages
from locked import KEY, flip, key_file, pieces
from memory_search import files, found_in
from planted import PORTS, SMALL, Fault, io_process_of
from ranged import ask
from waiting import wait_until

from kvstore import Client, ClientConfig
from node.config import NodeConfig
from node.disk.rows import Rows, namespace_key
from node.disk.scrub import scrub
from node.server import Node

MIB = 1 << 20
# Page sizes: one byte, a sector, odd, more than one cipher unit, whole units, and more than is read
# at a time.
SIZES = (1, 4096, 8192 + 5, MIB + 5000, 2 * MIB, 4 * MIB + 77)
LARGE: dict[str, Any] = {
    **{
        "ram_nbytes": 32 * MIB,
        "extent_nbytes": 16 * MIB,
        "disk_nbytes": 128 * MIB,
        "disk_extent_nbytes": 16 * MIB,
    },
    "batch_nbytes_max": 32 * MIB,
}


@pytest.fixture
def key(tmp_path: Path) -> dict[str, str]:
    return {"encrypt_key_file": key_file(tmp_path / "key")}


@pytest.mark.parametrize("nbytes", SIZES)
def test_pages_survive_a_restart_and_are_not_in_clear_on_disk(
    nodes: Nodes, key: dict[str, str], nbytes: int
) -> None:
    node = nodes.start(**LARGE, **key)
    pages = Pages("a secret model", nbytes, salt="a secret salt")
    keys = pages.keys(1, 2, 3)
    client = nodes.connect(node)
    pages.put(client, keys, durable=True)
    pages.drop_from_ram(node)
    assert pages.get(client, keys) == [True] * 3
    node = nodes.restart(node, **LARGE, **key)
    assert not found_in(
        nodes.data_dir, [b"a secret model", b"a secret salt", KEY, KEY.hex().encode()]
    )
    if nbytes >= 64:
        assert not found_in(nodes.data_dir, pieces(pages, keys))
    client = nodes.connect(node)
    assert pages.get(client, keys) == [True] * 3
    assert client.verify(pages.namespace, keys).intact == 3
    assert node.disk is not None
    assert scrub(node.disk, b"", 1 << 30).intact == 3


def test_search_finds_pages_in_a_plain_directory(nodes: Nodes) -> None:
    """The search finds page bytes and names in a plain directory.

    Otherwise the tests of encrypted directories would pass because the search is broken.
    """
    node = nodes.start(**LARGE)
    pages = Pages("a secret model", MIB + 5000, salt="a secret salt")
    keys = pages.keys(1, 2, 3)
    pages.put(nodes.connect(node), keys, durable=True)
    nodes.stop(node)
    there = {
        needle for needle, _ in found_in(nodes.data_dir, [*pieces(pages, keys), b"a secret model"])
    }
    assert there == {*pieces(pages, keys), b"a secret model"}


def test_ranges_are_deciphered_without_the_rest_of_the_page(
    nodes: Nodes, key: dict[str, str]
) -> None:
    node = nodes.start(**LARGE, **key)
    pages = Pages("ranges", 9 * MIB + 77)
    keys = pages.keys(1, 2)
    client = nodes.connect(node)
    pages.put(client, keys, durable=True)
    for ranges in (
        [(0, 10)],
        [(MIB - 5, 10)],
        [(3 * MIB + 1, 2 * MIB)],
        [(9 * MIB, 77)],
        [(5, 1), (8 * MIB + 9, 9)],
    ):
        pages.drop_from_ram(node)
        assert ask(client, pages, keys, *ranges) == [True, True]
    assert node.disk.counters.pages_read_in_part == 10


def test_rewritten_slot_has_no_equal_ciphertext(nodes: Nodes, key: dict[str, str]) -> None:
    """Equal bytes of another page in the same slot, under the same key, have other ciphertext."""
    node = nodes.start(**{**LARGE, "disk_nbytes": 16 * MIB}, **key)
    pages = Pages("again", MIB)
    client, zeros = nodes.connect(node), bytes(MIB)
    first, second = pages.keys(1, 2)
    client.put(pages.namespace, [first], [zeros])
    client.flush()
    before = (nodes.data_dir / "extents" / "000000").read_bytes()
    offset = node.disk.records.offset(node.disk._find(pages.digest, first))
    client.remove(pages.namespace, [first])
    client.flush()
    client.put(pages.namespace, [second], [zeros])
    client.flush()
    assert node.disk.records.offset(node.disk._find(pages.digest, second)) == offset
    after = (nodes.data_dir / "extents" / "000000").read_bytes()
    alike = [
        at for at in range(offset, offset + MIB, 16) if before[at : at + 16] == after[at : at + 16]
    ]
    assert not alike
    assert len({after[at : at + 16] for at in range(offset, offset + MIB, 16)}) == MIB // 16


def test_changed_byte_on_disk_is_a_miss(nodes: Nodes, key: dict[str, str]) -> None:
    node = nodes.start(**LARGE, **key)
    pages = Pages("damaged", 2 * MIB)
    one, other = pages.keys(1, 2)
    client = nodes.connect(node)
    pages.put(client, [one, other], durable=True)
    offset = node.disk.records.offset(node.disk._find(pages.digest, one))
    number, within = divmod(offset, 16 * MIB)
    flip(nodes.data_dir / "extents" / f"{number:06d}", within + MIB + 12345)
    pages.drop_from_ram(node)
    assert pages.get(client, [one, other]) == [False, True]
    assert node.disk.counters.pages_corrupt == 1


def test_damaged_namespace_key_loses_only_its_namespace(
    nodes: Nodes, key: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    node = nodes.start(**key)
    lost, kept = Pages("lost"), Pages("kept")
    client = nodes.connect(node)
    for pages in (lost, kept):
        pages.put(client, pages.keys(1, 2), durable=True)
    number = node.disk._index.namespace_ids.known(lost.digest)
    mark = node.disk._index.namespace_ids._vault.mark
    nodes.stop(node)
    rows = Rows(nodes.data_dir / "rows", 64 << 10, key_mark=mark)
    wrapped = dict(rows.namespaces())[number]
    rows.put([(namespace_key(number), wrapped[:40] + bytes([wrapped[40] ^ 1]) + wrapped[41:])], [])
    rows.close()
    node = nodes.start(**key)
    assert (
        f"row {number} of namespaces is damaged, its pages are dropped: its wrapped key is damaged"
        in caplog.text
    )
    client = nodes.connect(node)
    assert lost.get(client, lost.keys(1, 2)) == [False, False]
    assert kept.get(client, kept.keys(1, 2)) == [True, True]
    lost.put(client, lost.keys(1, 2), durable=True)
    node = nodes.restart(node, **key)
    assert lost.get(nodes.connect(node), lost.keys(1, 2)) == [True, True]


def test_durable_pages_survive_a_killed_io_process(tmp_path: Path, fault: Fault) -> None:
    """Each request to the I/O process carries its page keys, so a new one needs no state of a
    killed one.
    """
    config = NodeConfig(
        **PORTS,
        **SMALL,
        data_dir=str(tmp_path / "data"),
        encrypt_key_file=key_file(tmp_path / "key"),
    )
    node = Node(config)
    node.start()
    try:
        pages = Pages("killed", 8192)
        keys = pages.keys(1, 2, 3)
        with Client(ClientConfig(address=f"127.0.0.1:{node.grpc.port}", timeout_s=20.0)) as client:
            pages.put(client, keys[:2], durable=True)
            os.kill(io_process_of(node), signal.SIGKILL)
            wait_until(lambda: bool(node.disk and node.disk.stop_reason))
            client.recover()
            pages.put(client, keys[2:], durable=True)
            pages.drop_from_ram(node)
            assert pages.get(client, keys) == [True] * 3
        assert not found_in(tmp_path / "data", pieces(pages, keys))
        assert list(files(tmp_path / "data"))
    finally:
        node.stop()
    node = Node(config)
    try:
        assert pages.on_disk(node, keys) == [True] * 3
    finally:
        node.stop()


def test_key_is_in_no_command_line(tmp_path: Path) -> None:
    path = key_file(tmp_path / "key")
    node = Node(
        NodeConfig(**PORTS, **SMALL, data_dir=str(tmp_path / "data"), encrypt_key_file=path)
    )
    try:
        line = Path(f"/proc/{io_process_of(node)}/cmdline").read_bytes()
        assert node.disk is not None
        assert node.disk._index.namespace_ids._vault.mark.encode() in line
        assert KEY.hex().encode() not in line
    finally:
        node.stop()
