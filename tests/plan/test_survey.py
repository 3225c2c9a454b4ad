"""A survey of a trace in one pass: tokens, time windows and stored pages; and samples, compared
with exact surveys.
"""

import itertools
import statistics
from collections import Counter

import pytest
from brute_force import lru_hits, most_hits, trees

from kvstore.errors import InvalidRequest
from kvstore.tools import survey as module
from kvstore.tools.survey import EXACT, Sampling, Survey, sampling
from kvstore.tools.trace import TraceRequest, chatting

PAGE_TOKENS = 16.0
EIGHTH = Sampling(8, 64)
SIZES = [1, 4, 9, 20, 64, 200, 1000]


def surveyed(
    requests: list[TraceRequest], sample: Sampling = EXACT, window_ms: float = 5000.0
) -> Survey:
    survey = Survey(SIZES, window_ms, PAGE_TOKENS, sample)
    for request in requests:
        survey.add(request)
    return survey


def hits_of_each(requests: list[TraceRequest], pages: int) -> list[int]:
    chains = [request.hash_ids for request in requests]
    sums = [lru_hits(chains[:count], pages) for count in range(len(chains) + 1)]
    return [after - before for before, after in itertools.pairwise(sums)]


@pytest.mark.parametrize("pages", SIZES)
def test_tokens_are_those_of_hit_pages_with_a_short_last_page(pages: int) -> None:
    requests = trees(1, 120, fresh=0.2, deep=4)
    survey = surveyed(requests)
    wanted = sum(
        min(hits * PAGE_TOKENS, request.input_length)
        for request, hits in zip(requests, hits_of_each(requests, pages), strict=True)
    )
    assert survey.tokens(pages) == wanted
    assert survey.tokens_asked == sum(request.input_length for request in requests)


