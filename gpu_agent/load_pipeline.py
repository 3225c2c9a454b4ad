"""How a chunk of pages travels between an engine's slots and the store: through a buffer of ours, or
straight from and to the node's memory.

    BufferCarrier   slots <-> page buffer of the lane <-> client's put and get        any wire; pages that are sealed
                    slots <-> client's put and get                                    the same, of host memory in pieces
    ArenaCarrier    slots <-> the node's slots, mapped here                           shared memory

A keyed namespace's pages are sealed and checked in the buffer, or in the engine's own memory: in the node's others
could change them before or after. Both save and load the same bytes. A chunk is loaded in order and only as far as its
pages are intact.
"""

import collections
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from operator import eq
from typing import Any, Protocol

import torch

from gpu_agent.pool import KVPool, UnitTable
from gpu_agent.transfer import Fence, Gathered, MappedPages, Placed, Transfer
from kvstore import PutOutcome
from kvstore.checksum import cuts, leaf, roots
from kvstore.client import Client
from kvstore.cluster.calls import leading, put_outcomes
from kvstore.deadline import Deadline
from kvstore.errors import Exhausted, KVStoreError
from kvstore.keys import Namespace, short
from kvstore.log_rate import LogRate
from kvstore.threads import begun, end
from kvstore.tracing import NamesRequest
from kvstore.transports.mapped_memory import AcquiredSlots, ArenaMap

# What a save or a load hands to the engine, and what becomes of it.

log = logging.getLogger(__name__)
log.addFilter(LogRate())
log.addFilter(NamesRequest())


@dataclass(frozen=True)
class SaveResult:
    """Pages of a save: `stored` now; `existing`, stored before or just being stored by another
    writer; `dropped`, not kept, with the reason."""

    stored: int
    existing: int
    dropped: int
    reason: str | None = None


@dataclass(frozen=True)
class LoadResult:
    """`pages`: leading pages whose KV is in the engine's slots: those that skip_tokens covers
    wholly, then the `loaded` ones. Slots of later pages hold nothing of meaning: on a GPU they may
    have been written with what did not match its checksum. `error`: why a load ended early, None for a plain miss."""

    pages: int
    loaded: int
    error: str | None = None


@dataclass(frozen=True)
class SaveJob:
    """`gathered`: the engine may reuse the slots. `done`: the outcome; always comes."""

    gathered: concurrent.futures.Future[None]
    done: concurrent.futures.Future[SaveResult]


@dataclass(frozen=True)
class LoadJob:
    """`done`: the outcome; always comes. Until then the slots must not be used."""

    done: concurrent.futures.Future[LoadResult]


@dataclass
class AgentStats:
    """Counts since the agent was made. `pages_forged`: of a keyed namespace, without its seal; of the agent's client,
    which may be shared."""

    lookups: int = 0
    lookups_failed: int = 0
    saves: int = 0
    pages_stored: int = 0
    pages_existing: int = 0
    pages_dropped: int = 0
    loads: int = 0
    loads_failed: int = 0
    pages_loaded: int = 0
    pages_forged: int = 0


