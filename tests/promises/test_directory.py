"""Today's node starts on and serves golden/data-dir-*, directories that older nodes of this format
wrote.
"""

import contextlib
import hashlib
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rocksdict
from directory import KEY, KEYS, LARGE, PAGES, SETTINGS, SPACE
from told import SMALL

from kvstore import Client, ClientConfig, Keep
from node.config import NodeConfig
from node.disk.rows import FORMAT_VERSION, Rows
from node.server import Node

GOLDEN = Path(__file__).parents[1] / "golden"
KINDS = {"plain": "", "encrypted": "-encrypted"}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(kind: str, tmp_path: Path) -> Path:
    with tarfile.open(GOLDEN / f"data-dir-{FORMAT_VERSION}{KINDS[kind]}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "data"


@contextlib.contextmanager
def running(kind: str, place: Path) -> Iterator[Client]:
    settings: dict[str, Any] = {
        **SMALL,
        **SETTINGS,
        "scrub_nbytes_per_s": 0,
        "data_dir": str(place),
    }
    if kind == "encrypted":
        key = place.parent / "key"
        key.write_text(KEY.hex())
        key.chmod(0o400)
        settings["encrypt_key_file"] = str(key)
    node = Node(NodeConfig(**settings))
    node.start()
    config = ClientConfig(
        address=f"127.0.0.1:{node.grpc.port}", wire="bulk", connect_timeout_s=20.0, timeout_s=60.0
    )
    try:
        with Client(config) as client:
            yield client
    finally:
        node.stop()


def test_every_page_of_an_old_directory_is_a_hit(kind: str, place: Path) -> None:
    """Every page of the old directory is a hit with the right bytes.

    If this fails, an upgrade would empty every disk. Either keep reading the format, or raise
    FORMAT_VERSION, so that the directory is refused and not changed.
    """
    spaces = [SPACE] if kind == "encrypted" else [SPACE, LARGE]
    with running(kind, place) as client:
        disk = client.node_status().disk
        assert (disk.page_count, disk.rows_damaged) == (sum(map(len, KEYS[: len(spaces)])), 0)
        for space, keys, pages in zip(spaces, KEYS, PAGES, strict=False):
            buffers = [bytearray(space.layout.page_nbytes) for _ in keys]
            assert client.get(space, keys, buffers) == [True] * len(keys)
            assert buffers == pages
            assert all(stat.on_disk and stat.ttl_ms > 0 for stat in client.stat(space, keys))
        assert client.scrub().damaged == 0
        assert client.node_status().disk.pages_corrupt == 0


def test_writes_keep_the_directory_format(kind: str, place: Path) -> None:
    """Writes keep the format, so that the old node can be started on the directory again."""
    with running(kind, place) as client:
        client.put(SPACE, [b"\x09" * 32], [bytes(8192)], Keep(durable=True))
    mark = (
        hashlib.sha256(b"kvstore-disk-key-1\0" + KEY).hexdigest()[:8] if kind == "encrypted" else ""
    )
    rows = Rows(place / "rows", SETTINGS["disk_extent_nbytes"], key_mark=mark)
    count = len(list(rows.pages()))
    rows.close()
    assert count == sum(map(len, KEYS[: 1 if mark else 2])) + 1
    with contextlib.closing(
        rocksdict.Rdict(str(place / "rows"), rocksdict.Options(raw_mode=True))
    ) as opened:
        assert (
            opened[b"F"]
            == f"{FORMAT_VERSION} {SETTINGS['disk_extent_nbytes']} {mark}".rstrip().encode()
        )
