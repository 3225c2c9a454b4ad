"""A request at hand: what of it the store has, what is being loaded, and which of its blocks need no save any more."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpu_agent.blocks.askers import Answer
from gpu_agent.blocks.groups import BlockGroup, first_ending, unsaved_blocks

STAGED_BLOCKS = 16  # of an answer's, while it goes on: as much work as for one


class EngineRequest(Protocol):
    """What is read of the engine's request."""

    request_id: str
    block_hashes: list[bytes]  # of all full blocks of known tokens; grows
    num_tokens: int
    num_computed_tokens: int


@dataclass
class Request:
    """`planned[group]`: leading blocks that need no save any more: present, staged, or given up. With `next_tokens`
    tokens computed there is one more, with `due_tokens` enough of them to be saved."""

    request: EngineRequest
    planned: list[int]
    next_tokens: int = 0
    due_tokens: int = 0
    present: Answer = ()
    offered: tuple[int, int] = (0, 0)  # tokens in the engine, tokens after a load
    loading: int = 0  # ranks that have not ended its load
    polled: bool = False  # the engine asked for the answer at least once
    load_began_at: float = 0.0
    judged: tuple[int, int] | None = None  # the hit that was decided about, as `offered`
    declined: bool | None = None  # whether it is none; None: not decided since it was asked anew
    refused: bool = False  # a load failed: no second one, or the engine would ask for it forever
    scheduled: bool = False  # a step was scheduled since its blocks were allocated, so its tokens were computed
    barred: bool = False  # its KV may not be stored

    def plan_anew(self) -> None:
        self.planned = [0] * len(self.planned)
        self.next_tokens = self.due_tokens = 0

    def plan(
        self,
        groups: Sequence[BlockGroup],
        hash_tokens: int,
        computed_tokens: int,
        tables: Sequence[Sequence[int]],
        room: int,
    ) -> tuple[list[Sequence[int]], int]:
        """Of each group the blocks to save now, `room` at most, which are planned afterwards; and how many more there
        are, which are found again the next time."""
        tokens = min(computed_tokens, len(self.request.block_hashes) * hash_tokens)  # no drafts, no placeholders
        full = [min(tokens // group.block_tokens, len(table)) for group, table in zip(groups, tables, strict=True)]
        there = self.present or [b""] * len(tables)
        found = list(map(unsaved_blocks, tables, there, self.planned, full))
        left = max(0, sum(map(len, found)) - room)
        if left:
            found = first_ending(groups, found, room)
            last = zip(found, self.planned, strict=True)
            self.planned = [blocks[-1] + 1 if blocks else planned for blocks, planned in last]
            self.next_tokens = self.due_tokens = 0
            return found, left
        self.planned = list(map(max, self.planned, full))
        following = [(planned, group.block_tokens) for planned, group in zip(self.planned, groups, strict=True)]
        self.next_tokens = min((blocks + 1) * tokens for blocks, tokens in following)
        self.due_tokens = min(self._due(blocks, tokens) for blocks, tokens in following)
        return found, 0

    def _due(self, planned: int, block_tokens: int) -> int:
        """With so many tokens computed there is more to save: a block of a prompt, some of an answer."""
        following = (planned + 1) * block_tokens
        return following if following <= self.request.num_tokens else (planned + STAGED_BLOCKS) * block_tokens
