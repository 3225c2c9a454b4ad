"""Hints in RAM: classes never invert, and a tenant's hints cost no other tenant a page."""

import contextlib
import random
from typing import Any

import pytest
from known_pages import Pages
from sandbox import Sandbox, fill

from kvstore.errors import Exhausted
from node.hints.session_pages import SessionPages
from node.memory.classes import HIGH, HIGHEST, LOW, NORMAL
from node.memory.hinting import Answer, Verdict, demote, retain

PAGE = 4096
EXTENT = 16 * PAGE
HOUR_MS = 3_600_000


def keep(
    box: Sandbox,
    space: Pages,
    keys: list[bytes],
    rank: int,
    ttl_ms: int = HOUR_MS,
    holder: bytes = b"",
) -> list[Answer]:
    digest = space.namespace.digest
    answers = retain(box.tier, digest, keys, rank, ttl_ms, holder, lambda key: True)
    assert box.tier.check() == []
    return answers


def verdicts(answers: list[Answer]) -> set[int]:
    return {answer.verdict for answer in answers}


def test_retained_pages_outlive_newer_ones_until_their_time_ends() -> None:
    box = Sandbox(64 * PAGE, EXTENT)
    space = box.open("m", PAGE)
    kept = fill(box, space, *range(8))
    assert verdicts(keep(box, space, kept, HIGH, ttl_ms=1000)) == {Verdict.ACCEPTED}
    fill(box, space, *range(100, 300))
    assert box.present(space, kept) == set(kept)
    box.now_ms += 1000
    fill(box, space, 300)
    assert box.present(space, kept) == set(kept[:7]), "the oldest now, the end of the chain first"
    fill(box, space, *range(301, 308))
    assert box.present(space, kept) == set()
    assert box.tier.check() == []


def test_retained_page_that_was_used_is_the_newest_when_its_time_ends() -> None:
    box = Sandbox(64 * PAGE, EXTENT)
    space = box.open("m", PAGE)
    kept = fill(box, space, *range(8))
    keep(box, space, kept, HIGH, ttl_ms=1000)
    box.now_ms += 500
    assert box.get(space, kept[:4]) == [True] * 4
    fill(box, space, *range(100, 156))
    box.now_ms += 1000
    fill(box, space, *range(200, 204))
    assert box.present(space, kept) == set(kept[:4])


def test_pages_of_a_low_class_go_first() -> None:
    box = Sandbox(64 * PAGE, EXTENT)
    space = box.open("m", PAGE)
    old, new = fill(box, space, *range(32)), fill(box, space, *range(100, 132))
    keep(box, space, new, LOW)
    fill(box, space, *range(200, 232))
    assert box.present(space, old) == set(old)
    assert box.present(space, new) == set()


def test_long_chain_is_evicted_from_its_end() -> None:
    box = Sandbox(2048 * PAGE, EXTENT)
    space = box.open("m", PAGE)
    kept = space.keys(*range(1000))
    box.put(space, kept)
    assert verdicts(keep(box, space, kept, HIGH)) == {Verdict.ACCEPTED}
    assert verdicts(keep(box, space, kept, LOW)) == {Verdict.ACCEPTED}
    box.put(space, space.keys(*range(2000, 3048)))
    fill(box, space, *range(5000, 5100))
    assert box.present(space, kept) == set(kept[:900])


def test_raised_pages_have_half_of_the_quota_and_the_rest_is_clipped() -> None:
    box = Sandbox(8 * EXTENT, EXTENT)
    box.limit(some=64 * PAGE)
    space = box.open("m", PAGE, tenant="some")
    keys = fill(box, space, *range(64))
    answers = [answer.verdict for answer in keep(box, space, keys, HIGH)]
    assert answers == [Verdict.ACCEPTED] * 32 + [Verdict.CLIPPED] * 32
    new = fill(box, space, *range(100, 132))
    assert box.present(space, [*keys, *new]) == {*keys[:32], *new}


