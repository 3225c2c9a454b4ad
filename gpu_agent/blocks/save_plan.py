"""Decide when computed blocks are stored: after the engine has seen the result of their step.

    stage(step 7) --> step 7 ran --> order --> ranks gather --> all acknowledged
       | pinned         |                                         | unpinned
       |                +--> no result of step 7: dropped, unpinned, staged again later
       +--> no room: not staged, tried again in a later step
                       request ended: defer(step 7) --> step 7 ran --> late
                                      not pinned                        | stage_late: the engine
                                                                        v still has the block
                                                                      stage(newest step)

No rank can tell a computed block from one that was not computed. So blocks are pinned from before
they are computed until the last rank has read them. Blocks of an ended request that found no room
are not pinned: they stay in the engine's prefix cache for a while, and are staged from there. This
module takes the engine's calls and returns orders for the ranks (`StepOrders`), which answer with a
`Report`; it moves no KV.
"""

import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvstore.tracing import REQUESTS_MAX

# Late blocks are given up when none of them could be staged for so long: longer than agents'
# processes may take to start.
LATE_S = 90.0


class GroupBlocks(NamedTuple):
    """Blocks of one group to save or to load: keys and block ids, in the same order.

    A prompt has thousands, and the engine waits: so operations work on whole lists.
    """

    group: int
    keys: list[bytes]
    blocks: list[int]


class SaveOrder(NamedTuple):
    """For every rank: store these blocks, and report when their memory has been read.

    `requests`: the engine's names of the first few requests.
    """

    job: int
    parts: list[GroupBlocks]
    requests: tuple[str, ...]


class LoadOrder(NamedTuple):
    """For every rank: fetch these blocks, and report the request in any case."""

    request_id: str
    parts: list[GroupBlocks]


class StepOrders(NamedTuple):
    """Orders for the ranks beside one step of the engine.

    `scarce`: the engine lacks blocks, so none may stay pinned for a save that waits for a process
    to start.
    """

    step: int
    epoch: int | None
    loads: list[LoadOrder]
    saves: list[SaveOrder]
    scarce: bool = False


@dataclass
class Report:
    """Report of one rank, or of several combined, for a step."""

    step: int
    # Save job -> ranks that have read its blocks
    acknowledged: dict[int, int] = field(default_factory=dict)
    # Load of a request -> ranks that ended it
    finished: dict[str, int] = field(default_factory=dict)
    # Requests with a load that brought less than ordered
    failed: set[str] = field(default_factory=set)
    away: int = 0  # ranks where every load would fail now
    uncounted: int = 0  # ranks with saves whose outcome no `take_counts` has returned yet

    def add(self, other: "Report") -> "Report":
        """Add another rank's report."""
        _add_counts(self.acknowledged, other.acknowledged)
        _add_counts(self.finished, other.finished)
        self.failed |= other.failed
        self.away += other.away
        self.uncounted += other.uncounted
        self.step = min(self.step, other.step)
        return self


@dataclass
class _Staged:
    """Blocks of a request; `late` ones are not pinned, and `hurried` ones wait for no others."""

    owner: str
    parts: list[GroupBlocks]
    late: bool = False
    hurried: bool = False


@dataclass
class _Job:
    parts: list[GroupBlocks]
    missing_ranks: int = field(default=0)


