"""How a chunk of pages travels between an engine's slots and the store: through a buffer of ours, or
straight from and to the node's memory.

    BufferCarrier   slots <-> page buffer of the lane <-> client's put and get        any wire
    ArenaCarrier    slots <-> the node's slots, mapped here                           shared memory

Both save and load the same bytes. A chunk is loaded in order and only as far as its pages are intact.
"""

import concurrent.futures
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from gpu_agent.pool import KVPool
from gpu_agent.transfer import Fence, Gathered, Placed, Transfer
from gpu_agent.units import UnitTable
from kvstore import PutOutcome
from kvstore.checksum import checksum, key_seed
from kvstore.client import Client
from kvstore.deadline import Deadline
from kvstore.errors import Exhausted, KVStoreError
from kvstore.keys import Namespace
from kvstore.wires.arena_map import ArenaMap

log = logging.getLogger(__name__)

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

    def seeds(self) -> list[int]:
        return [key_seed(self.namespace.digest, prefix_hash) for prefix_hash in self.prefix_hashes]


class Carrier(Protocol):
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
        """Leading pages that are in the slots now; later pages' slots are untouched. Closes what was fetched."""


@dataclass(frozen=True)
class Fetched:
    """A chunk on its way to the slots; `close` gives back what it holds, placed or not."""

    chunk: Chunk
    held: contextlib.ExitStack
    pages: list[torch.Tensor] = field(default_factory=list)
    hashes: "_Hashes | None" = None
    checksums: list[bytes] = field(default_factory=list)

    def close(self) -> None:
        self.held.close()


class BufferCarrier:
    """`buffer`: uint8 CPU tensor `[pages, page_nbytes]`, at least as many pages as a chunk has."""

    asks_first = False
    overlaps = False  # there is one buffer

    def __init__(self, client: Client, transfer: Transfer, buffer: torch.Tensor) -> None:
        self._client = client
        self._transfer = transfer
        self._buffer = buffer

    def save(self, chunk: Chunk, gathered: Gathered | None) -> list[PutOutcome]:
        pages = list(self._buffer[: len(chunk.prefix_hashes)])
        self._transfer.gather(chunk.pool, chunk.table, pages, chunk.fence, gathered)
        return self._client.put(chunk.namespace, chunk.prefix_hashes, pages, timeout_s=chunk.deadline.remaining())

    def fetch(self, chunk: Chunk) -> Fetched:
        return Fetched(chunk, contextlib.ExitStack())

    def place(self, fetched: Fetched, skip_tokens: int, placed: Placed | None) -> int:
        chunk = fetched.chunk
        pages = list(self._buffer[: len(chunk.prefix_hashes)])
        timeout_s = chunk.deadline.remaining()
        hits = self._client.get(chunk.namespace, chunk.prefix_hashes, pages, prefix=True, timeout_s=timeout_s)
        run = [*hits, False].index(False)
        if run:
            table = chunk.table.select(slice(run))
            self._transfer.scatter(chunk.pool, table, pages[:run], chunk.fence, skip_tokens, placed)
        return run


