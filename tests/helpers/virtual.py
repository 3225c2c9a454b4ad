"""Virtual time: processes that run one at a time, in an order chosen by a seed, and a network.

A process is a thread that runs only during its turn, which ends when it waits. Only waiting takes
time, so minutes pass in moments and a seed reproduces the whole run.
"""

import heapq
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from kvstore.deadline import Deadline
from kvstore.errors import DeadlineExceeded, KVStoreError, Unavailable

Result = TypeVar("Result")

DELAY_S = (0.0005, 0.02)
LATE_S = (0.5, 6.0)


class Ended(BaseException):
    """The world ended while a process waited."""


class Process:
    """A process, which may run while `turn` is set.

    `waits` counts its waits, so that each is woken only once.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.turn = threading.Event()
        self.waits = 0


class Signal:
    """An event that happens once, and that one process may wait for."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.given = False
        self.wakes: Callable[[], None] = lambda: None

    def give(self) -> None:
        self.given = True
        self._world.at(0.0, self.wakes)


class World:
    """The clock, the queue of events and the processes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._parked: dict[Process, int] = {}
        self._running: Process | None = None
        self._back = threading.Event()  # set when a process ends its turn
        self._broken: list[BaseException] = []
        self._ended = False

    def monotonic(self) -> float:
        return self.now

    def at(self, delay_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), happens))

    def spawn(self, name: str, work: Callable[[], None]) -> None:
        process = Process(name)

        def run() -> None:
            process.turn.wait()
            try:
                if not self._ended:
                    work()
            except Ended:
                pass
            except Exception as error:  # noqa: BLE001 is raised by `run`
                self._broken.append(error)
            self._back.set()

        threading.Thread(target=run, name=name, daemon=True).start()
        self._parked[process] = 0
        self.at(0.0, lambda: self._wake(process, 0))

    def sleep(self, seconds: float) -> None:
        self.wait(Signal(self), self.now + seconds)

    def wait(self, signal: Signal, until: float) -> bool:
        """Wait in a process for the signal or a time; return whether the signal was given."""
        process = self._running
        assert process is not None, "only a process can wait"
        if not signal.given and self.now < until:
            process.waits += 1
            self._parked[process] = waits = process.waits
            signal.wakes = lambda: self._wake(process, waits)
            if until < float("inf"):
                self.at(until - self.now, signal.wakes)
            process.turn.clear()
            self._back.set()
            process.turn.wait()
            if self._ended:
                raise Ended
        return signal.given

    def together(
        self, name: str, calls: Sequence[Callable[[], Result]]
    ) -> list[Result | KVStoreError]:
        """Run each call in its own process; return what each returned or raised."""
        answers: dict[int, Result | KVStoreError] = {}
        all_are_there = Signal(self)

        def run(number: int) -> None:
            try:
                answers[number] = calls[number]()
            except KVStoreError as error:
                answers[number] = error
            if len(answers) == len(calls):
                all_are_there.give()

        for number in range(len(calls)):
            self.spawn(name, partial(run, number))
        if calls:
            self.wait(all_are_there, float("inf"))
        return [answers[number] for number in range(len(calls))]

    def _wake(self, process: Process, waits: int) -> None:
        if self._parked.get(process) == waits:
            del self._parked[process]
            self._resume(process)

    def _resume(self, process: Process) -> None:
        self._running = process
        self._back.clear()
        process.turn.set()
        assert self._back.wait(60.0), f"{process.name} does not end its turn"
        self._running = None
        if self._broken:
            raise self._broken[0]

    def run(self, until: float) -> None:
        """Run all events until a time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, happens = heapq.heappop(self._events)
            happens()
        self.now = max(self.now, until)

    def end(self) -> None:
        """End all processes."""
        self._ended = True
        while self._parked:
            self._resume(self._parked.popitem()[0])


class Network:
    """A network that loses, delays and duplicates messages.

    Hosts may be down, paused or partitioned from each other.
    """

    def __init__(
        self, world: World, lost: float = 0.0, late: float = 0.0, doubled: float = 0.0
    ) -> None:
        self.world = world
        self.lost, self.late, self.doubled = lost, late, doubled
        self.paused_until: dict[str, float] = {}
        self.lives: dict[str, int] = {}  # life number of each host that is up
        self.apart: set[frozenset[str]] = set()
        self.sent = 0

    def call(
        self, source: str, target: str, serve: Callable[[], Result], deadline: Deadline
    ) -> Result:
        """Return or raise what `serve` does at the target.

        Raises DeadlineExceeded if the request or the answer does not arrive in time.
        """
        world, answers, signal = self.world, list[Any](), Signal(self.world)

        def arrived(answer: Any) -> None:
            answers.append(answer)
            signal.give()

        def work() -> None:
            try:
                answer: Any = serve()
            except KVStoreError as error:
                answer = error
            self._send(target, source, lambda: arrived(answer))

        if target not in self.lives:
            world.sleep(min(DELAY_S[0], deadline.remaining()))
            raise Unavailable(f"{target} is down")
        self._send(source, target, lambda: world.spawn(f"{source} at {target}", work))
        if not world.wait(signal, world.now + deadline.remaining()):
            raise DeadlineExceeded(f"{target} has not answered in {deadline.seconds:g} s")
        if isinstance(answers[0], KVStoreError):
            raise answers[0]
        return answers[0]  # type: ignore[no-any-return]

    def _send(self, source: str, target: str, arrives: Callable[[], None]) -> None:
        rng, life = self.world.rng, self.lives.get(target)
        self.sent += 1

        def deliver() -> None:
            if target in self.lives and self.lives[target] == life:
                pause_s = self.paused_until.get(target, 0.0) - self.world.now
                if pause_s > 0:
                    self.world.at(pause_s, deliver)
                elif frozenset((source, target)) not in self.apart:
                    arrives()

        if rng.random() < self.lost or frozenset((source, target)) in self.apart:
            return
        for _ in range(1 + (rng.random() < self.doubled)):
            self.world.at(rng.uniform(*(LATE_S if rng.random() < self.late else DELAY_S)), deliver)