def test_new_pages_find_a_place_after_a_quota_was_lowered() -> None:
    """Regression: raised pages filled the whole quota, and each new page replaced the one before
    until their time ended.
    """
    box = Sandbox(8 * EXTENT, EXTENT)
    box.limit(some=64 * PAGE)
    space = box.open("m", PAGE, tenant="some")
    kept = keep_all(box, space, 64)
    box.limit(some=32 * PAGE)
    new = fill(box, space, *range(100, 116))
    assert box.present(space, new) == set(new)
    assert len(box.present(space, kept)) == 16
    fill(box, space, *range(200, 232))
    assert len(box.present(space, kept)) == 16, "half of the new quota"
    assert box.tier.check() == []


def keep_all(box: Sandbox, space: Pages, count: int) -> list[bytes]:
    """Fill a quota of `count` pages and retain as many as may be; return those."""
    keys = fill(box, space, *range(count))
    answers = keep(box, space, keys, HIGH)
    return [k for k, a in zip(keys, answers, strict=True) if a.verdict is Verdict.ACCEPTED]


def test_session_lowers_only_what_it_raised() -> None:
    box = Sandbox(64 * PAGE, EXTENT)
    space = box.open("m", PAGE)
    keys = fill(box, space, *range(8))
    keep(box, space, keys, HIGH, holder=b"a")
    assert verdicts(keep(box, space, keys, LOW, holder=b"b")) == {Verdict.REFUSED}
    assert verdicts(keep(box, space, keys[:4], HIGHEST, holder=b"b")) == {Verdict.ACCEPTED}
    assert verdicts(keep(box, space, keys[:4], NORMAL, holder=b"a")) == {Verdict.REFUSED}
    assert verdicts(keep(box, space, keys[:4], HIGH, 1, holder=b"c")) == {Verdict.CLIPPED}
    assert verdicts(keep(box, space, keys[4:], NORMAL, holder=b"a")) == {Verdict.ACCEPTED}
    assert len(box.tier.eviction.order.kept) == 4


def test_pinned_page_takes_its_class_when_the_pin_ends() -> None:
    box = Sandbox(64 * PAGE, EXTENT)
    space = box.open("m", PAGE)
    keys = fill(box, space, *range(4))
    box.pin(space, keys)
    keep(box, space, keys, HIGH)
    box.unpin(space, keys)
    assert box.tier.check() == []
    fill(box, space, *range(100, 300))
    assert box.present(space, keys) == set(keys)
    box.remove(space, keys)
    assert len(box.tier.eviction.order.kept) == 0
    assert box.tier.check() == []


def test_page_that_the_disk_lacks_is_not_demoted() -> None:
    box = Sandbox(64 * PAGE, EXTENT)
    space = box.open("m", PAGE)
    keys = fill(box, space, 1)
    answers = demote(box.tier, space.namespace.digest, keys, b"", lambda key: True)
    assert verdicts(answers) == {Verdict.REFUSED}
    assert box.present(space, keys) == set(keys)


# ---- other tenants ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_hints_of_a_tenant_cost_no_other_tenant_a_page(seed: int) -> None:
    """Run the same puts with and without one tenant's hints: the others keep the same pages."""

    def run(hinting: bool) -> list[set[bytes]]:
        chance = random.Random(seed)
        box = Sandbox(16 * EXTENT, EXTENT)
        box.limit(quoted=4 * EXTENT, loud=4 * EXTENT)
        spaces = [box.open("m", PAGE, tenant=name) for name in ("quoted", "loud", "free", "other")]
        # Both a tenant with a quota and one without it hint; `quoted` and `other` never do
        for number in range(800):
            box.now_ms += 1
            space = chance.choice(spaces)
            keys = space.keys(*range(number, number + chance.randint(1, 6)))
            box.put(space, keys)
            rank, ttl_ms = chance.choice((LOW, HIGH, HIGHEST)), chance.randint(1, 400)
            raises = rank > NORMAL or space is spaces[1]
            if hinting and space in spaces[1:3] and raises:
                retain(box.tier, space.namespace.digest, keys, rank, ttl_ms, b"s", lambda key: True)
        assert box.tier.check() == []
        every = range(1300)
        return [box.present(spaces[each], spaces[each].keys(*every)) for each in (0, 3)]

    for hinted, plain in zip(run(hinting=True), run(hinting=False), strict=True):
        assert hinted >= plain


