"""Run a save or a load chunk by chunk, along the path that can be used (`transfer_path.py`).

    SaveTask.run(path)    path.save(chunk)                        until all pages are stored
    LoadTask.run(path)    path.fetch(chunk) -> path.place(chunk)  until a page is missing or damaged

`run` returns False if its path was lost. The agent then runs the task along another one.

While one part of a load is placed, the next one is fetched, or placed too:

    in turn         fetch 0 | place 0          | place 1          | place 2 ...
                            | fetch 1 |        | fetch 2 |
    in parallel     fetch 0 | place 0          | fetch 2 | place 2 ...
                    fetch 1         | place 1          | fetch 3 ...

In parallel, the link has its next work as soon as one part is placed. This needs a path that may
write a part before it knows whether the one before it is intact.
"""

import collections
import concurrent.futures
import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial

from gpu_agent.transfer import Placed
from gpu_agent.transfer_path import Fetched, PageBatch, TransferPath
from kvstore import PutOutcome
from kvstore.errors import KVStoreError
from kvstore.sync import Event
from kvstore.threads import begun, end

DEPTH = 2  # parts of one load that move at a time


@dataclass(frozen=True)
class SaveResult:
    """Pages of a save.

    `stored`: by this save. `existing`: stored before, or just being stored by another writer.
    `dropped`: not kept, with the reason.
    """

    stored: int
    existing: int
    dropped: int
    reason: str | None = None


@dataclass(frozen=True)
class LoadResult:
    """Result of a load.

    `pages`: leading pages whose KV is in the engine's slots: those that skip_tokens covers
    completely, then the `loaded` ones. The content of later pages' slots is undefined: on a GPU
    they may hold bytes that did not match their checksum. `error`: why a load ended early, None for
    a plain miss.
    """

    pages: int
    loaded: int
    error: str | None = None


@dataclass(frozen=True)
class SaveJob:
    """A running save. `gathered`: done when the engine may reuse the slots.

    `done`: the result; it always comes.
    """

    gathered: concurrent.futures.Future[None]
    done: concurrent.futures.Future[SaveResult]


@dataclass(frozen=True)
class LoadJob:
    """A running load. `done`: the result; it always comes.

    Until then the slots must not be used.
    """

    done: concurrent.futures.Future[LoadResult]


class SaveTask:
    """Store the pages of a chain that are missing, head first.

    One thread runs it.

    `gathered`: done when the engine may reuse the slots. `stopping`: set when the agent closes.
    """

    def __init__(
        self, pages: PageBatch, gathered: concurrent.futures.Future[None], stopping: Event
    ) -> None:
        self.pages = pages
        self.reason: str | None = None  # why pages are dropped
        self.chunked = False  # several calls have aged the chain
        self._gathered = gathered
        self._stopping = stopping
        self._left = list(range(len(pages)))
        self._stored = self._existing = 0

    @property
    def result(self) -> SaveResult:
        """Return the result of the save."""
        dropped = len(self.pages) - self._stored - self._existing
        return SaveResult(self._stored, self._existing, dropped, self.reason if dropped else None)

    def skip(self, present: Sequence[bool]) -> None:
        """Leave out the pages of `present`, which are stored already, before the first `run`."""
        self._left = [page for page, stored in enumerate(present) if not stored]
        self._existing = len(self.pages) - len(self._left)

    def release_slots(self) -> None:
        """Tell the engine that its slots have been read, or will not be."""
        if not self._gathered.done():
            self._gathered.set_result(None)

    def run(self, path: TransferPath) -> bool:
        """Store the remaining pages along `path`, and return whether the save is over.

        It continues along another path if this one is lost before all slots were read. Raises
        KVStoreError.
        """
        while self._left:
            if self._stopping.is_set():
                self.reason = "the agent is closed"
                break
            chunk, rest = self._left[: path.chunk_pages], self._left[path.chunk_pages :]
            self.chunked = self.chunked or bool(rest)
            try:
                outcomes = path.save(self.pages.select(chunk), None if rest else self.release_slots)
            except KVStoreError:
                if self._gathered.done() or not _goes_on(path, self.pages):
                    raise
                return False
            self._left = rest
            if self._is_full(outcomes):  # without its head the rest of a chain is useless
                break
        return True

    def _is_full(self, outcomes: list[PutOutcome]) -> bool:
        """Count the outcomes of a chunk, and return whether the node took no more pages."""
        new = outcomes.count(PutOutcome.STORED)
        self._stored += new
        if new == len(outcomes):
            return False
        self._existing += outcomes.count(PutOutcome.EXISTS) + outcomes.count(PutOutcome.BUSY)
        if PutOutcome.AWAY in outcomes:
            self.reason = "members of the cluster do not answer"
        if PutOutcome.FULL in outcomes:
            self.reason = "the node is full of pages that it may not evict"
        return PutOutcome.FULL in outcomes


