"""A call's keys asked of their members, and of the next ones before the first have answered. Pure but for the clock and
the queue: who asks, and in which thread, is given.

    key 0    a ......................... too late
             |- hedge_s -> b ... answers: the key has its answer, and a is left to itself

Who is left to itself goes on until its deadline, in what was made for it alone: nobody reads what it writes.
"""

import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

from kvstore.cluster.spread import ELSEWHERE, FIRST_SHARE, Answer, Ask
from kvstore.deadline import Deadline
from kvstore.errors import DeadlineExceeded, KVStoreError

Begin = Callable[[Callable[[], None]], bool]  # in a thread; False: there is none


@dataclass(eq=False)
class _Asked:
    """Of one member at a time. `until`: when the next members are asked too; None: they are."""

    member: str
    places: list[int]
    until: float | None


def hedged(
    routes: Sequence[Sequence[str]],
    ask: Ask[Answer],
    begin: Begin,
    lacks: Callable[[Answer], bool],
    absent: Answer,
    deadline: Deadline,
    hedge_s: float,
) -> list[Answer]:
    """An answer per key, as of `spread`; a member that has not answered after `hedge_s` is one that lacks all that it
    was asked for, and may still answer. What `ask` returns must be its own: it may run on when this has returned."""
    race = _Race(routes, ask, begin, lacks, absent, deadline, hedge_s)
    race.ask_next(range(len(routes)))
    while race.open:
        race.step()
    return race.ended()


class _Race(Generic[Answer]):
    def __init__(
        self,
        routes: Sequence[Sequence[str]],
        ask: Ask[Answer],
        begin: Begin,
        lacks: Callable[[Answer], bool],
        absent: Answer,
        deadline: Deadline,
        hedge_s: float,
    ) -> None:
        self._ask, self._begin, self._lacks = ask, begin, lacks
        self._deadline, self._hedge_s = deadline, hedge_s
        self._answers = [absent] * len(routes)
        self._left = [list(route) for route in routes]
        self._settled: set[int] = set()
        self._running = Counter[int]()  # members that are asked now, by place
        self._asked: dict[_Asked, None] = {}
        self._failed: dict[str, KVStoreError] = {}
        self._answered = False
        self._outcomes: queue.SimpleQueue[tuple[_Asked, list[Answer] | KVStoreError]] = queue.SimpleQueue()

    @property
    def open(self) -> bool:
        """Whether an answer is waited for."""
        return not self._deadline.passed and any(
            count and place not in self._settled for place, count in self._running.items()
        )

    def ask_next(self, places: Iterable[int]) -> None:
        groups: dict[str, list[int]] = {}
        for place in places:
            while place not in self._settled and self._left[place]:
                member = self._left[place].pop(0)
                if member not in self._failed:
                    groups.setdefault(member, []).append(place)
                    break
        for member, some in groups.items():
            self._running.update(some)
            asked = _Asked(member, some, time.monotonic() + self._hedge_s)
            self._asked[asked] = None
            another = any(self._left[place] for place in some)

            def work(asked: _Asked = asked, another: bool = another) -> None:
                try:
                    limit = self._deadline
                    if another:  # without a thread it is waited for, and one that is has the thread for so long
                        limit = limit.sooner(limit.remaining() * FIRST_SHARE)
                    self._outcomes.put((asked, self._ask(asked.member, asked.places, limit)))
                except KVStoreError as error:
                    self._outcomes.put((asked, error))

            if not self._begin(work):
                work()

    def step(self) -> None:
        """The next answer, or the time at which somebody else is asked."""
        now = time.monotonic()
        untils = [asked.until for asked in self._asked if asked.until is not None]
        try:
            left_s = min([self._deadline.remaining(), *(until - now for until in untils)])
        except DeadlineExceeded:
            return
        try:
            asked, outcome = self._outcomes.get(timeout=max(0.0, left_s))
        except queue.Empty:
            self._hedge(time.monotonic())
            return
        places = asked.places
        self._running.subtract(places)
        del self._asked[asked]
        if isinstance(outcome, KVStoreError):
            if not isinstance(outcome, ELSEWHERE):
                raise outcome
            self._failed[asked.member] = outcome
            self.ask_next(places)
            return
        self._answered = True
        for place, answer in zip(places, outcome, strict=True):
            if place not in self._settled:
                self._answers[place] = answer
                if not self._lacks(answer):
                    self._settled.add(place)
        self.ask_next(places)

    def _hedge(self, now: float) -> None:
        for asked in list(self._asked):
            if asked.until is not None and asked.until <= now:
                asked.until = None
                self.ask_next(asked.places)

    def ended(self) -> list[Answer]:
        if self._failed and not self._answered:
            raise next(iter(self._failed.values()))
        if self._answers and not self._answered:
            self._deadline.remaining()
        return self._answers