class ArenaCarrier:
    """Needs a client that maps the node's arena. Pages are hashed by `hashers` beside the copies: a core
    hashes 10 to 25 GB/s of memory that it has not seen, a GPU's link moves 55."""

    asks_first = True
    overlaps = True

    def __init__(self, client: Client, transfer: Transfer, hashers: concurrent.futures.Executor) -> None:
        self._client = client
        self._transfer = transfer
        self._hashers = hashers

    def save(self, chunk: Chunk, gathered: Gathered | None) -> list[PutOutcome]:
        timeout_s = chunk.deadline.remaining()
        with self._client.open_put(chunk.namespace, chunk.prefix_hashes, timeout_s=timeout_s) as slots:
            outcomes = [PutOutcome(verdict) for verdict in slots.verdicts]
            wanted = [i for i, outcome in enumerate(outcomes) if outcome is PutOutcome.STORED]
            if not wanted:
                return outcomes
            pages = self._tensors(slots.arena, slots.offsets, chunk, SAVE_WAIT_S)
            seeds = chunk.seeds()
            with _Hashes(self._hashers, slots.pages, [seeds[i] for i in wanted]) as hashes:
                table = chunk.table if len(wanted) == len(outcomes) else chunk.table.select(wanted)
                self._transfer.gather(chunk.pool, table, pages, chunk.fence, gathered, hashes.begin)
                checksums = [hashes.of(page) for page in range(len(wanted))]
            slots.commit(checksums)
            return outcomes

    def fetch(self, chunk: Chunk) -> Fetched:
        timeout_s = chunk.deadline.remaining()
        with contextlib.ExitStack() as held:
            opened = self._client.open_get(chunk.namespace, chunk.prefix_hashes, prefix=True, timeout_s=timeout_s)
            slots = held.enter_context(opened)
            run = [*slots.hits, False].index(False)
            pages = self._tensors(slots.arena, slots.offsets, chunk, LOAD_WAIT_S)[:run]
            hashes = held.enter_context(_Hashes(self._hashers, slots.pages[:run], chunk.seeds()[:run]))
            hashes.begin(range(run))
            return Fetched(chunk, held.pop_all(), pages, hashes, slots.checksums)

    def place(self, fetched: Fetched, skip_tokens: int, placed: Placed | None) -> int:
        chunk, pages = fetched.chunk, fetched.pages
        assert fetched.hashes is not None
        with fetched.held:
            intact = self._scatter(chunk, pages, fetched.hashes, fetched.checksums, skip_tokens, placed)
        if intact < len(pages):
            self._report(chunk, intact)
        return intact

    def _scatter(
        self,
        chunk: Chunk,
        pages: list[torch.Tensor],
        hashes: "_Hashes",
        expected: list[bytes],
        skip_tokens: int,
        placed: Placed | None,
    ) -> int:
        """Pages in the slots, up to the first damaged one. Whole pages travel while later ones are still
        hashed; layer by layer, all must be known to be intact before the first layer is."""
        run = len(pages)

        def ready(some: range) -> None:
            for page in some:
                if hashes.of(page) != expected[page]:
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
            self._transfer.scatter(chunk.pool, table, pages[:run], chunk.fence, skip_tokens, placed)
        return run

    def _tensors(self, arena: ArenaMap, offsets: Sequence[int], chunk: Chunk, wait_s: float) -> list[torch.Tensor]:
        """Raises Exhausted while the arena is still made ready for copies."""
        if not self._transfer.host_memory(arena.memory):
            wait_s = min(wait_s, chunk.deadline.remaining())
            if not self._transfer.await_host_memory(wait_s):
                raise Exhausted(f"the node's memory is still being page-locked after {wait_s:.1f} s")
        nbytes = chunk.namespace.layout.page_nbytes
        return [torch.frombuffer(arena.memory, dtype=torch.uint8, count=nbytes, offset=offset) for offset in offsets]

    def _report(self, chunk: Chunk, page: int) -> None:
        """The node checks its copy and drops it; whatever it says, this load ended before that page."""
        prefix_hash = chunk.prefix_hashes[page]
        log.error("page %s of model %s did not match its checksum", prefix_hash.hex(), chunk.namespace.model)
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
    """Checksums of pages, made by other threads. Nobody reads the pages any more when the context ends."""

    def __init__(self, hashers: concurrent.futures.Executor, pages: Sequence[memoryview], seeds: Sequence[int]) -> None:
        self._hashers = hashers
        self._pages = pages
        self._seeds = seeds
        nbytes = sum(page.nbytes for page in pages)
        wanted = min(max(nbytes // HASHED_TASKS, HASHED_NBYTES_MIN), HASHED_NBYTES_MAX)
        self._step = max(1, wanted * len(pages) // nbytes) if nbytes else 1
        # page -> (first page of the group that is hashed with it, the group's checksums)
        self._found: dict[int, tuple[int, concurrent.futures.Future[list[bytes]]]] = {}

    def begin(self, pages: range) -> None:
        """These pages are complete in memory."""
        for first in range(pages.start, pages.stop, self._step):
            group = range(first, min(first + self._step, pages.stop))
            future = self._hashers.submit(self._hash, group)
            for page in group:
                self._found[page] = (first, future)

    def _hash(self, group: range) -> list[bytes]:
        return [checksum(self._pages[page], self._seeds[page]) for page in group]

    def of(self, page: int) -> bytes:
        first, future = self._found[page]
        return future.result()[page - first]

    def __enter__(self) -> "_Hashes":
        return self

    def __exit__(self, *_: object) -> None:
        futures = {future for _, future in self._found.values()}
        for future in futures:
            future.cancel()
        concurrent.futures.wait(futures)
