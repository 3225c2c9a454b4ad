"""Members that are asked before the first of them have answered."""

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from kvstore import DeadlineExceeded, InvalidRequest, KVStoreError, Unavailable
from kvstore.cluster.hedge import hedged
from kvstore.deadline import Deadline

SOON, NEVER = 0.05, 60.0


class Fleet:
    """Members that have some of the keys; `slow`: who answers only when it is told to."""

    def __init__(self, *slow: str, **has: set[int]) -> None:
        self.has = has
        self.fails: dict[str, KVStoreError] = {}
        self.asked: list[tuple[str, list[int]]] = []
        self.told = {member: threading.Event() for member in slow}
        self.threads: list[threading.Thread] = []
        self.thread_count_max = 100

    def ask(self, member: str, places: list[int], limit: Deadline) -> list[str]:
        self.asked.append((member, places))
        if member in self.told:
            self.told[member].wait(10.0)
        if member in self.fails:
            raise self.fails[member]
        return [member if place in self.has[member] else "" for place in places]

    def begin(self, work: Callable[[], None]) -> bool:
        if len(self.threads) == self.thread_count_max:
            return False
        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()
        return True

    def get(self, routes: Sequence[str], hedge_s: float = SOON, seconds: float = 10.0) -> list[str]:
        try:
            return hedged(routes, self.ask, self.begin, lambda one: not one, "", Deadline(seconds), hedge_s)
        finally:
            for event in self.told.values():
                event.set()
            for thread in self.threads:
                thread.join()


def test_who_answers_in_time_is_the_only_one_asked() -> None:
    fleet = Fleet(a={0, 2}, b={1})
    assert fleet.get(["ab", "ba", "ab"], NEVER) == ["a", "b", "a"]
    assert sorted(fleet.asked) == [("a", [0, 2]), ("b", [1])]


def test_who_is_silent_is_not_waited_for() -> None:
    fleet = Fleet("a", a={0, 1}, b={0}, c={1})
    began = time.monotonic()
    assert fleet.get(["ab", "ac"]) == ["b", "c"]
    assert time.monotonic() - began < 5.0
    assert sorted(fleet.asked) == [("a", [0, 1]), ("b", [0]), ("c", [1])]


def test_what_the_second_lacks_comes_from_the_first_after_all() -> None:
    fleet = Fleet("a", a={0}, b=set())
    threading.Timer(0.3, fleet.told["a"].set).start()
    assert fleet.get(["ab"]) == ["a"]


def test_what_is_lacked_or_fails_is_asked_of_the_next_at_once() -> None:
    fleet = Fleet(a={0}, b={1}, c={2})
    fleet.fails["c"] = Unavailable("away")
    assert fleet.get(["ab", "ab", "cb"], NEVER) == ["a", "b", ""]


def test_a_member_may_be_asked_twice_at_a_time() -> None:
    """For what it is the first of, and for what another lacked: each has its own time."""
    fleet = Fleet("b", a={1}, b={0, 1})
    threading.Timer(0.5, fleet.told["b"].set).start()
    assert fleet.get(["ab", "ba"]) == ["b", "a"]


def test_all_are_silent() -> None:
    fleet = Fleet("a", "b", a={0}, b={0})
    with pytest.raises(DeadlineExceeded):
        fleet.get(["ab"], seconds=0.3)


def test_nobody_can_be_asked() -> None:
    fleet = Fleet()
    fleet.fails = {"a": Unavailable("a is away"), "b": Unavailable("b is away")}
    with pytest.raises(Unavailable):
        fleet.get(["ab"], NEVER)


def test_the_callers_mistake_is_the_callers() -> None:
    fleet = Fleet(b={0})
    fleet.fails["a"] = InvalidRequest("a hash is too long")
    with pytest.raises(InvalidRequest):
        fleet.get(["ab"], NEVER)


def test_without_threads_they_are_asked_one_after_the_other() -> None:
    fleet = Fleet(a={0}, b={1})
    fleet.thread_count_max = 0
    assert fleet.get(["ab", "ab"]) == ["a", "b"]


def test_without_threads_one_that_hangs_leaves_time_for_the_next() -> None:
    """So it is when many calls wait for it, and have all the threads."""
    fleet = Fleet(a={0}, b={0, 1})
    fleet.thread_count_max = 0
    ask = fleet.ask

    def hangs(member: str, places: list[int], limit: Deadline) -> list[str]:
        if member == "a":
            time.sleep(limit.remaining())
            raise DeadlineExceeded("no answer from a")
        return ask(member, places, limit)

    routes = ["ab", "ba"]
    assert hedged(routes, hangs, fleet.begin, lambda one: not one, "", Deadline(1.0), SOON) == ["b", "b"]


def test_no_keys() -> None:
    assert Fleet().get([]) == []