class SavePlan:
    """Plan of saves. Not thread-safe: an engine has one scheduler.

        ranks         that acknowledge a job
        blocks_max    blocks pinned at a time, over all groups
        order_blocks  blocks of one order; fewer wait for more
        pin, unpin    keep blocks of the engine, by their ids, and give them back
        hold_s        how long blocks wait for more: each order costs the engine and the ranks
                      as much as its blocks do
        scarce        whether the engine lacks free blocks. Then none wait: they are needed back,
                      and a preempted request needs its own stored

    For blocks of ended requests:

        cached        for each block of a part, whether the engine's prefix cache has it under its
                      key; by default none is saved after its request
        late_max      how many of them may wait
        spare         how many free blocks of the engine may be pinned for them
    """

    def __init__(
        self,
        ranks: int,
        blocks_max: int,
        order_blocks: int,
        pin: Callable[[Sequence[int]], None],
        unpin: Callable[[Sequence[int]], None],
        hold_s: float = 0.0,
        scarce: Callable[[], bool] = lambda: False,
        cached: Callable[[GroupBlocks], Sequence[bool]] | None = None,
        late_max: int = 0,
        spare: Callable[[], int] = lambda: 0,
    ) -> None:
        self.ranks = ranks
        self._blocks_max = blocks_max
        self._order_blocks = order_blocks
        self._pin = pin
        self._unpin = unpin
        # steps without a result yet, in order
        self._steps: OrderedDict[int, list[_Staged]] = OrderedDict()
        self._hold_s = hold_s
        self.scarce = scarce
        self._ready: deque[tuple[str, GroupBlocks]] = deque()  # and their owners
        self._ready_count = 0  # blocks of these
        self._ready_at = 0.0  # when the first of them became ready
        self._hurried = False  # one of them waits for no others
        self._jobs: dict[int, _Job] = {}
        # By group: staged, ready or in a job, so that no block is saved twice
        self._known: dict[int, set[bytes]] = {}
        self._pinned = 0
        self._next_job = 0
        self._cached = cached
        self._late_max = late_max if cached else 0
        self._spare = spare
        self._late: deque[_Staged] = deque()  # of steps with a known result, oldest first
        # By group: all late blocks, those of steps without a result included
        self._late_keys: dict[int, set[bytes]] = {}
        self._late_at = 0.0  # when one of them was staged, or the first was deferred
        self._lost = 0  # late blocks that were given up, not returned by `take_lost` yet

    @property
    def room(self) -> int:
        """Return how many more blocks may be staged."""
        return self._blocks_max - self._pinned

    @property
    def busy(self) -> bool:
        """Return whether steps are needed: something is staged, ready or being read."""
        return bool(self._ready or self._jobs or any(self._steps.values()) or self._late)

    def begin(self, step: int) -> None:
        """Begin to schedule a step; numbers ascend."""
        self._steps[step] = []

    def stage(self, owner: str, parts: Iterable[GroupBlocks], hurried: bool = False) -> None:
        """Stage blocks whose tokens are computed by the end of the newest step, at most `room`.

        Without a running step they are ready. Blocks that are in a save already are left out.
        `hurried`: as after `hurry`.
        """
        new = [part for part in (_without(self._known, part) for part in parts) if part.keys]
        if not new:
            return
        self._pinned += _count(new)
        assert self._pinned <= self._blocks_max
        for part in new:
            self._pin(part.blocks)
        if self._steps:
            next(reversed(self._steps.values())).append(_Staged(owner, new, hurried=hurried))
        else:
            self._make_ready(_Staged(owner, new, hurried=hurried))

    def defer(self, owner: str, parts: Iterable[GroupBlocks]) -> None:
        """Remember blocks that the engine may free, in the order to save them, for `stage_late`.

        Their tokens are computed by the end of the newest step. The oldest late blocks are given up
        if there are too many.
        """
        new = [part for part in (_without(self._late_keys, part) for part in parts) if part.keys]
        excess = sum(map(len, self._late_keys.values())) - self._late_max
        while excess > 0 and self._late:
            excess -= _count(self._late[0].parts)
            self._give_up(self._late.popleft().parts)
        if excess > 0:
            new, rest = _split(new, max(0, _count(new) - excess))
            self._give_up(rest)
        if not new:
            return
        if not self._late:
            self._late_at = time.monotonic()
        into = next(reversed(self._steps.values())) if self._steps else self._late
        into.append(_Staged(owner, new, late=True))

    def stage_late(self) -> None:
        """Stage late blocks that the engine still has, as many as there is room for.

        Nothing may change the engine's prefix cache during this call. Blocks may have been computed
        again in the newest step, so they are saved after its result, like all others.
        """
        assert self._cached is not None
        spare = self._spare()
        while self._late and (room := min(self.room, spare)) > 0:
            some = self._late.popleft()
            parts, rest = _split(some.parts, room)
            if rest:
                self._late.appendleft(_Staged(some.owner, rest, late=True, hurried=some.hurried))
            self._forget_late(parts)
            kept = [_select(part, self._cached(part)) for part in parts]
            self._lost += _count(parts) - _count(kept)
            before = self._pinned
            self.stage(some.owner, kept, some.hurried)
            spare -= self._pinned - before
            self._late_at = time.monotonic()
        if self._late and time.monotonic() > self._late_at + LATE_S:
            while self._late:
                self._give_up(self._late.popleft().parts)

    @property
    def has_late(self) -> bool:
        """Return whether blocks of ended requests wait for room."""
        return bool(self._late)

    def hurry(self, owner: str) -> None:
        """Let what is staged or late of a request wait for no other blocks to be saved."""
        for some in itertools.chain(self._late, *self._steps.values()):
            some.hurried |= some.owner == owner
        self._hurried |= any(one == owner for one, _ in self._ready)

    def take_lost(self) -> int:
        """Return the number of late blocks that were given up since the last call."""
        lost, self._lost = self._lost, 0
        return lost

    def ran(self, step: int) -> set[str]:
        """Release what a step staged, now that its result is known.

        Drop blocks of earlier steps whose results never came. Return their requests, which must
        stage again.
        """
        dropped: set[str] = set()
        while self._steps and next(iter(self._steps)) <= step:
            number, staged = self._steps.popitem(last=False)
            for some in staged:
                if some.late and number == step:
                    self._late.append(some)
                elif some.late:
                    self._give_up(some.parts)
                elif number == step:
                    self._make_ready(some)
                else:
                    dropped.add(some.owner)
                    self._release(some.parts)
        return dropped

    def orders(self) -> list[SaveOrder]:
        """Return what the ranks must save now."""
        orders: list[SaveOrder] = []
        early = (
            self._ready_count < self._order_blocks
            and not self._hurried
            and time.monotonic() < self._ready_at + self._hold_s
        )
        if not self._ready or (early and not self.scarce()):
            return orders
        self._hurried = False
        while self._ready:
            parts, owners = self._next_order()
            self._jobs[self._next_job] = _Job(parts, self.ranks)
            orders.append(SaveOrder(self._next_job, parts, owners[:REQUESTS_MAX]))
            self._next_job += 1
        return orders

    def acknowledge(self, job: int, ranks: int = 1) -> None:
        """Note that more ranks have read the blocks of a job."""
        known = self._jobs[job]
        known.missing_ranks -= ranks
        if known.missing_ranks <= 0:
            del self._jobs[job]
            self._release(known.parts)

    def forget(self) -> None:
        """Drop everything that is in no order yet."""
        for staged in self._steps.values():
            for some in staged:
                if not some.late:
                    self._release(some.parts)
            staged.clear()
        self._late.clear()
        self._late_keys.clear()
        self._release([part for _, part in self._ready])
        self._ready.clear()
        self._ready_count, self._hurried = 0, False

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        staged = [some for staged in self._steps.values() for some in staged]
        held = [part for some in staged if not some.late for part in some.parts]
        ready = [part for _, part in self._ready]
        held += ready + [part for job in self._jobs.values() for part in job.parts]
        found = []
        if _count(held) != self._pinned or self._pinned > self._blocks_max:
            found.append(
                f"{self._pinned} blocks are pinned for {_count(held)} saves, at most "
                f"{self._blocks_max}"
            )
        known = sorted((group, key) for group, keys in self._known.items() for key in keys)
        if sorted((part.group, key) for part in held for key in part.keys) != known:
            found.append("the keys under way are not those of the pinned blocks")
        if _count(ready) != self._ready_count:
            found.append(f"{_count(ready)} blocks are ready, {self._ready_count} are counted")
        late = [some for some in staged if some.late] + list(self._late)
        keys = sorted(
            (part.group, key) for some in late for part in some.parts for key in part.keys
        )
        if keys != sorted((group, key) for group, some in self._late_keys.items() for key in some):
            found.append("the late keys are not those of the late blocks")
        if len(keys) > self._late_max:
            found.append(f"{len(keys)} blocks are late, at most {self._late_max}")
        return found

    def _give_up(self, parts: Sequence[GroupBlocks]) -> None:
        self._forget_late(parts)
        self._lost += _count(parts)

    def _forget_late(self, parts: Iterable[GroupBlocks]) -> None:
        for part in parts:
            self._late_keys[part.group].difference_update(part.keys)

    def _make_ready(self, staged: _Staged) -> None:
        if not self._ready:
            self._ready_at = time.monotonic()
        self._hurried |= staged.hurried
        self._ready.extend((staged.owner, part) for part in staged.parts)
        self._ready_count += _count(staged.parts)

    def _next_order(self) -> tuple[list[GroupBlocks], tuple[str, ...]]:
        """Take the first ready blocks, as many as an order may have, and their owners."""
        parts: dict[int, GroupBlocks] = {}
        owners: dict[str, None] = {}
        left = self._order_blocks
        while left and self._ready:
            owner, part = self._ready.popleft()
            if len(part.keys) > left:
                self._ready.appendleft(
                    (owner, GroupBlocks(part.group, part.keys[left:], part.blocks[left:]))
                )
                part = GroupBlocks(part.group, part.keys[:left], part.blocks[:left])
            left -= len(part.keys)
            owners[owner] = None
            into = parts.setdefault(part.group, GroupBlocks(part.group, [], []))
            into.keys.extend(part.keys)
            into.blocks.extend(part.blocks)
        self._ready_count -= self._order_blocks - left
        return list(parts.values()), tuple(owners)

    def _release(self, parts: Sequence[GroupBlocks]) -> None:
        self._pinned -= _count(parts)
        for part in reversed(parts):
            self._known[part.group].difference_update(part.keys)
            # The last block first: blocks freed first are reused first, and a chain should lose its
            # end.
            self._unpin(part.blocks[::-1])


