"""Parts of a page in a slot: which bytes are read, and where each of them is."""

import random

import pytest

from kvstore import Namespace, checksum, opaque_layout
from node.memory.page import NamespaceIndex
from node.memory.promotion import SHARE_MAX, PartialPage, parts_wanted
from node.memory.tenant_usage import TenantUsage
from node.slab import SlotAllocator

ALIGN = 4096


def space_of(page_nbytes: int) -> NamespaceIndex:
    account = TenantUsage(SlotAllocator(ALIGN, ALIGN), list).of("default")
    return NamespaceIndex(Namespace(model="m", layout=opaque_layout(page_nbytes)), account)


@pytest.mark.parametrize("leaf_nbytes", [256, 4096, 10_000])
def test_partial_page_has_all_bytes_of_its_ranges_and_leaves(
    leaf_nbytes: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksum, "LEAF_NBYTES", leaf_nbytes)
    rng = random.Random(seed)
    for _ in range(200):
        checksum.cuts.cache_clear()
        page_nbytes = rng.randint(1, 100_000)
        page = rng.randbytes(page_nbytes) + bytes(ALIGN)
        ranges = [
            (start, rng.randint(1, page_nbytes - start))
            for start in rng.choices(range(page_nbytes), k=3)
        ]
        parts = PartialPage(space_of(page_nbytes), ranges)
        assert all(start % ALIGN == end % ALIGN == 0 for start, end in parts.runs)
        slot = b"".join(page[start:end] for start, end in parts.runs)
        assert len(slot) == parts.slot_nbytes <= -(-page_nbytes // ALIGN) * ALIGN
        covered = [checksum.cuts(page_nbytes)[number] for number in parts.numbers]
        for start, end in [*covered, *((start, start + nbytes) for start, nbytes in ranges)]:
            assert (
                slot[parts.slot_offset(start) : parts.slot_offset(start) + end - start]
                == page[start:end]
            )
        assert parts.slot_nbytes <= sum(end - start + 2 * ALIGN for start, end in covered)
    checksum.cuts.cache_clear()


def test_small_pages_and_large_shares_are_read_whole() -> None:
    mib = 1 << 20
    large, one_leaf = space_of(16 * mib), space_of(2 * mib - 4096)
    assert parts_wanted(large, []) is None
    assert parts_wanted(one_leaf, [(0, 1)]) is None
    most = int(16 * SHARE_MAX)
    wanted = parts_wanted(large, [(0, most * mib)])
    assert wanted is not None
    assert wanted.slot_nbytes == most * mib
    assert parts_wanted(large, [(0, most * mib + 1)]) is None
    assert parts_wanted(large, [(number * mib, 1) for number in range(most + 1)]) is None
