"""Move chunks of pages between slots and the store, in mapped memory or through a buffer.

    MappedPath      slots <-> the node's slots, mapped here          shared memory
    BufferedPath    slots <-> page buffer <-> client's put and get   any transport, and signed pages
                    slots <-> client's put and get                   the same, for host memory

Pages of a keyed namespace are signed and verified in a buffer or in the engine's own memory. In the
node's memory other processes could change them before or after. Both paths store and load the same
bytes. A load takes the pages in order, and only as far as they are intact.
"""

import concurrent.futures
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
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
from kvstore.threads import end
from kvstore.tracing import NamesRequest
from kvstore.transports.mapped_memory import AcquiredSlots, ArenaMap

log = logging.getLogger(__name__)
log.addFilter(LogRate())
log.addFilter(NamesRequest())

# Bytes that one task hashes. A chunk is cut into enough tasks to keep all threads busy. Smaller
# tasks cost more than they save, larger ones end late (H200).
HASHED_NBYTES_MIN, HASHED_NBYTES_MAX = 1 << 20, 8 << 20
HASHED_TASKS = 16
# How long a save and a load wait while a node's memory is page-locked, at its first use. A load
# waits less, because computing is soon faster.
SAVE_WAIT_S, LOAD_WAIT_S = 5.0, 0.25


@dataclass(frozen=True)
class PageBatch:
    """Pages of a chain: their keys, their slots, and what a worker needs to move them."""

    namespace: Namespace
    prefix_hashes: list[bytes]
    pool: KVPool
    table: UnitTable
    fence: Fence
    deadline: Deadline

    def select(self, pages: Sequence[int]) -> "PageBatch":
        """Return some of the pages, by their indices in ascending order."""
        hashes = [self.prefix_hashes[page] for page in pages]
        consecutive = pages[-1] - pages[0] == len(pages) - 1
        table = self.table.select(slice(pages[0], pages[-1] + 1) if consecutive else pages)
        return PageBatch(self.namespace, hashes, self.pool, table, self.fence, self.deadline)

    def __len__(self) -> int:
        return len(self.prefix_hashes)


class TransferPath(Protocol):
    """A way to move chunks. Methods raise KVStoreErrors; after they return, nothing moves any more.

    `chunk_pages`: pages of one chunk. `asks_first`: `save` makes a lookup before it gathers, so a
    short save needs no other one. `overlaps`: a chunk may be fetched while another is placed.
    """

    asks_first: bool
    overlaps: bool
    chunk_pages: int

    @property
    def lost(self) -> bool:
        """Return whether the near node does not answer, or is no longer near."""

    def verifies_in_slots(self, pool: KVPool) -> bool:
        """Return whether pages are verified in their slots, so chunks may be placed in parallel."""

    def save(self, chunk: PageBatch, gathered: Gathered | None) -> list[PutOutcome]:
        """Store a chunk.

        `gathered` is called, if given, when its slots have been read.
        """

    def fetch(self, chunk: PageBatch) -> "Fetched":
        """Begin a load: find the pages, and start to verify them."""

    def place(self, fetched: "Fetched", skip_tokens: int, placed: Placed | None) -> int:
        """Copy fetched pages to their slots, and return the number of leading ones that arrived.

        Closes the fetched chunk. Slots of later pages have undefined content. `placed` is called
        only if all pages of the chunk arrived: a layer without a page is not in place, and the
        engine would compute over the slots' old content.
        """


@dataclass(frozen=True)
class Fetched:
    """A chunk on its way to the slots; `close` releases what it holds, placed or not.

    `slots`: the node's; `pages` are their leading hits. `hashes`: of the pages, unless the GPU
    makes the leaves of the bytes that arrive there.
    """

    chunk: PageBatch
    held: contextlib.ExitStack
    pages: Sequence[torch.Tensor] = ()
    slots: AcquiredSlots | None = None
    hashes: "_LeafHashes | None" = None

    def intact(self, first: int, leaves: Sequence[bytes]) -> int:
        """Count the leading pages from `first` on whose `leaves` match their checksums."""
        assert self.slots is not None
        digest, keys = (
            self.chunk.namespace.digest,
            self.chunk.prefix_hashes[first : first + len(leaves)],
        )
        return leading(
            list(
                map(
                    eq,
                    roots(leaves, digest, keys),
                    self.slots.checksums[first : first + len(leaves)],
                )
            )
        )

    def close(self) -> None:
        """Release the slots."""
        self.held.close()


