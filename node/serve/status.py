"""What a node tells about itself, as messages."""

import os
import time
from dataclasses import asdict
from typing import Any

import kvstore
from kvstore.messages import namespace_message
from kvstore.pb import kvstore_pb2 as pb
from node.config import NodeConfig
from node.disk.tier import DiskTier
from node.ram.arena import Arena
from node.ram.inventory import Inventory
from node.ram.tier import RamTier
from node.serve.replies import in_range


class Status:
    """Reads counters; changes nothing."""

    def __init__(self, config: NodeConfig, arena: Arena, tier: RamTier, disk: DiskTier | None) -> None:
        self._config = config
        self._arena = arena
        self._tier = tier
        self._inventory = Inventory(tier)
        self._disk = disk
        self._started = time.monotonic()
        self.memory = PrivateMemory()

    def node(self, draining: bool, **facts: Any) -> pb.NodeStatusReply:
        """`facts`: fields of the reply that the service knows."""
        totals, namespaces = self.namespaces()
        degraded = self._disk is not None and bool(self._disk.poisoned)
        return in_range(
            pb.NodeStatusReply,
            version=kvstore.__version__,
            state="DRAINING" if draining else "DEGRADED" if degraded else "SERVING",
            uptime_ms=int((time.monotonic() - self._started) * 1000),
            insecure=self._config.insecurity,
            now_unix_ms=time.time_ns() // 1_000_000,
            pid=os.getpid(),
            rss_nbytes=self.memory.nbytes(),
            ram=self._ram(),
            disk=None if self._disk is None else self._disk_status(self._disk),
            namespaces=namespaces,
            totals=totals,
            **facts,
        )

    def namespaces(self) -> tuple[pb.Counters, list[pb.NamespaceInfo]]:
        """Counters of all namespaces together, and each namespace."""
        totals, each = self._inventory.counters()
        infos = [
            in_range(
                pb.NamespaceInfo,
                digest=index.digest,
                namespace=namespace_message(index.value),
                page_nbytes=index.page_nbytes,
                page_count=page_count,
                counters=in_range(pb.Counters, **counters.as_dict()),
                disk_page_count=self._disk.page_count(index.digest) if self._disk else 0,
            )
            for index, counters, page_count in each
        ]
        return in_range(pb.Counters, **totals.as_dict()), infos

    def _ram(self) -> pb.RamStatus:
        tier, slots = self._tier, self._tier.slots
        classes = [
            in_range(pb.SizeClass, slot_nbytes=size, block_count=blocks, slot_count=count, used_count=used)
            for size, blocks, count, used in self._inventory.size_classes()
        ]
        return in_range(
            pb.RamStatus,
            capacity_nbytes=slots.region_nbytes,
            used_nbytes=slots.used_nbytes,
            extent_nbytes=slots.extent_nbytes,
            extent_count=slots.extent_count,
            extent_free_count=slots.extent_free_count,
            page_count=tier.visible_count,
            writing_count=tier.writing_count,
            held_count=tier.held_count,
            pinned_count=tier.pinned_count,
            huge_nbytes=self._arena.huge_nbytes,
            size_classes=classes,
        )

    def _disk_status(self, disk: DiskTier) -> pb.DiskStatus:
        slots = disk.records.slots
        return in_range(
            pb.DiskStatus,
            state="POISONED" if disk.poisoned else "SERVING",
            reason=disk.poisoned,
            data_dir=self._config.data_dir,
            capacity_nbytes=slots.region_nbytes,
            used_nbytes=slots.used_nbytes,
            page_count=disk.records.count,
            queue_nbytes=disk.writer.queue_nbytes,
            queue_nbytes_max=self._config.disk_queue_nbytes,
            direct_io=disk.files.direct,
            extent_count=slots.extent_count,
            extent_free_count=slots.extent_free_count,
            **asdict(disk.counters),
        )


class PrivateMemory:
    """Resident bytes of this process outside shared memory, that is outside the arena. Reads a file that
    stays open: the status must be told even when no descriptor is left."""

    def __init__(self) -> None:
        self._fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)

    def nbytes(self) -> int:
        for line in os.pread(self._fd, 1 << 14, 0).splitlines():
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024
        return 0

    def close(self) -> None:
        os.close(self._fd)
