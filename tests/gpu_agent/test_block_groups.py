"""Which blocks a prefix needs, compared with a direct implementation of the definition."""

import random
from typing import Any, cast

import pytest

from gpu_agent.blocks.groups import (
    NULL_BLOCK,
    BlockGroup,
    by_end,
    loaded_blocks,
    longest_prefix,
    tokens_by_tier,
    unsaved_blocks,
)
from gpu_agent.blocks.lookups import look_up_all_shards, presence
from kvstore import Client, LookupResult
from kvstore.deadline import Deadline
from kvstore.results import Tier


def test_full_group_needs_every_block() -> None:
    assert BlockGroup(32).first_block(1000) == 0


@pytest.mark.parametrize(
    ("end", "first"), [(32, 0), (40, 0), (64, 0), (72, 1), (96, 1), (104, 2), (128, 2)]
)
def test_window_group_needs_the_blocks_in_the_next_tokens_window(end: int, first: int) -> None:
    assert BlockGroup(32, window_tokens=40).first_block(end) == first


@pytest.mark.parametrize(("end", "first"), [(32, 0), (96, 0), (128, 4), (160, 4), (256, 8)])
def test_chunk_group_needs_the_blocks_of_the_current_chunk(end: int, first: int) -> None:
    assert BlockGroup(32, chunk_tokens=128).first_block(end) == first


def test_block_of_several_hashes_has_the_last_one_as_key() -> None:
    hashes = [bytes([i]) for i in range(7)]
    group = BlockGroup(32)
    assert group.keys(hashes, 16) == [b"\1", b"\3", b"\5"]
    assert group.keys_of(hashes, 16, [0, 2]) == [b"\1", b"\5"]
    assert BlockGroup(16).keys(hashes, 16) == hashes


def test_prefix_ends_before_the_first_gap_of_a_full_group() -> None:
    groups = [BlockGroup(16)]
    assert longest_prefix(groups, [[True, True, False, True]], 0, 64, 16) == 32
    # The engine has the missing block.
    assert longest_prefix(groups, [[False, True, True, True]], 16, 64, 16) == 64
    assert (
        longest_prefix(groups, [[True] * 4], 0, 63, 16) == 48
    )  # one token must be left to compute
    # The engine's part ends within a block.
    assert longest_prefix(groups, [[True] * 4], 8, 64, 16) == 8


def test_window_group_may_have_gaps_before_its_window() -> None:
    groups = [BlockGroup(16), BlockGroup(16, window_tokens=31)]
    full, window = [True] * 8, [False] * 4 + [True] * 4
    assert longest_prefix(groups, [full, window], 0, 128, 16) == 128
    # A prefix of 80 tokens needs block 3 of the window group.
    assert longest_prefix(groups, [full[:5] + [False] * 3, window], 0, 128, 16) == 0
    assert list(loaded_blocks(groups[1], 0, 128)) == [6, 7]
    assert list(loaded_blocks(groups[1], 112, 128)) == [7]
    assert list(loaded_blocks(groups[0], 112, 128)) == [7]


