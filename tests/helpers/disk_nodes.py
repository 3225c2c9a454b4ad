"""Nodes with a disk in the test process, on a file layer with injectable faults."""

import hashlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import known_pages
from local_nodes import connect

from kvstore import Client
from node.config import NodeConfig
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
    """A file layer that makes the real calls, with faults that a test switches on.

    `fail`: the errno with which each named operation fails. `short`: each call moves one sector.
    `torn`: a write reports success, but only its first sector reaches the file. `flip`: a read
    returns one bit wrong. `reading` and `writing`: while cleared, such calls wait.
    """

    def __init__(self) -> None:
        self.fail: dict[str, int] = {}
        self.short = self.torn = self.flip = False
        self.reading, self.writing = threading.Event(), threading.Event()
        self.reading.set()
        self.writing.set()
        self.waiting = threading.Semaphore(0)  # released once by each call that waits
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
            assert event.wait(60.0), "the test did not resume the disk"

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


class Nodes:
    """Start and stop nodes on the data directory of one test."""

    def __init__(self, data_dir: Path, layer: FaultyLayer) -> None:
        self.data_dir = data_dir
        self.layer = layer
        self._running: list[Node] = []
        self._clients: list[Client] = []

    def start(self, **settings: Any) -> Node:
        """Start a node; keyword arguments are NodeConfig fields."""
        node = Node(NodeConfig(**{**SMALL, "data_dir": str(self.data_dir), **settings}))
        node.start()
        self._running.append(node)
        return node

    def connect(self, node: Node, wire: str = "bulk", **settings: Any) -> Client:
        client = connect(node, wire, patience_s=20.0, **settings)
        self._clients.append(client)
        return client

    def stop(self, node: Node) -> None:
        """Stop a node gracefully, after checking that it is idle without violations or leaks."""
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


def settle(node: Node) -> None:
    """Wait until no page is read, written or queued, then check that nothing leaked."""
    tier, disk = node.tier, node.disk
    end = time.monotonic() + 60.0

    def busy() -> bool:
        return bool(tier.held_count or tier.writing_count or (disk and disk.writer.queue_nbytes))

    while busy() and time.monotonic() < end:
        threading.Event().wait(0.002)
    assert not busy(), f"{tier.held_count=} {tier.writing_count=}"
    assert node.check() == []


class Pages(known_pages.Pages):
    """Pages whose keys are distributed like real hashes."""

    def __init__(self, name: str, page_nbytes: int = 8192, **fields: Any) -> None:
        super().__init__(name, page_nbytes, **fields)
        self.digest = self.namespace.digest

    def key(self, number: int) -> bytes:
        return hashlib.sha256(b"%d" % number).digest()

    def on_disk(self, node: Node, keys: Sequence[bytes]) -> list[bool]:
        assert node.disk is not None
        return node.disk.present(self.digest, keys)

    def drop_from_ram(self, node: Node) -> None:
        """Drop all pages from RAM as eviction would; pages on disk stay there."""
        settle(node)  # a reply may arrive before the node has released its pages
        with node.tier.lock:
            for page in list(node.tier.namespaces.find(self.digest).pages.values()):
                assert page.holds == 0
                node.tier.forget(page, "evicted")


class Clock:
    """A clock for both tiers of a node, in seconds since the epoch, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 2_000_000_000

    def __call__(self) -> int:
        return self.now_s

    def govern(self, node: Node) -> None:
        assert node.disk is not None
        node.tier.clock_s = node.disk._clock_s = self
