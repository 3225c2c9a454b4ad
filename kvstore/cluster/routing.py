"""Spread a call's keys over members and merge their answers, without any I/O.

    keys       0 1 2 3 4 5
    routes     a b a c b a  first           each key's members, in the order in which they are asked
               b c b a a c  second
    round 1    a: 0 2 5   b: 1 4   c: 3     at the same time
    round 2    b: 2       c: 1              the misses of a; and what was asked of b, which failed

A member that failed is not asked again in this call. A key that no member answered is a miss,
unless no member answered anything.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from kvstore.deadline import Deadline
from kvstore.errors import DeadlineExceeded, Exhausted, KVStoreError, ProtocolError, Unavailable

Answer = TypeVar("Answer")
Outcome = TypeVar("Outcome")
AskMember = Callable[[str, list[int], Deadline], list[Answer]]  # (member, indices of keys, limit)
RunParallel = Callable[
    [Sequence[Callable[[], list[Answer]]]], Sequence[list[Answer] | KVStoreError]
]
# Asks each member for its indices, within the limit; returns what each returned or raised
AskAll = Callable[[Mapping[str, list[int]], Deadline], Sequence[list[Answer] | KVStoreError]]
# Errors of a member that could not be reached at all
UNREACHABLE = (Unavailable, DeadlineExceeded, ProtocolError)
# Errors after which another member may still answer. Any other one is the caller's mistake.
TRY_NEXT = (*UNREACHABLE, Exhausted)
Away = dict[str, KVStoreError]  # by member: why it could not be reached
FIRST_SHARE = 0.5  # share of the remaining time for a member, if another one can be asked after it


def in_parallel(ask: AskMember[Answer], run_parallel: RunParallel[Answer]) -> AskAll[Answer]:
    """Return a function that asks members by calls of `ask`, which `run_parallel` makes."""

    def ask_all(
        groups: Mapping[str, list[int]], limit: Deadline
    ) -> Sequence[list[Answer] | KVStoreError]:
        return run_parallel([partial(ask, *group, limit) for group in groups.items()])

    return ask_all


def try_owners(
    routes: Sequence[Sequence[str]],
    ask_all: AskAll[Answer],
    is_miss: Callable[[Answer], bool],
    default: Answer,
    deadline: Deadline,
) -> list[Answer]:
    """Return an answer per key, from the first member of its route that has one.

    `is_miss` says whether the next member is to be asked; `default` is the answer for keys that no
    member answered. Raises a member's error if it is the caller's mistake, or if none answered.
    """
    answers: list[Answer] = [default] * len(routes)
    asked = [0] * len(routes)  # members of each key's route
    left: Sequence[int] = range(len(routes))  # keys without an answer
    failed: dict[str, KVStoreError] = {}
    answered = False
    while (groups := _next(routes, left, asked, failed)) and not deadline.passed:
        more = any(asked[index] < len(routes[index]) for index in left)
        limit = Deadline(deadline.remaining() * FIRST_SHARE) if more else deadline
        again: list[int] = []
        for (member, indices), outcome in zip(groups.items(), ask_all(groups, limit), strict=True):
            if isinstance(outcome, KVStoreError):
                if not isinstance(outcome, TRY_NEXT):
                    raise outcome
                failed[member] = outcome
                again += indices
                continue
            answered = True
            for index, answer in zip(indices, outcome, strict=True):
                answers[index] = answer
            if any(map(is_miss, outcome)):
                again += [index for index in indices if is_miss(answers[index])]
        left = sorted(again)
    if failed and not answered:
        raise next(iter(failed.values()))
    if routes and not answered:
        deadline.remaining()  # no member was asked: the call came too late, so this raises
    return answers


def _next(
    routes: Sequence[Sequence[str]],
    left: Sequence[int],
    asked: list[int],
    failed: Mapping[str, KVStoreError],
) -> dict[str, list[int]]:
    """Return the keys to ask each member for now, and count these members as asked."""
    groups: dict[str, list[int]] = {}
    for index in left:
        for at, member in enumerate(routes[index][asked[index] :], asked[index] + 1):
            asked[index] = at
            if member not in failed:
                groups.setdefault(member, []).append(index)
                break
    return groups


def broadcast(
    routes: Sequence[Sequence[str]],
    ask_all: AskAll[Answer],
    combine: Callable[[Answer, Answer], Answer],
    default: Answer,
    deadline: Deadline,
    away: Away | None = None,
) -> list[Answer]:
    """Return an answer per key, combined from those of all members of its route.

    The members are asked at the same time. Raises as `answers_of_all` does.
    """
    groups: dict[str, list[int]] = {}
    for index, route in enumerate(routes):
        for member in route:
            groups.setdefault(member, []).append(index)
    answers = [default] * len(routes)
    outcomes = dict(zip(groups, ask_all(groups, deadline), strict=True))
    for member, outcome in answers_of_all(outcomes, away).items():
        for index, answer in zip(groups[member], outcome, strict=True):
            answers[index] = combine(answers[index], answer)
    return answers


def answers_of_all(
    outcomes: Mapping[str, Outcome | KVStoreError], away: Away | None = None
) -> dict[str, Outcome]:
    """Return the members' answers, or raise the error of one after the others have finished.

    `away` takes the errors of members that could not be reached; these are raised only if no member
    could be reached.
    """
    failed = {
        member: outcome for member, outcome in outcomes.items() if isinstance(outcome, KVStoreError)
    }
    fatal = [
        error for error in failed.values() if away is None or not isinstance(error, UNREACHABLE)
    ]
    if fatal or (failed and len(failed) == len(outcomes)):
        raise (fatal or list(failed.values()))[0]
    if away is not None:
        away |= failed
    return {
        member: outcome
        for member, outcome in outcomes.items()
        if not isinstance(outcome, KVStoreError)
    }
