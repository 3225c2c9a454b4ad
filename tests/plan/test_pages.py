"""The size of a page: as given, or from the lengths of requests."""

import random

import pytest

from kvstore.errors import InvalidRequest
from kvstore.tools.model_config import CacheSize
from kvstore.tools.survey import TOKEN_NBYTES, page_size
from kvstore.tools.trace import TraceRequest


def requests(page_tokens: int, full_only: bool) -> list[TraceRequest]:
    """Return requests of random lengths whose last, partial page is left out or included."""
    chance = random.Random(page_tokens)
    made = []
    for _ in range(400):
        tokens = chance.randint(page_tokens, 200 * page_tokens)
        pages = tokens // page_tokens if full_only else -(-tokens // page_tokens)
        made.append(TraceRequest(0, tokens, 1, tuple(range(pages))))
    return made


@pytest.mark.parametrize("full_only", [False, True])
@pytest.mark.parametrize("page_tokens", [16, 64, 512])
def test_tokens_of_a_page_follow_from_lengths(page_tokens: int, full_only: bool) -> None:
    found = page_size(requests(page_tokens, full_only), None, None, None)
    assert (found.tokens, found.nbytes) == (page_tokens, page_tokens * TOKEN_NBYTES)
    assert "Llama 3 8B" in found.assumed[0]


def test_given_page_size_replaces_the_assumption() -> None:
    found = page_size(requests(64, True), 128, None, CacheSize(1000))
    assert (found.tokens, found.nbytes, found.assumed) == (128, 128_000, ())
    assert page_size(requests(64, True), None, 4096, None).nbytes == 4096


def test_page_of_a_hybrid_model_holds_its_state() -> None:
    found = page_size(requests(64, True), None, None, CacheSize(100, 50_000))
    assert found.nbytes == 64 * 100 + 50_000
    assert "recurrent state of 50,000 bytes beside 100 bytes a token" in found.assumed[0]


def test_page_has_whole_tokens_if_no_request_fills_its_last_page() -> None:
    found = page_size(
        [TraceRequest(0, 30, 1, (1, 2)), TraceRequest(0, 47, 1, (1, 2, 3))], None, None, None
    )
    assert found.tokens == 16


def test_mean_page_size_is_weighted_by_pages() -> None:
    sizes = [TraceRequest(0, 0, 0, (1,), 1000, 16.0), TraceRequest(0, 0, 0, (1, 2, 3), 2000, 16.0)]
    assert page_size(sizes, None, None, None).nbytes == 1750


def test_recorded_trace_has_its_page_size() -> None:
    recorded = [
        request._replace(page_nbytes=4096, page_tokens=16.0) for request in requests(64, True)
    ]
    assert page_size(recorded, None, None, None) == page_size([], 16.0, 4096, None)
    mixed = [*recorded, recorded[0]._replace(page_nbytes=8192)]
    assert "2 sizes" in page_size(mixed, None, None, None).assumed[0]


def test_trace_without_lengths_needs_an_option() -> None:
    with pytest.raises(InvalidRequest, match="--tokens-per-page"):
        page_size([TraceRequest(0, 0, 0, (1, 2))], None, None, None)
