"""Run copies of one direction on two lanes, each a GPU buffer and a stream, in turn.

    gather     fill: kernel  slots -> buffer      drain: copies  buffer -> pages
    scatter    fill: copies  pages -> buffer      drain: kernel  buffer -> slots

    lane 0    upload | fill 0 | drain 0 ...... | fill 2 | (waits)  | drain 2 ......
    lane 1           | fill 1 | (waits)        | drain 1 ......... | fill 3 | ...
    link                      | drain 0 ...... | drain 1 ......... | drain 2 ......

In stream order a buffer is drained before it is filled again, so that chunks need no waits between
streams. The copy of one lane is enqueued long before the other lane's copy ends, so the copy engine
never idles between them.
"""

import contextlib
import queue
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpu_agent.kernels.device import Device
from gpu_agent.kernels.plan import Chunk
from kvstore.buffers import move

LANES = 2
JOBS_MAX = 4  # of one direction in flight; further callers wait
CHUNKS_AHEAD = 64  # of one job enqueued and not yet waited for
SLOTS_NBYTES = 1 << 18  # for a job's indices; a larger job enlarges its ticket
# Half of a chunk: (chunk, buffer address, slots address, stream).
Half = Callable[[Chunk, int, int, Any], None]


@dataclass(frozen=True)
class Job:
    """A job. `slots`: contiguous int64 CPU tensors, copied to GPU memory one after the other.

    `fill` and `drain` enqueue the halves of a chunk.

    Hooks, on the job's own thread: `before(chunk)` before a chunk is enqueued; `all_filled` when
    the last fill has happened; `queued(chunk, drained)` when a chunk is enqueued, with the event
    behind its drain; `drained(chunk)` when that has happened. All but `all_filled` are called in
    the order of the chunks.
    """

    slots: Sequence[torch.Tensor]
    chunks: Sequence[Chunk]
    fill: Half
    drain: Half
    before: Callable[[Chunk], None] | None = None
    all_filled: Callable[[], None] | None = None
    queued: Callable[[Chunk, Any], None] | None = None
    drained: Callable[[Chunk], None] | None = None


class _Ticket:
    """Resources of a job in flight: its indices on both sides, and its events."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.uploaded = device.event()
        self._filled = [device.event() for _ in range(LANES)]  # one for each of the last chunks
        self._drained = [device.event() for _ in range(CHUNKS_AHEAD)]
        self._reserve(SLOTS_NBYTES)

    def _reserve(self, nbytes: int) -> None:
        self._host, self.slots = self._device.host_memory(nbytes), self._device.memory(nbytes)
        self._room_nbytes, self._address = nbytes, self._host.data_ptr()

    def stage(self, slots: Sequence[torch.Tensor]) -> None:
        """Copy a job's indices to the memory that `upload` reads."""
        self._nbytes = sum(table.nbytes for table in slots)
        if self._nbytes > self._room_nbytes:
            self._reserve(1 << (self._nbytes - 1).bit_length())
        address = self._address
        for table in slots:
            # Not torch's copy, which wakes a thread for each core.
            nbytes = table.nbytes
            move(address, table.data_ptr(), nbytes)
            address += nbytes

    def upload(self, stream: Any) -> None:
        if not self._nbytes:  # only copies: nothing on the GPU reads indices
            return
        host = array("Q", (self._address,))
        self._device.copy(array("Q", (self.slots.ptr,)), host, self._nbytes, stream, True)
        self.uploaded.record(stream)

    def filled(self, number: int) -> Any:
        """Return the event behind the fill of one of the job's last `LANES` chunks."""
        return self._filled[number % LANES]

    def drained(self, number: int) -> Any:
        """Return the event behind the drain of one of the newest `CHUNKS_AHEAD` chunks."""
        return self._drained[number % CHUNKS_AHEAD]


class Pipeline:
    """A pipeline, shared by jobs chunk by chunk: a small job need not wait for all of a large one.

    It has its own streams, because torch's come from a shared pool; two lanes on one stream would
    run one after the other.

    Thread-safe. `_lock` covers what is enqueued for one chunk; no thread waits for the GPU under
    it.
    """

    def __init__(self, device: Device, buffer_nbytes: int) -> None:
        self._streams = [device.stream() for _ in range(LANES)]
        self._buffers = [device.memory(buffer_nbytes) for _ in range(LANES)]
        self._next = 0
        self._lock = threading.Lock()
        self._tickets: queue.SimpleQueue[_Ticket] = queue.SimpleQueue()
        for _ in range(JOBS_MAX):
            self._tickets.put(_Ticket(device))

    def run(self, job: Job) -> None:
        """Run a job; all chunks are drained when it returns."""
        ticket = self._tickets.get()
        newest: dict[int, int] = {}  # lane -> the job's newest chunk in it
        try:
            ticket.stage(job.slots)
            done = 0
            for number, chunk in enumerate(job.chunks):
                if number - done == CHUNKS_AHEAD:
                    done = self._drained(job, ticket, done)
                if job.before:
                    job.before(chunk)
                newest[self._enqueue(job, ticket, number, newest)] = number
                if job.queued:
                    job.queued(chunk, ticket.drained(number))
                while job.drained and done < number and ticket.drained(done).done:
                    done = self._drained(job, ticket, done)
            self._finish(job, ticket, newest, done)
        except BaseException:
            for stream in self._streams:
                stream.synchronize()
            raise
        finally:
            self._tickets.put(ticket)

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Let no job run within the block; new ones wait."""
        tickets: list[_Ticket] = []
        try:
            while len(tickets) < JOBS_MAX:
                tickets.append(self._tickets.get())
            yield
        finally:
            for ticket in tickets:
                self._tickets.put(ticket)

    def _enqueue(self, job: Job, ticket: _Ticket, number: int, newest: dict[int, int]) -> int:
        """Enqueue a chunk on the next lane, and return the lane."""
        chunk, slots = job.chunks[number], ticket.slots.ptr
        with self._lock:
            lane, self._next = self._next, (self._next + 1) % LANES
            stream, buffer = self._streams[lane], self._buffers[lane].ptr
            if not newest:
                ticket.upload(stream)
            elif lane not in newest and job.slots:
                stream.wait_event(ticket.uploaded)
            job.fill(chunk, buffer, slots, stream)
            if job.all_filled and number >= len(job.chunks) - LANES:
                ticket.filled(number).record(stream)
            job.drain(chunk, buffer, slots, stream)
            ticket.drained(number).record(stream)
        return lane

    def _finish(self, job: Job, ticket: _Ticket, newest: dict[int, int], done: int) -> None:
        """Wait for the chunks from `done` on.

        Each lane's newest chunk stands for its earlier ones. The last chunks may all be in one lane
        if another job's came between.
        """
        last, count = max(done, len(job.chunks) - LANES), len(job.chunks)
        # After the newest of all, the other lane has usually ended too, and a wait for it costs no
        # sleep.
        ends = sorted(newest.values(), reverse=True)
        for number in range(done, last) if job.drained else ():
            self._drained(job, ticket, number)
        if job.all_filled:
            for number in ends:
                (
                    ticket.filled(number) if number >= count - LANES else ticket.drained(number)
                ).synchronize()
            job.all_filled()
        for number in range(last, count) if job.drained else ():
            self._drained(job, ticket, number)
        for number in ends:
            ticket.drained(number).synchronize()

    def _drained(self, job: Job, ticket: _Ticket, number: int) -> int:
        """Wait for the drain of a chunk; return the number of drained chunks."""
        ticket.drained(number).synchronize()
        if job.drained:
            job.drained(job.chunks[number])
        return number + 1
