"""Build the status messages of a node."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor

import kvstore
from kvstore.messages import namespace_message
from kvstore.pb import kvstore_pb2 as pb
from node.config import NodeConfig
from node.disk.tier import DiskTier
from node.memory.arena import Arena
from node.memory.inventory import Inventory
from node.memory.tier import RamTier

# Reduce a status to what a tenant may see: what it needs to use the node, and its own pages.

# Fields about the node that everybody may see.
_PUBLIC_FIELDS = (
    "version",
    "instance_id",
    "state",
    "uptime_ms",
    "limits",
    "bulk_port",
    "metrics_port",
    "now_unix_ms",
)


def redact_for_tenant(
    status: pb.NodeStatusReply, namespaces: Sequence[pb.NamespaceInfo], tenant: str
) -> pb.NodeStatusReply:
    """Reduce a status to what a tenant may see: its namespaces and its use.

    `namespaces`: those of the tenant.
    """
    own = pb.NodeStatusReply(
        namespaces=namespaces, tenants=[use for use in status.tenants if use.tenant == tenant]
    )
    for name in _PUBLIC_FIELDS:
        if status.DESCRIPTOR.fields_by_name[name].message_type:
            getattr(own, name).CopyFrom(getattr(status, name))
        else:
            setattr(own, name, getattr(status, name))
    for field in pb.Counters.DESCRIPTOR.fields:
        setattr(
            own.totals, field.name, sum(getattr(info.counters, field.name) for info in namespaces)
        )
    return own


# Build messages from numbers that other threads change meanwhile, or that come from clocks: each
# number is clamped to its field's range, because protobuf refuses others.

Message = TypeVar("Message")

_LIMITS: dict[type, dict[str, int]] = {}


def clamp_to_field(kind: type[Message], **fields: Any) -> Message:
    """Build a message whose out-of-range values, such as negative ages, are 0."""
    limits = _LIMITS.get(kind) or _LIMITS.setdefault(kind, _unsigned(kind))
    for name, largest in limits.items():
        if not 0 <= fields.get(name, 0) <= largest:
            fields[name] = min(max(0, fields[name]), largest)
    return kind(**fields)


def _unsigned(kind: Any) -> dict[str, int]:
    """Return the largest value of each unsigned, single field.

    A descriptor's `label` is missing in protobuf 7, and its constants came with 4.25; see `make
    test-protobuf`.
    """
    empty = kind()
    largest = {
        FieldDescriptor.CPPTYPE_UINT32: (1 << 32) - 1,
        FieldDescriptor.CPPTYPE_UINT64: (1 << 64) - 1,
    }
    return {
        field.name: largest[field.cpp_type]
        for field in kind.DESCRIPTOR.fields
        if field.cpp_type in largest and isinstance(getattr(empty, field.name), int)
    }


class Status:
    """Status of a node. It reads counters and changes nothing."""

    def __init__(
        self, config: NodeConfig, arena: Arena, tier: RamTier, disk: DiskTier | None
    ) -> None:
        self._config = config
        self._arena = arena
        self._tier = tier
        self._inventory = Inventory(tier)
        self._disk = disk
        self._started = time.monotonic()
        self.memory = PrivateMemory()

    def node(self, draining: bool, **facts: Any) -> pb.NodeStatusReply:
        """Return the node's status; `facts` are fields that the service knows."""
        totals, namespaces = self.namespaces()
        degraded = self._disk is not None and bool(self._disk.stop_reason)
        return clamp_to_field(
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
        """Return the counters of all namespaces together, and each namespace."""
        totals, each = self._inventory.counters()
        infos = [
            clamp_to_field(
                pb.NamespaceInfo,
                digest=index.digest,
                namespace=namespace_message(index.value),
                page_nbytes=index.page_nbytes,
                page_count=page_count,
                counters=clamp_to_field(pb.Counters, **counters.as_dict()),
                disk_page_count=self._disk.page_count(index.digest) if self._disk else 0,
            )
            for index, counters, page_count in each
        ]
        return clamp_to_field(pb.Counters, **totals.as_dict()), infos

    def _ram(self) -> pb.RamStatus:
        tier, slots = self._tier, self._tier.slots
        classes = [
            clamp_to_field(
                pb.SizeClass,
                slot_nbytes=size,
                block_count=blocks,
                slot_count=count,
                used_count=used,
            )
            for size, blocks, count, used in self._inventory.size_classes()
        ]
        return clamp_to_field(
            pb.RamStatus,
            capacity_nbytes=slots.region_nbytes,
            used_nbytes=slots.used_nbytes,
            extent_nbytes=slots.extent_nbytes,
            extent_count=slots.extent_count,
            extent_free_count=slots.extent_free_count,
            page_count=tier.visible_count,
            writing_count=tier.writing_count,
            held_count=tier.held_count,
            pinned_count=len(tier.eviction.pins),
            huge_nbytes=self._arena.huge_nbytes,
            size_classes=classes,
        )

    def _disk_status(self, disk: DiskTier) -> pb.DiskStatus:
        slots = disk.records.slots
        return clamp_to_field(
            pb.DiskStatus,
            state="POISONED" if disk.stop_reason else "SERVING",
            reason=disk.stop_reason,
            data_dir=self._config.data_dir,
            capacity_nbytes=slots.region_nbytes,
            usable_nbytes=slots.usable_nbytes,
            limit=disk.space.reason,
            filesystem_free_nbytes=disk.space.file_system.free_nbytes,
            filesystem_nbytes=disk.space.file_system.total_nbytes,
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
    """Resident bytes of this process outside shared memory, that is outside the arena.

    It reads a file that stays open: the status must work even when no descriptor is left.
    """

    def __init__(self) -> None:
        self._fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)

    def nbytes(self) -> int:
        """Return the private memory of this process in bytes."""
        for line in os.pread(self._fd, 1 << 14, 0).splitlines():
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024
        return 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
