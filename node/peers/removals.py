"""Namespaces that are removed from a whole cluster: each member does it once, also one that was away.

a client's call --> here, and --> etcd --> the others, who were called, too, or were away
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.errors import ConfigError
from kvstore.keys import REMOVAL_NBYTES
from node.peers.etcd import Etcd
from node.peers.identity import REMOVALS_KEPT_S, Identity
from node.peers.roster import Removal, Roster, parse_removed

log = logging.getLogger(__name__)

DONE_MAX = 1 << 12  # removals that are known to be done here
WAITING_MAX = 1 << 10  # that etcd is to be told of
RECORD_S = 1.0  # that a call waits for etcd; what is not recorded by then is when etcd answers
TOUCH_S = 3600.0


@dataclass(frozen=True)
class _Record:
    digest: bytes
    removal: bytes
    erasure: bytes
    written: threading.Event = field(default_factory=threading.Event)


class Removals:
    """`remove` forgets a namespace's pages here; `settle` returns when they stay forgotten after power loss, `erase`
    when nothing is left of those of some namespaces; both may raise KVStoreError. Thread-safe."""

    def __init__(
        self,
        identity: Identity,
        remove: Callable[[bytes], None],
        settle: Callable[[], None],
        erase: Callable[[list[bytes]], None],
    ) -> None:
        self._identity = identity
        self._remove = remove
        self._settle = settle
        self._erase = erase
        self._to_erase = list(identity.to_erase)  # namespaces that are removed here already, in an earlier life perhaps
        self._wake = threading.Condition()
        self._done: OrderedDict[bytes, None] = OrderedDict()  # names of removals
        self._records: list[_Record] = []
        self._heard: list[Removal] = []
        self._number = identity.applied
        self._seen = identity.applied  # number of the newest that was heard of
        self._saved_at = 0.0
        self._closed = False

    def catch_up(self, removals: Sequence[Removal], number: int, anew: bool = False) -> None:
        """Apply missed removals at the start, before requests are served.

        `anew`: etcd was reset while this node was away, so numbers do not tell which removals it missed, and
        all are applied. On KVStoreError or OSError it is unknown how many were applied.
        """
        missed = [some for some in removals if anew or some.number > self._identity.applied]
        for some in missed:
            self._remove(some.digest)
            self._to_erase += [some.digest] if some.erasure else []
        if missed:
            log.info("%d namespaces were removed while this node was away: their pages are gone", len(missed))
            self._settle()
        self._save(number)
        self._seen = max(self._seen, number)

    def record(self, digest: bytes, removal: bytes, erasure: bytes = b"") -> None:
        """This node has done it; the others are to. Waits a moment, so that it is in etcd if that answers; but not for
        each namespace of an erasure, which takes longer by itself."""
        record = _Record(digest, removal or os.urandom(REMOVAL_NBYTES), erasure)
        self._note(record.removal)
        with self._wake:
            if len(self._records) >= WAITING_MAX:
                log.error("the removal of namespace %s is not recorded: etcd is away for too many", digest.hex())
                return
            self._records.append(record)
            self._wake.notify_all()
        if not erasure and not record.written.wait(RECORD_S):
            log.warning("the removal of namespace %s is not in etcd yet; members that are away keep it", digest.hex())

    def begin_erasure(self, erasure: bytes) -> None:
        """This node is asked itself; what it hears of that from others is done."""
        if erasure:
            self._note(erasure)

    @property
    def seen(self) -> int:
        """The number of the newest that was heard of."""
        return self._seen

    def heard(self, removals: Sequence[Removal], number: int) -> None:
        """What etcd has; must not wait."""
        with self._wake:
            fresh = [some for some in removals if some.number > self._seen]
            if fresh:
                self._seen = fresh[-1].number
                self._heard += fresh
                self._wake.notify_all()
            self._number = max(self._number, number)

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def work(self, etcd: Etcd, roster: Roster) -> None:
        """One round, after waiting for something to do. Raises what kept it from being done; it is done again then."""
        with self._wake:
            self._wake.wait_for(lambda: self._closed or self._records or self._heard or self._to_erase, TOUCH_S)
            if self._closed:
                return
            heard, number, records = list(self._heard), self._number, list(self._records)
            to_erase = list(self._to_erase)
        with contextlib.ExitStack() as both:
            both.callback(self._record_all, records, etcd, roster)
            self._apply(heard, number)
        if to_erase:  # what is heard meanwhile waits
            self._erase(to_erase)
            with self._wake:
                del self._to_erase[: len(to_erase)]
            self._save(self._identity.applied)

    def _apply(self, heard: list[Removal], number: int) -> None:
        for some in heard:
            if some.removal not in self._done and some.erasure not in self._done:
                log.info("namespace %s was removed from the cluster", some.digest.hex())
                self._remove(some.digest)
                self._note(some.removal)
                self._to_erase += [some.digest] if some.erasure else []
        if heard:
            self._settle()
        with self._wake:
            del self._heard[: len(heard)]
        if heard or time.monotonic() - self._saved_at >= TOUCH_S:
            self._save(number)

    def _record_all(self, records: list[_Record], etcd: Etcd, roster: Roster) -> None:
        for record in records:
            self._write(record, etcd, roster)
            with self._wake:
                self._records.remove(record)
            record.written.set()

    def _write(self, record: _Record, etcd: Etcd, roster: Roster) -> None:
        """Once for all members that were called: the name of the removal says whether it is there."""
        key, revision = roster.removed_key(record.digest), 0
        removal = record.removal.hex()
        fields = {"removal": removal, "by": self._identity.member}
        if record.erasure:
            fields["erasure"] = record.erasure.hex()
        value = json.dumps(fields).encode()
        lease, _ = etcd.grant(REMOVALS_KEPT_S)
        while True:
            there, _ = etcd.swap(key, value, lease, revision)
            if there is None:
                return
            with contextlib.suppress(ConfigError):
                if there.revision and parse_removed(there.value)[0] == record.removal:
                    break
            revision = there.revision
        etcd.revoke(lease)

    def _note(self, removal: bytes) -> None:
        """This node has done it, or an erasure."""
        with self._wake:
            self._done[removal] = None
            if len(self._done) > DONE_MAX:
                self._done.popitem(last=False)

    def _save(self, number: int) -> None:
        self._identity.save(max(number, self._identity.applied), self._to_erase)
        self._saved_at = time.monotonic()
