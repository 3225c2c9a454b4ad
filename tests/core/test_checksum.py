"""The checksum notices what it is there to notice."""

import random

import pytest

from kvstore.checksum import checksum, key_seed, running_checksum

SEED = key_seed(b"n" * 16, b"h" * 32)


def test_each_flipped_bit_is_noticed() -> None:
    page = bytearray(random.Random(1).randbytes(512))
    good = checksum(bytes(page), SEED)
    for bit in range(len(page) * 8):
        page[bit // 8] ^= 1 << bit % 8
        assert checksum(bytes(page), SEED) != good
        page[bit // 8] ^= 1 << bit % 8
    assert checksum(bytes(page), SEED) == good


def test_a_page_does_not_match_under_another_key_or_namespace() -> None:
    page = b"x" * 4096
    seeds = {SEED, key_seed(b"n" * 16, b"i" * 32), key_seed(b"o" * 16, b"h" * 32)}
    assert len({checksum(page, seed) for seed in seeds}) == 3


@pytest.mark.parametrize("step", [1, 100, 4096, 5000])
def test_chunks_add_up_to_the_whole(step: int) -> None:
    page = random.Random(2).randbytes(5000)
    hasher = running_checksum(SEED)
    for start in range(0, len(page), step):
        hasher.update(memoryview(page)[start : start + step])
    assert hasher.digest() == checksum(page, SEED)
