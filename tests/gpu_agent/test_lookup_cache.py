"""Lookups of an engine that polls: which answers it gets, and when."""

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from gpu_agent.lookup_cache import MISS_S, LookupCache
from kvstore.tracing import Trace, current, named

TIMEOUT_S = 5.0


class Store:
    """A store that answers when `open` is set, and records its calls."""

    def __init__(self) -> None:
        self.present = {b"a", b"b"}
        self.calls: list[list[bytes]] = []
        self.traces: list[Trace | None] = []
        self.open = threading.Event()
        self.open.set()

    def ask(self, keys: Sequence[bytes]) -> tuple[bool, ...]:
        self.calls.append(list(keys))
        self.traces.append(current())
        assert self.open.wait(60)
        return tuple(key in self.present for key in keys)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def verdicts(store: Store, clock: Clock) -> Iterator[LookupCache]:
    verdicts = LookupCache(store.ask, TIMEOUT_S, clock)
    yield verdicts
    store.open.set()
    verdicts.close()
    assert verdicts.check() == []


def settled(verdicts: LookupCache, key: bytes, request: str = "r") -> bool:
    """Poll for the answer as an engine does."""
    end = time.monotonic() + 60
    while (found := verdicts.lookup(key, request)) is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    return found


def test_keys_of_a_step_are_looked_up_in_one_call(store: Store, verdicts: LookupCache) -> None:
    assert [
        verdicts.lookup(key, request) for key, request in ((b"a", "r"), (b"x", "r"), (b"b", "s"))
    ] == [None] * 3
    assert store.calls == []
    verdicts.flush()
    assert settled(verdicts, b"a")
    assert not settled(verdicts, b"x")
    assert settled(verdicts, b"b", "s")
    assert store.calls == [[b"a", b"x", b"b"]]
    assert store.traces == [named("r")._replace(others=(named("s"),))], (
        "the call must carry both requests"
    )


def test_answer_is_kept_while_its_requests_live(store: Store, verdicts: LookupCache) -> None:
    verdicts.lookup(b"a", "r")
    verdicts.flush()
    assert settled(verdicts, b"a")
    assert verdicts.lookup(b"a", "s")
    verdicts.release("r")
    store.present.clear()
    assert verdicts.lookup(b"a", "s")
    verdicts.release("s")
    verdicts.release("s")
    assert verdicts.lookup(b"a", "t") is None  # looked up again
    verdicts.flush()
    assert not settled(verdicts, b"a", "t")
    assert len(store.calls) == 2


def test_miss_is_looked_up_again_for_a_later_request(
    store: Store, clock: Clock, verdicts: LookupCache
) -> None:
    """Regression: one long request kept a temporary miss, such as of an outage, for all others."""
    verdicts.lookup(b"x", "long")
    verdicts.flush()
    assert not settled(verdicts, b"x", "long")
    store.present.add(b"x")
    clock.now += MISS_S / 2
    assert verdicts.lookup(b"x", "soon") is False, "a burst must not repeat the lookup"
    clock.now += MISS_S
    assert verdicts.lookup(b"x", "soon") is False, "one request must not repeat the lookup"
    assert verdicts.lookup(b"x", "later") is None
    verdicts.flush()
    assert settled(verdicts, b"x", "later")
    assert store.calls == [[b"x"], [b"x"]]


def test_late_answer_is_a_miss(store: Store, clock: Clock, verdicts: LookupCache) -> None:
    store.open.clear()
    verdicts.lookup(b"a", "r")
    verdicts.flush()
    clock.now += TIMEOUT_S
    assert verdicts.lookup(b"a", "r") is None
    clock.now += 0.1
    assert verdicts.lookup(b"a", "r") is False
    store.open.set()
    verdicts.lookup(b"b", "r")
    verdicts.flush()
    assert settled(verdicts, b"b")
    assert verdicts.lookup(b"a", "r") is False  # the answer does not change


def test_steps_during_a_hang_are_combined_in_one_call(
    store: Store, clock: Clock, verdicts: LookupCache
) -> None:
    store.open.clear()
    for key in (b"1", b"2", b"3", b"4"):
        verdicts.lookup(key, "r")
        verdicts.flush()
        while not store.calls:
            time.sleep(0.001)
    verdicts.lookup(b"gone", "s")
    verdicts.flush()
    verdicts.release("s")
    store.open.set()
    assert not settled(verdicts, b"4")
    assert store.calls == [[b"1"], [b"2", b"3", b"4"]]


def test_failed_load_is_a_miss_until_its_requests_end(verdicts: LookupCache) -> None:
    verdicts.lookup(b"a", "r")
    verdicts.flush()
    assert settled(verdicts, b"a")
    verdicts.mark_miss([b"a", b"unknown"])
    assert verdicts.lookup(b"a", "r") is False
    assert verdicts.lookup(b"a", "another") is False
    for request in ("r", "another"):
        verdicts.release(request)
    assert verdicts.lookup(b"a", "later") is None


def test_call_that_raises_is_a_miss_and_the_next_one_works(
    store: Store, verdicts: LookupCache, caplog: pytest.LogCaptureFixture
) -> None:
    present, store.present = store.present, None  # type: ignore[assignment]
    verdicts.lookup(b"a", "r")
    verdicts.flush()
    assert not settled(verdicts, b"a")
    assert "a lookup of 1 pages failed" in caplog.text
    store.present = present
    verdicts.lookup(b"b", "r")
    verdicts.flush()
    assert settled(verdicts, b"b")


def test_answer_that_comes_after_a_miss_was_noted_is_ignored(
    store: Store, verdicts: LookupCache
) -> None:
    """A page that was found missing by its load must not become a hit again."""
    store.open.clear()
    assert verdicts.lookup(b"a", "r") is None
    verdicts.flush()
    end = time.monotonic() + 60
    while not store.calls:  # the call has begun
        assert time.monotonic() < end
    verdicts.mark_miss([b"a"])
    assert verdicts.lookup(b"a", "r") is False
    store.open.set()
    assert verdicts.lookup(b"b", "s") is None
    verdicts.flush()
    assert settled(verdicts, b"b", "s")  # the call for "a" has ended, too
    assert verdicts.lookup(b"a", "r") is False
