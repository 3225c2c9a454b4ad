"""The row database: the format of rows, and damaged, foreign or interrupted databases."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvstore.errors import ConfigError
from node.disk.data_dir import DataDir
from node.disk.io_process import ProcessStorage
from node.disk.page_table import PageTable
from node.disk.rows import FORMAT_VERSION, PageRow, Rows, is_expired, parse_page_row
from node.memory.arena import Arena

EXTENT_NBYTES = 1 << 20
GOLDEN = Path(__file__).parent.parent / "golden" / "format.json"


def row(number: int, namespace: int = 1, nbytes: int = 32) -> PageRow:
    prefix_hash = number.to_bytes(8, "big") * (nbytes // 8)
    return PageRow(
        namespace,
        prefix_hash,
        number * 4096,
        4096,
        1_000_000,
        1_000_001,
        0,
        bytes([number % 256]) * 16,
    )


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1 << 20)
    yield arena
    arena.close()


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[Rows]:
    rows = Rows(tmp_path / "rows", EXTENT_NBYTES)
    yield rows
    rows.close()


@pytest.mark.parametrize("nbytes", [16, 32, 64])
def test_row_is_parsed_as_written(nbytes: int) -> None:
    ours = row(7, 65535, nbytes)._replace(
        offset=(1 << 44) - 4096, used_s=(1 << 32) - 1, expiry_s=(1 << 32) - 1
    )
    assert parse_page_row(ours.key, ours.value()) == ours


@pytest.mark.parametrize(
    ("expiry_s", "ahead_s", "is_over"),
    [
        (2_000_000, 0, False),
        (2_000_000, 10, False),  # a synchronized clock may be set back by seconds
        (2_000_000, 11, True),
        (999_999, 0, True),
        (0, 11, False),  # without a time to live, the time of writing does not matter
    ],
)
def test_row_from_the_future_counts_as_expired(expiry_s: int, ahead_s: int, is_over: bool) -> None:
    ours = row(7)._replace(expiry_s=expiry_s)
    assert is_expired(ours.stored_s, expiry_s, ours.stored_s - ahead_s) == is_over


def test_row_follows_the_documented_format() -> None:
    """A row equals the example of docs/FORMAT.md, built here without the project's code."""
    example = json.loads(GOLDEN.read_text())["row"]
    prefix_hash, page_checksum = (
        bytes.fromhex(example["prefix_hash"]),
        bytes.fromhex(example["checksum"]),
    )
    key = b"P" + struct.pack(">H", example["namespace"]) + prefix_hash
    value = struct.pack(
        "<QQIII",
        *(example[name] for name in ("offset", "slot_nbytes", "stored_s", "used_s", "expiry_s")),
    )
    value += page_checksum + bytes.fromhex(example["leaves"])
    value += struct.pack(">Q", xxhash.xxh3_64_intdigest(key + value))
    assert (key.hex(), value.hex()) == (example["key"], example["value"])
    ours = parse_page_row(key, value)
    assert ours is not None
    assert (ours.key, ours.value()) == (key, value)
    assert (ours.namespace, ours.prefix_hash, ours.checksum) == (
        example["namespace"],
        prefix_hash,
        page_checksum,
    )
    assert ours.leaves.hex() == example["leaves"]
    assert ours[2:7] == tuple(
        example[name] for name in ("offset", "slot_nbytes", "stored_s", "used_s", "expiry_s")
    )


