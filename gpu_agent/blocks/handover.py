"""Wait for pages that another engine is saving (prefill-decode disaggregation).

    prefill   request ends --> ticket: the store will have so many tokens of this prompt
    proxy     passes the ticket on with the request
    decode    matched: None, None, ... the last promised block is there, look all up --> load
                        |
                        +--- deadline, or a failed lookup: load what is there, compute the rest

A block that prefill has computed is known to no node until its save begins. So decode asks again
and again, but for one block of each group only, and after pauses that grow with the wait.
"""

import enum
import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from gpu_agent.blocks.groups import BlockGroup, EngineRequest
from gpu_agent.blocks.lookups import Lookups, Question
from kvstore.keys import Namespace
from kvstore.log_rate import LogRate

log = logging.getLogger(__name__)
log.addFilter(LogRate())

VERSION = 1  # of a ticket
TOKENS_MAX = 1 << 32
DIGEST_NBYTES = 16  # of a digest in a ticket
# The pause between two probes grows with the wait so far. Each request that waits lengthens it,
# since a probe costs the engine 50 us.
PAUSE_S = 0.005  # at first
PAUSE_SHARE = 16  # then the wait divided by this
PAUSE_S_MAX = 0.05
PAUSE_EACH_S = 0.001  # at least, for each request that waits
WAITING_MAX = 256  # requests that wait at a time; further ones do not
# The store may refuse what prefill saves, and answer lookups. After so many waits in vain, one
# after the other, requests wait this share of the time, but for one in the time of so many waits.
# Not shorter: the tickets may be one client's bad ones, and most promises are kept by then.
VAIN_MAX = 3
SHORT_WAIT = 1 / 8
REST_WAITS = 10


