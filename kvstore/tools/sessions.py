"""Say what a session's client could tell the store, and simulate what the store makes of it.

A trace's requests may name their session, and the one after which it is over (`ended`). From that
the client of a session knows, at each request, only what has happened:

    after a request   retain its chain for PAUSES times the mean of the session's own pauses so far;
                      of all sessions' before it has one, and FIRST_PAUSE_MS before anybody has one
    after the last    the session is over: its own pages go before all others

It does not know when, or whether, the next request comes. `Simulated` is a node with one page size
(node/memory/pools.py): exact LRU in classes, a request's pages aged tail first.
"""

import heapq
import itertools
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvstore.tools.trace import SYSTEM_PROMPT_PAGES, TraceRequest

PAUSES = 2.0
FIRST_PAUSE_MS = 60_000.0
RAISED_SHARE = 0.5  # as node/memory/classes.py
LOW, NORMAL, LAPSED, HIGH = range(4)
AGENTS = 48  # at a time
TURNS, PAUSE_MS, NEXT_MS = 7.0, 8000.0, 10_000.0  # medians, and the mean until another one begins


def agents(count: int, seed: int = 1, at_a_time: int = AGENTS) -> list[TraceRequest]:
    """Generate requests of agents that call tools: each turn has all pages of the one before.

    An agent has a pace of its own (its pauses vary around it), a few turns or many, and one of a
    few system prompts. When it has finished, another one begins.
    """
    chance, fresh = random.Random(seed), itertools.count()
    prompts = [tuple(itertools.islice(fresh, pages)) for pages in SYSTEM_PROMPT_PAGES]
    names = itertools.count()
    requests: list[TraceRequest] = []
    # (time, session, turns left, median pause, chain)
    waiting: list[tuple[float, int, int, float, tuple[int, ...]]] = []

    def begin(at_ms: float) -> None:
        turns = max(1, int(chance.lognormvariate(math.log(TURNS), 0.8)))
        pause_ms = chance.lognormvariate(math.log(PAUSE_MS), 0.8)
        task = tuple(itertools.islice(fresh, chance.randint(1, 12)))
        chain = chance.choice(prompts) + task
        heapq.heappush(waiting, (at_ms, next(names), turns, pause_ms, chain))

    for _ in range(at_a_time):
        begin(chance.uniform(0, FIRST_PAUSE_MS))
    while len(requests) < count:
        at_ms, name, turns, pause_ms, chain = heapq.heappop(waiting)
        over = turns == 1
        requests.append(
            TraceRequest(at_ms, len(chain) * 512, 128, chain, session=str(name), ended=over)
        )
        if over:
            begin(at_ms + chance.expovariate(1 / NEXT_MS))
            continue
        next_ms = at_ms + chance.lognormvariate(math.log(pause_ms), 0.7)
        chain += tuple(itertools.islice(fresh, chance.randint(1, 6)))
        heapq.heappush(waiting, (next_ms, name, turns - 1, pause_ms, chain))
    return requests