@pytest.mark.parametrize("seed", range(2))
def test_classes_never_invert(seed: int) -> None:
    """Compare random puts, reads, hints and time with a model of one page size."""
    chance = random.Random(seed)
    box, model = Sandbox(64 * PAGE, EXTENT), Model(64)
    space = box.open("m", PAGE)
    for _ in range(400):
        box.now_ms += chance.randint(1, 20)
        model.end_classes(box.now_ms)
        keys = space.keys(chance.randrange(200))
        what = chance.random()
        if what < 0.6:
            before = box.present(space, list(model.ranks))
            box.put(space, keys)
            after = box.present(space, [*model.ranks, *keys])
            model.check(before - after)
            model.put(keys[0])
            model.forget(before - after)
        elif what < 0.8:
            rank = chance.choice((LOW, NORMAL, HIGH, HIGHEST))
            ttl_ms = chance.randint(1, 500)
            there = [key for key in keys if key in model.ranks]
            # without a time that ends between model and node
            for key, answer in zip(there, keep(box, space, there, rank, ttl_ms), strict=True):
                if answer.verdict is Verdict.ACCEPTED:
                    model.keep(key, rank, box.now_ms + ttl_ms)
        else:
            box.get(space, keys)
    assert box.tier.check() == []


class Model:
    """Ranks of pages; a victim must be of the lowest rank that there is."""

    def __init__(self, count_max: int) -> None:
        self.ranks: dict[bytes, tuple[int, int]] = {}
        self._count_max = count_max

    def put(self, key: bytes) -> None:
        self.ranks.setdefault(key, (NORMAL, 0))

    def keep(self, key: bytes, rank: int, end_ms: int) -> None:
        self.ranks[key] = (rank, end_ms)

    def end_classes(self, now_ms: int) -> None:
        for key, (_, end_ms) in self.ranks.items():
            if end_ms and end_ms <= now_ms:
                self.ranks[key] = (NORMAL, 0)

    def check(self, gone: set[bytes]) -> None:
        if gone:
            assert len(self.ranks) == self._count_max
            lowest = min(rank for rank, _ in self.ranks.values())
            assert {self.ranks[key][0] for key in gone} == {lowest}

    def forget(self, gone: set[bytes]) -> None:
        for key in gone:
            del self.ranks[key]


# ---- sessions --------------------------------------------------------------------------------


def test_session_owns_what_it_alone_named_and_what_was_stored_since_it_began() -> None:
    sessions = SessionPages()
    sessions.name("t", b"d", b"a", 10, [b"old", b"absent", b"mine", b"ours"], [9, None, 10, 11])
    sessions.name("t", b"d", b"b", 5, [b"ours", b"mine too"], [11, 5])
    sessions.name("t", b"d", b"c", 5, [b"ours"], [11])
    owned = [
        name
        for name in (b"old", b"absent", b"mine", b"ours", b"mine too")
        if sessions.owns(b"d", b"a", name)
    ]
    assert owned == [b"mine"]
    assert sessions.take("t", b"other", b"a", 10) == ([], False)
    assert sessions.take("t", b"d", b"a", 10) == ([b"mine"], False)
    assert sessions.take("t", b"d", b"a", 10) == ([], False)
    assert sessions.check() == []


def test_page_that_a_younger_session_named_first_is_nobodys() -> None:
    """Regression: the older session, which named it later, deleted it from under the younger."""
    sessions = SessionPages()
    sessions.name("t", b"d", b"young", 7, [b"ours"], [6])
    sessions.name("t", b"d", b"old", 5, [b"ours", b"mine"], [6, 6])
    assert sessions.take("t", b"d", b"old", 10) == ([b"mine"], False)
    assert sessions.check() == []


