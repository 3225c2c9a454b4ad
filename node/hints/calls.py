"""Serve the request Hint."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.errors import Exhausted, InvalidRequest
from kvstore.keys import check_prefix_hashes
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results.hints import PRIORITY_DEFAULT, PRIORITY_HIGH, PRIORITY_MAX, SESSION_NBYTES_MAX
from node.config import NodeConfig
from node.hints.prefetch import Prefetcher
from node.hints.session_pages import SessionPages
from node.memory.classes import HIGH, HIGHEST, LOW, NORMAL
from node.memory.hinting import ACCEPTED, Answer, Verdict, delete, demote, retain, stored_ms
from node.memory.tier import RamTier

# Least priority of each class
LEAST = ((85, HIGHEST), (PRIORITY_HIGH, HIGH), (PRIORITY_DEFAULT, NORMAL), (0, LOW))

FULL = Answer(Verdict.REFUSED, "too many hints to prefetch wait")
SHORTER = "the time is longer than pin_ttl_ms_max, which is taken instead"


def hint_names(kind: Any) -> list[str]:
    """Return the names of an enumeration's values from 1 on, such as `retain`."""
    return [name.removeprefix("HINT_").lower() for name in kind.keys()[1:]]


def ends_session(request: pb.HintRequest) -> bool:
    """Return whether a hint gives a session's pages away: they are not used again."""
    return request.action == pb.HINT_RETAIN and request.priority < PRIORITY_DEFAULT


