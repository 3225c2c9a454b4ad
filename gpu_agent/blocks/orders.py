"""What passes between the scheduler's side and the ranks: orders for one step, and what came of them."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpu_agent.blocks.save_plan import Part, SaveOrder


class LoadOrder(NamedTuple):
    """For every rank: fetch these blocks, and report the request in any case."""

    request_id: str
    parts: list[Part]


class StepOrders(NamedTuple):
    """What the ranks do beside one step of the engine. `scarce`: it lacks blocks, so none may stay pinned for a save
    that waits for a process to start."""

    step: int
    epoch: int | None
    loads: list[LoadOrder]
    saves: list[SaveOrder]
    scarce: bool = False


@dataclass
class Report:
    """What one rank, or several together, did beside a step."""

    step: int
    acknowledged: dict[int, int] = field(default_factory=dict)  # save job -> ranks that have read its blocks
    finished: dict[str, int] = field(default_factory=dict)  # load of a request -> ranks that ended it
    failed: set[str] = field(default_factory=set)  # requests with a load that brought less than ordered
    away: int = 0  # ranks where every load would fail now

    def add(self, other: "Report") -> "Report":
        _count(self.acknowledged, other.acknowledged)
        _count(self.finished, other.finished)
        self.failed |= other.failed
        self.away += other.away
        self.step = min(self.step, other.step)
        return self


def _count(counts: dict[Any, int], more: dict[Any, int]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count
