"""Simulate a GPU for tests: streams in any order that CUDA allows, and the kernels' arithmetic.

Enqueued work runs only when a thread waits, one step of a randomly chosen stream at a time. So a
missing wait in the pipeline, a buffer that is reused too early, or a page that is read too late
gives wrong bytes for some seed.
"""

import contextlib
import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu_agent.kernels.device import Addresses, Launch, LeavesLaunch
from gpu_agent.kernels.plan import LOADS, PLANE_FIELDS, TILE_FIELDS, WARP_THREADS, Divisor
from gpu_agent.transfer import Fence
from kvstore.checksum import leaf

Step = Callable[[], bool]  # False: it can not run yet
SWITCH_SHARE = 0.2  # share of steps after which another stream may run first


def quotient(n: int, by: Divisor) -> int:
    """Divide as the kernel does, in 32 bits."""
    return ((((n * by.magic) >> 32) + n) & 0xFFFFFFFF) >> by.shift


def run_kernel(kernel: str, launch: Launch | LeavesLaunch) -> None:
    """Run a kernel over CPU memory at the addresses of `launch`, one thread after the other."""
    if isinstance(launch, LeavesLaunch):
        return _make_leaves(launch)
    for number in range(launch.page_count):
        page_index = launch.page_first + number
        page = launch.base + number * launch.stride
        if launch.page_table:
            page = _int64s(launch.page_table + 8 * page_index, 1)[0]
        for position in range(launch.tile_count):
            tile = (ctypes.c_int32 * TILE_FIELDS).from_address(
                launch.tiles + 4 * TILE_FIELDS * position
            )
            plane = _int64s(launch.planes + 8 * PLANE_FIELDS * tile[0], PLANE_FIELDS)
            _move_tile(kernel, launch, list(tile), plane, page, page_index)


def _make_leaves(launch: LeavesLaunch) -> None:
    """Make leaves as `leaves.cu` does, with the library's arithmetic."""
    for number in range(launch.page_count):
        page_index = launch.page_first + number
        page = launch.base + number * launch.stride
        if launch.table:
            page = _int64s(launch.table + 8 * page_index, 1)[0]
        assert not (page | launch.page_nbytes) % 8, "a misaligned word: a fault on a GPU"
        for part in range(launch.part_count):
            start = part * launch.part_nbytes
            end = (
                launch.page_nbytes if part == launch.part_count - 1 else start + launch.part_nbytes
            )
            sum_ = leaf(ctypes.string_at(page + start, end - start))
            ctypes.memmove(
                launch.out + 8 * (page_index * launch.part_count + part), sum_, len(sum_)
            )


def _move_tile(
    kernel: str,
    launch: Launch,
    tile: Sequence[int],
    plane: Sequence[int],
    page: int,
    page_index: int,
) -> None:
    base, slot_stride, page_offset, word, slots_before, units, unit_tokens = plane[:7]
    row_words, unit_rows, outer_count = Divisor(*plane[7:10]), Divisor(*plane[10:13]), plane[13]
    _, tile_row, tile_column, words = tile
    assert words <= WARP_THREADS * LOADS[word]
    slots = launch.slots + 8 * (slots_before * launch.job_pages + page_index * units)
    unit_first = launch.skip_tokens // unit_tokens - page_index * units
    flat = page + page_offset + (tile_row * row_words.value + tile_column) * word
    for k in range(words):
        rows = quotient(tile_column + k, row_words)
        column = tile_column + k - rows * row_words.value
        unit = quotient(tile_row + rows, unit_rows)
        rest, inside = tile_row + rows - unit * unit_rows.value, column * word
        for outer in range(outer_count):
            size, stride = Divisor(*plane[14 + 4 * outer : 17 + 4 * outer]), plane[17 + 4 * outer]
            after = quotient(rest, size)
            inside += (rest - after * size.value) * stride
            rest = after
        if unit < unit_first:
            continue
        slot = base + _int64s(slots + 8 * unit, 1)[0] * slot_stride + inside
        assert not (slot | flat) % word, "a misaligned word: a fault on a GPU"
        target, source = (flat + k * word, slot) if kernel == "gather" else (slot, flat + k * word)
        ctypes.memmove(target, source, word)


