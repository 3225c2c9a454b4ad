"""A call's keys spread over members, and the answers put together again. Pure: who asks, and how many at a time, is
given.

    keys       0 1 2 3 4 5
    routes     a b a c b a  first           each key's members, in the order in which they are asked
               b c b a a c  second
    round 1    a: 0 2 5   b: 1 4   c: 3     at the same time
    round 2    b: 2       c: 1              what a lacked; of b, which failed, the rest

A member that failed is not asked again in this call. What nobody answered is a miss, unless nobody answered anything.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvstore.deadline import Deadline
from kvstore.errors import DeadlineExceeded, Exhausted, KVStoreError, ProtocolError, Unavailable

Answer = TypeVar("Answer")
Outcome = TypeVar("Outcome")
Ask = Callable[[str, list[int], Deadline], list[Answer]]
Together = Callable[[Sequence[Callable[[], list[Answer]]]], Sequence[list[Answer] | KVStoreError]]
SILENT = (Unavailable, DeadlineExceeded, ProtocolError)  # of a member that could not be asked at all
# Of a member's: another one may still answer. The rest is the caller's mistake, wherever it asks.
ELSEWHERE = (*SILENT, Exhausted)
Away = dict[str, KVStoreError]  # by member: why it could not be asked
FIRST_SHARE = 0.5  # of the time that is left, for a member after which there is another one to ask


def spread(
    routes: Sequence[Sequence[str]],
    ask: Ask[Answer],
    together: Together[Answer],
    lacks: Callable[[Answer], bool],
    absent: Answer,
    deadline: Deadline,
) -> list[Answer]:
    """An answer per key. `ask(member, places, limit)`: of the keys at these places; `together` makes such calls at the
    same time, and returns what each returned or raised. `lacks`: whether the next member is to be asked.

    Raises what a member raised if it is the caller's mistake, or if no member answered.
    """
    answers: list[Answer] = [absent] * len(routes)
    left = {place: list(route) for place, route in enumerate(routes)}
    failed: dict[str, KVStoreError] = {}
    answered = False
    while (groups := _next(left, failed)) and not deadline.passed:
        limit = Deadline(deadline.remaining() * FIRST_SHARE) if any(left.values()) else deadline
        calls = [_bound(ask, member, places, limit) for member, places in groups.items()]
        for (member, places), outcome in zip(groups.items(), together(calls), strict=True):
            if isinstance(outcome, KVStoreError):
                if not isinstance(outcome, ELSEWHERE):
                    raise outcome
                failed[member] = outcome
                continue
            answered = True
            for place, answer in zip(places, outcome, strict=True):
                answers[place] = answer
                if not lacks(answer):
                    left[place].clear()
    if failed and not answered:
        raise next(iter(failed.values()))
    if routes and not answered:
        deadline.remaining()  # nobody was asked: who comes too late is told so
    return answers


def _next(left: dict[int, list[str]], failed: dict[str, KVStoreError]) -> dict[str, list[int]]:
    """Whom to ask now for which keys."""
    groups: dict[str, list[int]] = {}
    for place, route in left.items():
        while route:
            member = route.pop(0)
            if member not in failed:
                groups.setdefault(member, []).append(place)
                break
    return groups


def _bound(ask: Ask[Answer], member: str, places: list[int], limit: Deadline) -> Callable[[], list[Answer]]:
    return lambda: ask(member, places, limit)


def everywhere(
    routes: Sequence[Sequence[str]],
    ask: Ask[Answer],
    together: Together[Answer],
    combine: Callable[[Answer, Answer], Answer],
    absent: Answer,
    deadline: Deadline,
    away: Away | None = None,
) -> list[Answer]:
    """An answer per key, combined from those of all its members, which are asked at the same time. Raises as `of_all`
    does."""
    groups: dict[str, list[int]] = {}
    for place, route in enumerate(routes):
        for member in route:
            groups.setdefault(member, []).append(place)
    answers = [absent] * len(routes)
    calls = [_bound(ask, member, places, deadline) for member, places in groups.items()]
    outcomes = dict(zip(groups, together(calls), strict=True))
    for member, outcome in of_all(outcomes, away).items():
        for place, answer in zip(groups[member], outcome, strict=True):
            answers[place] = combine(answers[place], answer)
    return answers


def of_all(outcomes: Mapping[str, Outcome | KVStoreError], away: Away | None = None) -> dict[str, Outcome]:
    """What each member answered. Raises what one of them raised: what was to happen at all of them has happened at the
    others. `away` takes those that could not be asked, which is no error then, unless all could not."""
    failed = {member: outcome for member, outcome in outcomes.items() if isinstance(outcome, KVStoreError)}
    grave = [error for error in failed.values() if away is None or not isinstance(error, SILENT)]
    if grave or (failed and len(failed) == len(outcomes)):
        raise (grave or list(failed.values()))[0]
    if away is not None:
        away |= failed
    return {member: outcome for member, outcome in outcomes.items() if not isinstance(outcome, KVStoreError)}
