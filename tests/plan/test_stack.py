"""Hits at every size from one pass, compared with a simulated store of each size; and the upper
bound, compared with all possible choices of pages to keep.
"""

import itertools
import random
from array import array
from collections.abc import Iterable, Sequence

import pytest
from brute_force import Chain, lru_hits, most_hits, trees

from kvstore.tools.hit_curve import GROW, Curve, Intervals, Reuse, Stack


def uses(chains: Iterable[Chain]) -> list[list[Reuse]]:
    stack = Stack()
    return [stack.use(array("Q", chain).tobytes()) for chain in chains]


def curve_of(chains: Iterable[Chain]) -> Curve:
    curve = Curve()
    for found in uses(chains):
        for reuse in found:
            curve.add(reuse)
    return curve


def bound_of(chains: Sequence[Chain], pages: int) -> int:
    intervals = Intervals()
    for number, found in enumerate(uses(chains)):
        for reuse in found:
            intervals.add(reuse.last, number, reuse.pages)
    return intervals.by_start().most_hits(pages)


@pytest.mark.parametrize("seed", range(12))
def test_hits_at_every_size_equal_those_of_a_store(seed: int) -> None:
    chains = [request.hash_ids for request in trees(seed, 300, fresh=0.15, deep=1 + seed % 6)]
    curve, most = curve_of(chains), sum(map(len, chains))
    for pages in (*range(40), 55, 80, 130, 300, most):
        assert curve.hits(pages) == lru_hits(chains, pages), pages
    assert curve.hits(curve.pages_wanted) == curve.total == lru_hits(chains, most)
    assert curve.pages_wanted == 0 or curve.hits(curve.pages_wanted - 1) < curve.total


def test_equal_ids_after_different_pages_are_different_pages() -> None:
    """The same id after different pages is another page, as in a store."""
    chance = random.Random(7)
    chains = [tuple(chance.sample(range(9), chance.randint(1, 6))) for _ in range(400)]
    curve = curve_of(chains)
    for pages in (0, 1, 2, 5, 17, 60, 150, 400, 1000):
        assert curve.hits(pages) == lru_hits(chains, pages), pages


def test_distances_rise_along_a_chain() -> None:
    for found in uses(request.hash_ids for request in trees(3, 500, fresh=0.1, deep=5)):
        for before, after in itertools.pairwise(found):
            assert before.distance + before.pages <= after.distance
            assert before.last > after.last


def test_hits_of_empty_requests_and_long_chains_equal_those_of_a_store() -> None:
    long = tuple(range(600))
    chains = [(), long, (), (*long[:300], 9000), long, (9001,), long[:1]]
    curve = curve_of(chains)
    for pages in (0, 1, 299, 300, 301, 599, 600, 601, 700):
        assert curve.hits(pages) == lru_hits(chains, pages), pages


@pytest.mark.parametrize("pages", [GROW - 1, GROW, GROW + 1, 3 * GROW])
def test_curve_grows_with_larger_distances(pages: int) -> None:
    curve = Curve()
    for distance in (0, pages - 1):
        curve.add(Reuse(distance, 1, 0))
    assert [curve.hits(size) for size in (0, 1, pages - 1, pages, pages + 1)] == [0, 1, 1, 2, 2]


def test_size_for_hits_is_the_smallest() -> None:
    chains = [request.hash_ids for request in trees(5, 200, fresh=0.2, deep=4)]
    curve = curve_of(chains)
    for hits in (1, curve.total // 2, curve.total):
        size = curve.size_for(hits)
        assert curve.hits(size) >= hits > curve.hits(size - 1)


@pytest.mark.parametrize("seed", range(25))
def test_bound_equals_the_best_choice_of_pages(seed: int) -> None:
    chains = [request.hash_ids for request in trees(seed, 9, fresh=0.3, deep=2)]
    for pages in (0, 1, 2, 3):
        assert bound_of(chains, pages) == most_hits(chains, pages), pages


@pytest.mark.parametrize("seed", range(6))
def test_bound_is_at_least_the_hits_of_a_store(seed: int) -> None:
    chains = [request.hash_ids for request in trees(seed, 400, fresh=0.1, deep=4)]
    curve = curve_of(chains)
    for pages in (1, 3, 10, 30, 100, 300):
        assert curve.hits(pages) <= bound_of(chains, pages) <= curve.total
    assert bound_of(chains, curve.pages_wanted) == curve.total
