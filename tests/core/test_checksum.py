"""The checksum detects damaged, moved and exchanged bytes."""

import random
from typing import Any

import pytest
import xxhash
from waiting import OthersRun

from kvstore.buffers import HELD_NBYTES_MAX
from kvstore.checksum import (
    LEAF_NBYTES,
    LEAVES_MAX,
    Leaves,
    checksum,
    cuts,
    joined_checksum,
    key_seed,
    leaf_nbytes,
    leaves,
    parts_match,
    root,
)

SEED = key_seed(b"n" * 16, b"h" * 32)


def test_each_flipped_bit_is_detected() -> None:
    page = bytearray(random.Random(1).randbytes(512))
    good = checksum(bytes(page), SEED)
    for bit in range(len(page) * 8):
        page[bit // 8] ^= 1 << bit % 8
        assert checksum(bytes(page), SEED) != good
        page[bit // 8] ^= 1 << bit % 8
    assert checksum(bytes(page), SEED) == good


def test_checksum_depends_on_key_and_namespace() -> None:
    page = b"x" * 4096
    seeds = {SEED, key_seed(b"n" * 16, b"i" * 32), key_seed(b"o" * 16, b"h" * 32)}
    assert len({checksum(page, seed) for seed in seeds}) == 3


SIZES = [
    0,
    1,
    5000,
    HELD_NBYTES_MAX,
    HELD_NBYTES_MAX + 1,
    LEAF_NBYTES,
    2 * LEAF_NBYTES - 1,
    3 * LEAF_NBYTES + 7,
]


def parts_of(nbytes: int) -> list[tuple[int, int]]:
    """Return the parts of a page as docs/FORMAT.md defines them, computed independently."""
    step = 1 << 20
    while -(-nbytes // step) > 64:
        step += 1 << 20
    count = max(1, nbytes // step)
    return [(i * step, (i + 1) * step if i < count - 1 else nbytes) for i in range(count)]


@pytest.mark.parametrize("nbytes", [*SIZES, 64 << 20, (64 << 20) + 1, 200 << 20, (1 << 30) - 5])
def test_parts_cover_the_page_in_order(nbytes: int) -> None:
    parts = cuts(nbytes)
    assert list(parts) == parts_of(nbytes)
    assert [start for start, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == nbytes
    assert len(parts) <= LEAVES_MAX
    assert all(end - start == leaf_nbytes(nbytes) for start, end in parts[:-1])
    assert parts[-1][1] - parts[-1][0] < 2 * leaf_nbytes(nbytes)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("step", [1 << 10, 4099, 1 << 20, 5 << 20])
def test_checksum_is_equal_for_all_ways_of_computing_it(nbytes: int, step: int) -> None:
    page = memoryview(random.Random(nbytes).randbytes(nbytes))
    made = b"".join(xxhash.xxh3_64_digest(page[start:end]) for start, end in parts_of(nbytes))
    running = Leaves(nbytes)
    for start in range(0, nbytes, step):
        running.update(page[start : start + step])
    assert running.digest() == leaves(page) == made
    assert checksum(page, SEED) == root(made, SEED) == xxhash.xxh3_128_digest(made, SEED)
    assert joined_checksum([page[: nbytes // 3], page[nbytes // 3 :]], nbytes, SEED) == checksum(
        page, SEED
    )


def test_swapped_parts_are_detected() -> None:
    page = random.Random(3).randbytes(3 * LEAF_NBYTES)
    swapped = page[LEAF_NBYTES : 2 * LEAF_NBYTES] + page[:LEAF_NBYTES] + page[2 * LEAF_NBYTES :]
    assert checksum(page, SEED) != checksum(swapped, SEED)


@pytest.mark.parametrize("nbytes", [3 * LEAF_NBYTES, 3 * LEAF_NBYTES + 4096, 70 << 20])
def test_range_is_checked_by_the_parts_it_covers(nbytes: int) -> None:
    """A flipped byte is detected by each range that shares a part with it, and by no other."""
    draw = random.Random(nbytes)
    page = memoryview(bytearray(nbytes))
    made, parts = leaves(page), cuts(nbytes)
    for _ in range(20):
        bad = draw.randrange(nbytes)
        offset = draw.randrange(nbytes)
        ranges = [(offset, draw.randrange(1, min(nbytes - offset, LEAF_NBYTES) + 1))]
        touched = [(a, b) for a, b in parts if any(a < o + n and o < b for o, n in ranges)]
        page[bad] ^= 1
        assert parts_match(page, made, ranges) == (not any(a <= bad < b for a, b in touched))
        page[bad] ^= 1
        assert parts_match(page, made, ranges)


def test_range_at_the_end_of_a_longer_last_part_is_checked() -> None:
    page = memoryview(bytearray(2 * LEAF_NBYTES + 5000))
    made = leaves(page)
    page[-1] ^= 1
    assert not parts_match(page, made, [(2 * LEAF_NBYTES + 100, 4900)])


def test_other_threads_run_during_a_large_checksum(others_run: OthersRun) -> None:
    page = memoryview(bytes(16 << 20))
    assert others_run(lambda: checksum(page, SEED))


def test_large_parts_are_not_hashed_in_one_shot(monkeypatch: pytest.MonkeyPatch) -> None:
    """One-shot hashing holds the GIL with xxhash 3.2 to 3.7, which may not be installed here."""
    one_shot = xxhash.xxh3_64_digest

    def short(data: Any) -> bytes:
        assert len(data) <= HELD_NBYTES_MAX
        return bytes(one_shot(data))

    monkeypatch.setattr(xxhash, "xxh3_64_digest", short)
    for nbytes in (1, HELD_NBYTES_MAX, HELD_NBYTES_MAX + 1, 1 << 20):
        assert leaves(bytes(nbytes)) == one_shot(bytes(nbytes))
