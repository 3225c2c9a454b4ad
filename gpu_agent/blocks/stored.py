"""Which blocks are in the store since somebody last asked: for an engine's events.

    note (staged) --> ordered (in a job) --> every rank has stored the job's pages --> take
                                        \\-> a rank could not: nobody is told

What a block is to the engine is its own business: descriptions are kept and given back.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from gpu_agent.blocks.save_plan import SaveOrder


class StoredBlocks:
    """`ranks`: how many report on a job. Not thread-safe."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._noted: dict[tuple[int, bytes], Any] = {}
        self._jobs: dict[int, list[Any]] = {}
        self._kept: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._stored: list[Any] = []

    def note(self, group: int, key: bytes, description: Any) -> None:
        self._noted[group, key] = description

    def ordered(self, orders: Iterable[SaveOrder]) -> None:
        for order in orders:
            found = [self._noted.pop((part.group, key), None) for part in order.parts for key in part.keys]
            self._jobs[order.job] = [description for description in found if description is not None]

    def ended(self, ended: Mapping[int, int], kept: Mapping[int, int]) -> None:
        """Ranks that are done with a job, and those of them that have all its pages in the store."""
        for job, ranks in ended.items():
            self._ended[job] = self._ended.get(job, 0) + ranks
            self._kept[job] = self._kept.get(job, 0) + kept.get(job, 0)
            if self._ended[job] < self._ranks:
                continue
            descriptions = self._jobs.pop(job, [])
            if self._kept.pop(job) == self._ended.pop(job):
                self._stored += descriptions

    def forget(self) -> None:
        """What was noted and not ordered will not be stored."""
        self._noted.clear()

    def take(self) -> list[Any]:
        stored, self._stored = self._stored, []
        return stored