def with_sessions(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Name the sessions of a trace without them.

    A request that has all pages of an earlier one continues its session. Nothing says that a
    session is over.
    """
    newest: dict[int, str] = {}  # by the last page of a session's chain
    names = itertools.count()
    for request in requests:
        ids = request.hash_ids
        if not request.session and ids:
            last = next((page for page in reversed(ids) if page in newest), None)
            name = newest.pop(last) if last is not None else str(next(names))
            newest[ids[-1]] = name
            request = request._replace(session=name)
        yield request


class Told(NamedTuple):
    """Say what a client tells after a request: its chain's time, or that the session is over."""

    ttl_ms: float
    over: bool = False


class SessionClients:
    """The clients of a trace's sessions, and what they have seen."""

    def __init__(self) -> None:
        self._last_ms: dict[str, float] = {}
        self._pauses: dict[str, tuple[float, int]] = {}  # their sum and number
        self._all = (0.0, 0)

    def after(self, request: TraceRequest) -> Told | None:
        """Return what the client tells after a request; None for one without a session."""
        name, now_ms = request.session, request.timestamp_ms
        if not name:
            return None
        if name in self._last_ms:
            pause_ms = now_ms - self._last_ms[name]
            total, count = self._pauses.get(name, (0.0, 0))
            self._pauses[name] = (total + pause_ms, count + 1)
            self._all = (self._all[0] + pause_ms, self._all[1] + 1)
        if request.ended:
            self._last_ms.pop(name, None)
            self._pauses.pop(name, None)
            return Told(0.0, over=True)
        self._last_ms[name] = now_ms
        total, count = self._pauses.get(name, self._all)
        return Told(PAUSES * (total / count if count else FIRST_PAUSE_MS))


class Simulated:
    """A store of so many pages that obeys hints."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._classes: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(4)]
        self._rank: dict[int, int] = {}
        self._used: dict[int, int] = {}  # number of the last use
        self._uses = itertools.count()
        self._ends: list[tuple[float, int, int]] = []
        self._end: dict[int, float] = {}  # of a page in another class
        self._owner: dict[int, str] = {}  # empty: several sessions

    def use(self, request: TraceRequest) -> int:
        """Look up and store a request's pages; return the length of its leading run of hits."""
        self._end_classes(request.timestamp_ms)
        ids, ranks = request.hash_ids, self._rank
        hits = sum(1 for _ in itertools.takewhile(ranks.__contains__, ids))
        for page in ids:  # none of its own is evicted for another one
            if page in ranks:
                del self._classes[ranks[page]][page]
        for page in ids:
            if page not in ranks and (len(ranks) < self._capacity or self._evict()):
                ranks[page] = NORMAL
        for page in reversed(ids):
            if page in ranks:
                self._classes[ranks[page]][page] = None
                self._used[page] = next(self._uses)
            if self._owner.setdefault(page, request.session) != request.session:
                self._owner[page] = ""
        return hits

    def _evict(self) -> bool:
        low, normal, lapsed, high = self._classes
        by_age = sorted(
            filter(None, (normal, lapsed)), key=lambda some: self._used[next(iter(some))]
        )
        for pages in (low, *by_age, high):
            if pages:
                page, _ = pages.popitem(last=False)
                del self._rank[page], self._used[page]
                self._end.pop(page, None)
                return True
        return False

    def _end_classes(self, now_ms: float) -> None:
        while self._ends and self._ends[0][0] <= now_ms:
            end_ms, _, page = heapq.heappop(self._ends)
            if self._end.get(page) == end_ms:
                del self._end[page]
                self._move(page, LAPSED)

    def _move(self, page: int, rank: int) -> None:
        del self._classes[self._rank[page]][page]
        self._rank[page] = rank
        self._classes[rank][page] = None

    def tell(self, request: TraceRequest, told: Told) -> None:
        """Obey what the client tells after the request."""
        moving: list[int] = []
        raised, most = len(self._classes[HIGH]), int(RAISED_SHARE * self._capacity)
        for page in request.hash_ids:
            if page not in self._rank:
                continue
            is_high = self._rank[page] == HIGH
            if told.over:
                if self._owner[page] == request.session:
                    self._end[page] = math.inf
                    moving.append(page)
            elif is_high or raised < most:
                raised += not is_high
                end_ms = request.timestamp_ms + told.ttl_ms
                self._end[page] = max(end_ms, self._end.get(page, 0.0) if is_high else 0.0)
                moving.append(page)
        for page in reversed(moving):
            self._move(page, LOW if told.over else HIGH)
            if not told.over:
                heapq.heappush(self._ends, (self._end[page], next(self._uses), page))


def hit_rates(requests: Sequence[TraceRequest], capacity: int) -> tuple[float, float]:
    """Return the simulated hit rates of a store of so many pages, without and with hints."""
    return hit_rate(requests, capacity, hinted=False), hit_rate(requests, capacity, hinted=True)


def hit_rate(requests: Iterable[TraceRequest], capacity: int, hinted: bool) -> float:
    """Return the simulated hit rate of a store of so many pages."""
    store, clients, counts = Simulated(capacity), SessionClients(), Counter[str]()
    for request in requests:
        hits = store.use(request)
        if not request.stored:
            counts["asked"] += len(request.hash_ids)
            counts["hit"] += hits
        if hinted and (told := clients.after(request)) is not None:
            store.tell(request, told)
    return counts["hit"] / counts["asked"] if counts["asked"] else 0.0
