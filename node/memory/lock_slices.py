"""Turns: work under the RAM tier's lock takes so many steps, then others have theirs.

    with the lock:  step step step ... (spent)     with the lock:  step step ...
    without it:                        let others, or copy a page

Whoever works may be asked for as much as he likes; a turn is short all the same.
"""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeVar

from node.memory.page import Page

T = TypeVar("T")
Key = TypeVar("Key")

STEPS = 256  # each a few microseconds: a page evicted, a page looked at and passed over


class SlicedWork(NamedTuple):
    """A page's bytes are to be copied to another slot, without the lock; the page is held meanwhile."""

    page: Page
    target: int


# Runs under the tier's lock, but for what it yields: None, to let others have their turn, or a move.
Work = Generator[SlicedWork | None, None, T]


class StepBudget:
    """Steps that are left in this turn. Guarded by the tier's lock."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = STEPS

    def take(self) -> bool:
        """A step; whether there was one left."""
        self.left -= 1
        return self.left >= 0

    @property
    def over(self) -> bool:
        return self.left <= 0


def run_in_slices(lock: threading.Lock, turn: StepBudget, work: Work[T], move: Callable[[SlicedWork], None]) -> T:
    """Runs `work` under the lock, and lets go of it whenever it yields: for others, or to `move` a page that
    `work` has held for it."""
    try:
        while True:
            with lock:
                turn.left = STEPS
                try:
                    wanted = next(work)
                except StopIteration as done:
                    value: T = done.value
                    return value
            if wanted is None:
                time.sleep(0)  # else this thread would have the lock again
            else:
                move(wanted)
    except BaseException:
        with lock:
            work.close()
        raise


def split_in_slices(lock: threading.Lock, work: Callable[[Sequence[Key]], Sequence[T]], keys: Sequence[Key]) -> list[T]:
    """What `work` makes of each key, under the lock for so many at a time as a turn has steps."""
    done: list[T] = []
    for start in range(0, len(keys), STEPS):
        if start:
            time.sleep(0)  # as above
        with lock:
            done += work(keys[start : start + STEPS])
    return done
