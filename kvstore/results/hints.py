"""Define hints: what a client knows about the future of pages, and what became of it."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore.pb import kvstore_pb2 as pb

# As in TensorRT-LLM: 0..100, and what a page without a hint has
PRIORITY_MAX, PRIORITY_DEFAULT, PRIORITY_HIGH = 100, 35, 60
SESSION_NBYTES_MAX = 64
SECONDS_MAX = 1e9


class HintAction(enum.Enum):
    """Enumerate what a hint asks for."""

    NAME = pb.HINT_NAME  # only that the session uses these pages
    RETAIN = pb.HINT_RETAIN
    PIN = pb.HINT_PIN
    PREFETCH = pb.HINT_PREFETCH
    DEMOTE = pb.HINT_DEMOTE
    DELETE = pb.HINT_DELETE


@dataclass(frozen=True)
class Hint:
    """Tell what a client knows about pages. A store may forget pages all the same.

    `RETAIN` puts them into an eviction class for `ttl_s` seconds, by `priority`: below 35 they are
    evicted before all others of the tenant, from 60 after them, from 85 last. `PIN` is
    `Client.pin`. `PREFETCH` brings a chain into the RAM of the near node. `DEMOTE` takes pages out
    of RAM that the disk has. `DELETE` ends the session: pages go that only it has named, and that
    were stored since it began, `session_age_s` before its first hint.
    """

    action: HintAction
    priority: int = PRIORITY_HIGH
    ttl_s: float = 0.0
    session: str = ""
    session_age_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= PRIORITY_MAX:
            raise InvalidRequest(f"priority {self.priority} is not in 0..{PRIORITY_MAX}")
        if self.action in (HintAction.RETAIN, HintAction.PIN) and not self.ttl_s > 0:
            raise InvalidRequest("a hint to keep pages needs a time, ttl_s")
        if not all(0 <= seconds <= SECONDS_MAX for seconds in (self.ttl_s, self.session_age_s)):
            raise InvalidRequest(f"a hint's time in seconds is not in 0..{SECONDS_MAX:g}")
        if self.action is HintAction.DELETE and not self.session:
            raise InvalidRequest("a hint to delete needs a session")
        if len(self.session.encode()) > SESSION_NBYTES_MAX:
            raise InvalidRequest(f"a session's name has at most {SESSION_NBYTES_MAX} bytes")

    def message(self, namespace: bytes, prefix_hashes: Sequence[bytes]) -> pb.HintRequest:
        """Return the request for these pages."""
        return pb.HintRequest(
            namespace=namespace,
            prefix_hashes=prefix_hashes,
            action=self.action.value,
            priority=self.priority,
            ttl_ms=max(int(self.ttl_s > 0), round(self.ttl_s * 1000)),
            session=self.session.encode(),
            session_age_ms=round(self.session_age_s * 1000),
        )


@dataclass(frozen=True)
class HintResult:
    """Count what became of a hint, in pages. `reasons`: why some were clipped or refused.

    Clipped pages follow the hint in part, such as for a shorter time. `deleted`: pages of the
    session that were removed.
    """

    accepted: int = 0
    clipped: int = 0
    refused: int = 0
    reasons: tuple[str, ...] = ()
    deleted: int = 0
