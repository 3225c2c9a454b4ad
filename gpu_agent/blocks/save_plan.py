"""When computed blocks may be stored: after the step that computed them is known to have been clean.

    stage(step 7) --> step 7 ran, no failed load --> order --> ranks gather --> all acknowledged
       | pinned         |                                                          | unpinned
       |                +--> a load failed: steps 7 and later are dropped, unpinned, staged anew later
       +--> no room: not staged, tried again in a later step

What a step computes over blocks whose load failed looks like any other KV, on every rank. So nothing is
stored before the engine has seen the step's result, and blocks are pinned from before they are computed
until the last rank has read them. The engine's calls in, orders out: nothing here moves KV.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kvstore.tracing import REQUESTS_MAX

Block: TypeAlias = tuple[int, bytes, int]  # group, key, block id


class Part(NamedTuple):
    """Blocks of one group: keys and the engine's block ids, as many of each."""

    group: int
    keys: list[bytes]
    blocks: list[int]


class SaveOrder(NamedTuple):
    """For every rank: store these blocks, and say when their memory has been read. `requests`: whose they are, as the
    engine calls them, the first few."""

    job: int
    parts: list[Part]
    requests: tuple[str, ...]


@dataclass
class _Staged:
    owner: str
    blocks: list[Block]


@dataclass
class _Job:
    blocks: list[Block]
    missing_ranks: int = field(default=0)


class SavePlan:
    """`ranks`: how many acknowledge a job. `blocks_max`: pinned at a time, over all groups. `order_blocks`:
    of one order; fewer wait for more, for `hold_s` at most, since each order costs the engine and the ranks as
    much as its blocks do, and not while blocks are `scarce`: then they are wanted back, and a request that is
    thrown out wants its own stored. `pin` and `unpin` take block ids. Not thread-safe: an engine has one scheduler."""

    def __init__(
        self,
        ranks: int,
        blocks_max: int,
        order_blocks: int,
        pin: Callable[[Sequence[int]], None],
        unpin: Callable[[Sequence[int]], None],
        hold_s: float = 0.0,
        scarce: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ranks = ranks
        self._blocks_max = blocks_max
        self._order_blocks = order_blocks
        self._pin = pin
        self._unpin = unpin
        self._steps: OrderedDict[int, list[_Staged]] = OrderedDict()  # outstanding, in order
        self._hold_s = hold_s
        self.scarce = scarce
        self._ready: list[Block] = []
        self._owners: list[str] = []  # of each that is ready
        self._ready_at = 0.0  # when the first of them was
        self._jobs: dict[int, _Job] = {}
        self._known: set[tuple[int, bytes]] = set()  # staged, ready or in a job: once is enough
        self._pinned = 0
        self._next_job = 0

    @property
    def room(self) -> int:
        """Blocks that may still be staged."""
        return self._blocks_max - self._pinned

    @property
    def busy(self) -> bool:
        """Whether steps are needed to get on: something is staged, ready, or being read."""
        return bool(self._ready or self._jobs or any(self._steps.values()))

    def knows(self, group: int, key: bytes) -> bool:
        """Whether such a block is under way."""
        return (group, key) in self._known

    def begin(self, step: int) -> None:
        """A step is being scheduled; numbers ascend."""
        self._steps[step] = []

    def stage(self, owner: str, blocks: Sequence[Block]) -> None:
        """Blocks whose tokens are computed by the end of the newest step; at most `room`. Without an
        outstanding step they are ready. Blocks under way already are left out."""
        new = [block for block in blocks if block[:2] not in self._known]
        assert len(new) <= self.room
        if not new:
            return
        self._known.update(block[:2] for block in new)
        self._pinned += len(new)
        self._pin([block for _, _, block in new])
        if self._steps:
            next(reversed(self._steps.values())).append(_Staged(owner, new))
        else:
            self._make_ready(_Staged(owner, new))

    def ran(self, step: int, clean: bool) -> set[str]:
        """A step's result was seen. Returns the owners of what was dropped: they have to stage again.

        A step that was not clean takes those with it that are outstanding: they may have computed over
        the same blocks.
        """
        dropped: set[str] = set()
        while self._steps and (not clean or next(iter(self._steps)) <= step):
            number, staged = self._steps.popitem(last=False)
            for some in staged:
                if clean and number == step:
                    self._make_ready(some)
                else:
                    dropped.add(some.owner)
                    self._release(some.blocks)
        return dropped

    def orders(self) -> list[SaveOrder]:
        """What the ranks shall store now."""
        orders: list[SaveOrder] = []
        early = len(self._ready) < self._order_blocks and time.monotonic() < self._ready_at + self._hold_s
        if early and not self.scarce():
            return orders
        while self._ready:
            blocks, self._ready = self._ready[: self._order_blocks], self._ready[self._order_blocks :]
            owners, self._owners = self._owners[: self._order_blocks], self._owners[self._order_blocks :]
            self._jobs[self._next_job] = _Job(blocks, self.ranks)
            requests = tuple(dict.fromkeys(owners))[:REQUESTS_MAX]
            orders.append(SaveOrder(self._next_job, _parts(blocks), requests))
            self._next_job += 1
        return orders

    def acknowledge(self, job: int, ranks: int = 1) -> None:
        """So many more ranks have read the blocks of a job."""
        known = self._jobs[job]
        known.missing_ranks -= ranks
        if known.missing_ranks <= 0:
            del self._jobs[job]
            self._release(known.blocks)

    def forget(self) -> None:
        """Drops what no rank was told of."""
        for staged in self._steps.values():
            for some in staged:
                self._release(some.blocks)
            staged.clear()
        ready, self._ready, self._owners = self._ready, [], []
        self._release(ready)

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        held = [block for staged in self._steps.values() for some in staged for block in some.blocks]
        held += self._ready + [block for job in self._jobs.values() for block in job.blocks]
        found = []
        if len(held) != self._pinned or self._pinned > self._blocks_max:
            found.append(f"{self._pinned} blocks are pinned for {len(held)} saves, at most {self._blocks_max}")
        if {block[:2] for block in held} != self._known:
            found.append("the keys under way are not those of the pinned blocks")
        if len(self._owners) != len(self._ready):
            found.append(f"{len(self._ready)} blocks are ready, of {len(self._owners)} owners")
        return found

    def _make_ready(self, staged: _Staged) -> None:
        if not self._ready:
            self._ready_at = time.monotonic()
        self._ready += staged.blocks
        self._owners += [staged.owner] * len(staged.blocks)

    def _release(self, blocks: Sequence[Block]) -> None:
        self._known.difference_update(block[:2] for block in blocks)
        self._pinned -= len(blocks)
        # The last block first: what is freed first is reused first, and a chain should lose its end.
        self._unpin([block for _, _, block in reversed(blocks)])


def _parts(blocks: Sequence[Block]) -> list[Part]:
    group = blocks[0][0]
    if all(block[0] == group for block in blocks):
        return [Part(group, [key for _, key, _ in blocks], [number for _, _, number in blocks])]
    parts: dict[int, Part] = {}
    for group, key, block in blocks:
        part = parts.setdefault(group, Part(group, [], []))
        part.keys.append(key)
        part.blocks.append(block)
    return list(parts.values())