def test_random_groups_match_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        groups = [
            BlockGroup(rng.choice([16, 32]), rng.choice([0, 0, 20, 70]), rng.choice([0, 0, 64]))
            for _ in range(2)
        ]
        present = [
            [rng.random() < 0.8 for _ in range(320 // group.block_tokens)] for group in groups
        ]
        local, limit = 32 * rng.randrange(4), rng.randrange(400)

        def fits(
            end: int, local: int = local, groups: list[BlockGroup] = groups, present: list = present
        ) -> bool:
            for group, there in zip(groups, present, strict=True):
                for block in range(end // group.block_tokens):
                    seen = (
                        not group.window_tokens
                        or (block + 1) * group.block_tokens > end - group.window_tokens
                    )
                    if group.chunk_tokens:
                        seen &= (
                            block + 1
                        ) * group.block_tokens > end // group.chunk_tokens * group.chunk_tokens
                    if seen and (block + 1) * group.block_tokens > local and not there[block]:
                        return False
            return True

        expected = max(
            [end for end in range(local, min(limit, 320) + 1, 32) if end > local and fits(end)],
            default=local,
        )
        assert longest_prefix(groups, present, local, limit, 32) == expected


def test_group_saves_the_blocks_that_the_store_lacks() -> None:
    draw = random.Random(7)
    for _ in range(400):
        table = [draw.choice([NULL_BLOCK, 5, 6, 7, 8, 9]) for _ in range(draw.randrange(20))]
        there = bytes(draw.random() < 0.2 for _ in range(draw.randrange(20)))
        end, first = draw.randrange(len(table) + 1), draw.randrange(20)
        for some in (there, b""):
            stored = some.ljust(len(table), b"\0")
            expected = [i for i in range(first, end) if table[i] != NULL_BLOCK and not stored[i]]
            assert list(unsaved_blocks(table, some, first, end)) == expected
    assert unsaved_blocks([5] * 9, bytes(3), 2, 9) == range(2, 9)
    # Present blocks before the first one do not matter.
    assert unsaved_blocks([5] * 9, b"\1\1\0", 2, 9) == range(2, 9)


def test_load_with_too_few_blocks_takes_a_shorter_prefix() -> None:
    draw = random.Random(8)
    groups = [BlockGroup(16), BlockGroup(48), BlockGroup(32)]
    for _ in range(200):
        found = [sorted(draw.sample(range(12), draw.randrange(9))) for _ in groups]
        ends = sorted(
            ((block + 1) * group.block_tokens, number, block)
            for number, (group, blocks) in enumerate(zip(groups, found, strict=True))
            for block in blocks
        )
        count = draw.randrange(1, len(ends) + 2)
        for chosen in by_end(groups, found, count):
            assert sorted(
                (number, block) for number, blocks in enumerate(chosen) for block in blocks
            ) == sorted((number, block) for _, number, block in ends[:count])
            del ends[:count]
        assert not ends
    assert next(by_end([BlockGroup(16)], [range(3, 9)], 2)) == [range(3, 5)]


def test_tokens_of_a_load_are_divided_by_the_tiers_of_its_blocks() -> None:
    groups = [BlockGroup(16), BlockGroup(32, window_tokens=40)]
    tiers = (bytes((1, 2, 2, 3, 0)), bytes((0, 1)))
    shares = tokens_by_tier(groups, tiers, [range(1, 4), [1]], 48)
    # 16 tokens of RAM in a block of 32, 32 on disk, 16 of a peer: 80 in all
    assert shares == {Tier.RAM: 20, Tier.DISK: 19, Tier.PEER: 9}
    assert tokens_by_tier(groups, (bytes((1, 1)), b""), [range(2), []], 32) == {Tier.RAM: 32}


def test_lookup_of_several_shards_finds_the_farthest_tier() -> None:
    found = {
        "near": LookupResult(4, (True,) * 4),
        "disk": LookupResult(3, (True, True, True, False), bytes((2, 1, 2, 0))),
        "peer": LookupResult(2, (True, True, False), bytes((3, 1, 0))),
    }

    class Nodes:
        def lookup(self, namespace: str, keys: Any, timeout_s: float) -> LookupResult:
            return found[namespace]

    for names, tiers in (
        (["near"], b"\1\1\1\1"),
        (["disk", "peer"], b"\3\1\0\0"),
        (["near", "disk"], b"\2\1\2\0"),
    ):
        question: Any = [(names, [b"a", b"b", b"c", b"d"])]
        answer = look_up_all_shards(cast("Client", Nodes()), question, Deadline(60.0))
        assert answer == (tiers,)
        assert presence(answer) == (bytes(tier > 0 for tier in tiers),)


def test_keys_of_a_range_equal_keys_of_single_blocks() -> None:
    group, hashes = BlockGroup(32), [bytes([i]) for i in range(9)]
    assert (
        group.keys_of(hashes, 16, range(1, 4))
        == group.keys(hashes, 16)[1:4]
        == group.keys_of(hashes, 16, [1, 2, 3])
    )
    assert group.keys_of(hashes, 16, range(2, 2)) == []