class AgentCounts:
    """Those of `AgentStats` as they grow, and a line of the log for what did not end well. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = AgentStats()

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self._stats, name, getattr(self._stats, name) + count)

    def saved(self, result: SaveResult) -> SaveResult:
        self.add(pages_stored=result.stored, pages_existing=result.existing, pages_dropped=result.dropped)
        if result.dropped:
            count = result.stored + result.existing + result.dropped
            log.info("%d of %d pages were not stored: %s", result.dropped, count, result.reason)
        return result

    def loaded(self, result: LoadResult) -> LoadResult:
        self.add(pages_loaded=result.loaded, loads_failed=int(result.error is not None))
        if result.error is not None:
            log.info("a load ended after %d pages: %s", result.pages, result.error)
        return result

    def now(self, **others: int) -> AgentStats:
        """A copy; `others` are counted elsewhere."""
        with self._lock:
            return replace(self._stats, **others)


log.addFilter(LogRate())
log.addFilter(NamesRequest())

# Hashed by one task: a job is cut into as many as keep all threads busy, but less than this costs more than
# it spreads, and more than that ends late (H200).
HASHED_NBYTES_MIN, HASHED_NBYTES_MAX = 1 << 20, 8 << 20
HASHED_TASKS = 16
# While a node's memory is page-locked, at its first use: a save may wait, of a load computing is sooner done.
SAVE_WAIT_S, LOAD_WAIT_S = 5.0, 0.25


@dataclass(frozen=True)
class Chunk:
    """Consecutive pages of a load, or the missing ones of a save: keys, and where their tokens are."""

    namespace: Namespace
    prefix_hashes: list[bytes]
    pool: KVPool
    table: UnitTable
    fence: Fence
    deadline: Deadline


@dataclass(frozen=True)
class Job:
    """What a worker needs of one save or load."""

    prefix_hashes: list[bytes]
    pool: KVPool
    table: UnitTable
    fence: Fence
    deadline: Deadline

    def chunk(self, namespace: Namespace, pages: list[int]) -> Chunk:
        """Some of its pages, in ascending order."""
        hashes = [self.prefix_hashes[page] for page in pages]
        together = pages[-1] - pages[0] == len(pages) - 1
        table = self.table.select(slice(pages[0], pages[-1] + 1) if together else pages)
        return Chunk(namespace, hashes, self.pool, table, self.fence, self.deadline)


class TransferPath(Protocol):
    """Methods raise KVStoreErrors; whatever happens, nothing moves any more when they return.

    `asks_first`: `save` asks the node before it gathers, so that nobody else need ask what is missing.
    `overlaps`: a chunk may be fetched while another is placed.
    """

    asks_first: bool
    overlaps: bool

    def save(self, chunk: Chunk, gathered: Gathered | None) -> list[PutOutcome]:
        """`gathered` is called when the slots have been read; not if no page is wanted."""

    def fetch(self, chunk: Chunk) -> "Fetched":
        """What a load begins with: where the pages are, and their verification."""

    def place(self, fetched: "Fetched", skip_tokens: int, placed: Placed | None) -> int:
        """Copy fetched pages to their slots and return how many leading ones arrived. Close what was fetched.

        Slots of later pages have no defined content. `placed` is called only if all pages of the chunk
        arrived: a layer without a page is not in place, and an engine that was told so would compute
        over the slots' old content.
        """


@dataclass(frozen=True)
class Fetched:
    """A chunk on its way to the slots; `close` gives back what it holds, placed or not. `slots`: the node's, whose
    leading hits the pages are. `hashes`: theirs, unless the GPU is going to make leaves of what arrives there."""

    chunk: Chunk
    held: contextlib.ExitStack
    pages: Sequence[torch.Tensor] = ()
    slots: AcquiredSlots | None = None
    hashes: "_Hashes | None" = None

    def intact(self, first: int, leaves: Sequence[bytes]) -> int:
        """How many of the pages from `first` on have their checksum, up to one that has not; `leaves`: of each."""
        assert self.slots is not None
        digest, keys = self.chunk.namespace.digest, self.chunk.prefix_hashes[first : first + len(leaves)]
        return leading(list(map(eq, roots(leaves, digest, keys), self.slots.checksums[first : first + len(leaves)])))

    def close(self) -> None:
        self.held.close()


class BufferedPath:
    """`buffer`: uint8 CPU tensor `[pages, page_nbytes]`, at least as many pages as a chunk has. Not used for pages that
    the transfer knows in pieces: they are sent from the slots, and received there and then verified."""

    asks_first = False
    overlaps = False  # there is one buffer

    def __init__(self, client: Client, transfer: Transfer, buffer: torch.Tensor) -> None:
        self._client = client
        self._transfer = transfer
        self._buffer = buffer

    def save(self, chunk: Chunk, gathered: Gathered | None) -> list[PutOutcome]:
        pieces = self._transfer.pieces(chunk.pool, chunk.table)
        if pieces is not None:
            outcomes = self._put(chunk, pieces)
            if gathered:
                gathered()
            return outcomes
        pages = list(self._buffer[: len(chunk.prefix_hashes)])
        self._transfer.gather(chunk.pool, chunk.table, pages, chunk.fence, gathered)
        return self._put(chunk, pages)

    def fetch(self, chunk: Chunk) -> Fetched:
        return Fetched(chunk, contextlib.ExitStack())

    def place(self, fetched: Fetched, skip_tokens: int, placed: Placed | None) -> int:
        chunk = fetched.chunk
        whole = not (skip_tokens or placed)  # else some slots are not written, or layer by layer
        pieces = self._transfer.pieces(chunk.pool, chunk.table) if whole else None
        if pieces is not None:
            return self._get(chunk, pieces)
        pages = list(self._buffer[: len(chunk.prefix_hashes)])
        run = self._get(chunk, pages)
        if run:
            table = chunk.table.select(slice(run))
            told = placed if run == len(chunk.prefix_hashes) else None
            self._transfer.scatter(chunk.pool, table, pages[:run], chunk.fence, skip_tokens, told)
        return run

    def _put(self, chunk: Chunk, pages: Sequence[Any]) -> list[PutOutcome]:
        timeout_s = chunk.deadline.remaining()
        return self._client.put(chunk.namespace, chunk.prefix_hashes, pages, timeout_s=timeout_s)

    def _get(self, chunk: Chunk, pages: Sequence[Any]) -> int:
        """Leading pages that came."""
        timeout_s = chunk.deadline.remaining()
        hits = self._client.get(chunk.namespace, chunk.prefix_hashes, pages, prefix=True, timeout_s=timeout_s)
        return [*hits, False].index(False)


class MappedPath:
    """Needs a client that maps the node's arena. Pages are hashed by the GPU, or where it can not by `hashers` beside
    the copies: a core hashes 10 to 25 GB/s of memory that it has not seen, a GPU's link moves 55."""

    asks_first = True
    overlaps = True

    def __init__(self, client: Client, transfer: Transfer, hashers: concurrent.futures.Executor) -> None:
        self._client = client
        self._transfer = transfer
        self._hashers = hashers

    def save(self, chunk: Chunk, gathered: Gathered | None) -> list[PutOutcome]:
        timeout_s = chunk.deadline.remaining()
        with self._client.open_put(chunk.namespace, chunk.prefix_hashes, timeout_s=timeout_s) as slots:
            outcomes = put_outcomes(slots.verdicts)
            wanted = [i for i, outcome in enumerate(outcomes) if outcome is PutOutcome.STORED]
            if not wanted:
                return outcomes
            pages = self._mapped(slots.arena, slots.offsets, chunk, SAVE_WAIT_S)
            table = chunk.table if len(wanted) == len(outcomes) else chunk.table.select(wanted)
            leaves: list[bytes] = []
            if self._transfer.makes_leaves(chunk.pool):
                self._transfer.gather(chunk.pool, table, pages, chunk.fence, gathered, summed=leaves.extend)
            else:
                with _Hashes(self._hashers, slots.pages) as hashes:
                    self._transfer.gather(chunk.pool, table, pages, chunk.fence, gathered, hashes.begin)
                    leaves.extend(hashes.of(page) for page in range(len(wanted)))
            slots.commit(leaves)
            return outcomes

    def fetch(self, chunk: Chunk) -> Fetched:
        timeout_s = chunk.deadline.remaining()
        with contextlib.ExitStack() as held:
            opened = self._client.open_get(chunk.namespace, chunk.prefix_hashes, prefix=True, timeout_s=timeout_s)
            slots = held.enter_context(opened)
            run = [*slots.hits, False].index(False)
            pages = self._mapped(slots.arena, slots.offsets[:run], chunk, LOAD_WAIT_S)
            hashes = None if self._transfer.makes_leaves(chunk.pool) else self._hashed(held, slots, run)
            return Fetched(chunk, held.pop_all(), pages, slots, hashes)

    def _hashed(self, held: contextlib.ExitStack, slots: AcquiredSlots, run: int) -> "_Hashes":
        hashes = held.enter_context(_Hashes(self._hashers, slots.pages[:run]))
        hashes.begin(range(run))
        return hashes

    def place(self, fetched: Fetched, skip_tokens: int, placed: Placed | None) -> int:
        with fetched.held:
            if placed or not self._transfer.makes_leaves(fetched.chunk.pool):
                intact = self._scatter(fetched, skip_tokens, placed)
            else:
                intact = self._scatter_first(fetched, skip_tokens)
        if intact < len(fetched.pages):
            self._report(fetched.chunk, intact)
        return intact

    def _scatter_first(self, fetched: Fetched, skip_tokens: int) -> int:
        """Pages in the slots, up to the first damaged one; the slots of later ones hold nothing of meaning. The GPU
        looks at what arrived."""
        chunk, pages, leaves = fetched.chunk, fetched.pages, list[bytes]()
        table = chunk.table.select(slice(len(pages)))
        self._transfer.scatter(chunk.pool, table, pages, chunk.fence, skip_tokens, summed=leaves.extend)
        return fetched.intact(0, leaves)  # a page that nobody looked at is none

    def _scatter(self, fetched: Fetched, skip_tokens: int, placed: Placed | None) -> int:
        """Pages in the slots, up to the first damaged one. Whole pages travel while later ones are still
        hashed; layer by layer, all must be known to be intact before the first layer is."""
        chunk, pages, run = fetched.chunk, fetched.pages, len(fetched.pages)
        assert fetched.slots is not None
        hashes = fetched.hashes or self._hashed(fetched.held, fetched.slots, run)

        def ready(some: range) -> None:
            for page in some:
                if not fetched.intact(page, [hashes.of(page)]):
                    raise _Damaged(page)

        try:
            if placed:
                ready(range(run))
            elif run:
                table = chunk.table.select(slice(run))
                self._transfer.scatter(chunk.pool, table, pages, chunk.fence, skip_tokens, ready=ready)
                return run
        except _Damaged as damaged:
            run = damaged.page
        if run:  # those in front of a damaged one, or all of them layer by layer
            table = chunk.table.select(slice(run))
            told = placed if run == len(chunk.prefix_hashes) else None
            self._transfer.scatter(chunk.pool, table, pages[:run], chunk.fence, skip_tokens, told)
        return run

    def _mapped(self, arena: ArenaMap, offsets: Sequence[int], chunk: Chunk, wait_s: float) -> MappedPages:
        """Raises Exhausted while the arena is still made ready for copies."""
        if not self._transfer.host_memory(arena.memory):
            wait_s = min(wait_s, chunk.deadline.remaining())
            if not self._transfer.await_host_memory(wait_s):
                raise Exhausted(f"the node's memory is still being page-locked after {wait_s:.1f} s")
        return MappedPages(arena.memory, arena.address, offsets, chunk.namespace.layout.page_nbytes)

    def _report(self, chunk: Chunk, page: int) -> None:
        """The node checks its copy and drops it; whatever it says, this load ended before that page."""
        prefix_hash = chunk.prefix_hashes[page]
        log.error("page %s of model %s did not match its checksum", short(prefix_hash), chunk.namespace.model)
        try:
            self._client.verify(chunk.namespace, [prefix_hash], timeout_s=chunk.deadline.remaining())
        except KVStoreError as error:
            log.warning("could not report a damaged page: %s", error)


