"""RAM quotas: a tenant over its quota loses its own pages, and a tenant within it loses none."""

import contextlib
import random
from typing import Any

import pytest
from sandbox import Sandbox, fill

from kvstore.errors import Exhausted
from node.memory.page import PutStatus

PAGE = 4096
EXTENT = 16 * PAGE


def test_tenant_at_its_quota_evicts_its_own_oldest_page() -> None:
    box = Sandbox(4 * EXTENT, EXTENT)
    box.limit(quiet=32 * PAGE, loud=32 * PAGE)
    quiet, loud = box.open("m", PAGE, tenant="quiet"), box.open("m", PAGE, tenant="loud")
    kept = fill(box, quiet, *range(32))
    keys = fill(box, loud, *range(500))
    assert box.present(quiet, kept) == set(kept)
    assert box.present(loud, keys) == set(keys[-32:])
    assert box.nbytes("loud") == 32 * PAGE
    assert box.tier.check() == []


@pytest.mark.parametrize("there", [0, 5, 32])
@pytest.mark.parametrize("others", [0, 128])  # pages: none, or as many as there are slots
def test_batch_larger_than_the_quota_is_cut(there: int, others: int) -> None:
    box = Sandbox(8 * EXTENT, EXTENT)
    box.limit(loud=32 * PAGE)
    loud, free = box.open("m", PAGE, tenant="loud"), box.open("m", PAGE, tenant="free")
    fill(box, free, *range(others))
    old = fill(box, loud, *range(there))
    keys = loud.keys(*range(1000, 1050))
    assert box.put(loud, keys) == [PutStatus.WRITE] * 32 + [PutStatus.FULL] * 18
    assert box.nbytes("loud") == 32 * PAGE
    assert box.present(loud, [*old, *keys]) == set(keys[:32])
    assert box.tier.check() == []


def test_tenant_without_a_quota_uses_the_rest() -> None:
    box = Sandbox(4 * EXTENT, EXTENT)
    box.limit(quiet=32 * PAGE)
    free, quiet = box.open("m", PAGE, tenant="free"), box.open("m", PAGE, tenant="quiet")
    kept = fill(box, quiet, *range(16))
    keys = fill(box, free, *range(200))
    assert box.present(quiet, kept) == set(kept)
    assert box.present(free, keys) == set(keys[-48:]), "unused memory must be used"
    more = fill(box, quiet, *range(100, 116))
    assert box.present(quiet, kept + more) == set(kept + more)
    assert box.present(free, keys) == set(keys[-32:]), (
        "its oldest pages must make room for a tenant within its quota"
    )
    assert box.tier.check() == []


def test_tenant_over_a_lowered_quota_is_evicted_first() -> None:
    box = Sandbox(4 * EXTENT, EXTENT)
    old, over = box.open("m", PAGE, tenant="old"), box.open("m", PAGE, tenant="over")
    kept = fill(box, old, *range(32))
    keys = fill(box, over, *range(32))
    box.limit(over=8 * PAGE)
    assert box.tier.check() == []
    assert box.present(over, keys) == set(keys), "no page is evicted before room is needed"
    fill(box, old, *range(100, 108))
    assert box.present(old, kept) == set(kept)
    assert box.present(over, keys) == set(keys[8:])
    fill(box, over, 100)
    assert box.nbytes("over") == 8 * PAGE, "its own put must bring it within its quota"
    assert box.tier.check() == []


def test_pages_moved_to_another_pool_keep_their_order() -> None:
    box = Sandbox(4 * EXTENT, EXTENT)
    space = box.open("m", PAGE, tenant="some")
    keys = fill(box, space, *range(32))
    box.now_ms += 1
    box.get(space, keys[:4])
    for quotas in ({"some": 32 * PAGE}, {}, {"some": 32 * PAGE}):
        box.limit(**quotas)
        assert box.tier.check() == []
    for number in range(28):
        box.now_ms += 1
        box.put(space, space.keys(100 + number))
        assert box.present(space, keys) == {*keys[:4], *keys[5 + number :]}