def test_hits_of_each_window_are_those_of_its_requests() -> None:
    requests = trees(2, 120, fresh=0.2, deep=4)
    survey = surveyed(requests)
    found = survey.by_window()
    for place, pages in enumerate(SIZES):
        wanted: Counter[int] = Counter()
        for request, hits in zip(requests, hits_of_each(requests, pages), strict=True):
            wanted[int(request.timestamp_ms // 5000)] += hits
        assert {window: hits[place] for window, hits in found.items()} == {
            window: wanted[window] for window in found
        }
        assert survey.hits(pages).value == sum(wanted.values())
    assert survey.asked.total() == survey.pages_asked
    assert survey.seconds == (requests[-1].timestamp_ms - requests[0].timestamp_ms) / 1000


def test_survey_of_stored_pages_counts_no_requests() -> None:
    chain = tuple(range(5))
    stored = TraceRequest(0, 80, 0, chain, stored=True)
    asks = TraceRequest(1000, 48, 0, chain[:3])
    survey = surveyed([stored, asks, stored])
    assert (survey.requests, survey.pages_asked, survey.hits(10).value) == (1, 3, 3)
    assert survey.most_hits(10).value == 3
    assert survey.most_hits(2).value == 2
    assert sum(survey.used.values()) == 13
    assert survey.by_window(stored=True)[0][SIZES.index(20)] == 8, (
        "hits are not 3 pages looked up and 5 stored again"
    )


@pytest.mark.parametrize("one_in", [pytest.param(2.0, marks=pytest.mark.long), 5.0])
def test_sample_is_right_within_its_error(one_in: float) -> None:
    """Estimates of a sample are within four standard errors, which are small.

    Traces and samples are deterministic.
    """
    requests = list(chatting(4000, at_a_time=400))
    exact, sampled = surveyed(requests), surveyed(requests, sampling(one_in))
    assert sampled.pages_asked == exact.pages_asked
    assert abs(sampled.pages / exact.pages - 1) < 0.1
    assert sampled.sample.rate == pytest.approx(1 / one_in)
    for pages in (2000, 5000, 8000, 20_000):
        for estimate, truth in (
            (sampled.hits(pages), exact.hits(pages)),
            (sampled.most_hits(pages), exact.most_hits(pages)),
        ):
            assert truth.error == 0
            assert (
                abs(estimate.value - truth.value) <= 4 * estimate.error + 0.002 * exact.pages_asked
            ), pages
            assert estimate.error < 0.03 * exact.pages_asked
        assert sampled.tokens(pages) == pytest.approx(exact.tokens(pages), rel=0.1)
    half = exact.hits(10**9).value / 2
    assert sampled.size_for(half) == pytest.approx(exact.size_for(half), rel=0.2)


def test_windows_of_a_sample_are_scaled_to_all_pages() -> None:
    requests = list(chatting(4000, at_a_time=300))
    exact, sampled = (
        surveyed(requests, window_ms=100_000),
        surveyed(requests, sampling(3.0), window_ms=100_000),
    )
    place = SIZES.index(1000)
    wanted, found = exact.by_window(), sampled.by_window()
    assert wanted.keys() == found.keys()
    total = sum(hits[place] for hits in wanted.values())
    assert sum(hits[place] for hits in found.values()) == pytest.approx(total, rel=0.1)


def test_sample_with_hardly_any_page_is_refused() -> None:
    """A sample with hardly any page is refused; pages outside a sample do not count as misses."""
    survey = surveyed(list(chatting(50)), sampling(1e9))
    with pytest.raises(InvalidRequest, match="too few to say anything"):
        survey.check()


def test_too_short_window_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WINDOWS_MAX", 20)
    requests = trees(2, 120, fresh=0.2, deep=4)
    assert surveyed(requests, window_ms=5000.0).pages_asked
    with pytest.raises(InvalidRequest, match="longer --window"):
        surveyed(requests, window_ms=1e-6)


def test_requests_within_a_millisecond_have_no_times() -> None:
    first, *_ = trees(2, 1, fresh=0.2, deep=4)
    assert surveyed([first, first._replace(timestamp_ms=1e-320)]).seconds == 0


def test_windows_of_a_sample_sum_to_its_hits() -> None:
    sampled = surveyed(list(chatting(600, at_a_time=40)), sampling(3.0))
    for place, pages in enumerate(SIZES):
        in_windows = sum(hits[place] for hits in sampled.by_window().values())
        assert in_windows == pytest.approx(sampled.hits(pages).value, abs=1e-6)


def test_sample_has_short_last_pages_only() -> None:
    """In a sample, only the last page of a request is short.

    Each request here comes twice, and its last page has one token only.
    """
    whole = [
        request._replace(input_length=0)
        for request in chatting(1500, at_a_time=40)
        for _ in range(2)
    ]
    short = [request._replace(input_length=16 * len(request.hash_ids) - 15) for request in whole]
    pages = 10**6
    lacking = [
        surveyed(whole, some).tokens(pages) - surveyed(short, some).tokens(pages)
        for some in (EXACT, EIGHTH)
    ]
    assert lacking[0] == 15 * 1500
    assert lacking[1] == pytest.approx(lacking[0], rel=0.2)


def test_error_of_a_sample_is_the_deviation_of_samples() -> None:
    """The standard error of a sample agrees with the deviation of estimates from other samples.

    Other ids make other samples of the same trace.
    """
    requests, values, errors = list(chatting(800, at_a_time=60)), [], []
    for shift in range(12):
        moved = [
            r._replace(hash_ids=tuple(i + shift * 10**6 for i in r.hash_ids)) for r in requests
        ]
        estimate = surveyed(moved, EIGHTH).hits(300)
        values.append(estimate.value)
        errors.append(estimate.error)
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(values), rel=0.5)


def test_bound_of_a_sample_is_linear_between_group_sizes() -> None:
    sampled = surveyed(list(chatting(1500, at_a_time=60)), EIGHTH)
    one_in = EIGHTH.one_in
    low, half, high = (
        sampled.most_hits(3 * one_in + part).value for part in (0, one_in // 2, one_in)
    )
    assert low < half < high
    assert half == pytest.approx((low + high) / 2, rel=1e-9)


def test_bound_equals_the_best_choice_of_pages() -> None:
    for seed in range(8):
        requests = trees(seed, 9, fresh=0.3, deep=2)
        for pages in (1, 2, 3):
            assert surveyed(requests).most_hits(pages).value == most_hits(
                [r.hash_ids for r in requests], pages
            )


def test_sample_of_every_page_is_exact() -> None:
    assert sampling(1.0) is EXACT
    assert sampling(0.3) is EXACT
    assert sampling(4.0) == Sampling(8, 32)


def test_request_without_pages_is_counted() -> None:
    requests = [request._replace(hash_ids=()) for request in trees(1, 3, 0.5, 2)]
    survey = surveyed(requests)
    assert (survey.requests, survey.pages_asked, survey.pages_wanted) == (3, 0, 0)
