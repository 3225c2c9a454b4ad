"""A replay with events that affect the nodes, recorded second by second.

A client error is counted and treated as a miss, so that the replay continues as an engine would.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from kvstore.client import Client
from kvstore.errors import KVStoreError
from kvstore.keys import Namespace
from kvstore.results import LookupResult, PutOutcome
from kvstore.tools.replay import ReplayReport, replay
from kvstore.tools.trace import TraceRequest

Result = TypeVar("Result")
SLEEP_S = 0.01
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Event:
    """An action during the replay.

    `action` runs in a thread when the share `at` of the requests is done and the previous event has
    ended.
    """

    at: float
    name: str
    action: Callable[[], object]


@dataclass
class Second:
    """Pages, and the bytes of pages that were stored or loaded, in one second."""

    asked: int = 0
    hit: int = 0
    nbytes: int = 0
    errors: int = 0


class Trial:
    """One replay, started by `run`.

    `errors`: counts by error message. `found`: pages found by each lookup. `late_s`: the largest
    delay of a call beyond its deadline. `lag_s`: the largest delay of a thread that only sleeps,
    which measures this machine. `events`: the second in which each event began.
    """

    def __init__(
        self,
        client: Client,
        namespace: Namespace,
        events: Sequence[Event] = (),
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """`tick` is called after each request."""
        self.errors: Counter[str] = Counter()
        self.found: list[int] = []
        self.late_s = -math.inf
        self.lag_s = 0.0
        self.seconds: list[Second] = []
        self.events: list[tuple[int, str]] = []
        self._client = client
        self._namespace = namespace
        self._ahead = sorted(events, key=lambda event: event.at)
        self._tick = tick
        self._beside = ThreadPoolExecutor(1)
        self._under_way: list[Future[None]] = []
        self._totals = (0, 0, 0, 0)

    def run(self, requests: Sequence[TraceRequest]) -> ReplayReport:
        """Run the replay; raises what an event's action raised."""
        self._start = time.monotonic()
        done = threading.Event()
        with self._beside, ThreadPoolExecutor(1) as sleeper:
            sleeper.submit(self._sleep, done)
            try:
                report = replay(
                    cast(Client, self),
                    requests,
                    self._namespace,
                    None,
                    lambda report: self._note(report, len(requests)),
                )
            finally:
                done.set()
        for future in self._under_way:
            future.result()
        return report

    # ---- the client that the replay uses ----------------------------------------------

    @property
    def wire_name(self) -> str:
        return self._client.wire_name

    def lookup(self, namespace: Namespace, prefix_hashes: list[bytes]) -> LookupResult:
        nothing = LookupResult(0, (False,) * len(prefix_hashes))
        found = self._asked(lambda: self._client.lookup(namespace, prefix_hashes), nothing)
        self.found.append(sum(found.present))
        return found

    def get(
        self,
        namespace: Namespace,
        prefix_hashes: list[bytes],
        buffers: list[bytearray],
        prefix: bool,
    ) -> list[bool]:
        nothing = [False] * len(prefix_hashes)
        return self._asked(
            lambda: self._client.get(namespace, prefix_hashes, buffers, prefix=prefix), nothing
        )

    def put(
        self, namespace: Namespace, prefix_hashes: list[bytes], pages: list[Any]
    ) -> list[PutOutcome]:
        nothing = [PutOutcome.AWAY] * len(prefix_hashes)
        return self._asked(lambda: self._client.put(namespace, prefix_hashes, pages), nothing)

    def _asked(self, call: Callable[[], Result], instead: Result) -> Result:
        start = time.monotonic()
        try:
            return call()
        except KVStoreError as error:
            self.errors[f"{type(error).__name__}: {error}"] += 1
            return instead
        finally:
            self.late_s = max(self.late_s, time.monotonic() - start - self._client.config.timeout_s)

    @property
    def overdue_s(self) -> float:
        """Return the largest delay of a call beyond its deadline, less the machine's own delay."""
        return max(0.0, self.late_s - self.lag_s)

    # ---- events --------------------------------------------------------------------

    def _sleep(self, done: threading.Event) -> None:
        while not done.is_set():
            start = time.monotonic()
            time.sleep(SLEEP_S)
            self.lag_s = max(self.lag_s, time.monotonic() - start - SLEEP_S)

    def _happen(self, event: Event) -> None:
        self.events.append((int(time.monotonic() - self._start), event.name))
        event.action()

    def _note(self, report: ReplayReport, total: int) -> None:
        self._tick()
        second = int(time.monotonic() - self._start)
        self.seconds += [Second() for _ in range(second + 1 - len(self.seconds))]
        nbytes = report.verified_nbytes + report.pages_stored * report.page_nbytes
        totals = (report.pages_asked, report.pages_hit, nbytes, self.errors.total())
        asked, hit, moved, errors = (
            new - old for new, old in zip(totals, self._totals, strict=True)
        )
        self._totals = totals
        now = self.seconds[second]
        now.asked, now.hit, now.nbytes, now.errors = (
            now.asked + asked,
            now.hit + hit,
            now.nbytes + moved,
            now.errors + errors,
        )
        while self._ahead and report.requests >= self._ahead[0].at * total:
            self._under_way.append(self._beside.submit(self._happen, self._ahead.pop(0)))


def plot(values: Sequence[float | None], highest: float) -> str:
    """Return a bar for each value, from 0 to `highest`, and a blank for None."""
    top = len(BARS) - 1
    return "".join(
        " " if some is None else BARS[min(top, round(some / (highest or 1) * top))]
        for some in values
    )