def test_shared_page_is_nobodys_after_the_session_that_named_it_first_has_ended() -> None:
    """Regression: the next session to name it owned it, and deleted it from under the third."""
    sessions = SessionPages(sessions_max=8)
    for name in (b"a", b"b", b"c"):
        sessions.name("t", b"d", name, 0, [b"ours", name], [5, 5])
    assert sessions.take("t", b"d", b"a", 10) == ([b"a"], False)
    sessions.name("t", b"d", b"b", 0, [b"ours"], [5])
    assert sessions.take("t", b"d", b"b", 10) == ([b"b"], False)
    assert sessions.check() == []
    # A session with the name of one that has ended is a new one
    sessions.name("t", b"d", b"a", 7, [b"older", b"ours", b"new"], [6, 5, 7])
    assert sessions.take("t", b"d", b"a", 10) == ([b"new"], False)
    for number in range(4):
        sessions.name("t", b"d", bytes([number]), 0, [], [])
    assert (sessions.session_count, sessions.page_count) == (4, 0)
    assert sessions.forgotten_count == 1, "an ended one costs nobody anything"
    assert sessions.check() == []


def test_session_is_taken_in_parts() -> None:
    sessions = SessionPages()
    keys = [bytes([number]) for number in range(5)]
    sessions.name("t", b"d", b"a", 0, keys, [0] * 5)
    assert sessions.take("t", b"d", b"a", 2) == ([keys[4], keys[3]], True)
    assert sessions.take("t", b"d", b"a", 9) == ([keys[2], keys[1], keys[0]], False)
    assert sessions.session_count == sessions.page_count == 0


def test_storm_of_sessions_stays_within_its_share_and_leaves_others_theirs() -> None:
    sessions = SessionPages(sessions_max=1000, pages_max=4000)
    sessions.name("quiet", b"q", b"s", 0, [b"page"], [1])
    for number in range(100_000):
        key = number.to_bytes(4, "big")
        sessions.name("loud", b"l", key, 0, [key], [1])
        if not number % 20_000:
            assert sessions.check() == []
    assert sessions.check() == []
    assert sessions.session_count == 501
    assert sessions.forgotten_count == 99_500
    assert sessions.owns(b"q", b"s", b"page")
    sessions.name(
        "loud", b"l", b"long", 0, [bytes([a, b]) for a in range(99) for b in range(99)], [1] * 9801
    )
    assert sessions.check() == []
    assert sessions.owns(b"q", b"s", b"page")
    sessions.drop("loud")
    sessions.drop("nobody")
    assert (sessions.session_count, sessions.page_count) == (1, 1)


def test_many_tenants_together_stay_within_the_limit() -> None:
    sessions: Any = SessionPages(sessions_max=10, pages_max=20)
    for number in range(100):
        sessions.name(f"t{number}", b"d", b"s", 0, [bytes([number]), bytes([number, 1])], [1, 1])
        assert sessions.check() == []
    assert sessions.session_count == 10


# ---- all together ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_books_hold_with_sizes_quotas_pins_reads_and_hints(seed: int) -> None:
    storm(seed, 250)


def storm(seed: int, steps: int) -> None:
    chance, box = random.Random(seed), Sandbox(12 * 16 * PAGE, 16 * PAGE)
    spaces = [
        box.open(f"m{nbytes}", nbytes, tenant=tenant)
        for tenant in ("quoted", "free", "other")
        for nbytes in (PAGE, 3 * PAGE, 9000)
    ]
    held: list[Any] = []
    for step in range(steps):
        box.now_ms += chance.randint(0, 30)
        space = chance.choice(spaces)
        first = chance.randrange(60)
        keys = space.keys(*range(first, first + chance.randint(1, 6)))
        what = chance.randrange(9)
        with contextlib.suppress(Exhausted):
            if what < 4:
                box.put(space, keys)
            elif what == 4:
                box.limit(**{"quoted": chance.choice((0, 3, 6)) * EXTENT})
            elif what == 5:
                held.append(box.hold(space, keys))
            elif what == 6:
                (box.pin if chance.random() < 0.5 else box.unpin)(space, keys)
            elif what == 7:
                box.remove(space, keys[:1])
            else:
                rank, ttl_ms = chance.choice((LOW, NORMAL, HIGH, HIGHEST)), chance.randint(1, 900)
                holder = chance.choice((b"", b"a", b"b"))
                keep(box, space, keys, rank, ttl_ms, holder)
        if held and chance.random() < 0.5:
            pages = held.pop(chance.randrange(len(held)))
            box.tier.release([page for page in pages if page is not None])
        if not step % 10:
            assert box.tier.check() == []
    assert box.tier.check() == []