class _Damaged(Exception):
    """A page is not what its writer stored."""

    def __init__(self, page: int) -> None:
        super().__init__(f"page {page}")
        self.page = page


class _Hashes:
    """Leaves of pages, made by other threads, of which several may share a page. Nobody reads the pages any more when
    the context ends."""

    def __init__(self, hashers: concurrent.futures.Executor, pages: Sequence[memoryview]) -> None:
        self._hashers = hashers
        self._pages = pages
        nbytes = sum(page.nbytes for page in pages)
        self._cuts = cuts(pages[0].nbytes) if pages else ()
        wanted = min(max(nbytes // HASHED_TASKS, HASHED_NBYTES_MIN), HASHED_NBYTES_MAX)
        self._step = max(1, wanted * len(pages) * len(self._cuts) // nbytes) if nbytes else 1  # parts of a task
        # page -> for each of its parts the task that hashes it, and which of the task's it is
        self._found: dict[int, list[tuple[concurrent.futures.Future[list[bytes]], int]]] = {}

    def begin(self, pages: range) -> None:
        """These pages are complete in memory."""
        parts = [(page, start, end) for page in pages for start, end in self._cuts]
        for first in range(0, len(parts), self._step):
            some = parts[first : first + self._step]
            future = self._hashers.submit(self._hash, some)
            for place, (page, _, _) in enumerate(some):
                self._found.setdefault(page, []).append((future, place))

    def _hash(self, parts: list[tuple[int, int, int]]) -> list[bytes]:
        return [leaf(self._pages[page][start:end]) for page, start, end in parts]

    def of(self, page: int) -> bytes:
        return b"".join([future.result()[place] for future, place in self._found[page]])

    def __enter__(self) -> "_Hashes":
        return self

    def __exit__(self, *_: object) -> None:
        futures = {future for parts in self._found.values() for future, _ in parts}
        end(futures)


# A load in parts: while one is on its way to the slots, the next is asked for, or on its way too.
#
#     one by one      fetch 0 | place 0          | place 1          | place 2 ...
#                             | fetch 1 |        | fetch 2 |
#     abreast         fetch 0 | place 0          | fetch 2 | place 2 ...
#                     fetch 1         | place 1          | fetch 3 ...
#
# Abreast, the link has its next work when one part's is done. It takes a mover that need not know
# of one part that it is intact before it writes the next.

DEPTH = 2


def parts_of(first: int, count: int, step: int, overlaps: bool) -> list[range]:
    """Pages `first` to `count`, at most `step` at a time. Nothing is placed while the first part is fetched: it
    is a quarter of the others, where those overlap."""
    parts: list[range] = []
    while first < count:
        wanted = max(1, step // 4) if overlaps and not parts and count - first > step else step
        parts.append(range(first, min(first + wanted, count)))
        first = parts[-1].stop
    return parts


def run_pipeline(
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
            if len(running) == DEPTH:
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
