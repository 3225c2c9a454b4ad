"""Data directories mixed from backups: rows of one time, extents of another time or node.

Each hit is compared byte by byte, and no call may fail. Set `SEEDS=1000` for a longer run.
"""

import contextlib
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from disk_nodes import FaultyLayer, Nodes, Pages

from kvstore import PutOutcome
from kvstore.errors import ConfigError
from node.server import Node

SEEDS = int(os.environ.get("SEEDS", "1"))
KEYS = range(80)


def snapshot(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to, copy_function=shutil.copyfile)
    return to


def operator_key(path: Path) -> str:
    path.write_text(bytes(range(32)).hex() + "\n")
    path.chmod(0o600)
    return str(path)


class Storm:
    """Run nodes one after another on one directory and take a backup after each."""

    def __init__(
        self,
        nodes: Nodes,
        make_pages: type[Pages],
        folder: Path,
        randomly: random.Random,
        **settings: Any,
    ) -> None:
        self.nodes, self.folder, self.randomly, self.settings = nodes, folder, randomly, settings
        self.spaces = [
            make_pages("a"),
            make_pages("b", tenant="b"),
            make_pages("c", 5000),
            make_pages("a", salt="s"),
        ]
        self.backups: list[Path] = []

    def live(self, name: str) -> None:
        """Run a node with random puts, removals and reads, stop it, and take the backup `name`."""
        node = self.nodes.start(**self.settings)
        client = self.nodes.connect(node)
        for _ in range(6):
            pages = self.randomly.choice(self.spaces)
            some = pages.keys(*self.randomly.sample(KEYS, 20))
            pages.put(client, some)
            if self.randomly.random() < 0.3:
                client.remove(pages.namespace, self.randomly.sample(some, 5))
            if self.randomly.random() < 0.2:
                client.remove_namespace(pages.namespace)
        self.ask(node)
        client.flush()
        self.nodes.stop(node)
        self.backups.append(snapshot(self.nodes.data_dir, self.folder / name))

    def ask(self, node: Node) -> int:
        """Read all keys, check the bytes of each hit, and return the number of hits."""
        client, hits = self.nodes.connect(node), 0
        for pages in self.spaces:
            keys = pages.keys(*KEYS)
            for start in range(0, len(keys), 20):
                hits += pages.get(client, keys[start : start + 20]).count(True)
            client.verify(pages.namespace, keys)
        return hits

    def mix(self) -> None:
        """Rebuild the data directory: the rows of one backup, each extent of a random one."""
        rows, *_ = self.randomly.sample(self.backups, 1)
        shutil.rmtree(self.nodes.data_dir)
        snapshot(rows, self.nodes.data_dir)
        for path in (self.nodes.data_dir / "extents").iterdir():
            other = self.randomly.choice(self.backups) / "extents" / path.name
            if other.exists():
                shutil.copyfile(other, path)
            if self.randomly.random() < 0.1:
                os.truncate(path, self.randomly.randrange(path.stat().st_size + 1))


@pytest.mark.parametrize("key", ["plain", "encrypted"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_directory_mixed_from_backups_gives_right_bytes_or_misses(
    nodes: Nodes, tmp_path: Path, seed: int, key: str
) -> None:
    randomly = random.Random(seed)
    settings = {"encrypt_key_file": operator_key(tmp_path / "key")} if key == "encrypted" else {}
    storm = Storm(nodes, Pages, tmp_path, randomly, **settings)
    for life in range(2):
        storm.live(f"own-{life}")
    shutil.rmtree(nodes.data_dir)
    storm.live("another node's")
    hits = 0
    for _ in range(3):
        storm.mix()
        node = nodes.start(**settings)
        hits += storm.ask(node)
        client = nodes.connect(node)
        for pages in storm.spaces:  # new puts are stored and found
            some = pages.keys(*randomly.sample(KEYS, 10))
            pages.put(client, some)
            assert pages.get(client, some) == [True] * len(some)
        storm.ask(node)
        nodes.stop(node)
    assert hits, "without a hit this test shows nothing"


def test_copy_of_a_running_nodes_directory_gives_right_bytes_or_is_refused(
    nodes: Nodes, layer: FaultyLayer, tmp_path: Path, pages: Pages
) -> None:
    node = nodes.start()
    client = nodes.connect(node)
    stored = pages.keys(*range(60))
    pages.put(client, stored, durable=True)
    copying = Copying(nodes.data_dir, tmp_path / "copy")
    for number in range(60, 260):
        pages.put(client, pages.keys(number), durable=True)
        if copying.step():
            break
    copying.finish()
    other = Nodes(tmp_path / "copy", layer)
    with contextlib.suppress(ConfigError):
        twin = other.start()
        pages.get(other.connect(twin), pages.keys(*range(260)))
        assert pages.put(other.connect(twin), pages.keys(999)) == [PutOutcome.STORED]
    other.close()
    assert any(pages.get(client, stored))


class Copying:
    """Copy a directory file by file, while it changes."""

    def __init__(self, folder: Path, to: Path) -> None:
        self._folder, self._to = folder, to
        self._left = [path for path in sorted(folder.rglob("*")) if path.is_file()]

    def step(self) -> bool:
        """Copy the next file; return whether it was the last one."""
        path = self._left.pop()
        target = self._to / path.relative_to(self._folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(path, target)
        return not self._left

    def finish(self) -> None:
        while self._left:
            self.step()
