"""Forgetting a tenant: what it had is removed, then overwritten, or made unreadable, and looked for.

    remove   its namespaces in RAM and on disk; its pages in the writer's queue and on their way to other members
    RAM      all that no page has is overwritten with zeros: where its pages lay, whenever that was
    disk     its namespaces' rows, and their former versions; then
               encrypted: nothing more, their keys are gone
               plain: all that no page has is overwritten, synced and read back

A put of the tenant that is under way ends without a page. One that begins later is a new page and stays.
"""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Container, Sequence
from typing import Protocol

from kvstore.errors import Exhausted, InvalidRequest, Unavailable, UnknownNamespace
from kvstore.keys import REMOVAL_NBYTES, check_removal
from kvstore.pb import kvstore_pb2 as pb
from node.disk.durability import Durability
from node.disk.tier import DiskTier
from node.disk.wiping import wipe
from node.peers.couriers import Couriers
from node.ram.page import Page
from node.ram.tier import RamTier
from node.ram.wiping import Wiping, close_namespaces

log = logging.getLogger(__name__)

FORGET_S = 60.0
BUSY_S = 10.0  # for slots that are in use, when all others are done


class Waiting(Protocol):
    """Who asks; `gone`: nobody waits for the answer any more."""

    @property
    def gone(self) -> Callable[[], bool]: ...


class Cluster(Protocol):
    """Those who are to do the same; see `node.peers.registry.Registry`."""

    def begin_erasure(self, erasure: bytes) -> None: ...

    def record_removal(self, digest: bytes, removal: bytes, erasure: bytes) -> None: ...


class Erasure:
    """Thread-safe. `view(offset, nbytes)` is the arena's memory, `stops` says whether the node does."""

    def __init__(
        self,
        tier: RamTier,
        disk: DiskTier | None,
        durability: Durability,
        couriers: Couriers,
        view: Callable[[int, int], memoryview],
        stops: Callable[[], bool],
    ) -> None:
        self._tier = tier
        self._disk = disk
        self._durability = durability
        self._couriers = couriers
        self._view = view
        self._stops = stops
        self.cluster: Cluster | None = None  # of a node that is registered

    def forget(self, request: pb.ForgetRequest, caller: Waiting) -> pb.ForgetReply:
        """Raises Exhausted if the disk fails, or there is no time for all of it: what is removed stays so."""
        if not request.tenant:
            raise InvalidRequest("no tenant is named; the namespaces of no tenant are removed one by one")
        check_removal(request.removal)
        end = time.monotonic() + (request.wait_ms / 1000 or FORGET_S)
        if self.cluster is not None:
            self.cluster.begin_erasure(request.removal)
        digests = self._digests(request.tenant)
        pages = sum(map(self._removed, digests))
        if self.cluster is not None:
            for digest in digests:
                self.cluster.record_removal(digest, removal_of(request.removal, digest), request.removal)
        reply = pb.ForgetReply(namespaces=len(digests), pages=pages)
        self._couriers.drop_gone()
        if not request.remove_only:
            self._erase(digests, reply, end, caller.gone)
        return reply

    def catch_up(self, digests: list[bytes]) -> None:
        """Of namespaces that were erased elsewhere, and are removed here. Raises KVStoreError."""
        self._couriers.drop_gone()
        self._erase(digests, pb.ForgetReply(namespaces=len(digests)), math.inf, lambda: False)

    def _erase(self, digests: Sequence[bytes], reply: pb.ForgetReply, end: float, gone: Callable[[], bool]) -> None:
        """What was removed."""

        def check() -> None:
            if self._stops():
                raise Unavailable("this node is draining; what it had of the tenant is removed, but not overwritten")
            if gone():
                raise Unavailable("the caller is gone")
            if time.monotonic() >= end:
                raise Exhausted("not all could be overwritten in the time of the call; ask again, with more of it")

        try:
            self._durability.settle()  # pages that waited to be written are let go of
        finally:  # of a disk that is stopped, too
            self._erase_ram(set(digests), reply, check)
        if self._disk is not None:
            self._erase_disk(self._disk, digests, reply, check)
        if open_count := close_namespaces(self._tier, digests):
            log.info("%d namespaces that were erased have new pages", open_count)
        log.warning(
            "namespaces of a tenant were erased: %d with %d pages, %d slots or rows are left",
            reply.namespaces,
            reply.pages,
            reply.left,
        )

    def _digests(self, tenant: str) -> list[bytes]:
        """Of its namespaces that are open, and of those that are only on disk."""
        with self._tier.lock:
            found = {index.digest: None for index in self._tier.namespaces.all() if index.value.tenant == tenant}
        if self._disk is not None:
            found.update(dict.fromkeys(self._disk.spaces_of(tenant)))
        return list(found)

    def _removed(self, digest: bytes) -> int:
        try:
            return self._tier.remove_namespace(digest)
        except UnknownNamespace:  # on disk, but could not be opened
            return self._tier.below.remove_namespace(digest)

    def _erase_ram(self, digests: Container[bytes], reply: pb.ForgetReply, check: Callable[[], None]) -> None:
        def erased(page: Page) -> bool:
            return page.namespace.digest in digests

        wiped = Wiping(self._tier, self._view, erased).run(check, BUSY_S)
        reply.ram_nbytes = wiped.nbytes
        if wiped.left:
            reply.left += wiped.left
            reply.why.append(f"{wiped.left} slots of RAM are still being read or written")

    def _erase_disk(
        self, disk: DiskTier, digests: Sequence[bytes], reply: pb.ForgetReply, check: Callable[[], None]
    ) -> None:
        try:
            dropped = disk.drop_spaces(digests)
            if dropped.left:
                reply.left += dropped.left
                reply.why.append(f"{dropped.left} files of rows still have rows of the tenant")
            if disk.encrypted:
                reply.keys_destroyed = dropped.spaces
                return
            wiped = wipe(disk, check, BUSY_S)
        except OSError as error:
            disk.blame("erasing", error)
            raise Exhausted(
                f"removed and overwritten in RAM, but the disk fails: {error}; mend it, ask again"
            ) from error
        reply.disk_nbytes = wiped.nbytes
        if wiped.left:
            reply.left += wiped.left
            reply.why.append(f"{wiped.left} slots on disk are still being read, or are not zero although overwritten")


def removal_of(removal: bytes, digest: bytes) -> bytes:
    """The name of the removal of one of the namespaces; none if that of the tenant has none."""
    return hashlib.sha256(removal + digest).digest()[:REMOVAL_NBYTES] if removal else b""