class BufferedPath:
    """Move pages through `buffer`, a uint8 CPU tensor `[chunk_pages, page_nbytes]`.

    Pages that the transfer offers as segments do not use it: they are sent from the slots, and
    received and verified there.
    """

    asks_first = False
    overlaps = False  # there is one buffer
    lost = False

    def __init__(self, client: Client, transfer: Transfer, buffer: torch.Tensor) -> None:
        self._client = client
        self._transfer = transfer
        self._buffer = buffer
        self.chunk_pages = len(buffer)

    def verifies_in_slots(self, pool: KVPool) -> bool:
        """Return False: pages are verified in the buffer."""
        return False

    def save(self, chunk: PageBatch, gathered: Gathered | None) -> list[PutOutcome]:
        """Copy pages into the buffer and put them."""
        pieces = self._transfer.pieces(chunk.pool, chunk.table)
        if pieces is not None:
            outcomes = self._put(chunk, pieces)
            if gathered:
                gathered()
            return outcomes
        pages = list(self._buffer[: len(chunk)])
        self._transfer.gather(chunk.pool, chunk.table, pages, chunk.fence, gathered)
        return self._put(chunk, pages)

    def fetch(self, chunk: PageBatch) -> Fetched:
        """Return the chunk: nothing is fetched ahead."""
        return Fetched(chunk, contextlib.ExitStack())

    def place(self, fetched: Fetched, skip_tokens: int, placed: Placed | None) -> int:
        """Get pages and copy them into the slots; return how many are in place."""
        chunk = fetched.chunk
        # otherwise some slots are not written, or layer by layer
        whole = not (skip_tokens or placed)
        pieces = self._transfer.pieces(chunk.pool, chunk.table) if whole else None
        if pieces is not None:
            return self._get(chunk, pieces)
        pages = list(self._buffer[: len(chunk)])
        hits = self._get(chunk, pages)
        if hits:
            _scatter(self._transfer, chunk, pages[:hits], skip_tokens, placed)
        return hits

    def _put(self, chunk: PageBatch, pages: Sequence[Any]) -> list[PutOutcome]:
        timeout_s = chunk.deadline.remaining()
        return self._client.put(chunk.namespace, chunk.prefix_hashes, pages, timeout_s=timeout_s)

    def _get(self, chunk: PageBatch, pages: Sequence[Any]) -> int:
        """Fill `pages` and return the number of leading hits."""
        timeout_s = chunk.deadline.remaining()
        hits = self._client.get(
            chunk.namespace, chunk.prefix_hashes, pages, prefix=True, timeout_s=timeout_s
        )
        return [*hits, False].index(False)


