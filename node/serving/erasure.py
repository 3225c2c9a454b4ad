"""Erase a tenant: remove its pages, zero them in RAM, destroy its keys, scan for the rest.

    remove   its namespaces in RAM and on disk; its pages in the writer's queue and in replication
    RAM      the slots of removed pages are zeroed before other pages get them; slots in use, when
             that use ends
    disk     its namespaces' rows and their former versions, with the wrapped page keys: the rows'
             files are rewritten and scanned

Page bytes on the disk are not overwritten: on an SSD that proves nothing. On an encrypted disk they
are noise without their key. On a plain disk they may stay on the medium until other pages are
written there, and the reply says so. A running put of the tenant ends without a page. A later one
is a new page and stays.
"""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Sequence

from kvstore.errors import Exhausted, InvalidRequest, UnknownNamespace
from kvstore.keys import REMOVAL_NBYTES, check_removal
from kvstore.pb import kvstore_pb2 as pb
from node.auth.access import Caller
from node.cluster.registry import Registry
from node.cluster.replicator import Replicator
from node.disk.durability import Durability
from node.disk.tier import DiskTier
from node.memory.removal import remove_namespace, to_zero_count, zero_leftovers
from node.memory.tier import RamTier

log = logging.getLogger(__name__)

FORGET_S = 60.0
BUSY_S = 10.0  # for slots that are in use
LOOK_S = 0.05  # between two checks of them


class Erasure:
    """Serve `forget`. Thread-safe.

    `stops` says whether the node stops.
    """

    def __init__(
        self,
        tier: RamTier,
        disk: DiskTier | None,
        durability: Durability,
        replicator: Replicator,
        stops: Callable[[], bool],
    ) -> None:
        self._tier = tier
        self._disk = disk
        self._durability = durability
        self._replicator = replicator
        self._stops = stops
        self.cluster: Registry | None = None  # of a registered node

    def forget(self, request: pb.ForgetRequest, caller: Caller) -> pb.ForgetReply:
        """Remove and erase a tenant's namespaces.

        Raises Exhausted if the disk fails or time is too short; removed pages stay removed.
        """
        if not request.tenant:
            raise InvalidRequest(
                "no tenant is named; remove namespaces without a tenant one by one"
            )
        check_removal(request.removal)
        end = time.monotonic() + (request.wait_ms / 1000 or FORGET_S)
        if self.cluster is not None:
            self.cluster.begin_erasure(request.removal)
        digests, zeroed_nbytes = self._digests(request.tenant), self._tier.eviction.zeroed_nbytes
        pages = sum(map(self._removed, digests))
        if self.cluster is not None:
            for digest in digests:
                self.cluster.record_removal(
                    digest, removal_of(request.removal, digest), request.removal
                )
        reply = pb.ForgetReply(namespaces=len(digests), pages=pages)
        self._replicator.drop_gone()
        if not request.remove_only:
            self._erase(digests, reply, end, caller.has_left)
        reply.ram_nbytes = self._tier.eviction.zeroed_nbytes - zeroed_nbytes
        return reply

    def catch_up(self, digests: list[bytes]) -> None:
        """Erase namespaces that were erased elsewhere and are removed here. Raises KVStoreError."""
        self._replicator.drop_gone()
        self._erase(digests, pb.ForgetReply(namespaces=len(digests)), math.inf, lambda: False)

    def _erase(
        self,
        digests: Sequence[bytes],
        reply: pb.ForgetReply,
        end: float,
        has_left: Callable[[], bool],
    ) -> None:
        """Finish the removal, and count the rest."""
        try:
            self._durability.settle()  # releases pages that waited to be written
        finally:  # also with a stopped disk
            self._wait_for_slots(digests, reply, end, has_left)
        if self._disk is not None:
            self._erase_rows(self._disk, digests, reply)
        if open_count := self._close_namespaces(digests):
            log.info("%d namespaces that were erased have new pages", open_count)
        log.warning(
            "namespaces of a tenant were erased: %d with %d pages, %d slots or rows are left",
            reply.namespaces,
            reply.pages,
            reply.left,
        )

    def _digests(self, tenant: str) -> list[bytes]:
        """Return the digests of a tenant's namespaces, open or only on disk."""
        with self._tier.lock:
            found = {
                index.digest: None
                for index in self._tier.namespaces.all()
                if index.value.tenant == tenant
            }
        if self._disk is not None:
            found.update(dict.fromkeys(self._disk.spaces_of(tenant)))
        return list(found)

    def _removed(self, digest: bytes) -> int:
        try:
            return remove_namespace(self._tier, digest, zero=True)
        except UnknownNamespace:  # on disk, but could not be opened
            return self._tier.below.remove_namespace(digest)

    def _wait_for_slots(
        self,
        digests: Sequence[bytes],
        reply: pb.ForgetReply,
        end: float,
        has_left: Callable[[], bool],
    ) -> None:
        """Wait a while for readers and writers of removed pages, which zero their slots."""
        erased = frozenset(digests)
        zero_leftovers(self._tier, erased)
        end = min(end, time.monotonic() + BUSY_S)
        while left := to_zero_count(self._tier, erased):
            if time.monotonic() >= end or has_left() or self._stops():
                reply.left += left
                reply.why.append(f"{left} slots of RAM are still being read or written")
                return
            time.sleep(LOOK_S)

    def _erase_rows(self, disk: DiskTier, digests: Sequence[bytes], reply: pb.ForgetReply) -> None:
        reply.plain_disk = not disk.encrypted
        try:
            dropped = disk.drop_spaces(digests)
        except OSError as error:
            disk.on_error("erasing", error)
            raise Exhausted(
                f"removed, and zeroed in RAM, but the disk fails: {error}; repair it and try again"
            ) from error
        if dropped.left:
            reply.left += dropped.left
            reply.why.append(f"{dropped.left} files of rows still have rows of the tenant")
        if disk.encrypted:
            reply.keys_destroyed = dropped.spaces

    def _close_namespaces(self, digests: Sequence[bytes]) -> int:
        """Forget empty namespaces and miss reasons; return how many still have pages."""
        with self._tier.lock:
            self._tier.miss_reasons.forget()
            return len([digest for digest in digests if not self._tier.namespaces.close(digest)])


def removal_of(removal: bytes, digest: bytes) -> bytes:
    """Return a namespace's removal name, derived from the tenant's; empty without one."""
    return hashlib.sha256(removal + digest).digest()[:REMOVAL_NBYTES] if removal else b""
