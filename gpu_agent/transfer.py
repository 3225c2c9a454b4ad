"""Define the transfer between an engine's slots and page buffers, with a reference in torch.

    gather    slots --> pages      read by save; the engine may reuse its slots afterwards
    scatter   pages --> slots      written by load

`TorchTransfer` is the CPU path and the oracle that every kernel is tested against. It also moves
CUDA tensors, one staged copy per plane: correct, not fast. `gpu_agent.kernels.cuda` is the fast
one.
"""

import contextlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias, overload

import torch

from gpu_agent.pool import KVPool, UnitTable
from kvstore.buffers import Pieces
from kvstore.errors import InvalidRequest

# Marks the work that the engine had enqueued on its stream; None without streams.
Fence: TypeAlias = torch.cuda.Event | None
# Called by `gather`: all slots have been read.
Gathered: TypeAlias = Callable[[], None]
# Called by `gather`: these pages are complete.
Landed: TypeAlias = Callable[[range], None]
# Called by both moves: the leaves (`kvstore.checksum`) of all pages, as they were in GPU memory.
Summed: TypeAlias = Callable[[list[bytes]], None]
# Called by `scatter`: this layer is in its slots once the event has happened (None: now).
Placed: TypeAlias = Callable[[int, Fence], None]
# Called by `scatter` before it reads these pages.
Ready: TypeAlias = Callable[[range], None]


class MappedPages(Sequence[torch.Tensor]):
    """Pages of `nbytes` bytes at `offsets` of memory mapped at `base`.

    Addresses are made at once, tensors on demand: a tensor costs a microsecond, and a load has
    hundreds of pages.
    """

    def __init__(self, memory: memoryview, base: int, offsets: Sequence[int], nbytes: int) -> None:
        self._memory, self._base, self._offsets, self.nbytes = memory, base, offsets, nbytes

    @property
    def addresses(self) -> "array[int]":
        """Return the addresses of all pages."""
        base = self._base
        return array("Q", [base + offset for offset in self._offsets])

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> "MappedPages": ...

    def __getitem__(self, index: int | slice) -> "torch.Tensor | MappedPages":
        if isinstance(index, slice):
            return MappedPages(self._memory, self._base, self._offsets[index], self.nbytes)
        return torch.frombuffer(
            self._memory, dtype=torch.uint8, count=self.nbytes, offset=self._offsets[index]
        )


class Transfer(Protocol):
    """Move pages between slots and page buffers. Thread-safe.

    `pages`: one contiguous uint8 CPU tensor `[layout.page_nbytes]` for each page of `units`,
    anywhere in memory, in the byte order of `PageLayout`. Both moves begin after `fence` and have
    ended when they return. A slot that `units` does not name is neither read nor written.

    Callbacks run on the calling thread, before the move returns. One that raises ends the move:
    nothing moves any more when the exception arrives.
    """

    def fence(self, pool: KVPool) -> Fence:
        """Return a fence behind all work enqueued so far; call it on the engine's thread."""

    def makes_leaves(self, pool: KVPool) -> bool:
        """Return whether the moves can make the leaves of pages in GPU memory.

        Then damage on the link and in host memory is found, and no core hashes the bytes.
        """

    def pieces(self, pool: KVPool, units: UnitTable) -> list[Pieces] | None:
        """Return each page's segments in the slots, so that no copy is needed.

        None means that pages must be copied: the slots are not in host memory, too small, or used
        by the engine even if a load fails.
        """

    def gather(
        self,
        pool: KVPool,
        units: UnitTable,
        pages: Sequence[torch.Tensor],
        fence: Fence,
        gathered: Gathered | None = None,
        landed: Landed | None = None,
        summed: Summed | None = None,
    ) -> None:
        """Fill `pages` from the slots.

        `gathered` is called once, as soon as all slots are read and may be reused; the last pages
        may still travel. `landed` is called for runs of complete pages, in order, while later ones
        travel. `summed` is called at the end with leaves made before the bytes left, only where
        `makes_leaves`.
        """

    def scatter(
        self,
        pool: KVPool,
        units: UnitTable,
        pages: Sequence[torch.Tensor],
        fence: Fence,
        skip_tokens: int = 0,
        placed: Placed | None = None,
        ready: Ready | None = None,
        summed: Summed | None = None,
    ) -> None:
        """Fill the slots from `pages`, without those of the first `skip_tokens` tokens.

        The engine has these already, and other requests may share their slots.

        With `placed` the layers move one after the other, ascending. It is called for each as soon
        as its writes are enqueued: a stream that waits for the event may compute that layer while
        later ones move. Small layers may share an event.

        `ready` is called for runs of pages before they are read, in order, while earlier ones move.
        If it raises, slots of that run and of later pages are untouched. Not with `placed`.

        `summed` is called at the end with leaves of the bytes that arrived, so damage is found
        after the slots were written. Only where `makes_leaves`, not with `placed`.
        """

    def host_memory(self, memory: memoryview) -> bool:
        """Announce that pages will lie in `memory`, one mapping; return whether it is prepared.

        Preparing makes copies fast and runs in the background. Without it, moves are only slower.
        """

    def await_host_memory(self, timeout_s: float) -> bool:
        """Wait while memory is being prepared; return False if it still is.

        A GPU's driver blocks this whole process meanwhile, a second per 10 GB: a move that begins
        then may miss its deadline.
        """


