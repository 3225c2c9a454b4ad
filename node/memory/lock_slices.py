"""Slice work under the RAM tier's lock into steps, and let other threads run in between.

    with the lock:  step step step ... (spent)     with the lock:  step step ...
    without it:                      others run, a page is copied, or lower tiers are called

So the lock is held for a short time, however much a caller requests.
"""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

from node.memory.page import Page

T = TypeVar("T")
Key = TypeVar("Key")

STEPS = 256  # each a few microseconds: a page evicted, or a page skipped


class SlicedWork(NamedTuple):
    """Request a copy of a held page's bytes to another slot, without the lock."""

    page: Page
    target: int


# Runs under the tier's lock, except while it is suspended by a yield of:
#     None          let other threads have the lock
#     SlicedWork    copy a page
#     a function    call it; the yield expression's value is its result
Work = Generator[SlicedWork | Callable[[], Any] | None, Any, T]


class StepBudget:
    """Steps that are left in this slice.

    Guarded by the tier's lock.
    """

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = STEPS

    def take(self) -> bool:
        """Take a step.

        Return whether there was one left.
        """
        self.left -= 1
        return self.left >= 0

    @property
    def over(self) -> bool:
        """Return whether the budget is used up."""
        return self.left <= 0


def run_in_slices(
    lock: threading.Lock, budget: StepBudget, work: Work[T], move: Callable[[SlicedWork], None]
) -> T:
    """Run `work` under the lock, and release the lock whenever it yields.

    `move` copies a page that it holds.
    """
    answer: Any = None
    try:
        while True:
            with lock:
                budget.left = STEPS
                try:
                    wanted = work.send(answer)
                except StopIteration as done:
                    value: T = done.value
                    return value
            answer = None
            if wanted is None:
                time.sleep(0)  # otherwise this thread would have the lock again
            elif isinstance(wanted, SlicedWork):
                move(wanted)
            else:
                answer = wanted()
    except BaseException:
        with lock:
            work.close()
        raise


def split_in_slices(
    lock: threading.Lock, work: Callable[[Sequence[Key]], Sequence[T]], keys: Sequence[Key]
) -> list[T]:
    """Return the result of `work` for each key.

    It runs under the lock for as many keys at a time as a slice has steps.
    """
    done: list[T] = []
    for start in range(0, len(keys), STEPS):
        if start:
            time.sleep(0)  # as above
        with lock:
            done += work(keys[start : start + STEPS])
    return done