class MappedPath:
    """Move pages directly from and to the node's arena, which the client has mapped.

    The GPU hashes the pages. If it can not, `hashers` do, beside the copies: a core hashes 10 to 25
    GB/s of memory that is not in its cache, a GPU's link moves 55.
    """

    asks_first = True
    overlaps = True

    def __init__(
        self,
        client: Client,
        transfer: Transfer,
        hashers: concurrent.futures.Executor,
        chunk_pages: int,
    ) -> None:
        self._client = client
        self._transfer = transfer
        self._hashers = hashers
        self.chunk_pages = chunk_pages

    @property
    def lost(self) -> bool:
        """Return whether the arena is not mapped any more."""
        return not self._client.maps_arena

    def verifies_in_slots(self, pool: KVPool) -> bool:
        """Return whether pages are verified on the GPU."""
        return self._transfer.makes_leaves(pool)

    def save(self, chunk: PageBatch, gathered: Gathered | None) -> list[PutOutcome]:
        """Copy pages into reserved arena slots and commit."""
        timeout_s = chunk.deadline.remaining()
        with self._client.open_put(
            chunk.namespace, chunk.prefix_hashes, timeout_s=timeout_s
        ) as slots:
            outcomes = put_outcomes(slots.verdicts)
            wanted = [i for i, outcome in enumerate(outcomes) if outcome is PutOutcome.STORED]
            if not wanted:
                return outcomes
            pages = self._mapped(slots.arena, slots.offsets, chunk, SAVE_WAIT_S)
            table = chunk.table if len(wanted) == len(outcomes) else chunk.table.select(wanted)
            leaves: list[bytes] = []
            if self._transfer.makes_leaves(chunk.pool):
                self._transfer.gather(
                    chunk.pool, table, pages, chunk.fence, gathered, summed=leaves.extend
                )
            else:
                with _LeafHashes(self._hashers, slots.pages) as hashes:
                    self._transfer.gather(
                        chunk.pool, table, pages, chunk.fence, gathered, hashes.begin
                    )
                    leaves.extend(hashes.of(page) for page in range(len(wanted)))
            slots.commit(leaves)
            return outcomes

    def fetch(self, chunk: PageBatch) -> Fetched:
        """Find and hold pages in the arena."""
        timeout_s = chunk.deadline.remaining()
        with contextlib.ExitStack() as held:
            opened = self._client.open_get(
                chunk.namespace, chunk.prefix_hashes, prefix=True, timeout_s=timeout_s
            )
            slots = held.enter_context(opened)
            hits = [*slots.hits, False].index(False)
            pages = self._mapped(slots.arena, slots.offsets[:hits], chunk, LOAD_WAIT_S)
            hashes = (
                None if self._transfer.makes_leaves(chunk.pool) else self._hashed(held, slots, hits)
            )
            return Fetched(chunk, held.pop_all(), pages, slots, hashes)

    def _hashed(
        self, held: contextlib.ExitStack, slots: AcquiredSlots, count: int
    ) -> "_LeafHashes":
        hashes = held.enter_context(_LeafHashes(self._hashers, slots.pages[:count]))
        hashes.begin(range(count))
        return hashes

    def place(self, fetched: Fetched, skip_tokens: int, placed: Placed | None) -> int:
        """Copy held pages into the slots, verified; return how many are in place."""
        with fetched.held:
            if not fetched.pages:
                return 0  # a miss; `skip_tokens` may lie inside the first page
            if placed or not self._transfer.makes_leaves(fetched.chunk.pool):
                intact = self._verify_and_scatter(fetched, skip_tokens, placed)
            else:
                intact = self._scatter_and_verify(fetched, skip_tokens)
        if intact < len(fetched.pages):
            self._report(fetched.chunk, intact)
        return intact

    def _scatter_and_verify(self, fetched: Fetched, skip_tokens: int) -> int:
        """Write all pages, and return how many precede the first damaged one.

        The GPU makes leaves of the bytes that arrived. Slots of later pages have undefined content.
        """
        chunk, pages, leaves = fetched.chunk, fetched.pages, list[bytes]()
        table = chunk.table.select(slice(len(pages)))
        self._transfer.scatter(
            chunk.pool, table, pages, chunk.fence, skip_tokens, summed=leaves.extend
        )
        return fetched.intact(0, leaves)  # a page without leaves does not count

    def _verify_and_scatter(self, fetched: Fetched, skip_tokens: int, placed: Placed | None) -> int:
        """Write the pages before the first damaged one, and return their number.

        Whole pages move while later ones are still hashed. Layer by layer, all pages must be intact
        before the first layer moves.
        """
        chunk, pages, count = fetched.chunk, fetched.pages, len(fetched.pages)
        assert fetched.slots is not None
        hashes = fetched.hashes or self._hashed(fetched.held, fetched.slots, count)

        def verify(some: range) -> None:
            for page in some:
                if not fetched.intact(page, [hashes.of(page)]):
                    raise _Damaged(page)

        try:
            if placed:
                verify(range(count))
            elif count:
                table = chunk.table.select(slice(count))
                self._transfer.scatter(
                    chunk.pool, table, pages, chunk.fence, skip_tokens, ready=verify
                )
                return count
        except _Damaged as damaged:
            count = damaged.page
        if count:  # the pages before a damaged one, or all of them layer by layer
            _scatter(self._transfer, chunk, pages[:count], skip_tokens, placed)
        return count

    def _mapped(
        self, arena: ArenaMap, offsets: Sequence[int], chunk: PageBatch, wait_s: float
    ) -> MappedPages:
        """Return pages of the arena.

        Raises Exhausted while it is still being prepared for copies.
        """
        if not self._transfer.host_memory(arena.memory):
            wait_s = min(wait_s, chunk.deadline.remaining())
            if not self._transfer.await_host_memory(wait_s):
                raise Exhausted(
                    f"the node's memory is still being page-locked after {wait_s:.1f} s"
                )
        return MappedPages(arena.memory, arena.address, offsets, chunk.namespace.layout.page_nbytes)

    def _report(self, chunk: PageBatch, page: int) -> None:
        """Make the node verify its copy and drop it.

        The load has ended before that page anyway.
        """
        prefix_hash = chunk.prefix_hashes[page]
        log.error(
            "page %s of model %s did not match its checksum",
            short(prefix_hash),
            chunk.namespace.model,
        )
        try:
            self._client.verify(
                chunk.namespace, [prefix_hash], timeout_s=chunk.deadline.remaining()
            )
        except KVStoreError as error:
            log.warning("could not report a damaged page: %s", error)