class TorchTransfer:
    """Gather and scatter by torch's indexing, a plane at a time.

    Makes no leaves.
    """

    def fence(self, pool: KVPool) -> Fence:
        """Return an event behind the current stream."""
        return (
            torch.cuda.current_stream(pool.device).record_event()
            if pool.device.type == "cuda"
            else None
        )

    def makes_leaves(self, pool: KVPool) -> bool:
        """Return False."""
        return False

    def pieces(self, pool: KVPool, units: UnitTable) -> list[Pieces] | None:
        """Return None: pages are copied."""
        return None

    @torch.inference_mode()
    def gather(
        self,
        pool: KVPool,
        units: UnitTable,
        pages: Sequence[torch.Tensor],
        fence: Fence,
        gathered: Gathered | None = None,
        landed: Landed | None = None,
        summed: Summed | None = None,
    ) -> None:
        """Copy slots into pages."""
        check_pages(pool, units, pages)
        with _ordered(pool.device, fence):
            indices = {space: units.flat(space).to(pool.device) for space in pool.spaces}
            for plane in pool.planes:
                values = plane.bits[indices[plane.space]].contiguous()
                start, nbytes = plane.piece.offset, plane.piece.nbytes
                rows = values.view(torch.uint8).view(units.page_count, nbytes).cpu()
                for page, row in zip(pages, rows, strict=True):
                    page[start : start + nbytes].copy_(row)
        if gathered:
            gathered()
        if landed and units.page_count:
            landed(range(units.page_count))

    @torch.inference_mode()
    def scatter(
        self,
        pool: KVPool,
        units: UnitTable,
        pages: Sequence[torch.Tensor],
        fence: Fence,
        skip_tokens: int = 0,
        placed: Placed | None = None,
        ready: Ready | None = None,
        summed: Summed | None = None,
    ) -> None:
        """Copy pages into slots."""
        check_pages(pool, units, pages)
        if ready and units.page_count:
            ready(range(units.page_count))
        pool.check_skip(skip_tokens, units.page_count)
        with _ordered(pool.device, fence) as stream:
            indices = {space: units.flat(space).to(pool.device) for space in pool.spaces}
            for layer in pool.layout.layers:
                for plane in pool.planes if units.page_count else ():
                    if plane.piece.layer != layer:
                        continue
                    skip = skip_tokens // plane.piece.plane.unit_tokens
                    start, nbytes = plane.piece.offset, plane.piece.nbytes
                    # In memory of its own: inside a page a plane may start at any byte, an int32
                    # may not.
                    data = torch.stack([page[start : start + nbytes] for page in pages]).to(
                        pool.device
                    )
                    values = data.view(-1).view(plane.bits.dtype).view(-1, *plane.bits.shape[1:])
                    plane.bits[indices[plane.space][skip:]] = values[skip:]
                if placed:
                    placed(layer, stream.record_event() if stream else None)

    def host_memory(self, memory: memoryview) -> bool:
        """Return True: there is nothing to prepare."""
        return True

    def await_host_memory(self, timeout_s: float) -> bool:
        """Return True."""
        return True


@contextlib.contextmanager
def _ordered(device: torch.device, fence: Fence) -> Iterator[torch.cuda.Stream | None]:
    """Yield a stream of our own that starts after `fence` and is empty at the end."""
    if device.type != "cuda":
        yield None
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        if fence is not None:
            stream.wait_event(fence)
        try:
            yield stream
        finally:
            stream.synchronize()


def check_pages(pool: KVPool, units: UnitTable, pages: Sequence[torch.Tensor]) -> None:
    """Raise InvalidRequest unless there is one fitting buffer for each page.

    A job may have hundreds, so this takes only about 0.2 µs per page.
    """
    if len(pages) != units.page_count:
        raise InvalidRequest(f"{len(pages)} page buffers for {units.page_count} pages")
    nbytes = pool.layout.page_nbytes
    if isinstance(pages, MappedPages) and pages.nbytes == nbytes:
        return
    for number, page in enumerate(pages):
        if (
            page.nbytes != nbytes
            or page.dtype != torch.uint8
            or page.ndim != 1
            or not page.is_cpu
            or not page.is_contiguous()
        ):
            raise InvalidRequest(
                f"page buffer {number} must be a contiguous uint8 CPU tensor of shape [{nbytes}], "
                f"not {page.dtype} {list(page.shape)} with strides {list(page.stride())} on "
                f"{page.device}"
            )