def _without(known: dict[int, set[bytes]], part: GroupBlocks) -> GroupBlocks:
    """Return the blocks of a part whose keys were not known in its group, and add them."""
    keys = known.setdefault(part.group, set())
    if not keys.isdisjoint(part.keys):
        part = _select(part, [key not in keys for key in part.keys])
    keys.update(part.keys)
    return part


def _select(part: GroupBlocks, chosen: Sequence[bool]) -> GroupBlocks:
    """Return the chosen blocks of a part."""
    if all(chosen):
        return part
    return GroupBlocks(
        part.group,
        list(itertools.compress(part.keys, chosen)),
        list(itertools.compress(part.blocks, chosen)),
    )


def _split(parts: Iterable[GroupBlocks], count: int) -> tuple[list[GroupBlocks], list[GroupBlocks]]:
    """Return the first `count` blocks and the others."""
    head: list[GroupBlocks] = []
    rest: list[GroupBlocks] = []
    for part in parts:
        if count:
            head.append(GroupBlocks(part.group, part.keys[:count], part.blocks[:count]))
        if len(part.keys) > count:
            rest.append(GroupBlocks(part.group, part.keys[count:], part.blocks[count:]))
        count = max(0, count - len(part.keys))
    return head, rest


def _count(parts: Iterable[GroupBlocks]) -> int:
    return sum(len(part.keys) for part in parts)


def _add_counts(counts: dict[Any, int], more: dict[Any, int]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count