class LoadTask:
    """Put the leading stored pages of a chain into their slots.

    One thread runs it.

    `skip_tokens`, `placed`: as in `Agent.load`. `ahead`: threads that move later parts. `stopping`:
    set when the agent closes.
    """

    def __init__(
        self,
        pages: PageBatch,
        skip_tokens: int,
        placed: Placed | None,
        ahead: concurrent.futures.Executor,
        stopping: Event,
    ) -> None:
        self.pages = pages
        self.error: str | None = None
        self.chunked = False  # several calls have aged the chain
        self._skip_tokens = skip_tokens
        self._placed = placed
        self._ahead = ahead
        self._stopping = stopping
        self._first = self._in_place = skip_tokens // pages.namespace.layout.page_tokens

    @property
    def result(self) -> LoadResult:
        """Return the result of the load."""
        return LoadResult(self._in_place, self._in_place - self._first, self.error)

    def run(self, path: TransferPath) -> bool:
        """Load the remaining pages along `path`, and return whether the load is over.

        It continues along another path if this one is lost before any of the next part moved.
        Raises KVStoreError. However it ends, afterwards nothing moves and no slot is held.
        """
        count = len(self.pages)
        parts = parts_of(self._in_place, count, path.chunk_pages, path.overlaps)
        with contextlib.suppress(_PathLost), contextlib.closing(self._moved(path, parts)) as moved:
            for part, pages in zip(parts, moved, strict=False):
                self.chunked = self.chunked or (pages > 0 and self._in_place > self._first)
                self._in_place += pages
                if self._in_place < part.stop:
                    break
                if self._stopping.is_set() and part.stop < count:
                    self.error = "the agent is closed"
                    break
            return True
        return False

    def _moved(self, path: TransferPath, parts: Sequence[range]) -> Generator[int, None, None]:
        """Yield the number of pages of each part that are in place, in order."""
        if not path.overlaps or len(parts) == 1:
            yield from map(partial(self._move, path), parts)
        elif not self._placed and path.verifies_in_slots(self.pages.pool):
            yield from self._moved_in_parallel(path, parts)
        else:
            yield from self._moved_in_turn(path, parts)

    def _moved_in_parallel(
        self, path: TransferPath, parts: Sequence[range]
    ) -> Generator[int, None, None]:
        running: collections.deque[concurrent.futures.Future[int]] = collections.deque()
        try:
            for part in parts:
                moving = begun(self._ahead, self._move, path, part)
                if moving is None:  # no thread is free for it
                    while running:
                        yield running.popleft().result()
                    yield self._move(path, part)
                    continue
                running.append(moving)
                if len(running) == DEPTH:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            end(running)

    def _moved_in_turn(
        self, path: TransferPath, parts: Sequence[range]
    ) -> Generator[int, None, None]:
        next_one: concurrent.futures.Future[Fetched] | None = None
        try:
            for part, following in zip(parts, [*parts[1:], None], strict=True):
                fetched = next_one.result() if next_one else self._fetch(path, part)
                next_one = begun(self._ahead, self._fetch, path, following) if following else None
                with contextlib.closing(fetched):
                    yield self._place(path, part, fetched)
        finally:
            if next_one and not next_one.cancel() and not next_one.exception():
                next_one.result().close()

    def _move(self, path: TransferPath, part: range) -> int:
        with contextlib.closing(self._fetch(path, part)) as fetched:
            return self._place(path, part, fetched)

    def _fetch(self, path: TransferPath, part: range) -> Fetched:
        try:
            return path.fetch(self.pages.select(part))
        except KVStoreError as error:
            if _goes_on(path, self.pages):
                raise _PathLost from error
            raise

    def _place(self, path: TransferPath, part: range, fetched: Fetched) -> int:
        skip = self._skip_tokens - part.start * self.pages.namespace.layout.page_tokens
        placed = self._placed if part.stop == len(self.pages) else None
        # Less than a page is skipped, in the first part
        return path.place(fetched, max(0, skip), placed)


class _PathLost(Exception):
    """The near node does not answer, and there is time left to ask the owners."""


def _goes_on(path: TransferPath, pages: PageBatch) -> bool:
    """Return whether a job continues along another path after an error."""
    return path.lost and not pages.deadline.passed


def parts_of(first: int, count: int, step: int, overlaps: bool) -> list[range]:
    """Return pages `first` to `count`, at most `step` at a time.

    Nothing is placed while the first part is fetched, so if parts overlap it is a quarter of the
    others.
    """
    parts: list[range] = []
    while first < count:
        wanted = max(1, step // 4) if overlaps and not parts and count - first > step else step
        parts.append(range(first, min(first + wanted, count)))
        first = parts[-1].stop
    return parts
