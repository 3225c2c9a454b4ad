"""The parts of a load: whatever ends it, nothing moves any more then, and nothing that was fetched is held."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from page_pools import WAIT_S

from gpu_agent.carriers import Fetched
from gpu_agent.parts import travelled


@pytest.mark.parametrize("abreast", [False, True])
def test_a_load_that_ends_early_gives_back_the_part_behind_when_that_does_not_move_any_more(abreast: bool) -> None:
    """One by one the part behind was fetched ahead; abreast it is on its way to the slots."""
    chunk: Any = None
    begun, held = threading.Event(), set[range]()

    def fetch(part: range) -> Fetched:
        stack = contextlib.ExitStack()
        held.add(part)
        stack.callback(held.remove, part)
        if part.start:
            begun.set()
        return Fetched(chunk, stack)

    def place(part: range, _: Fetched) -> int:
        if part.start:
            time.sleep(0.2)
        return 0

    with ThreadPoolExecutor(2) as ahead:
        with contextlib.closing(travelled([range(1), range(1, 2)], fetch, place, ahead, abreast)) as moved:
            assert next(moved) == 0
            assert begun.wait(WAIT_S)
        assert held == set()


@pytest.mark.parametrize("abreast", [False, True])
def test_parts_for_which_there_is_no_thread_move_in_the_callers_and_never_again(
    abreast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool keeps what it can start no thread for: a part was moved once more, into slots that were others' then."""
    fetched, placed = list[range](), list[range]()

    def fetch(part: range) -> Fetched:
        fetched.append(part)
        nothing: Any = None
        return Fetched(nothing, contextlib.ExitStack())

    def place(part: range, _: Fetched) -> int:
        placed.append(part)
        return len(part)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    parts = [range(n, n + 1) for n in range(4)]
    with ThreadPoolExecutor(2) as ahead:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert list(travelled(parts, fetch, place, ahead, abreast)) == [1] * 4
        ahead.submit(lambda: None).result(WAIT_S)  # what was queued before has had its turn
    assert fetched == placed == parts
