"""Survey a trace in one pass, exactly or from a sample of its pages, for a capacity plan.

A sample (SHARDS: Waldspurger et al. 2015) selects pages by a hash of their id, all uses of a page
or none. The selected part of a chain is a chain, so `kvstore.tools.hit_curve` still applies; a
store of C pages becomes one of C/n. Several such groups are used, disjoint and each of one page in
n: their differences give the error. *Misses* are estimated and subtracted from the known number of
requests, so it matters little whether the sample has the few pages that all requests begin with.

Tokens and bytes per page come from the user, the trace, or an estimate: a trace whose requests have
`input_length` tokens in n pages shows how many tokens t a page has. Either the last page may be
partial (Mooncake's traces), or only full pages have ids (engines):

    (n - 1) * t <  input_length <=  n * t            n * t <= input_length < (n + 1) * t
"""

import itertools
import math
import statistics
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore.tools.hit_curve import ID_NBYTES, Curve, Intervals, Stack, Starts, Windows
from kvstore.tools.model_config import CacheSize
from kvstore.tools.trace import TraceRequest

GROUPS = 8  # groups of a sample
GROUP_PAGES_MIN = 10  # a group with fewer pages is too small for an estimate
SCALED_MIN = 4  # pages of a scaled store in a group
WINDOWS_MAX = 100_000  # time windows; 1 GiB of memory
_MASK = (1 << 64) - 1

LOOKED_AT = 2000  # requests used to find the size of a page
LEAST, MOST = 1e-9, 1e15  # range of accepted values: sums and products stay finite
PAGE_NBYTES_MAX = 1 << 40
# Of a model with 32 layers and 8 KV heads of 128, two bytes each (Llama 3 8B)
TOKEN_NBYTES = 128 << 10


@dataclass(frozen=True)
class Sampling:
    """Sampling into `groups` disjoint groups, each of one page in `one_in`."""

    groups: int = 1
    one_in: int = 1

    @property
    def rate(self) -> float:
        """Return the sampled share."""
        return self.groups / self.one_in

    @property
    def pages_min(self) -> int:
        """Return the smallest store that a sample can estimate.

        With only one or two pages per group, the estimate would be chance.
        """
        return SCALED_MIN * self.one_in if self.one_in > 1 else 1


EXACT = Sampling()


def sampling(one_in: float) -> Sampling:
    """Return the sampling of about one page in so many, over all groups."""
    return EXACT if one_in <= 1 else Sampling(GROUPS, round(GROUPS * one_in))


@dataclass(frozen=True)
class Estimate:
    """An estimate. `error`: standard error, 0 if it is exact."""

    value: float
    error: float = 0.0


