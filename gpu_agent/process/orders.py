"""Orders that an engine's process has given and not seen the end of.

save ---> GATHERED ---> SAVED          each order ends once: by an answer, or when the process that had
load -----------------> LOADED         it is gone, for then nothing reads or writes its blocks any more
"""

from dataclasses import dataclass
from typing import TypeVar

from gpu_agent.jobs import LoadJob, LoadResult, SaveJob, SaveResult
from gpu_agent.process.frames import Loaded, Saved
from kvstore.errors import ProtocolError
from kvstore.sync import Future

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class _Save:
    job: SaveJob
    pages: int
    overdue_at: float

    def fail(self, reason: str) -> None:
        self.end(SaveResult(0, 0, self.pages, reason))

    def end(self, result: SaveResult) -> None:
        if not self.job.gathered.done():
            self.job.gathered.set_result(None)
        self.job.done.set_result(result)


@dataclass(frozen=True)
class _Load:
    job: LoadJob
    pages: int
    overdue_at: float

    def fail(self, reason: str) -> None:
        self.job.done.set_result(LoadResult(0, 0, reason))


class Orders:
    """Not thread-safe. Numbers are never used again, so that a late answer is nobody else's."""

    def __init__(self) -> None:
        self._saves: dict[int, _Save] = {}  # in the order of their deadlines, for all have as long
        self._loads: dict[int, _Load] = {}
        self._next = 0

    def save(self, pages: int, overdue_at: float, job: SaveJob) -> int:
        number = self._number()
        self._saves[number] = _Save(job, pages, overdue_at)
        return number

    def load(self, pages: int, overdue_at: float) -> tuple[int, LoadJob]:
        number, load = self._number(), _Load(new_load(), pages, overdue_at)
        self._loads[number] = load
        return number, load.job

    def gathered(self, number: int) -> None:
        """This and the following raise ProtocolError for what no such order can have brought."""
        future = _known(self._saves, number).job.gathered
        if future.done():
            raise ProtocolError(f"the blocks of save {number} were read twice")
        future.set_result(None)

    def saved(self, said: Saved) -> None:
        save = _known(self._saves, said.order)
        if said.stored + said.existing + said.dropped != save.pages:
            raise ProtocolError(f"a save of {save.pages} pages ended with {said}")
        del self._saves[said.order]
        save.end(SaveResult(said.stored, said.existing, said.dropped, said.reason))

    def loaded(self, said: Loaded) -> None:
        load = _known(self._loads, said.order)
        if not said.loaded <= said.pages <= load.pages:
            raise ProtocolError(f"a load of {load.pages} pages ended with {said}")
        del self._loads[said.order]
        load.job.done.set_result(LoadResult(said.pages, said.loaded, said.error))

    def fail(self, number: int, reason: str) -> None:
        """An order that could not be given."""
        order = self._saves.pop(number, None) or self._loads.pop(number)
        order.fail(reason)

    def fail_all(self, reason: str) -> int:
        """How many there were. Only when nothing touches their blocks any more."""
        orders: list[_Save | _Load] = [*self._saves.values(), *self._loads.values()]
        self._saves, self._loads = {}, {}
        for order in orders:
            order.fail(reason)
        return len(orders)

    def overdue(self, now: float) -> bool:
        """Whether one should have ended by now."""
        save, load = next(iter(self._saves.values()), None), next(iter(self._loads.values()), None)
        return bool((save and save.overdue_at < now) or (load and load.overdue_at < now))

    @property
    def loading(self) -> bool:
        return bool(self._loads)

    def __len__(self) -> int:
        return len(self._saves) + len(self._loads)

    def _number(self) -> int:
        self._next += 1
        return self._next


def new_save() -> SaveJob:
    return SaveJob(Future(), Future())


def new_load() -> LoadJob:
    return LoadJob(Future())


def _known(orders: dict[int, Kind], number: int) -> Kind:
    if number not in orders:
        raise ProtocolError(f"an answer to order {number}, which was not given or has ended")
    return orders[number]
