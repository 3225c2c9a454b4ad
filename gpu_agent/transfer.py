"""Between an engine's slots and page buffers: the interface, and the reference in plain torch.

    gather    slots --> pages      read by save; the engine may reuse its slots afterwards
    scatter   pages --> slots      written by load, only with pages whose checksum matched

`TorchTransfer` is the CPU path and the oracle that every kernel is tested against. It also moves
CUDA tensors, one staged copy per plane: correct, not fast.
"""

import contextlib
from collections.abc import Iterator
from typing import Protocol, TypeAlias

import torch

from gpu_agent.pool import KVPool
from gpu_agent.units import UnitTable
from kvstore.errors import InvalidRequest

# What the engine had enqueued on its stream at some moment; None where there are no streams.
Fence: TypeAlias = torch.cuda.Event | None


class Transfer(Protocol):
    """Thread-safe. `pages`: uint8 CPU tensor `[units.page_count, layout.page_nbytes]`, rows
    contiguous, in the byte order of `PageLayout`. Both moves have ended when they return, and both
    begin after `fence`. A slot that `units` does not name is neither read nor written.
    """

    def fence(self, pool: KVPool) -> Fence:
        """Called on the engine's thread: a mark behind all work enqueued there so far."""

    def gather(self, pool: KVPool, units: UnitTable, pages: torch.Tensor, fence: Fence) -> None:
        """Fills `pages` from the slots."""

    def scatter(self, pool: KVPool, units: UnitTable, pages: torch.Tensor, fence: Fence, skip_tokens: int = 0) -> None:
        """Fills the slots from `pages`, without those of the first `skip_tokens` tokens: the
        engine has these already, and other requests may share their slots."""


class TorchTransfer:
    """Index gather and scatter, a plane at a time."""

    def fence(self, pool: KVPool) -> Fence:
        return torch.cuda.current_stream(pool.device).record_event() if pool.device.type == "cuda" else None

    @torch.inference_mode()
    def gather(self, pool: KVPool, units: UnitTable, pages: torch.Tensor, fence: Fence) -> None:
        _check_pages(pool, units, pages)
        with _ordered(pool.device, fence):
            indices = {space: units.flat(space).to(pool.device) for space in pool.spaces}
            for plane in pool.planes:
                values = plane.bits[indices[plane.space]].contiguous()
                start, nbytes = plane.piece.offset, plane.piece.nbytes
                pages[:, start : start + nbytes].copy_(values.view(torch.uint8).view(units.page_count, nbytes))

    @torch.inference_mode()
    def scatter(self, pool: KVPool, units: UnitTable, pages: torch.Tensor, fence: Fence, skip_tokens: int = 0) -> None:
        _check_pages(pool, units, pages)
        pool.check_skip(skip_tokens, units.page_count)
        with _ordered(pool.device, fence):
            indices = {space: units.flat(space).to(pool.device) for space in pool.spaces}
            for plane in pool.planes:
                skip = skip_tokens // plane.piece.plane.unit_tokens
                start, nbytes = plane.piece.offset, plane.piece.nbytes
                data = pages[:, start : start + nbytes].to(pool.device).contiguous()
                # Aligned by itself: inside a page a plane may start at any byte, an int32 may not.
                values = torch.empty(
                    (len(pages) * plane.piece.units, *plane.bits.shape[1:]), dtype=plane.bits.dtype, device=pool.device
                )
                values.view(-1).view(torch.uint8).copy_(data.view(-1))
                plane.bits[indices[plane.space][skip:]] = values[skip:]


@contextlib.contextmanager
def _ordered(device: torch.device, fence: Fence) -> Iterator[None]:
    """A stream of our own that starts after `fence` and is empty at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        if fence is not None:
            stream.wait_event(fence)
        yield
        stream.synchronize()


def _check_pages(pool: KVPool, units: UnitTable, pages: torch.Tensor) -> None:
    shape = [units.page_count, pool.layout.page_nbytes]
    if pages.dtype != torch.uint8 or pages.device.type != "cpu" or list(pages.shape) != shape:
        raise InvalidRequest(
            f"pages must be a uint8 CPU tensor of shape {shape}, "
            f"not {pages.dtype} {list(pages.shape)} on {pages.device}"
        )
