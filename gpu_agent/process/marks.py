"""What an engine's stream had to do when an order was given, told to another process.

A mark is an event of CUDA that both processes know. The engine records it, which costs microseconds and
waits for nothing; the agents' process waits for it before it reads or writes the engine's blocks. Marks are
recorded again in turn: who waits for an old number waits for newer work too, which is late, never wrong.
"""

import contextlib

import torch

from gpu_agent.transfer import Fence
from kvstore.errors import ConfigError, ProtocolError

MARKS = 16
NO_MARK = -1


class Marks:
    """The engine's side. Memory that no stream writes, a CPU's, needs none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._next = 0
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._events = [torch.cuda.Event(interprocess=True) for _ in range(MARKS)]  # type: ignore[no-untyped-call]

    def handles(self) -> list[str]:
        """For the other process. Raises ConfigError."""
        try:
            with torch.cuda.device(self._device) if self._events else contextlib.nullcontext():
                return [event.ipc_handle().hex() for event in self._events]  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise ConfigError(f"events on {self._device} can not be shared with another process: {error}") from error

    def record(self) -> int:
        """The number of a mark behind all that the calling thread's stream was given so far."""
        if not self._events:
            return NO_MARK
        number, self._next = self._next, (self._next + 1) % MARKS
        self._events[number].record(torch.cuda.current_stream(self._device))
        return number


class KnownMarks:
    """The other side."""

    def __init__(self, device: torch.device, handles: list[str]) -> None:
        try:
            raw = [bytes.fromhex(handle) for handle in handles]
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"no handles of events: {error!r}") from error
        self._events: list[Fence] = [torch.cuda.Event.from_ipc_handle(device, handle) for handle in raw]  # type: ignore[no-untyped-call]

    def fence(self, number: int) -> Fence:
        """Raises ProtocolError for a mark that nobody recorded."""
        if number == NO_MARK and not self._events:
            return None
        if not 0 <= number < len(self._events):
            raise ProtocolError(f"mark {number} of {len(self._events)}")
        return self._events[number]