def test_slots_are_placed_as_documented() -> None:
    """Regression: the placement of slots changed without a new format version.

    Most pages of an older directory were lost at the start.
    """
    example = json.loads(GOLDEN.read_text())["disk_blocks"]
    assert example["format"] == FORMAT_VERSION, (
        "a new format or placement of slots needs an example of its own"
    )
    extent_nbytes = example["extent_nbytes"]
    for text, block_nbytes in example["block_nbytes_by_slot_nbytes"].items():
        slot_nbytes = int(text)
        halves = [extent_nbytes >> halvings for halvings in range(6, -1, -1)]
        fitting = [n for n in halves if n // slot_nbytes >= 4 and n % slot_nbytes <= n // 16]
        assert (fitting or [extent_nbytes])[0] == block_nbytes, f"slots of {slot_nbytes}"
        slots, found = PageTable(2 * extent_nbytes, extent_nbytes).slots, list[int]()
        while (offset := slots.allocate(slot_nbytes, 1)) is not None:
            found.append(offset)
        blocks = range(0, 2 * extent_nbytes, block_nbytes)
        assert sorted(found) == [
            start + within
            for start in blocks
            for within in range(0, block_nbytes - slot_nbytes + 1, slot_nbytes)
        ], f"slots of {slot_nbytes}"


@pytest.mark.parametrize("leaves", [b"", b"leaf 0..leaf 1.."])
def test_row_with_a_changed_or_missing_byte_is_refused(leaves: bytes) -> None:
    ours = row(7)._replace(leaves=leaves)
    key, value = ours.key, ours.value()
    for i in range(len(key)):
        changed = key[:i] + bytes([key[i] ^ 0x10]) + key[i + 1 :]
        assert parse_page_row(changed, value) is None, f"key byte {i}"
    for i in range(len(value)):
        changed = value[:i] + bytes([value[i] ^ 0x10]) + value[i + 1 :]
        assert parse_page_row(key, changed) is None, f"value byte {i}"
        assert parse_page_row(key, value[:i]) is None, f"cut to {i} bytes"
    assert parse_page_row(key, value + b"\0") is None
    assert parse_page_row(key[:-1], value) is None


def test_rows_are_ordered_by_namespace_and_hash(rows: Rows) -> None:
    wanted = [row(1), row(2), row(300), row(1, namespace=2), row(5, namespace=256)]
    rows.write({2: b"two", 256: b"more"}, reversed(wanted), [])
    assert [parse_page_row(*pair) for pair in rows.pages()] == wanted
    assert [parse_page_row(*pair) for pair in rows.pages(row(300).key)] == wanted[2:]
    assert list(rows.namespaces()) == [(2, b"two"), (256, b"more")]


def test_key_removed_and_stored_in_one_batch_is_stored(rows: Rows) -> None:
    rows.write({}, [row(1), row(2)], [])
    renewed = row(1)._replace(offset=8192)
    rows.write({}, [renewed], [row(1).key, row(2).key])
    assert [parse_page_row(*pair) for pair in rows.pages()] == [renewed]


def test_rows_survive_closing_and_opening(tmp_path: Path) -> None:
    for number in range(3):
        rows = Rows(tmp_path / "rows", EXTENT_NBYTES)
        assert len(list(rows.pages())) == number
        rows.write({number + 1: b"n"}, [row(number)], [])
        rows.close()


def test_cut_batch_is_present_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    """A batch is present as a whole or not at all, wherever a crash cuts the database's log."""
    rows = Rows(tmp_path / "rows", EXTENT_NBYTES)
    rows.write({1: b"n"}, [row(number) for number in range(10)], [])
    rows.write(
        {}, [row(number) for number in range(10, 30)], [row(number).key for number in range(5)]
    )
    rows.sync()
    (log,) = [path for path in (tmp_path / "rows").glob("*.log") if path.stat().st_size]
    length, seen = log.stat().st_size, set()
    for cut in range(0, length, length // 12):
        copy = tmp_path / f"cut{cut}"
        shutil.copytree(tmp_path / "rows", copy)
        with open(copy / log.name, "r+b") as file:
            file.truncate(length - cut)
        shortened = Rows(copy, EXTENT_NBYTES)
        seen.add(len(list(shortened.pages())))
        shortened.close()
    rows.close()
    assert seen == {0, 10, 25}


def test_rows_of_a_killed_run_are_in_a_synced_table_after_opening(
    tmp_path: Path,
) -> None:
    """Opening the database of a killed run moves its rows from the unsynced log to a table.

    RocksDB syncs the tables that it writes, but never the log of an earlier run.
    """
    rows = Rows(tmp_path / "rows", EXTENT_NBYTES)
    rows.write({1: b"n"}, [row(number) for number in range(10)], [])
    shutil.copytree(tmp_path / "rows", tmp_path / "killed")
    rows.close()
    assert not list((tmp_path / "killed").glob("*.sst"))
    opened = Rows(tmp_path / "killed", EXTENT_NBYTES)
    assert len(list((tmp_path / "killed").glob("*.sst"))) == 1
    assert sum(path.stat().st_size for path in (tmp_path / "killed").glob("*.log")) == 0
    assert len(list(opened.pages())) == 10
    opened.close()


def test_sync_of_the_rows_syncs_the_log_to_the_medium(rows: Rows) -> None:
    """A sync passes `sync=True` to RocksDB, which else writes its log to the page cache only."""

    class Spy:
        def __init__(self) -> None:
            self.asked: list[bool] = []

        def flush_wal(self, sync: bool) -> None:
            self.asked.append(sync)

    real, spy = rows._db, Spy()
    rows._db = spy  # type: ignore[assignment]
    try:
        rows.sync()
    finally:
        rows._db = real
    assert spy.asked == [True]


def test_flipped_bit_in_the_database_yields_no_changed_row(tmp_path: Path) -> None:
    """A flipped bit makes RocksDB refuse the file or a row fail its checksum; no row is changed."""
    rows = Rows(tmp_path / "rows", EXTENT_NBYTES)
    wanted = [row(number) for number in range(50)]
    rows.write({1: b"n"}, wanted, [])
    rows.close()
    (log,) = [
        path
        for path in (tmp_path / "rows").glob("*")
        if path.suffix in (".log", ".sst") and path.stat().st_size
    ]
    refused = fewer = 0
    for place in range(40, log.stat().st_size, log.stat().st_size // 10):
        copy = tmp_path / f"flip{place}"
        shutil.copytree(tmp_path / "rows", copy)
        with open(copy / log.name, "r+b") as file:
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1]))
        try:
            damaged = Rows(copy, EXTENT_NBYTES)
        except OSError:
            refused += 1
            continue
        try:
            found = [parse_page_row(*pair) for pair in damaged.pages()]
        except OSError:
            refused += 1
        else:
            assert {r for r in found if r is not None} <= set(wanted)
            fewer += len(found) < len(wanted)
        damaged.close()
    assert refused + fewer > 0, "no flip was noticed"


