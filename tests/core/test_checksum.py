"""The checksum notices what it is there to notice."""

import random
from typing import Any

import pytest
import xxhash

from kvstore.buffers import HELD_NBYTES_MAX
from kvstore.checksum import checksum, joined_checksum, key_seed, running_checksum

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


@pytest.mark.parametrize("nbytes", [0, 1, HELD_NBYTES_MAX, HELD_NBYTES_MAX + 1, 3 << 20])
def test_a_checksum_is_the_same_however_it_is_made(nbytes: int) -> None:
    page = memoryview(random.Random(nbytes).randbytes(nbytes))
    one_shot = xxhash.xxh3_128_digest(page, SEED)
    assert checksum(page, SEED) == one_shot
    assert joined_checksum([page[: nbytes // 3], page[nbytes // 3 :]], SEED) == one_shot


def test_other_threads_run_during_a_large_checksum(others_run: Any) -> None:
    page = memoryview(bytes(16 << 20))
    assert others_run(lambda: checksum(page, SEED))


def test_large_checksums_are_not_made_in_one_shot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which keeps the GIL with xxhash 3.2 to 3.7, whatever is installed here."""
    one_shot = xxhash.xxh3_128_digest

    def short(data: Any, seed: int) -> bytes:
        assert len(data) <= HELD_NBYTES_MAX
        return bytes(one_shot(data, seed))

    monkeypatch.setattr(xxhash, "xxh3_128_digest", short)
    for nbytes in (1, HELD_NBYTES_MAX, HELD_NBYTES_MAX + 1, 1 << 20):
        assert checksum(bytes(nbytes), SEED) == one_shot(bytes(nbytes), SEED)
