"""A load in parts: while one is on its way to the slots, the next is asked for, or on its way too.

    one by one      fetch 0 | place 0          | place 1          | place 2 ...
                            | fetch 1 |        | fetch 2 |
    abreast         fetch 0 | place 0          | fetch 2 | place 2 ...
                    fetch 1         | place 1          | fetch 3 ...

Abreast, the link has its next work when one part's is done. It takes a mover that need not know of one part that it is
intact before it writes the next.
"""

import collections
import concurrent.futures
import contextlib
from collections.abc import Callable, Generator, Sequence

from gpu_agent.carriers import Fetched
from kvstore.threads import begun, end

ABREAST = 2


def parts_of(first: int, count: int, step: int, overlaps: bool) -> list[range]:
    """Pages `first` to `count`, at most `step` at a time. Nothing is placed while the first part is fetched: it
    is a quarter of the others, where those overlap."""
    parts: list[range] = []
    while first < count:
        wanted = max(1, step // 4) if overlaps and not parts and count - first > step else step
        parts.append(range(first, min(first + wanted, count)))
        first = parts[-1].stop
    return parts


def travelled(
    parts: Sequence[range],
    fetch: Callable[[range], Fetched],
    place: Callable[[range, Fetched], int],
    ahead: concurrent.futures.Executor | None,
    abreast: bool,
) -> Generator[int, None, None]:
    """Pages of each part that are in place, in order. `ahead`: who fetches what is placed later. When the generator is
    closed nothing moves any more, and nothing that was fetched is held."""

    def move(part: range) -> int:
        with contextlib.closing(fetch(part)) as fetched:
            return place(part, fetched)

    if ahead is None or len(parts) == 1:
        yield from map(move, parts)
    elif abreast:
        yield from _abreast(parts, move, ahead)
    else:
        yield from _one_by_one(parts, fetch, place, ahead)


def _abreast(
    parts: Sequence[range], move: Callable[[range], int], ahead: concurrent.futures.Executor
) -> Generator[int, None, None]:
    running: collections.deque[concurrent.futures.Future[int]] = collections.deque()
    try:
        for part in parts:
            moving = begun(ahead, move, part)
            if moving is None:
                while running:
                    yield running.popleft().result()
                yield move(part)
                continue
            running.append(moving)
            if len(running) == ABREAST:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        end(running)


def _one_by_one(
    parts: Sequence[range],
    fetch: Callable[[range], Fetched],
    place: Callable[[range, Fetched], int],
    ahead: concurrent.futures.Executor,
) -> Generator[int, None, None]:
    next_one: concurrent.futures.Future[Fetched] | None = None
    try:
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            fetched = next_one.result() if next_one else fetch(part)
            next_one = begun(ahead, fetch, following) if following else None
            with contextlib.closing(fetched):
                yield place(part, fetched)
    finally:
        if next_one and not next_one.cancel() and not next_one.exception():
            next_one.result().close()