def test_another_extent_size_is_refused(tmp_path: Path) -> None:
    Rows(tmp_path / "rows", EXTENT_NBYTES).close()
    with pytest.raises(ConfigError, match=r"extents of 1048576 bytes.*2097152.*disk_extent_nbytes"):
        Rows(tmp_path / "rows", 2 * EXTENT_NBYTES)
    Rows(tmp_path / "rows", EXTENT_NBYTES).close()


@pytest.mark.parametrize("version", [1, FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_another_format_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """A database of another format version is refused and not changed.

    Rows of format 1, for example, had keys with 8 bytes of the hash.
    """
    with monkeypatch.context() as older:
        older.setattr("node.disk.rows.FORMAT_VERSION", version)
        rows = Rows(tmp_path / "rows", EXTENT_NBYTES)
        rows.write({1: b"n"}, [row(1)], [])
        rows.close()
    with pytest.raises(
        ConfigError,
        match=rf"format '{version}' by another version.*reads format 5.*another directory",
    ):
        Rows(tmp_path / "rows", EXTENT_NBYTES)
    monkeypatch.setattr("node.disk.rows.FORMAT_VERSION", version)
    rows = Rows(tmp_path / "rows", EXTENT_NBYTES)
    assert len(list(rows.pages())) == 1
    rows.close()


def test_refused_directory_keeps_its_extents_and_releases_its_lock(
    tmp_path: Path, arena: Arena
) -> None:
    def open_dir(extent_nbytes: int) -> None:
        DataDir(tmp_path, 1 << 22, extent_nbytes, arena.fd).close()

    opened = Rows(tmp_path / "rows", EXTENT_NBYTES)
    opened.close()
    (tmp_path / "extents").mkdir()
    (tmp_path / "extents" / "000003").write_bytes(b"page")
    with pytest.raises(ConfigError, match="another directory"):
        open_dir(2 * EXTENT_NBYTES)
    assert (tmp_path / "extents" / "000003").read_bytes() == b"page"
    open_dir(EXTENT_NBYTES)


def test_second_node_on_one_directory_is_refused(tmp_path: Path, arena: Arena) -> None:
    directory = ProcessStorage(tmp_path, 1 << 22, EXTENT_NBYTES, arena.fd)
    ports = (
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--bulk-port",
        "0",
        "--metrics-port",
        "0",
        "--ram-bytes",
        "1MiB",
    )
    sizes = (
        "--extent-bytes",
        "64KiB",
        "--disk-bytes",
        "4MiB",
        "--disk-extent-bytes",
        str(EXTENT_NBYTES),
    )
    command = [sys.executable, "-m", "node.main", *ports, *sizes, "--data-dir", str(tmp_path)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert second.returncode == 2
    assert f"--data-dir={tmp_path} is in use by another node" in second.stderr
    assert second.stderr.count("\n") == 1, "one line"
    directory.close()


@pytest.mark.parametrize("kind", [DataDir, ProcessStorage])
def test_file_as_data_dir_is_refused(tmp_path: Path, arena: Arena, kind: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can not be used"):
        kind(tmp_path / "file", 1 << 22, EXTENT_NBYTES, arena.fd)