def _int64s(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


@dataclass(eq=False)
class Event:
    """Event that counts how often it was recorded (by the host) and reached (in its stream)."""

    device: "SimulatedDevice"
    recorded: int = 0
    happened: int = 0

    def record(self, stream: "Stream") -> None:
        """Record the event on a stream."""
        self.recorded += 1
        version = self.recorded

        def step() -> bool:
            self.happened = max(self.happened, version)
            return True

        stream.steps.append(step)

    def synchronize(self) -> None:
        """Run the device until the event has happened."""
        self.device.run_until(lambda: self.happened >= self.recorded)

    @property
    def done(self) -> bool:
        """Return whether the event has happened, after a few random steps."""
        self.device.run_some()
        return self.happened >= self.recorded


@dataclass(eq=False)
class Stream:
    """Steps in their order."""

    device: "SimulatedDevice"
    steps: deque[Step] = field(default_factory=deque)

    def wait_event(self, event: Event) -> None:
        """Make the stream wait for an event."""
        # An event that was never recorded does not block, as in CUDA
        version = event.recorded
        self.steps.append(lambda: event.happened >= version)

    def synchronize(self) -> None:
        """Run the device until the stream is empty."""
        self.device.run_until(lambda: not self.steps)


class Memory:
    """GPU memory that CUDA has not cleared."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = torch.full((nbytes + 256,), 0xEE, dtype=torch.uint8)
        self.ptr = -(-self._bytes.data_ptr() // 256) * 256


class SimulatedDevice:
    """A GPU on the CPU: `gpu_agent.kernels.device.Device`.

    `kernel` replaces the kernels' arithmetic; `engine` is the stream that a fence follows.
    """

    def __init__(
        self, seed: int, kernel: Callable[[str, Launch | LeavesLaunch], None] = run_kernel
    ) -> None:
        self.device = torch.device("cpu")
        self.copies = self.launches = 0
        self.registered: list[tuple[int, int]] = []
        self._kernel = kernel
        self._draw = random.Random(seed)
        self._streams: list[Stream] = []
        self._lock = threading.RLock()
        self.engine = self.stream()

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def stream(self) -> Stream:
        """Make a stream."""
        self._streams.append(Stream(self))
        return self._streams[-1]

    def event(self) -> Event:
        """Make an event."""
        return Event(self)

    def memory(self, nbytes: int) -> Memory:
        """Allocate memory."""
        return Memory(nbytes)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate a tensor."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def upload(self, table: torch.Tensor) -> torch.Tensor:
        """Copy a table."""
        return table.clone()

    def fence(self) -> Any:
        """Return an event behind the engine's stream."""
        return self.mark(self.engine)

    def wait(self, fence: Fence) -> None:
        """Wait for an event."""
        if fence is not None:
            fence.synchronize()

    def mark(self, stream: Stream) -> Any:
        """Return an event behind a stream."""
        event = self.event()
        event.record(stream)
        return event

    def page_locked(self, addresses: Sequence[int], nbytes: int) -> bool:
        """Return True."""
        return True

    def register(self, address: int, nbytes: int) -> None:
        """Note a registration."""
        self.registered.append((address, nbytes))

    def unregister(self, address: int) -> None:
        """Drop a registration."""
        self.registered = [entry for entry in self.registered if entry[0] != address]

    def copy(
        self, targets: Addresses, sources: Addresses, nbytes: int, stream: Stream, locked: bool
    ) -> None:
        """Enqueue copies."""
        self.copies += 1

        def step() -> bool:
            for target, source in zip(targets, sources, strict=True):
                ctypes.memmove(target, source, nbytes)
            return True

        stream.steps.append(step)

    def launch(self, kernel: str, launch: Launch | LeavesLaunch, stream: Stream) -> None:
        """Enqueue a kernel."""
        self.launches += 1

        def step() -> bool:
            self._kernel(kernel, launch)
            return True

        stream.steps.append(step)

    def run_until(self, reached: Callable[[], bool]) -> None:
        """Run steps of random streams until `reached`."""
        with self._lock:
            while not reached():
                assert self._step(), "the streams wait for each other"

    def run_some(self) -> None:
        """Run no or a few steps, as may happen at any time."""
        with self._lock:
            for _ in range(self._draw.randrange(4)):
                self._step()

    def _step(self) -> bool:
        """Run the next step of a stream; often the same one, so that one is far ahead."""
        if self._draw.random() < SWITCH_SHARE:
            self._draw.shuffle(self._streams)
        for stream in self._streams:
            if stream.steps and stream.steps[0]():
                stream.steps.popleft()
                return True
        return False