def _scatter(
    transfer: Transfer,
    chunk: PageBatch,
    pages: Sequence[torch.Tensor],
    skip_tokens: int,
    placed: Placed | None,
) -> None:
    """Copy the leading pages of a chunk into its slots; call `placed` only if these are all."""
    table = chunk.table.select(slice(len(pages)))
    all_placed = placed if len(pages) == len(chunk) else None
    transfer.scatter(chunk.pool, table, pages, chunk.fence, skip_tokens, all_placed)


class _Damaged(Exception):
    """A page differs from what its writer stored."""

    def __init__(self, page: int) -> None:
        super().__init__(f"page {page}")
        self.page = page


class _LeafHashes:
    """Leaves of pages, hashed by other threads, several of which may share a page.

    When the context ends, no thread reads the pages any more.
    """

    def __init__(self, hashers: concurrent.futures.Executor, pages: Sequence[memoryview]) -> None:
        self._hashers = hashers
        self._pages = pages
        nbytes = sum(page.nbytes for page in pages)
        self._cuts = cuts(pages[0].nbytes) if pages else ()
        wanted = min(max(nbytes // HASHED_TASKS, HASHED_NBYTES_MIN), HASHED_NBYTES_MAX)
        # Parts of a task
        self._step = max(1, wanted * len(pages) * len(self._cuts) // nbytes) if nbytes else 1
        # page -> for each of its parts the task that hashes it, and the part's index in the task
        self._tasks: dict[int, list[tuple[concurrent.futures.Future[list[bytes]], int]]] = {}

    def begin(self, pages: range) -> None:
        """Hash these pages, which are complete in memory."""
        parts = [(page, start, end) for page in pages for start, end in self._cuts]
        for first in range(0, len(parts), self._step):
            some = parts[first : first + self._step]
            task = self._hashers.submit(self._hash, some)
            for index, (page, _, _) in enumerate(some):
                self._tasks.setdefault(page, []).append((task, index))

    def _hash(self, parts: list[tuple[int, int, int]]) -> list[bytes]:
        return [leaf(self._pages[page][start:end]) for page, start, end in parts]

    def of(self, page: int) -> bytes:
        return b"".join([task.result()[index] for task, index in self._tasks[page]])

    def __enter__(self) -> "_LeafHashes":
        return self

    def __exit__(self, *_: object) -> None:
        end({task for parts in self._tasks.values() for task, _ in parts})
