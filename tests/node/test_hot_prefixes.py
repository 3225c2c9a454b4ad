"""The prefixes found most often: a table of fixed size with nearly right counts."""

import random
from collections import Counter

from node.serving.hot_prefixes import EVERY, HALVED_S, HEAD_NBYTES, SIZE, HotPrefixes

SPACE = b"n" * 16


def head(number: int) -> bytes:
    return number.to_bytes(4, "big") + bytes(28)


def test_most_found_prefixes_come_first_with_about_their_count() -> None:
    heat, asked, rng = HotPrefixes(seed=1), Counter[int](), random.Random(2)
    for _ in range(200_000):
        number = rng.choice((1, 1, 1, 2, 2)) if rng.random() < 0.3 else rng.randrange(1000, 100_000)
        asked[number] += 1
        heat.observe(SPACE, [head(number), head(7), head(8)], [True, True, False])
    one, two, *_ = heat.hottest()
    assert [one.head, two.head] == [head(1)[:HEAD_NBYTES], head(2)[:HEAD_NBYTES]]
    assert abs(one.lookups - asked[1]) < asked[1] / 4
    assert abs(two.lookups - asked[2]) < asked[2] / 4
    assert one.pages == 2.0
    assert len(heat._entries) == SIZE


def test_misses_do_not_count() -> None:
    heat = HotPrefixes(every=1)
    for _ in range(100):
        heat.observe(SPACE, [head(1)], [False])
        heat.observe(SPACE, [], [])
    assert heat.hottest() == []


def test_sampling_is_fair_for_periodic_lookups() -> None:
    heat = HotPrefixes(seed=3)
    for number in range(EVERY * 1000):
        heat.observe(SPACE, [head(number % EVERY)], [True])
    counts = [hot.lookups for hot in heat.hottest()]
    assert len(counts) == EVERY, "a period equal to the sampling interval must hide no prefix"
    assert abs(sum(counts) / (EVERY * 1000) - 1) < 0.1


def test_heat_decays() -> None:
    now = [0.0]
    heat = HotPrefixes(every=1, clock=lambda: now[0])
    heat.observe(SPACE, [head(1)], [True])
    for _ in range(64):
        heat.observe(SPACE, [head(1)], [True])
    before = heat.hottest()[0].lookups
    now[0] += 2 * HALVED_S
    assert heat.hottest()[0].lookups == round(before / 4)
    now[0] += 20 * HALVED_S
    assert heat.hottest() == []


def test_page_count_of_a_prefix_does_not_decay() -> None:
    now = [0.0]
    heat = HotPrefixes(every=1, clock=lambda: now[0])
    for _ in range(64):
        heat.observe(SPACE, [head(1), head(2), head(3), head(4)], [True, True, False, True])
    assert heat.hottest()[0].pages == 2.0, "only the pages before the first miss count"
    now[0] += HALVED_S
    assert heat.hottest()[0].pages == 2.0


def test_lookup_after_weeks_without_any_is_counted() -> None:
    now = [0.0]
    heat = HotPrefixes(every=1, clock=lambda: now[0])
    heat.observe(SPACE, [head(1)], [True])
    now[0] += 5000 * HALVED_S
    heat.observe(SPACE, [head(2)], [True])
    assert [hot.head for hot in heat.hottest()] == [head(2)[:HEAD_NBYTES]]


def test_heat_replacement_inherits_count_and_error() -> None:
    heat = HotPrefixes(every=1, size=2)
    for number in (1, 1, 1, 1, 1, 2, 2, 2, 3):
        heat.observe(SPACE, [head(number)], [True])
    first, second = heat.hottest()
    assert (first.head, first.lookups, first.error) == (head(1)[:HEAD_NBYTES], 5, 0)
    assert (second.head, second.lookups, second.error) == (head(3)[:HEAD_NBYTES], 4, 3)
    assert second.pages == 1.0, "the mean must be that of its own lookups"


def test_heat_keeps_no_whole_key() -> None:
    heat = HotPrefixes(every=1)
    heat.observe(SPACE, [b"h" * 32], [True])
    heat.observe(SPACE, [b"h" * 32], [True])
    assert all(len(kept) == HEAD_NBYTES for _, kept in heat._entries)
