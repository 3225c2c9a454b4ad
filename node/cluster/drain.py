"""Drain a member: it receives no new pages, still serves, and hands its pages to their owners.

The other members fetch them (`rebalance.py`), because each of them knows its own free space. This
module follows the progress: a page counts as moved when one of its owners has it.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.cluster.calls import keyed_replies
from kvstore.cluster.view import State, View
from kvstore.deadline import Deadline
from kvstore.errors import KVStoreError, UnknownNamespace
from kvstore.keys import Namespace
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.channel import NodeConnection
from node.cluster.membership import Membership
from node.cluster.remote_pages import PeerChannels
from node.memory.inventory import Inventory
from node.memory.tier import RamTier

log = logging.getLogger(__name__)

PAGES = 4096  # pages checked together
CALL_S = 10.0


@dataclass(frozen=True)
class DrainTimeouts:
    """Intervals of a drain's progress checks, and when it gives up.

    In seconds.
    """

    pass_pause_s: float = 1.0
    patience_s: float = 30.0  # without progress; the remaining pages then stay here


TIMEOUTS = DrainTimeouts()


class Progress(NamedTuple):
    """Progress in pages; `over`: all are moved, or there was no progress for a while."""

    over: bool = False
    left: int = 0
    handed: int = 0


class Drain:
    """The drain of this member. Thread-safe."""

    def __init__(
        self,
        membership: Membership,
        channels: PeerChannels,
        tier: RamTier,
        timeouts: DrainTimeouts = TIMEOUTS,
    ) -> None:
        self.timeouts = timeouts
        self.on_over: Callable[[Progress], None] = lambda progress: None
        self._membership = membership
        self._channels = channels
        self._tier = tier
        self._inventory = Inventory(tier)
        self._lock = threading.Lock()
        self._over = threading.Event()  # of the current thread
        self._thread: threading.Thread | None = None
        self._progress = Progress()

    def begin(self) -> Progress:
        """Begin to drain, or report the progress.

        The finished state is reported once; the next call checks again. Raises the errors of
        `Membership.announce`.
        """
        with self._lock:
            if self._thread is None:
                self._membership.announce(State.DRAINING)
                self._over = threading.Event()
                self._progress = self._progress._replace(over=False)
                self._thread = threading.Thread(
                    target=self._run, args=(self._over,), name="drain", daemon=True
                )
                self._thread.start()
            if self._progress.over:
                self._thread = None
            return self._progress

    def end(self) -> Progress:
        """Stop draining: the member serves again."""
        self.stop()
        self._membership.announce(State.SERVING)
        return self._progress

    def stop(self) -> None:
        """Stop the thread without waiting: a running call ends by its deadline and is ignored."""
        with self._lock:
            self._thread = None
            self._over.set()

    def _run(self, over: threading.Event) -> None:
        least, since = -1, time.monotonic()
        while not over.wait(self.timeouts.pass_pause_s):
            view = self._membership.view
            own = view.by_id.get(self._membership.member) if view else None
            if view is None or own is None or own.state is not State.DRAINING:
                # not all members know yet, or etcd lost this member and will register it again in a
                # moment
                continue
            try:
                left, handed = self._count_pages(view, over)
            except UnknownNamespace:  # it was removed meanwhile
                continue
            except Exception:  # end of the thread: without this, callers would wait for ever
                log.exception("the progress of the drain is unknown; it is checked again")
                continue
            if over.is_set():
                return
            if least < 0 or left < least:
                least, since = left, time.monotonic()
            enough = not left or time.monotonic() - since > self.timeouts.patience_s
            self._progress = Progress(enough, left, handed)
            if enough:
                log.info("drained: %d pages are with their owners, %d are not", handed, left)
                self.on_over(self._progress)
                return

    # ---- progress ------------------------------------------------------------------------------

    def _count_pages(self, view: View, over: threading.Event) -> tuple[int, int]:
        """Count the pages that no owner has, and those that one has.

        A member that does not answer is not asked again in this pass.
        """
        counts, away = [0, 0], set[str]()
        with self._tier.lock:
            spaces = self._tier.namespaces.all()
        for space in spaces:
            after = b""
            while not over.is_set():
                infos, after = self._inventory.list_pages(space.digest, b"", after, PAGES)
                hashes = [info.prefix_hash for info in infos]
                handed = self._handed(view, space.digest, hashes, over, away)
                counts[0] += len(hashes) - len(handed)
                counts[1] += len(handed)
                if not after:
                    break
        return counts[0], counts[1]

    def _handed(
        self,
        view: View,
        digest: bytes,
        prefix_hashes: list[bytes],
        over: threading.Event,
        away: set[str],
    ) -> set[bytes]:
        """Return the pages that one of their owners has."""
        wanted: dict[str, list[bytes]] = {}
        for prefix_hash, owners in zip(
            prefix_hashes, view.owners.owners(digest, prefix_hashes), strict=True
        ):
            for owner in owners:
                wanted.setdefault(owner, []).append(prefix_hash)
        namespace, handed = self._tier.namespace(digest).value, set[bytes]()
        for owner, some in wanted.items():
            if owner not in away and not over.is_set():
                try:
                    handed.update(self._present_at(owner, namespace, some))
                except KVStoreError as error:
                    log.info("%s does not list its pages: %s", owner, error)
                    away.add(owner)
        return handed

    def _present_at(
        self, member: str, namespace: Namespace, prefix_hashes: list[bytes]
    ) -> list[bytes]:
        """Return which of the pages a member has as its own: copies are on no disk."""

        def call(connection: NodeConnection, limit: Deadline) -> list[Any]:
            return keyed_replies(
                connection, "stat", pb.StatRequest, namespace, prefix_hashes, limit
            )

        replies = self._channels.channel(member).run(call, namespace, Deadline(CALL_S))
        return [
            page.prefix_hash
            for reply in replies
            for page in reply.pages
            if page.present and not page.is_copy
        ]
