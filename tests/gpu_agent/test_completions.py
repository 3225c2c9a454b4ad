"""Completions: the descriptor is readable exactly while items wait, and no wake-up is lost."""

import select
import threading
from collections.abc import Iterator

import pytest

from gpu_agent.objects.parts import Completions


@pytest.fixture
def completions() -> Iterator[Completions[int]]:
    found: Completions[int] = Completions()
    yield found
    found.close()


def readable(completions: Completions[int], timeout_s: float = 0.0) -> bool:
    return bool(select.select([completions.fileno()], [], [], timeout_s)[0])


def test_descriptor_is_readable_while_items_wait(completions: Completions[int]) -> None:
    assert not readable(completions)
    completions.add(1)
    completions.add(2)
    assert readable(completions)
    assert completions.drain() == [1, 2]
    assert not readable(completions)
    assert completions.drain() == []


def test_no_wakeup_is_lost_between_threads(completions: Completions[int]) -> None:
    count, threads = 2000, 4

    def produce(start: int) -> None:
        for number in range(start, count, threads):
            completions.add(number)

    producers = [threading.Thread(target=produce, args=(start,)) for start in range(threads)]
    for producer in producers:
        producer.start()
    taken: list[int] = []
    while len(taken) < count:
        assert readable(completions, 10.0), f"only {len(taken)} of {count} items were signalled"
        taken += completions.drain()
    for producer in producers:
        producer.join()
    assert sorted(taken) == list(range(count))


def test_closed_completions_add_and_signal_nothing(completions: Completions[int]) -> None:
    completions.add(1)
    completions.close()
    completions.add(2)
    assert completions.drain() == []
    completions.close()
