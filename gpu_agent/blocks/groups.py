"""Find the blocks that a prefix needs, and the blocks of a request to save.

    tokens        0        32       64       96      128
    full          [   0   ][   1   ][   2   ][   3   ]      all blocks of the prefix
    window 40                       [   2   ][   3   ]      those that the next token attends to
    state                                    [   3   ]      the state after the last token
                                                     ^ end of a prefix

No I/O: tables, hashes and answers in, numbers out. `TrackedRequest` is what the scheduler knows of
a running request: its stored pages, its load, and the blocks that need no save any more.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gpu_agent.blocks.lookups import Answer, beyond_ram
from kvstore.results import Tier

NULL_BLOCK = 0  # entry of a block table that a window has left behind; never read or written
# blocks of an answer saved together while it is generated: as much work as for one
STAGED_BLOCKS = 16
NEVER = 1 << 62  # tokens; more than any request has
Tables = Sequence[Sequence[int]]  # by group: ids of a request's blocks


@dataclass(frozen=True)
class BlockGroup:
    """Layers that share a block table.

    `block_tokens`: tokens of a block id. `window_tokens`: how many tokens before the next one its
    layers attend to; 0: all. `chunk_tokens`: its layers attend to the current chunk of so many
    tokens; 0: no chunks. `is_state`: a block holds a recurrent state, the sum of all tokens before
    its end; see `state_group`.
    """

    block_tokens: int
    window_tokens: int = 0
    chunk_tokens: int = 0
    is_state: bool = False

    @property
    def needs_tail_only(self) -> bool:
        """Return whether its layers need only the last blocks of a prefix."""
        return bool(self.window_tokens or self.chunk_tokens)

    def first_block(self, end_tokens: int) -> int:
        """Return the first block that a request with `end_tokens` computed tokens needs."""
        first = 0
        if self.window_tokens:
            first = max(first, end_tokens - self.window_tokens)
        if self.chunk_tokens:
            first = max(first, end_tokens // self.chunk_tokens * self.chunk_tokens)
        return first // self.block_tokens

    def keys(self, hashes: Sequence[bytes], hash_tokens: int) -> list[bytes]:
        """Return the key of each full block: the hash of its last `hash_tokens` tokens."""
        step = self.block_tokens // hash_tokens
        return list(hashes[step - 1 :: step])

    def keys_of(
        self, hashes: Sequence[bytes], hash_tokens: int, blocks: Sequence[int]
    ) -> list[bytes]:
        """Return the keys of these blocks; see `keys`."""
        step = self.block_tokens // hash_tokens
        if isinstance(blocks, range):
            return list(hashes[(blocks.start + 1) * step - 1 : blocks.stop * step : step])
        return [hashes[(block + 1) * step - 1] for block in blocks]


def state_group(block_tokens: int) -> BlockGroup:
    """Return a group of recurrent states.

    A prefix needs only the block that ends with it, like a window of one token. But a block's
    position does not tell whether it holds a state: engines overwrite states and leave blocks out.
    So states are saved only when the engine offers them (`BlockScheduler.step`).
    """
    return BlockGroup(block_tokens, window_tokens=1, is_state=True)


def longest_prefix(
    groups: Sequence[BlockGroup],
    present: Sequence[Sequence[int]],
    local_tokens: int,
    limit_tokens: int,
    step_tokens: int,
) -> int:
    """Return the longest prefix, in tokens, that is complete once stored blocks are loaded.

    `present[group][block]` is 1 if all shards of the block are stored. The first `local_tokens`
    are in the engine. The result is a multiple of `step_tokens`, at most `limit_tokens`, and
    `local_tokens` if nothing can be added. A block that one group lacks shortens the prefix for all
    groups.
    """
    if local_tokens % step_tokens:
        return local_tokens
    ends = [
        _run_end(group, blocks, local_tokens) for group, blocks in zip(groups, present, strict=True)
    ]
    end = min([limit_tokens, *ends]) // step_tokens * step_tokens
    there = [
        bytes(blocks) if group.needs_tail_only else b""
        for group, blocks in zip(groups, present, strict=True)
    ]
    while end > local_tokens:
        shorter = min(
            _shorter(group, some, local_tokens, end)
            for group, some in zip(groups, there, strict=True)
        )
        if shorter == end:
            return end
        end = shorter // step_tokens * step_tokens
    return local_tokens


def _run_end(group: BlockGroup, blocks: Sequence[int], local_tokens: int) -> int:
    """Return the latest possible end of a prefix.

    For layers that need all blocks it is the end of the present ones, from the first that the
    engine lacks.
    """
    first = len(blocks) if group.needs_tail_only else local_tokens // group.block_tokens
    return group.block_tokens * (
        blocks.index(False, first) if False in blocks[first:] else len(blocks)
    )


def _shorter(group: BlockGroup, there: bytes, local_tokens: int, end_tokens: int) -> int:
    """Return `end_tokens` if the group has what such a prefix needs, else the next possible end.

    A prompt has thousands of blocks, so this never loops over single blocks.
    """
    blocks = end_tokens // group.block_tokens
    gap = (
        there.rfind(0, _first(group, local_tokens, end_tokens), blocks)
        if group.needs_tail_only
        else -1
    )
    if gap < 0:
        return end_tokens
    shorter = (
        there.rfind(1, 0, gap) + 1
    ) * group.block_tokens  # any longer prefix ends in a missing block
    if group.chunk_tokens:  # but a prefix that ends with a chunk needs no block of it
        shorter = max(shorter, (end_tokens - 1) // group.chunk_tokens * group.chunk_tokens)
    return shorter


def unsaved_blocks(
    table: Sequence[int], there: Sequence[int], first: int, end: int
) -> Sequence[int]:
    """Return the blocks from `first` to `end` that a table has and the store lacks.

    `there` is 1 for stored blocks, as far as known. The result is a range if it is all of them, as
    for most prompts, which have thousands.
    """
    if NULL_BLOCK not in table[first:end] and True not in there[first:end]:
        return range(first, end)
    known = itertools.chain(there[first:end], itertools.repeat(False))
    return [
        block
        for block, number, stored in zip(range(first, end), table[first:end], known, strict=False)
        if number != NULL_BLOCK and not stored
    ]


def by_end(
    groups: Sequence[BlockGroup], blocks: Sequence[Sequence[int]], count: int
) -> Iterator[list[Sequence[int]]]:
    """Yield each group's blocks, `count` of all at a time, those first that end first.

    If there is no room for more, a shorter prefix is then complete.
    """

    def ends(number: int) -> Iterator[tuple[int, int]]:
        tokens = groups[number].block_tokens
        return (((block + 1) * tokens, number) for block in blocks[number])

    merged = (number for _, number in heapq.merge(*map(ends, range(len(groups)))))
    taken = [0] * len(groups)
    while chosen := list(itertools.islice(merged, count)):
        before, taken = (
            taken,
            [taken[number] + chosen.count(number) for number in range(len(groups))],
        )
        yield [some[a:b] for some, a, b in zip(blocks, before, taken, strict=True)]


def loaded_blocks(group: BlockGroup, local_tokens: int, end_tokens: int) -> range:
    """Return the blocks to load to extend a prefix from `local_tokens` to `end_tokens`."""
    return range(_first(group, local_tokens, end_tokens), end_tokens // group.block_tokens)


def tokens_by_tier(
    groups: Sequence[BlockGroup], tiers: Answer, loaded: Sequence[Sequence[int]], tokens: int
) -> dict[Tier, int]:
    """Divide the tokens of a load by the tiers of its blocks, `loaded` of each group.

    A token has a block in each group, and windows leave most of theirs out: so each tier gets its
    share of the blocks, weighted with their tokens.
    """
    if not any(map(beyond_ram, tiers)):
        return {Tier.RAM: tokens}
    parts = dict.fromkeys(Tier, 0)
    for group, some, blocks in zip(groups, tiers, loaded, strict=True):
        found = [some[block] for block in blocks]
        for tier in Tier:
            parts[tier] += found.count(tier) * group.block_tokens
    whole = max(1, sum(parts.values()))
    shares = {tier: tokens * part // whole for tier, part in parts.items()}
    shares[Tier.RAM] += tokens - sum(shares.values())
    return shares


def _first(group: BlockGroup, local_tokens: int, end_tokens: int) -> int:
    return max(group.first_block(end_tokens), local_tokens // group.block_tokens)


class EngineRequest(Protocol):
    """Fields of the engine's request that are read."""

    request_id: str
    block_hashes: list[bytes]  # of all full blocks of known tokens; grows
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int