class Hints:
    """Obey hints. Thread-safe."""

    def __init__(self, config: NodeConfig, tier: RamTier) -> None:
        self._config = config
        self._tier = tier
        self.sessions = SessionPages()
        self.prefetcher = Prefetcher(tier)
        self._lock = threading.Lock()
        self._counts: Counter[tuple[int, int]] = Counter()  # pages by action and verdict
        self._handlers: dict[int, Callable[[pb.HintRequest], list[Answer]]] = {
            pb.HINT_NAME: lambda request: [ACCEPTED] * len(request.prefix_hashes),
            pb.HINT_RETAIN: self._retain,
            pb.HINT_PIN: self._pin,
            pb.HINT_DEMOTE: self._demote,
        }

    def close(self) -> None:
        """End what runs."""
        self.prefetcher.close()

    def hint(
        self, request: pb.HintRequest, peer: str, charge: Callable[[int], None]
    ) -> pb.HintReply:
        """Obey a hint; return what became of it for each key.

        `charge` is told the bytes that are fetched for it. Raises InvalidRequest.
        """
        self._check(request)
        tenant = self._tier.namespace(request.namespace).value.tenant
        if request.action == pb.HINT_DELETE:
            return self._delete(request, tenant)
        if request.session:
            self._name(request, tenant)
        if request.action == pb.HINT_PREFETCH:
            hashes = request.prefix_hashes[:]
            added = self.prefetcher.add(peer, request.namespace, hashes, charge)
            answers = [ACCEPTED if added else FULL] * len(hashes)
        else:
            answers = self._handlers[request.action](request)
        return self._reply(request.action, answers)

    def _check(self, request: pb.HintRequest) -> None:
        hashes, action = request.prefix_hashes, request.action
        if action == pb.HINT_DELETE:
            if hashes or not request.session:
                raise InvalidRequest("a hint to delete names a session and no keys")
        elif action in self._handlers or action == pb.HINT_PREFETCH:
            check_prefix_hashes(hashes, self._config.batch_keys_max, distinct=True)
        else:
            raise InvalidRequest(f"this node knows no hint with action {action}")
        if len(request.session) > SESSION_NBYTES_MAX:
            raise InvalidRequest(
                f"the session's name has {len(request.session)} bytes, at most "
                f"{SESSION_NBYTES_MAX} are allowed"
            )
        if request.priority > PRIORITY_MAX:
            raise InvalidRequest(f"priority {request.priority} is not in 0..{PRIORITY_MAX}")
        if action in (pb.HINT_RETAIN, pb.HINT_PIN) and not request.ttl_ms:
            raise InvalidRequest("a hint to keep pages needs a time, ttl_ms")

    def _name(self, request: pb.HintRequest, tenant: str) -> None:
        hashes = request.prefix_hashes[:]
        began_ms = self._tier.clock_ms() - request.session_age_ms
        stored = stored_ms(self._tier, request.namespace, hashes)
        self.sessions.name(tenant, request.namespace, request.session, began_ms, hashes, stored)

    def _owns(self, request: pb.HintRequest) -> Callable[[bytes], bool]:
        digest, session = request.namespace, request.session
        return lambda prefix_hash: self.sessions.owns(digest, session, prefix_hash)

    def _ttl_ms(self, request: pb.HintRequest) -> int:
        return min(int(request.ttl_ms), self._config.pin_ttl_ms_max)

    def _clipped(self, request: pb.HintRequest, answers: list[Answer]) -> list[Answer]:
        if request.ttl_ms <= self._config.pin_ttl_ms_max:
            return answers
        shorter = Answer(Verdict.CLIPPED, SHORTER)
        return [shorter if answer is ACCEPTED else answer for answer in answers]

    def _retain(self, request: pb.HintRequest) -> list[Answer]:
        rank = next(rank for least, rank in LEAST if request.priority >= least)
        answers = retain(
            self._tier,
            request.namespace,
            request.prefix_hashes[:],
            rank,
            self._ttl_ms(request),
            request.session,
            self._owns(request),
        )
        return self._clipped(request, answers)

    def _pin(self, request: pb.HintRequest) -> list[Answer]:
        hashes = request.prefix_hashes[:]
        try:
            pinned = self._tier.pin(request.namespace, hashes, self._ttl_ms(request))
        except Exhausted as error:
            return [Answer(Verdict.REFUSED, str(error))] * len(hashes)
        absent = Answer(Verdict.REFUSED, "the page is not here")
        return self._clipped(request, [ACCEPTED if done else absent for done in pinned])

    def _demote(self, request: pb.HintRequest) -> list[Answer]:
        hashes = request.prefix_hashes[:]
        return demote(self._tier, request.namespace, hashes, request.session, self._owns(request))

    def _delete(self, request: pb.HintRequest, tenant: str) -> pb.HintReply:
        digest, most = request.namespace, self._config.batch_keys_max
        hashes, more = self.sessions.take(tenant, digest, request.session, most)
        deleted = delete(self._tier, digest, hashes, request.session)
        self._count(request.action, [ACCEPTED] * sum(deleted.values()))
        return pb.HintReply(deleted=list(deleted), more=more)

    def _reply(self, action: int, answers: Sequence[Answer]) -> pb.HintReply:
        self._count(action, answers)
        reason = next((answer.reason for answer in answers if answer.reason), "")
        verdicts: Any = [answer.verdict for answer in answers]
        return pb.HintReply(verdicts=verdicts, reason=reason)

    def _count(self, action: int, answers: Sequence[Answer]) -> None:
        with self._lock:
            for answer, count in Counter(answer.verdict for answer in answers).items():
                self._counts[action, answer] += count

    def status(self) -> pb.HintStatus:
        """Return what became of all hints, and what is remembered for them."""
        with self._lock:
            counts: Any = sorted(self._counts.items())
        return pb.HintStatus(
            counts=[
                pb.HintCount(
                    action=hint_names(pb.HintAction)[action - 1],
                    verdict=hint_names(pb.HintVerdict)[verdict - 1],
                    pages=pages,
                )
                for (action, verdict), pages in counts
            ],
            retained_count=len(self._tier.eviction.order.kept),
            session_count=self.sessions.session_count,
            session_page_count=self.sessions.page_count,
            sessions_forgotten=self.sessions.forgotten_count,
            prefetching_count=self.prefetcher.waiting_count,
        )