class Survey:
    """Statistics of a trace: filled with `add`, request by request, then queried.

    `sizes`: in pages, ascending, for statistics per time window; other statistics take any size.
    `page_tokens`: of a full page.
    """

    def __init__(
        self, sizes: Sequence[int], window_ms: float, page_tokens: float, sample: Sampling = EXACT
    ) -> None:
        self.sizes = list(sizes)
        self.sample = sample
        self.window_ms = window_ms
        self._page_tokens = page_tokens
        scaled = [-(-size // sample.one_in) for size in sizes]
        self._groups = [_Group(scaled) for _ in range(sample.groups)]
        self.requests = 0
        self.pages_asked = 0
        self.tokens_asked = 0
        self.asked: Counter[int] = Counter()  # pages by window
        self._stored: Counter[int] = Counter()  # of requests without a lookup
        self.first_ms, self.last_ms = math.inf, -math.inf
        self.has_sessions = False

    def add(self, request: TraceRequest) -> None:
        """Add a request."""
        ids, now = request.hash_ids, request.timestamp_ms
        window, pages, asks = int(now // self.window_ms), len(ids), not request.stored
        if now < self.first_ms:
            self.first_ms = now
        if now > self.last_ms:
            self.last_ms = now
        if request.session:
            self.has_sessions = True
        if asks:
            self.requests += 1
            self.pages_asked += pages
            self.tokens_asked += request.input_length
            self.asked[window] += pages
        else:
            self._stored[window] += pages
        if len(self.asked) + len(self._stored) > WINDOWS_MAX:
            raise InvalidRequest(
                f"the trace has more than {WINDOWS_MAX:,} stretches of {self.window_ms / 1000:g} "
                "s: take a longer --window"
            )
        lacks = pages * self._page_tokens - request.input_length if request.input_length else 0.0
        if self.sample is EXACT:
            self._groups[0].add(window, array("Q", ids).tobytes(), asks, lacks)
        else:
            self._add_sampled(window, ids, asks, lacks)

    def _add_sampled(self, window: int, ids: Sequence[int], asks: bool, lacks: float) -> None:
        one_in, count = self.sample.one_in, self.sample.groups
        chains: list[list[int]] = [[] for _ in range(count)]
        for hash_id in ids:
            mixed = (hash_id + 0x632BE59BD9B4E019) * 0x9E3779B97F4A7C15 & _MASK
            mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & _MASK
            group = (mixed >> 32) % one_in
            if group < count:
                chains[group].append(hash_id)
        for some, chain in zip(self._groups, chains, strict=True):
            if chain:
                short = lacks if chain[-1] == ids[-1] else 0.0
                some.add(window, array("Q", chain).tobytes(), asks, short)

    def check(self) -> None:
        """Raise InvalidRequest if the added requests allow no estimate."""
        if not self.pages_asked:
            raise InvalidRequest("the trace has no request that asks for a page")
        least = min(group.stack.pages for group in self._groups)
        if self.sample is not EXACT and least < GROUP_PAGES_MIN:
            raise InvalidRequest(
                f"a sample of one page in {1 / self.sample.rate:g} has {least} pages in one of its "
                f"{len(self._groups)} groups, too few to say anything: take a smaller --sample, or "
                "1 for all pages"
            )

    # ---- what was found ------------------------------------------------------------------

    @property
    def used(self) -> Counter[int]:
        """Return the used pages by window, whether requested or stored."""
        return self.asked + self._stored

    @property
    def seconds(self) -> float:
        """Return the seconds from the first to the last request; 0 if the trace has no times."""
        span_ms = self.last_ms - self.first_ms if self.asked else 0.0
        return span_ms / 1000 if span_ms >= 1 else 0.0

    @property
    def pages(self) -> int:
        """Return the number of distinct pages."""
        return round(sum(group.stack.pages for group in self._groups) / self.sample.rate)

    @property
    def pages_wanted(self) -> int:
        """Return the smallest size with all hits."""
        return max(group.curve.pages_wanted for group in self._groups) * self.sample.one_in

    def hits(self, pages: int) -> Estimate:
        """Estimate the hits of a store of this size, each with its whole prefix."""
        scaled = -(-pages // self.sample.one_in)
        return self._estimate(lambda group: group.curve.hits(scaled))

    def most_hits(self, pages: int) -> Estimate:
        """Estimate the most hits that any policy can have; see `optimum`.

        Between two sizes that a group can have, it interpolates. For a sample the estimate is low:
        the number of a request's pages in a group varies, and having fewer gains less than having
        more costs.
        """
        scaled, rest = divmod(pages, self.sample.one_in)
        share = rest / self.sample.one_in

        def hits(group: _Group) -> float:
            least = group.most_hits(scaled)
            return least + share * (group.most_hits(scaled + 1) - least) if rest else least

        return self._estimate(hits)

    def tokens(self, pages: int) -> float:
        """Return the tokens of those hits."""
        scaled, full = -(-pages // self.sample.one_in), self._page_tokens
        lacking = sum(
            group.curve.hits(scaled) * full - group.curve.tokens(scaled, full)
            for group in self._groups
        )
        return max(0.0, self.hits(pages).value * full - lacking / self.sample.rate)

    def size_for(self, hits: float) -> int:
        """Return the smallest size with so many hits."""
        if self.sample is EXACT:
            return self._groups[0].curve.size_for(hits)
        sizes = range(0, self.pages_wanted + 1, self.sample.one_in)
        return sizes[
            min(bisect_left(sizes, hits, key=lambda size: self.hits(size).value), len(sizes) - 1)
        ]

    def by_window(self, stored: bool = False) -> dict[int, list[float]]:
        """Return the hits per window at each of `sizes`; `stored` counts all used pages."""
        asked = self.used if stored else self.asked
        found = {window: [float(pages)] * len(self.sizes) for window, pages in asked.items()}
        for group in self._groups:
            hits, uses = group.of_windows(stored)
            for window, used in uses.items():
                there = hits.get(window, [0] * len(self.sizes))
                found[window] = [
                    rest - (used - some) / self.sample.rate
                    for rest, some in zip(found[window], there, strict=True)
                ]
        return found

    def _estimate(self, hits: Callable[["_Group"], float]) -> Estimate:
        misses = [(group.pages_asked - hits(group)) * self.sample.one_in for group in self._groups]
        error = statistics.stdev(misses) / math.sqrt(len(misses)) if len(misses) > 1 else 0.0
        return Estimate(
            min(max(0.0, self.pages_asked - statistics.fmean(misses)), self.pages_asked), error
        )


class _Group:
    """Pages of one sample, or all."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.stack = Stack()
        self.curve = Curve()
        self.pages_asked = 0
        self._intervals = Intervals()
        self._starts: Starts | None = None  # built after the last request
        self._overlap = 0
        self._asked, self._stored = Windows(sizes), Windows(sizes)
        self._asks: Counter[int] = Counter()
        self._stores: Counter[int] = Counter()

    def add(self, window: int, chain: bytes, asks: bool, lacks: float) -> None:
        """Add a chain; `lacks` is how many tokens its last page is short of."""
        here, found, pages = self.stack.requests, self.stack.use(chain), len(chain) // ID_NBYTES
        if not asks:
            self._stores[window] += pages
            for reuse in found:
                self._stored.add(window, reuse)
            return
        self.pages_asked += pages
        self._asks[window] += pages
        left = pages
        for reuse in found:
            self.curve.add(reuse)
            self._asked.add(window, reuse)
            self._intervals.add(reuse.last, here, reuse.pages)
            left -= reuse.pages
        if not left and lacks > 0:
            self.curve.add_short_page(reuse.distance + reuse.pages - 1, lacks)

    def most_hits(self, pages: int) -> int:
        if self._starts is None:
            self._starts, self._overlap = self._intervals.by_start(), self._intervals.overlap()
        if pages >= self._overlap:
            return self.curve.total
        return self._starts.most_hits(pages)

    def of_windows(self, stored: bool) -> tuple[dict[int, list[int]], Counter[int]]:
        """Return (hits, used pages) by window; `stored` counts all used pages."""
        hits = self._asked.hits()
        if not stored:
            return hits, self._asks
        for window, more in self._stored.hits().items():
            hits[window] = [
                a + b for a, b in zip(hits.get(window, [0] * len(more)), more, strict=True)
            ]
        return hits, self._asks + self._stores


@dataclass(frozen=True)
class PageSize:
    """Size of a trace's pages. `assumed`: which values had to be assumed, in words."""

    tokens: float
    nbytes: int
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_positive("--tokens-per-page", self.tokens)
        if not 1 <= self.nbytes <= PAGE_NBYTES_MAX:
            raise InvalidRequest(f"--page-bytes {self.nbytes} must be in 1..{PAGE_NBYTES_MAX}")


def check_positive(option: str, value: float) -> None:
    """Raise InvalidRequest, which names the option, unless the value is above 0."""
    if not LEAST <= value <= MOST:
        raise InvalidRequest(f"{option} {value:g} must be above 0: in {LEAST:g}..{MOST:g}")


def page_size(
    requests: Iterable[TraceRequest],
    tokens: float | None,
    nbytes: int | None,
    model: CacheSize | None,
) -> PageSize:
    """Return the size of a trace's pages; None values are derived from requests or assumed.

    A page of a model with recurrent layers holds a state beside its tokens. Raises InvalidRequest.
    """
    some = [request for request in itertools.islice(requests, LOOKED_AT) if request.hash_ids]
    assumed = []
    if tokens is None:
        tokens = _mean_said(
            [(request.page_tokens, len(request.hash_ids)) for request in some]
        ) or _tokens(some)
    if tokens is None:
        raise InvalidRequest(
            "the trace does not show how many tokens a page has; set --tokens-per-page"
        )
    if nbytes is None and model is None:
        sizes = {request.page_nbytes for request in some} - {0}
        if sizes:
            nbytes = round(
                _mean_said([(request.page_nbytes, len(request.hash_ids)) for request in some])
            )
        if len(sizes) > 1:
            assumed.append(f"the trace has pages of {len(sizes)} sizes; their mean is used")
        elif not sizes:
            model = CacheSize(TOKEN_NBYTES)
            assumed.append(
                f"a token takes {TOKEN_NBYTES >> 10} KiB, as in Llama 3 8B at 16 bits; "
                "otherwise set --model-config or --page-bytes"
            )
    check_positive("--tokens-per-page", tokens)
    if nbytes is None:
        model = model or CacheSize(0)
        nbytes = math.ceil(tokens * model.token_nbytes) + model.state_nbytes
        if model.state_nbytes:
            assumed.append(
                f"each page holds one recurrent state of {model.state_nbytes:,} bytes beside "
                f"{model.token_nbytes:,} bytes a token; an engine that stores fewer needs less"
            )
    return PageSize(tokens, nbytes, tuple(assumed))


def _mean_said(found: list[tuple[float, int]]) -> float:
    """Return the mean of the values that requests state, weighted by pages; 0 without any."""
    known = [(value, pages) for value, pages in found if value]
    return (
        sum(value * pages for value, pages in known) / sum(pages for _, pages in known)
        if known
        else 0.0
    )


def _tokens(requests: list[TraceRequest]) -> float | None:
    """Estimate the tokens per page from the input lengths."""
    known = [
        (request.input_length, len(request.hash_ids))
        for request in requests
        if request.input_length
    ]
    if not known:
        return None
    most = min((tokens / (pages - 1) for tokens, pages in known if pages > 1), default=math.inf)
    least = math.ceil(max(tokens / pages for tokens, pages in known))
    if least < most:
        return float(least)
    full = math.floor(min(tokens / pages for tokens, pages in known))
    if full > max(tokens / (pages + 1) for tokens, pages in known):
        return float(full)
    return sum(tokens for tokens, _ in known) / sum(pages for _, pages in known)
