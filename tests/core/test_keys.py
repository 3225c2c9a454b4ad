"""Keys: which fields change a namespace's digest, and which tokens a prefix hash covers."""

import dataclasses
import hashlib
import struct
from array import array
from typing import Any

import pytest
import torch

from kvstore import InvalidRequest, Namespace, PageLayout, opaque_layout, prefix_hashes
from kvstore.keys import block_part, check_prefix_hashes, part_of

BASE = Namespace(model="m", layout=opaque_layout(4096), tp_size=4, pp_size=4, cp_size=4)
OTHER_VALUES: dict[str, Any] = {
    "model": "n",
    "layout": opaque_layout(8192),
    "tenant": "other",
    "revision": "r2",
    "tp_rank": 1,
    "tp_size": 8,
    "pp_rank": 1,
    "pp_size": 8,
    "cp_rank": 1,
    "cp_size": 8,
    "salt": "lora-7",
    "epoch": 1,
    "key_id": "0123456789abcdef",
}


def test_every_field_of_a_namespace_but_its_part_changes_its_digest() -> None:
    names = {field.name for field in dataclasses.fields(Namespace)}
    assert set(OTHER_VALUES) == names - {"part"}
    same = dataclasses.replace(BASE, part=part_of("c", 1, 2))
    assert (same, same.digest) == (BASE, BASE.digest)
    alone = dataclasses.replace(BASE, part=part_of("c", 0, 1, 1))
    assert [block_part(space).ranks for space in (BASE, same, alone)] == [64, 64, 1]
    assert block_part(same).id == block_part(alone).id != block_part(BASE).id
    digests = {
        dataclasses.replace(BASE, **{name: value}).digest for name, value in OTHER_VALUES.items()
    }
    assert len(digests | {BASE.digest}) == len(OTHER_VALUES) + 1


def test_text_moved_to_another_field_changes_the_digest() -> None:
    layout = opaque_layout(1)
    assert (
        Namespace("ab", layout, revision="c").digest != Namespace("a", layout, revision="bc").digest
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": ""}, "model must not be empty"),
        ({"tenant": ""}, "tenant must not be empty"),
        ({"salt": "x" * 1025}, "salt is longer than 1024"),
        ({"revision": "é" * 513}, "revision is longer than 1024"),
        ({"tp_rank": 4}, "tp_rank 4 is not in 0..tp_size-1"),
        ({"pp_rank": -1}, "pp_rank -1"),
        ({"cp_size": 0}, "cp_size is 0"),
        ({"tp_size": 1 << 17}, "tp_rank 0"),
        ({"epoch": -1}, "epoch -1"),
        ({"epoch": 1 << 64}, "epoch 18446744073709551616"),
        ({"key_id": "0123456789ABCDEF"}, "key_id '0123456789ABCDEF' is not 16 hex digits"),
        ({"key_id": "0123456789abcdef0"}, "key_id"),
        ({"key_id": "0123456789abcde\n"}, "key_id"),
    ],
)
def test_invalid_namespace_field_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        dataclasses.replace(BASE, **fields)


def test_prefix_hash_covers_all_tokens_before_it() -> None:
    hashes = prefix_hashes(range(64), 16)
    assert len(hashes) == 4
    changed = prefix_hashes([1, *range(1, 64)], 16)
    assert not set(hashes) & set(changed)
    assert prefix_hashes(range(32), 16) == hashes[:2]
    assert prefix_hashes(range(32, 64), 16, parent=hashes[1]) == hashes[2:]


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2)])
def test_only_full_pages_have_a_hash(tokens: int, pages: int) -> None:
    assert len(prefix_hashes(range(tokens), 16)) == pages


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3, 255],
        (1, 2, 3, 255),
        iter([1, 2, 3, 255]),
        array("H", [1, 2, 3, 255]),
        torch.tensor([1, 2, 3, 255]),
        bytes([1, 2, 3, 255]),
        bytearray([1, 2, 3, 255]),
        memoryview(bytes([1, 2, 3, 255])),
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_tokens_may_come_in_any_sequence(tokens: Any) -> None:
    assert prefix_hashes(tokens, 4) == [hashlib.sha256(struct.pack("<4I", 1, 2, 3, 255)).digest()]


@pytest.mark.parametrize(
    "tokens", [[-1], [1 << 32], [1.5], ["a"], "abcd", None, torch.tensor([[1, 2]]), 5]
)
def test_invalid_token_ids_are_refused(tokens: Any) -> None:
    with pytest.raises(InvalidRequest, match="token ids"):
        prefix_hashes(tokens, 1)


def test_page_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="page_tokens 0"):
        prefix_hashes([1], 0)


@pytest.mark.parametrize(
    ("hashes", "named"),
    [
        ([], "no key"),
        ([b""], "0 bytes"),
        ([b"x" * 15], "15 bytes"),
        ([b"x" * 32, b"x" * 65], "65 bytes"),
        ([b"x" * 32] * 2, "twice"),
        ([bytes([i]) * 32 for i in range(9)], "9 keys, at most 8"),
    ],
)
def test_invalid_batch_is_refused(hashes: list[bytes], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        check_prefix_hashes(hashes, 8, distinct=True)


def test_batch_may_repeat_a_key_if_not_distinct() -> None:
    check_prefix_hashes([b"x" * 16, b"x" * 16, b"y" * 64], 3, distinct=False)


def test_equal_layouts_written_as_lists_and_tuples_are_equal() -> None:
    layout: PageLayout = opaque_layout(64)
    assert (
        dataclasses.replace(BASE, layout=layout).digest
        == dataclasses.replace(BASE, layout=opaque_layout(64)).digest
    )