@pytest.mark.parametrize("held", [False, True])
def test_pages_of_many_sizes_count_with_the_space_they_block(held: bool) -> None:
    box = Sandbox(8 * 16 * EXTENT, 16 * EXTENT)
    half = 4 * 16 * EXTENT
    box.limit(quiet=half, loud=half)
    quiet = box.open("m", PAGE, tenant="quiet")
    kept = fill(box, quiet, *range(half // PAGE))
    for number in range(60):
        space = box.open(f"m{number}", (3 + number) * 3000, tenant="loud")
        box.now_ms += 1
        full = held and box.tier.namespace(space.namespace.digest).account.full_for(
            box.tier.namespace(space.namespace.digest).slot_nbytes
        )
        with (
            pytest.raises(Exhausted, match=r"tenant loud .* ram quota")
            if full
            else contextlib.nullcontext()
        ):
            box.put(space, space.keys(1))
        if held:
            box.acquire(space, space.keys(1))
        assert box.nbytes("loud") <= half
    assert box.present(quiet, kept) == set(kept)
    assert box.get(quiet, kept) == [True] * len(kept)
    assert box.tier.check() == []


def test_changed_page_size_costs_other_tenants_no_page() -> None:
    """Pages of two tenants share blocks. When one tenant changes its page size, the other's pages
    move.
    """
    box = Sandbox(16 * EXTENT, EXTENT)
    box.limit(quiet=8 * EXTENT, loud=8 * EXTENT)
    quiet, loud = box.open("m", PAGE, tenant="quiet"), box.open("m", PAGE, tenant="loud")
    kept = []
    for number in range(128):
        kept += fill(box, quiet, number)
        fill(box, loud, number)
    large = box.open("large", 16 * PAGE, tenant="loud")
    keys = fill(box, large, *range(8))
    assert box.present(large, keys) == set(keys), "a tenant must get its quota in any page size"
    assert box.get(quiet, kept) == [True] * 128
    assert all(box.get(large, keys))
    assert box.tier.check() == []


def test_page_removed_while_read_counts_until_its_release() -> None:
    box = Sandbox(4 * EXTENT, EXTENT)
    box.limit(loud=16 * PAGE)
    loud, other = box.open("m", PAGE, tenant="loud"), box.open("m", PAGE, tenant="other")
    keys = fill(box, loud, *range(16))
    held = box.read(loud, keys)
    box.remove(loud, keys)
    with pytest.raises(
        Exhausted, match="tenant loud has 65536 of the 65536 bytes of its ram quota"
    ):
        box.put(loud, loud.keys(50))
    assert box.put(other, other.keys(1)) == [PutStatus.WRITE]
    box.tier.release(held)
    assert box.nbytes("loud") == 0
    assert box.put(loud, loud.keys(50)) == [PutStatus.WRITE]


def test_page_larger_than_the_quota_is_refused() -> None:
    box = Sandbox(4 * EXTENT, EXTENT)
    box.limit(small=PAGE)
    space = box.open("m", 2 * PAGE, tenant="small")
    with pytest.raises(Exhausted, match="tenant small has 0 of the 4096 bytes"):
        box.put(space, space.keys(1))


def test_page_larger_than_the_quota_evicts_nothing() -> None:
    box = Sandbox(4 * EXTENT, EXTENT)
    box.limit(one=8 * PAGE)
    small, large = box.open("m", PAGE, tenant="one"), box.open("m", 16 * PAGE, tenant="one")
    kept = fill(box, small, *range(8))
    with pytest.raises(Exhausted, match="the quota is less"):
        box.put(large, large.keys(1))
    assert box.present(small, kept) == set(kept)


def test_pins_of_a_tenant_cost_another_no_page() -> None:
    box = Sandbox(4 * EXTENT, EXTENT)
    box.limit(quiet=32 * PAGE, loud=32 * PAGE)
    quiet, loud = box.open("m", PAGE, tenant="quiet"), box.open("m", PAGE, tenant="loud")
    kept, keys = fill(box, quiet, *range(32)), fill(box, loud, *range(32))
    box.pin(loud, keys)
    with pytest.raises(Exhausted, match="ram quota"):
        box.put(loud, loud.keys(100))
    assert box.present(quiet, kept) == set(kept)
    assert box.tier.check() == []


def test_quotas_above_the_ram_evict_from_the_largest_share() -> None:
    box = Sandbox(4 * EXTENT, EXTENT)
    box.limit(one=64 * PAGE, two=32 * PAGE)
    one, two = box.open("m", PAGE, tenant="one"), box.open("m", PAGE, tenant="two")
    fill(box, one, *range(64))
    fill(box, two, *range(32))
    assert box.nbytes("one") + box.nbytes("two") == 64 * PAGE
    assert abs(box.nbytes("one") - 2 * box.nbytes("two")) <= 6 * PAGE, (
        "each tenant must have about two thirds of its quota"
    )
    assert box.tier.check() == []


def test_near_copies_are_evicted_within_their_tenant() -> None:
    box = Sandbox(4 * EXTENT, EXTENT)
    box.limit(quiet=16 * PAGE, loud=32 * PAGE)
    box.tier.eviction.copy_nbytes_max = 24 * PAGE
    quiet, loud = box.open("m", PAGE, tenant="quiet"), box.open("m", PAGE, tenant="loud")
    for space, count in ((quiet, 12), (loud, 100)):
        for number in range(count):
            box.now_ms += 1
            (key,) = space.keys(number)
            reservation = box.tier.reserve(space.namespace.digest, [key], PAGE, copies={key})
            box.write(space, reservation)
            box.commit(reservation)
    kept = quiet.keys(*range(12))
    assert box.present(quiet, kept) == set(kept)
    assert box.tier.check() == []


def test_hit_rate_does_not_depend_on_a_flooding_tenant(seed: int) -> None:
    """A tenant whose pages do not all fit has the same hit rate beside one that floods.

    The other tenant also pins, holds and changes page sizes.
    """

    def hit_rate(hostile: bool) -> float:
        rng, other = random.Random(seed), random.Random(seed + 1)
        box = Sandbox(16 * EXTENT, EXTENT)
        box.limit(quiet=8 * EXTENT, loud=8 * EXTENT)
        quiet = box.open("m", PAGE, tenant="quiet")
        spaces = [box.open(f"m{n}", n * 2500, tenant="loud") for n in range(1, 20)]
        held: list[Any] = []
        hits = 0
        for _ in range(1500):
            box.now_ms += 1
            for _ in range(3 if hostile else 0):
                space = other.choice(spaces)
                keys = space.keys(*other.sample(range(1000), 4))
                try:
                    box.put(space, keys)
                    box.pin(space, keys[:1], 50)
                except Exhausted:
                    box.tier.release(held)
                    held = []
                held += [page for page in box.acquire(space, keys[1:2]) if page is not None]
            (key,) = quiet.keys(min(rng.randrange(300), rng.randrange(300)))
            (hit,) = box.get(quiet, [key])
            hits += hit
            if not hit:
                assert box.put(quiet, [key]) == [PutStatus.WRITE], (
                    "a tenant within its quota must always have room"
                )
        assert box.tier.check() == []
        return hits / 1500

    assert hit_rate(True) == pytest.approx(hit_rate(False), abs=0.01)


def test_partly_empty_blocks_are_merged_before_eviction() -> None:
    mib = 1 << 20
    box = Sandbox(4 * mib, mib)
    box.limit(quiet=2 * mib)
    quiet, loud = box.open("m", PAGE, tenant="quiet"), box.open("large", mib, tenant="loud")
    keys = fill(box, quiet, *range(2 * mib // PAGE))
    kept = [page.prefix_hash for page in box.read(quiet, keys) if page.offset % (4 * PAGE) == 0]
    box.tier.release(box.read(quiet, keys) * 2)
    box.remove(quiet, [key for key in keys if key not in kept])
    assert box.nbytes("quiet") == mib // 2, "one page of each block of four stays"
    box.limit(quiet=mib, loud=3 * mib)
    wanted = fill(box, loud, 1, 2, 3)
    assert box.present(loud, wanted) == set(wanted)
    assert box.get(quiet, kept) == [True] * len(kept)
    assert box.tier.check() == []


def test_page_used_during_a_quota_change_is_newest_in_its_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the page broke the order of the pool, and quotas of the other tenants were not
    applied.
    """
    box = Sandbox(4 * EXTENT, EXTENT)
    space = box.open("m", PAGE, tenant="one")
    keys = fill(box, space, *range(8))

    def use(_: float) -> None:
        box.now_ms += 1
        assert box.get(space, keys[:1]) == [True]

    with monkeypatch.context() as patch:
        patch.setattr("node.memory.scan.time.sleep", use)  # between two slices of the scan
        box.limit(one=8 * PAGE)
    assert box.tier.check() == []
    fill(box, space, *range(100, 107))
    assert box.present(space, keys) == {keys[0]}
