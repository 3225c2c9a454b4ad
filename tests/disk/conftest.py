"""Nodes with a disk tier in this process, without a keeper, on a fake file layer that fails when told to; and with
one, in which faults are planted."""

import contextlib
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from planted import PORTS, Fault, children, keeper_of
from planted import SMALL as KEPT
from ranged import LEAF, PAGE

from kvstore import Client, ClientConfig, Namespace, PutOutcome, checksum, opaque_layout
from kvstore.client import Keep
from kvstore.tools.trace import page_content
from node.config import NodeConfig
from node.disk.data_dir import DataDir
from node.disk.extents import FileLayer
from node.server import Node

SECTOR_NBYTES = 4096
SMALL: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 0,
    "bulk_port": 0,
    "metrics_port": 0,
    "ram_nbytes": 1 << 20,
    "extent_nbytes": 64 << 10,
    "disk_nbytes": 2 << 20,
    "disk_extent_nbytes": 64 << 10,
    "scrub_nbytes_per_s": 0,
    "flush_s": 5.0,
    "drain_s": 0.3,
    "log_level": "ERROR",
}


class FaultyLayer(FileLayer):
    """The real calls, but for the faults that are switched on.

    `fail`: the operation's name -> the errno it ends with. `short`: moves one sector per call.
    `torn`: a write says that it wrote all, but only its first sector reaches the file. `flip`: a
    read returns one bit wrong. `reading` and `writing`: cleared, they make such calls wait.
    """

    def __init__(self) -> None:
        self.fail: dict[str, int] = {}
        self.short = self.torn = self.flip = False
        self.reading, self.writing = threading.Event(), threading.Event()
        self.reading.set()
        self.writing.set()
        self.waiting = threading.Semaphore(0)  # one more for each call that waits
        self.calls: dict[str, int] = {"allocate": 0, "write": 0, "read": 0, "sync": 0}

    def heal(self) -> None:
        self.fail.clear()
        self.short = self.torn = self.flip = False
        self.reading.set()
        self.writing.set()

    def _begin(self, name: str) -> None:
        self.calls[name] += 1
        if name in self.fail:
            raise OSError(self.fail[name], os.strerror(self.fail[name]))

    def _wait(self, event: threading.Event) -> None:
        if not event.is_set():
            self.waiting.release()
            assert event.wait(20.0), "the test did not let the disk go on"

    def allocate(self, fd: int, nbytes: int) -> None:
        self._begin("allocate")
        super().allocate(fd, nbytes)

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        self._wait(self.writing)
        self._begin("write")
        if self.torn and view.nbytes > SECTOR_NBYTES:
            super().write(fd, view[:SECTOR_NBYTES], offset)
            return view.nbytes
        return super().write(fd, view[:SECTOR_NBYTES] if self.short else view, offset)

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        self._wait(self.reading)
        self._begin("read")
        moved = super().read(fd, view[:SECTOR_NBYTES] if self.short else view, offset)
        if self.flip:
            view[moved // 2] ^= 1
        return moved

    def sync(self, fd: int) -> None:
        self._begin("sync")
        super().sync(fd)


@pytest.fixture
def layer() -> FaultyLayer:
    return FaultyLayer()


class Nodes:
    """Starts and stops nodes on the data directory of one test."""

    def __init__(self, data_dir: Path, layer: FaultyLayer) -> None:
        self.data_dir = data_dir
        self.layer = layer
        self._running: list[Node] = []
        self._clients: list[Client] = []

    def start(self, **settings: Any) -> Node:
        """Keyword arguments are NodeConfig fields."""
        node = Node(NodeConfig(**{**SMALL, "data_dir": str(self.data_dir), **settings}))
        node.start()
        self._running.append(node)
        return node

    def connect(self, node: Node, wire: str = "bulk", **settings: Any) -> Client:
        address = f"127.0.0.1:{node.grpc.port}"
        patience = {"timeout_s": 20.0, "connect_timeout_s": min(20.0, settings.get("timeout_s", 20.0))}
        client = Client(ClientConfig(**{"address": address, "wire": wire, **patience, **settings}))
        self._clients.append(client)
        return client

    def stop(self, node: Node) -> None:
        """Gracefully; before that it must have come to rest without a violation or a leak."""
        self._running.remove(node)
        self.layer.heal()
        for client in self._clients:
            client.close()
        self._clients.clear()
        try:
            settle(node)
        finally:
            node.stop()
        assert node.check() == []

    def restart(self, node: Node, **settings: Any) -> Node:
        self.stop(node)
        return self.start(**settings)

    def close(self) -> None:
        for running in list(self._running):
            self.stop(running)


@pytest.fixture
def nodes(tmp_path: Path, layer: FaultyLayer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Every node of the test uses `layer`; all are checked and stopped at its end."""

    def open_here(*arguments: Any, pulse: Callable[[], None], **settings: Any) -> DataDir:
        return DataDir(*arguments, **settings, layer=layer)

    monkeypatch.setattr("node.server.ProcessStorage", open_here)
    nodes = Nodes(tmp_path / "data", layer)
    yield nodes
    nodes.close()


def settle(node: Node) -> None:
    """Waits until nothing is read, written or queued; then nothing may have leaked."""
    tier, disk = node.tier, node.disk
    end = time.monotonic() + 10.0

    def busy() -> bool:
        return bool(tier.held_count or tier.writing_count or (disk and disk.writer.queue_nbytes))

    while busy() and time.monotonic() < end:
        threading.Event().wait(0.002)
    assert not busy(), f"{tier.held_count=} {tier.writing_count=}"
    assert node.check() == []


@pytest.fixture(name="settle")
def settle_fixture() -> Callable[[Node], None]:
    return settle


class Pages:
    """Pages of one namespace whose bytes follow from their keys. Keys are spread like real hashes."""

    def __init__(self, name: str, page_nbytes: int = 8192, **fields: Any) -> None:
        self.namespace = Namespace(model=name, layout=opaque_layout(page_nbytes), **fields)
        self.digest = self.namespace.digest
        self.nbytes = page_nbytes

    def keys(self, *numbers: int) -> list[bytes]:
        return [hashlib.sha256(b"%d" % number).digest() for number in numbers]

    def content(self, key: bytes) -> bytes:
        return page_content(self.digest, key, self.nbytes)

    def put(self, client: Client, keys: Sequence[bytes], **keep: Any) -> list[PutOutcome]:
        return client.put(self.namespace, keys, [self.content(key) for key in keys], Keep(**keep))

    def get(self, client: Client, keys: Sequence[bytes]) -> list[bool]:
        """Reads and compares every byte of every hit."""
        buffers = [bytearray(self.nbytes) for _ in keys]
        hits = client.get(self.namespace, keys, buffers)
        for key, hit, buffer in zip(keys, hits, buffers, strict=True):
            assert not hit or buffer == self.content(key), f"wrong bytes under {key.hex()}"
        return hits

    def on_disk(self, node: Node, keys: Sequence[bytes]) -> list[bool]:
        assert node.disk is not None
        return node.disk.present(self.digest, keys)

    def drop_from_ram(self, node: Node) -> None:
        """As eviction would: what is on disk stays there."""
        settle(node)  # a reply may be there before the node has released its pages
        with node.tier.lock:
            for page in list(node.tier.namespaces.find(self.digest).pages.values()):
                assert page.holds == 0
                node.tier._forget(page, "evicted")


@pytest.fixture
def pages(request: pytest.FixtureRequest) -> Pages:
    return Pages(request.node.name)


@pytest.fixture
def make_pages() -> type[Pages]:
    return Pages


@pytest.fixture
def node(nodes: Nodes) -> Node:
    return nodes.start()


@pytest.fixture
def large(request: pytest.FixtureRequest) -> Iterator[Pages]:
    """Pages of several leaves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum, "LEAF_NBYTES", LEAF)
        checksum.cuts.cache_clear()
        yield Pages(request.node.name, PAGE)
    checksum.cuts.cache_clear()


@pytest.fixture
def stored(node: Node, nodes: Nodes, large: Pages) -> list[bytes]:
    """Keys of two pages that are on disk only."""
    keys = large.keys(1, 2)
    large.put(nodes.connect(node), keys, durable=True)
    large.drop_from_ram(node)
    return keys


class Clock:
    """Seconds since the epoch, moved by hand, for both tiers of a node."""

    def __init__(self) -> None:
        self.now_s = 2_000_000_000

    def __call__(self) -> int:
        return self.now_s

    def govern(self, node: Node) -> None:
        assert node.disk is not None
        node.tier.clock_s = node.disk._clock_s = self


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fault]:
    fault = Fault(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(fault.sitecustomize), os.environ.get("PYTHONPATH", "")]))
    yield fault
    fault.clear()


@pytest.fixture
def kept(tmp_path: Path, fault: Fault) -> Iterator[Node]:
    """A node in this process, its keeper in one of its own. Nobody may be left at the end."""
    others = set(children(os.getpid()))  # a node that other tests share, say
    node = Node(NodeConfig(**PORTS, **KEPT, data_dir=str(tmp_path / "data")))
    node.start()
    yield node
    fault.clear()
    with contextlib.suppress(ProcessLookupError):
        os.kill(keeper_of(node), signal.SIGCONT)
    node.stop()
    assert node.check() == []
    assert set(children(os.getpid())) <= others