@dataclass
class TrackedRequest:
    """Keep what the scheduler knows of a request.

    `planned[group]`: leading blocks that need no save: stored, staged, or given up. `gone[group]`:
    leading blocks up to the last one that had left the window by then.

    `next_tokens`: number of computed tokens with which one more block is full. `due_tokens`: number
    with which enough blocks are full for a save.
    """

    request: EngineRequest
    planned: list[int]
    next_tokens: int = 0
    due_tokens: int = 0
    present: Answer = ()
    tiers: Answer = ()  # of these blocks
    hit: tuple[int, int] = (0, 0)  # tokens in the engine, tokens after a load
    loading: int = 0  # ranks that have not ended its load
    polled: bool = False  # the engine polled for the answer at least once
    load_began_at: float = 0.0
    decided_hit: tuple[int, int] | None = None  # the hit that was decided on, as in `hit`
    declined: bool | None = None  # whether it was declined; None: not decided since the last lookup
    # a load failed: there is no second one, or the engine would retry for ever
    load_failed: bool = False
    # a step was scheduled since its blocks were allocated, so its tokens were computed
    scheduled: bool = False
    never_saved: bool = False  # its KV must not be stored
    states: set[tuple[int, int]] = field(default_factory=set)  # staged: end in tokens, group
    gone: dict[int, int] = field(default_factory=dict)
    # computed tokens before its first draft tokens since its blocks were allocated; None: no drafts
    drafted_at: int | None = None

    def plan_anew(self) -> None:
        """Plan all blocks again."""
        self.planned = [0] * len(self.planned)
        self.gone.clear()
        self.next_tokens = self.due_tokens = 0

    def plan(
        self,
        groups: Sequence[BlockGroup],
        hash_tokens: int,
        computed_tokens: int,
        tables: Sequence[Sequence[int]],
        room: int,
    ) -> tuple[list[Sequence[int]], int]:
        """Return each group's blocks to save now, `room` at most, and how many more there are.

        Returned blocks count as planned; the others are found again next time. Recurrent states
        are not among them: they are saved when the engine offers them.
        """
        # The engine hashes a block when its tokens are final, so drafts are left out
        tokens = min(computed_tokens, len(self.request.block_hashes) * hash_tokens)
        full = [
            0 if group.is_state else min(tokens // group.block_tokens, len(table))
            for group, table in zip(groups, tables, strict=True)
        ]
        for number, (table, end) in enumerate(zip(tables, full, strict=True)):
            some = table[self.planned[number] : end]
            if NULL_BLOCK in some:
                self.gone[number] = end - some[::-1].index(NULL_BLOCK)
        there = self.present or [b""] * len(tables)
        found = list(map(unsaved_blocks, tables, there, self.planned, full))
        left = max(0, sum(map(len, found)) - room)
        if left:
            found = next(by_end(groups, found, room), [()] * len(groups))
            last = zip(found, self.planned, strict=True)
            self.planned = [blocks[-1] + 1 if blocks else planned for blocks, planned in last]
            self.next_tokens = self.due_tokens = 0
            return found, left
        self.planned = list(map(max, self.planned, full))
        following = [
            (planned, group.block_tokens)
            for planned, group in zip(self.planned, groups, strict=True)
            if not group.is_state
        ]
        self.next_tokens = min(
            ((blocks + 1) * tokens for blocks, tokens in following), default=NEVER
        )
        self.due_tokens = min(
            (self._due(blocks, tokens) for blocks, tokens in following), default=NEVER
        )
        return found, 0

    def plan_tail(
        self,
        groups: Sequence[BlockGroup],
        step_tokens: int,
        computed_tokens: int,
        table_of: Callable[[], Tables],
    ) -> tuple[list[Sequence[int]], Tables]:
        """Return each group's unsaved blocks of the prompt's end that leave its window now.

        Only those that a hit needs. As in `plan` they count as planned, and so do those before
        them.
        """
        tables: Tables = ()
        found: list[Sequence[int]] = [()] * len(groups)
        for number, group in enumerate(groups):
            if group.is_state or not group.needs_tail_only:
                continue
            prompt = self.request.num_prompt_tokens
            # A hit may have to leave the last token to be computed
            first = group.first_block((prompt - 1) // step_tokens * step_tokens)
            first = max(first, self.planned[number])
            end = min(prompt // group.block_tokens, group.first_block(computed_tokens))
            if first < end:
                tables = tables or table_of()
                there = self.present[number] if self.present else b""
                found[number] = unsaved_blocks(tables[number], there, first, end)
            self.planned[number] = max(self.planned[number], end)
        return found, tables

    def wants_state(self, number: int, block: int, end_tokens: int) -> bool:
        """Return whether to save the recurrent state of a block, which ends at `end_tokens`.

        Not if it is stored, nor if draft tokens took part in it: an engine that rejects drafts
        rolls their state back, but no test here has seen how.
        """
        if self.drafted_at is not None and end_tokens > self.drafted_at:
            return False
        there = self.present[number] if self.present else b""
        return not (block < len(there) and there[block])

    def _due(self, planned: int, block_tokens: int) -> int:
        """Return how many tokens must be computed until there is more to save."""
        following = (planned + 1) * block_tokens
        return (
            following
            if following <= self.request.num_tokens
            else (planned + STAGED_BLOCKS) * block_tokens
        )
