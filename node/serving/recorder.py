"""Record requests as a trace while an administrator listens; pages are only numbered.

    lookup, put --- note ---> waiting --- record ---> ids without meaning outside this recording

A page's id is a MAC of its key, of 8 bytes, under a secret that is made when the recording begins
and forgotten when it ends: equal pages have equal ids, and an id reveals neither its prompt, nor
the same page in another recording. Ids are made when they are fetched: a recorded lookup costs an
append, and an attribute access while nothing is recorded.
"""

import hashlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.errors import Exhausted, InvalidRequest, UnknownNamespace
from kvstore.pb import kvstore_pb2 as pb
from node.memory.page import NamespaceIndex

RECORD_MS_MAX = 24 * 3600 * 1000
# Some 50 MiB of keys; more are dropped: 5 s of 100,000 pages a second
WAITING_PAGES_MAX = 1 << 19
REPLY_PAGES_MAX = 1 << 17  # 1 MiB of ids, made in 0.2 s
USE_PAGES = 4  # cost of a use besides, in pages
ABANDONED_S = 60.0  # a recording that is not fetched for so long ends
ID_NBYTES = 8


class _Use(NamedTuple):
    at_s: float
    namespace: bytes
    prefix_hashes: Sequence[bytes]
    stored: bool
    session: bytes
    ended: bool


class _Recording:
    def __init__(self, seconds: float, now: float) -> None:
        self.name = secrets.token_bytes(16)
        self.key = secrets.token_bytes(32)
        self.begin_s, self.end_s = now, now + seconds
        self.asked_s = now
        self.waiting: deque[_Use] = deque()
        self.pages = 0  # of those
        self.dropped = 0

    def is_abandoned(self, now: float) -> bool:
        return now > self.asked_s + ABANDONED_S


class Recorder:
    """The recorder. Thread-safe.

    `on`: check it first. `find`: a namespace by its digest; raises UnknownNamespace.
    """

    def __init__(
        self, find: Callable[[bytes], NamespaceIndex], clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.on = False
        self._find = find
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._recording: _Recording | None = None

    def note(
        self,
        namespace: bytes,
        prefix_hashes: Sequence[bytes],
        stored: bool,
        session: bytes = b"",
        ended: bool = False,
    ) -> None:
        """Record a use of a chain; `stored`: it was used or stored without a lookup.

        `session`: a hint named it, and perhaps said that it has `ended`.
        """
        with self._lock:
            recording, now = self._recording, self._clock_s()
            if recording is None or recording.is_abandoned(now):
                self._recording, self.on = None, False  # with its key, and waiting uses
            elif now > recording.end_s:
                return
            elif recording.pages + len(prefix_hashes) + USE_PAGES > WAITING_PAGES_MAX:
                recording.dropped += 1
            else:
                recording.waiting.append(
                    _Use(now, namespace, prefix_hashes, stored, session, ended)
                )
                recording.pages += len(prefix_hashes) + USE_PAGES

    def record(self, request: pb.RecordRequest, caller: object) -> pb.RecordReply:
        """Begin a recording, or return what was recorded since.

        Raises Exhausted while somebody records.
        """
        if not request.recording:
            return self._begin(request.ms)
        with self._lock:
            recording, now = self._recording, self._clock_s()
            # Later uses may not have been noted
            if recording is not None and recording.is_abandoned(now):
                recording = self._recording = None
                self.on = False
            if recording is None or recording.name != request.recording:
                raise InvalidRequest(
                    "this recording has ended: it was stopped, or not fetched for a minute"
                )
            if request.end:
                # Otherwise uses may come faster than they are fetched
                recording.end_s = min(recording.end_s, now)
            uses = self._take(recording)
            over = not recording.waiting and (request.end or now > recording.end_s)
            if over:
                self._recording, self.on = None, False
        return pb.RecordReply(
            recording=recording.name,
            uses=[
                message for use in uses if (message := self._message(recording, use)) is not None
            ],
            more=bool(recording.waiting),
            dropped=recording.dropped,
            over=over,
        )

    def _begin(self, ms: int) -> pb.RecordReply:
        if not 1 <= ms <= RECORD_MS_MAX:
            raise InvalidRequest(f"ms {ms} is not in 1..{RECORD_MS_MAX}, a day")
        now = self._clock_s()
        with self._lock:
            there = self._recording
            if there is not None and not there.is_abandoned(now):
                raise Exhausted("this node is being recorded already; only one recording at a time")
            self._recording = _Recording(ms / 1000, now)
            self.on = True
            return pb.RecordReply(recording=self._recording.name)

    def _take(self, recording: _Recording) -> list[_Use]:
        """Take, under the lock, as many uses as fit into a reply."""
        uses: list[_Use] = []
        pages, waiting = 0, recording.waiting
        while waiting and pages + len(waiting[0].prefix_hashes) + USE_PAGES <= REPLY_PAGES_MAX:
            uses.append(waiting.popleft())
            pages += len(uses[-1].prefix_hashes) + USE_PAGES
        recording.pages -= pages
        recording.asked_s = self._clock_s()
        return uses

    def _message(self, recording: _Recording, use: _Use) -> pb.RecordedUse | None:
        """Convert a use; None if its namespace was removed meanwhile."""
        try:
            space = self._find(use.namespace)
        except UnknownNamespace:
            return None
        value = space.value
        return pb.RecordedUse(
            at_ms=int(1000 * (use.at_s - recording.begin_s)),
            stored=use.stored,
            page_nbytes=space.page_nbytes,
            # A shard's page has a share of its tokens' KV: so the pages of all shards count each
            # token once.
            page_tokens=value.layout.page_tokens / (value.tp_size * value.pp_size * value.cp_size),
            pages=[
                _id(recording.key, use.namespace + prefix_hash) for prefix_hash in use.prefix_hashes
            ],
            # of all ranks' namespaces the same
            session=_id(recording.key, value.tenant.encode() + b"\0" + use.session)
            if use.session
            else 0,
            ended=use.ended,
        )


def _id(key: bytes, page: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(page, key=key, digest_size=ID_NBYTES).digest(), "little")
