"""`StagedSaves`: saves that an engine ordered before its agents' process was ready.

save ---> staged ---> the process is ready ---> sent to it, each with its whole deadline
             +------> STAGED_S passed, the start failed, the namespace was replaced,
                      or the engine lacks blocks: dropped

The engine keeps the blocks of staged saves pinned, so a save may not wait for ever, and no request
waits for one. Their number is bounded by what an engine pins (`gpu_agent.blocks.save_plan`), their
bytes by UNSENT_NBYTES_MAX. Pages of a dropped save count as dropped in its result.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpu_agent.jobs import SaveJob, SaveResult
from gpu_agent.process import channel
from gpu_agent.process.child import START_S
from gpu_agent.process.orders import new_save

STAGED_S = START_S  # a process that is not ready by then is ended


@dataclass(frozen=True)
class StagedSave:
    """An order that is sent later.

    `mark` is a CUDA event (`Marks`) that the engine recorded with the order, so that the agents wait
    for the step that computed the blocks. Marks are reused: one that was recorded again since only
    makes them wait longer.
    """

    job: SaveJob
    agent: int
    mark: int
    keys: Sequence[bytes]
    units: dict[str, bytes]
    trace: bytes
    until: float

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.keys)) + sum(map(len, self.units.values())) + len(self.trace)

    def drop(self, reason: str) -> None:
        self.job.gathered.set_result(None)
        self.job.done.set_result(SaveResult(0, 0, len(self.keys), reason))


class StagedSaves:
    """A queue of saves, sent in the order in which they were staged. Not thread-safe."""

    def __init__(self) -> None:
        self._saves: deque[StagedSave] = deque()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._saves)

    def add(self, agent: int, mark: int, keys: Sequence[bytes], units: dict[str, bytes], trace: bytes) -> SaveJob:
        save = StagedSave(new_save(), agent, mark, keys, units, trace, time.monotonic() + STAGED_S)
        if self._nbytes + save.nbytes > channel.UNSENT_NBYTES_MAX:
            save.drop(f"{self._nbytes} bytes of orders wait for the agents' process")
        else:
            self._saves.append(save)
            self._nbytes += save.nbytes
        return save.job

    def take(self) -> StagedSave:
        save = self._saves.popleft()
        self._nbytes -= save.nbytes
        return save

    def expire(self, now: float) -> None:
        """Drop those that have waited too long."""
        while self._saves and self._saves[0].until < now:
            self.take().drop(f"the agents' process was not ready within {STAGED_S:.0f} s")

    def drop(self, reason: str, which: Callable[[StagedSave], bool] = lambda _: True) -> None:
        """Drop all, or those that `which` names."""
        gone = [save for save in self._saves if which(save)]
        self._saves = deque(save for save in self._saves if not which(save))
        for save in gone:
            self._nbytes -= save.nbytes
            save.drop(reason)