class Ticket(NamedTuple):
    """A promise to save the first `tokens` of a prompt.

    `store`: digest of the namespaces, epoch included. `prompt`: digest of the last block's key,
    which names all tokens up to it.
    """

    tokens: int
    store: str
    prompt: str

    def fields(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return {"v": VERSION, **self._asdict()}


def read_ticket(fields: Any) -> Ticket:
    """Return the ticket with these fields. Raises ValueError.

    They come from a client, so only sizes and kinds are looked at, and the error shows none.
    """
    if not isinstance(fields, Mapping):
        raise ValueError("it is no object")
    if fields.get("v") != VERSION:
        raise ValueError(f"its version is not {VERSION}")
    tokens = fields.get("tokens")
    if type(tokens) is not int or not 0 <= tokens <= TOKENS_MAX:
        raise ValueError(f"its tokens are no number in 0..{TOKENS_MAX}")
    return Ticket(tokens, _digest(fields, "store"), _digest(fields, "prompt"))


def _digest(fields: Mapping[Any, Any], name: str) -> str:
    digest = fields.get(name)
    if not isinstance(digest, str) or len(digest) != 2 * DIGEST_NBYTES:
        raise ValueError(f"its {name} is not {2 * DIGEST_NBYTES} hex digits")
    return digest


@dataclass
class HandoverCounts:
    """Count requests with a ticket, those whose promise was not kept in time, and their waits."""

    handovers: int = 0
    handovers_short: int = 0
    handover_wait_seconds: float = 0.0


class Next(enum.Enum):
    """Enumerate what a waiting request does next."""

    WAIT = enum.auto()
    LOOK = enum.auto()  # look all of it up again
    GO = enum.auto()  # go on with what is known


@dataclass
class _Waiting:
    """A request that waits. `probe`: the question for its last promised blocks."""

    goal_tokens: int
    probe: Question
    began_at: float
    wait_s: float
    probed_at: float  # when the last answer came
    probing: bool = False
    rests_until: float = 0.0  # nothing is asked for it before


class Handovers:
    """The handovers of a scheduler, for its thread only.

    `wait_s`: longest wait of a request, from its arrival. `counts`: where to count. `last_tokens`:
    how many tokens at the end of a prompt no hit covers; the others are those of `BlockScheduler`.
    """

    def __init__(
        self,
        lookups: Lookups,
        wait_s: float,
        counts: HandoverCounts,
        groups: Sequence[BlockGroup],
        hash_tokens: int,
        step_tokens: int,
        last_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lookups = lookups
        self._wait_s = wait_s
        self.counts = counts
        self._groups = groups
        self._state_groups = sum(group.is_state for group in groups)
        self._hash_tokens, self._step_tokens = hash_tokens, step_tokens
        self._last_tokens = last_tokens
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}
        self._vain, self._vain_at = 0, -math.inf  # waits in vain, and the end of the last one
        self._rests_until = -math.inf

    def promise(
        self,
        request: EngineRequest,
        shards: Sequence[Sequence[Namespace]],
        states: Collection[tuple[int, int]],
        gone: Mapping[int, int] = MappingProxyType({}),
    ) -> Ticket | None:
        """Return a ticket for the prompt of a request whose blocks are being saved, if any are.

        `states`: its recurrent states that are being saved, as (end in tokens, group). A prefix
        ends with one of each group. `gone`: as in `TrackedRequest`; they may never be saved.
        """
        tokens = min(request.num_prompt_tokens, request.num_computed_tokens)
        tokens = tokens // self._step_tokens * self._step_tokens
        if self._state_groups:
            ends = Counter(end for end, _ in states if end <= tokens)
            tokens = max((end for end in ends if ends[end] == self._state_groups), default=0)
        if not tokens or any(self._groups[n].first_block(tokens) < end for n, end in gone.items()):
            return None
        return Ticket(tokens, _store_digest(shards), self._prompt_digest(request, tokens))

    def expect(
        self, request: EngineRequest, ticket: Ticket, shards: Sequence[Sequence[Namespace]]
    ) -> None:
        """Let a new request wait for what its ticket promises, if that is of use to it."""
        why = self._mismatch(request, ticket, shards)
        if why:
            log.warning("request %s does not wait for its handover: %s", request.request_id, why)
            return
        goal = min(ticket.tokens, request.num_tokens - self._last_tokens)
        goal = goal // self._step_tokens * self._step_tokens
        if goal <= 0 or not self._wait_s or (self._state_groups and goal != ticket.tokens):
            return  # an earlier end has no state
        if len(self._waiting) >= WAITING_MAX:
            log.warning("%d requests wait for handovers; this one does not", WAITING_MAX)
            return
        probe = []
        for group, namespaces in zip(self._groups, shards, strict=True):
            blocks = goal // group.block_tokens
            last = range(max(0, blocks - 1), blocks)
            keys = group.keys_of(request.block_hashes, self._hash_tokens, last)
            probe.append((namespaces, keys))
        now, wait_s = self._clock(), self._wait_s
        if now < self._rests_until:
            wait_s *= SHORT_WAIT
        elif self._vain >= VAIN_MAX:
            self._rests_until = now + REST_WAITS * wait_s
        self._waiting[request.request_id] = _Waiting(goal, probe, now, wait_s, now)
        self.counts.handovers += 1

    def _mismatch(
        self, request: EngineRequest, ticket: Ticket, shards: Sequence[Sequence[Namespace]]
    ) -> str:
        """Return why a ticket promises nothing for a request; empty if it does."""
        if ticket.store != _store_digest(shards):
            return (
                "its ticket is from an engine with other namespaces; compare them in both logs "
                "(weights, layout, epoch, shards)"
            )
        if (
            ticket.tokens % self._step_tokens
            or ticket.tokens > request.num_prompt_tokens
            or ticket.tokens > len(request.block_hashes) * self._hash_tokens
            or (ticket.tokens and ticket.prompt != self._prompt_digest(request, ticket.tokens))
        ):
            return "its ticket is for another prompt"
        return ""

    def _prompt_digest(self, request: EngineRequest, tokens: int) -> str:
        """Return the digest of the hash of the prompt's first `tokens` tokens."""
        key = request.block_hashes[tokens // self._hash_tokens - 1]
        return hashlib.sha256(key).digest()[:DIGEST_NBYTES].hex()

    def rests(self, request_id: str) -> bool:
        """Return whether nothing new can be known of what a request waits for."""
        waiting = self._waiting.get(request_id)
        return waiting is not None and self._clock() < waiting.rests_until

    def goal(self, request_id: str) -> int:
        """Return how many tokens a request waits for; 0 if it does not wait."""
        waiting = self._waiting.get(request_id)
        return waiting.goal_tokens if waiting else 0

    def next(self, request_id: str, tokens: int) -> Next:
        """Return what a request does next that could have so many of its tokens now."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return Next.GO
        now, probe_id = self._clock(), _probe_id(request_id)
        if tokens >= waiting.goal_tokens:
            self._end_wait(request_id, now)
            self._vain, self._rests_until = 0, -math.inf
            return Next.GO
        if self._lookups.failed(request_id) or (
            waiting.probing and self._lookups.failed(probe_id)
        ):  # a store that does not answer has nothing to wait for
            self._end_wait(request_id, now, "the store did not answer")
            return Next.GO
        if now >= waiting.began_at + waiting.wait_s:
            hangs = waiting.probing and self._lookups.answer(probe_id) is None
            if waiting.began_at >= self._vain_at:  # of waits at a time, one counts
                self._vain, self._vain_at = self._vain + 1, now
            self._end_wait(request_id, now, f"{waiting.wait_s:g} s were over")
            return Next.GO if hangs else Next.LOOK  # no second wait for a store that hangs
        if waiting.probing:
            found = self._lookups.answer(probe_id)
            if found is None:
                return Next.WAIT
            waiting.probing, waiting.probed_at = False, now
            if all(map(all, found)):
                return Next.LOOK
        pause_s = min(max(PAUSE_S, (now - waiting.began_at) / PAUSE_SHARE), PAUSE_S_MAX)
        due_at = waiting.probed_at + max(pause_s, PAUSE_EACH_S * len(self._waiting))
        if now >= due_at:
            self._lookups.ask(probe_id, waiting.probe)
            waiting.probing = True
        else:
            waiting.rests_until = min(due_at, waiting.began_at + waiting.wait_s)
        return Next.WAIT

    def drop(self, request_id: str) -> None:
        """Let a request wait no more."""
        if self._waiting.pop(request_id, None):
            self._lookups.drop(_probe_id(request_id))

    def drop_all(self) -> None:
        """Let no request wait any more."""
        for request_id in list(self._waiting):
            self.drop(request_id)

    def _end_wait(self, request_id: str, now: float, why: str = "") -> None:
        waiting = self._waiting[request_id]
        self.drop(request_id)
        self.counts.handover_wait_seconds += now - waiting.began_at
        if why:
            self.counts.handovers_short += 1
            log.warning(
                "request %s goes on without all of the %d tokens that its ticket promises: %s",
                request_id,
                waiting.goal_tokens,
                why,
            )


def _probe_id(request_id: str) -> str:
    return f"{request_id}\0handover"  # no HTTP header can hold such an id


def _store_digest(shards: Sequence[Sequence[Namespace]]) -> str:
    """Return the digest of the groups' namespaces, whatever the order of their shards."""
    whole = hashlib.sha256(b"kvstore-handover-1\0")
    for group in shards:
        whole.update(len(group).to_bytes(4, "big"))
        for digest in sorted(namespace.digest for namespace in group):
            whole.update(digest)
    return whole.digest()[:DIGEST_NBYTES].hex()
