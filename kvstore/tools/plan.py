"""Plan stores of several sizes: the hits on a trace, and the load on links and disks.

RAM and disk are one stack of pages. Pages committed to RAM are also written to disk, and both age
exactly (docs/decisions/0007): a page is in RAM if it is among the newest that fit into RAM, and in
the store if it is among the newest that fit into the larger of both. (A full disk is written to a
little later: up to half of the RAM more.)

Sizes are totals over all nodes. With R owners a page takes R slots; a share of the RAM may hold
copies of pages that other nodes own (near nodes).
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvstore.cluster.view import REPLICAS_MAX
from kvstore.errors import InvalidRequest
from kvstore.layout import slot_nbytes
from kvstore.tools.survey import EXACT, Estimate, PageSize, Sampling, Survey, check_positive
from kvstore.tools.trace import TraceRequest

NEARLY_ALL = 0.95  # share of an unlimited store's hits to plan for
ROWS_MAX = 10
CURVE_POINTS = 96
COPIES = (1, 2, 3)
NEAR_SHARE = 0.5  # default of `--copies-share`
NEAR_SHARE_MAX = 0.99
SIZE_NBYTES_MAX = 1 << 60
# Default sizes: powers of two, and half as much again
_OCTAVES = range(10, 61)


@dataclass(frozen=True)
class Wishes:
    """The user's wishes. `ram`, `disk`: bytes over all nodes; empty: sizes are chosen.

    `near_share`: share of the RAM for copies of pages that other nodes own. `disk_gb_per_s`:
    assumed read rate of the disks.
    """

    page: PageSize
    prefill_tokens_per_s: float
    ram: tuple[int, ...] = ()
    disk: tuple[int, ...] = ()
    copies: int = 1
    near_share: float = 0.0
    window_s: float = 60.0
    disk_gb_per_s: float = 2.0

    def __post_init__(self) -> None:
        check_positive("--prefill-tokens-per-s", self.prefill_tokens_per_s)
        _check("--copies", self.copies, 1 <= self.copies <= REPLICAS_MAX, f"in 1..{REPLICAS_MAX}")
        _check(
            "--near-share",
            self.near_share,
            0 <= self.near_share <= NEAR_SHARE_MAX,
            f"in 0..{NEAR_SHARE_MAX}",
        )
        check_positive("--window", self.window_s)
        check_positive("--disk-gb-per-s", self.disk_gb_per_s)
        beside = f", {self.copies} times, beside a share of {self.near_share:g}" * (
            self.copies > 1 or self.near_share > 0
        )
        for name, sizes, pages in (
            ("--ram", self.ram, self.ram_pages),
            ("--disk", self.disk, self.pages),
        ):
            for nbytes in sizes:
                _check(name, nbytes, nbytes <= SIZE_NBYTES_MAX, "at most 1 EiB")
                _check(
                    name,
                    nbytes,
                    pages(nbytes) >= 1,
                    f"at least a page of {self.page.nbytes} bytes{beside}",
                )

    def ram_pages(self, nbytes: int) -> int:
        """Return the distinct pages that this much RAM holds."""
        return self.pages(int(nbytes * (1 - self.near_share)))

    def pages(self, nbytes: int) -> int:
        """Return the distinct pages that this much disk holds."""
        return nbytes // slot_nbytes(self.page.nbytes) // self.copies

    def ram_nbytes(self, pages: int) -> int:
        """Return the RAM for so many distinct pages."""
        return round(self.nbytes(pages) / (1 - self.near_share))

    def nbytes(self, pages: int) -> int:
        """Return the disk for so many distinct pages."""
        return pages * slot_nbytes(self.page.nbytes) * self.copies


def _check(name: str, value: float, good: bool, said: str) -> None:
    if not good:
        raise InvalidRequest(f"{name} {value} must be {said}")


@dataclass(frozen=True)
class Rate:
    """GB/s (10^9); `peak`: in the worst window.

    None: the trace has no times.
    """

    mean: float | None
    peak: float | None


@dataclass(frozen=True)
class Row:
    """A store with this much RAM and disk.

    `hit_rate_ram`: found in RAM; `hit_rate_doubled`: with twice the RAM; `hit_rate_hinted`: if
    sessions tell what they know, for RAM alone and a trace that names them. Rates are of pages:
    between the store and engines, and between RAM and disk.
    """

    ram_nbytes: int
    disk_nbytes: int
    pages: int
    hit_rate: float
    hit_rate_error: float
    hit_rate_ram: float
    hit_rate_doubled: float
    hit_rate_hinted: float | None
    bound: float
    bound_error: float
    tokens_saved: int
    gpu_saved_s: float
    gets: Rate
    puts: Rate
    disk_reads: Rate
    disk_writes: Rate


@dataclass(frozen=True)
class CopyCost:
    """Cost of copies: the remaining hit rate, and the bytes for nearly all hits."""

    copies: int
    near_share: float
    hit_rate: float
    nearly_all_nbytes: int


@dataclass(frozen=True)
class Plan:
    """A capacity plan. `endless`: the hit rate of a store without limit.

    `nearly_all_pages`: the least size with 95 % of its hits, `wanted_pages`: with all; bytes are of
    RAM, including copies of others' pages. `ram_beside_disk_nbytes`: beside a disk for nearly all
    hits, the least RAM with which the disk reads no faster than `disk_gb_per_s`; None: the trace
    has no times. `ram_asked`: whether the user chose the RAM sizes.
    """

    requests: int
    pages_asked: int
    pages: int
    tokens_asked: int
    seconds: float
    sampled: float
    page_nbytes: int
    page_tokens: float
    assumed: tuple[str, ...]
    copies: int
    near_share: float
    prefill_tokens_per_s: float
    disk_gb_per_s: float
    window_s: float
    endless: float
    nearly_all_pages: int
    nearly_all_nbytes: int
    wanted_pages: int
    wanted_nbytes: int
    ram_beside_disk_nbytes: int | None
    ram_asked: bool
    rows: tuple[Row, ...]
    copy_costs: tuple[CopyCost, ...]
    curve: tuple[tuple[int, float], ...]  # (bytes, hit rate), without disk

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        values = asdict(self)
        return {"duration_s": values.pop("seconds"), **values}


def surveyed(requests: Iterable[TraceRequest], wishes: Wishes, sample: Sampling = EXACT) -> Survey:
    """Survey the requests in one pass.

    Raises InvalidRequest if nothing is asked for, or too little.
    """
    for name, asked in (
        ("--ram", [*map(wishes.ram_pages, wishes.ram)]),
        ("--disk", [*map(wishes.pages, wishes.disk)]),
    ):
        for pages in asked:
            if pages < sample.pages_min:
                raise InvalidRequest(
                    f"{name} with room for {pages:,} pages is too small for a sample of one page "
                    f"in {1 / sample.rate:g}, which tells of {sample.pages_min:,} and more: take a "
                    "smaller --sample, or 1 for all pages"
                )
    chosen = [place * 2**octave // 2 for octave in _OCTAVES for place in (2, 3)]
    sizes = {wishes.ram_pages(nbytes) for nbytes in (*chosen, *wishes.ram)}
    sizes |= {wishes.pages(nbytes) for nbytes in (*chosen, *wishes.disk)}
    survey = Survey(sorted(sizes - {0}), wishes.window_s * 1000, wishes.page.tokens, sample)
    for request in requests:
        survey.add(request)
    survey.check()
    return survey


def planned(
    survey: Survey,
    wishes: Wishes,
    on_progress: Callable[[float], None] = lambda done: None,
    hinted: Callable[[int], float] | None = None,
) -> Plan:
    """Compute the plan; `on_progress` receives the share that is done.

    `hinted`: the hit rate of a store of so many pages with hints, if sessions are known.
    """
    return _Planner(survey, wishes, hinted).plan(on_progress)


class _Planner:
    def __init__(
        self, survey: Survey, wishes: Wishes, hinted: Callable[[int], float] | None
    ) -> None:
        self._hinted = hinted
        self._survey = survey
        self._wishes = wishes
        self._asked = survey.pages_asked
        self._hits = survey.by_window()
        self._stored, self._used = survey.by_window(stored=True), survey.used
        self._endless = survey.hits(survey.pages_wanted).value
        self._nearly_all = survey.size_for(NEARLY_ALL * self._endless)

    def plan(self, on_progress: Callable[[float], None]) -> Plan:
        survey, wishes = self._survey, self._wishes
        rams, disks = wishes.ram or self._rams(), (0, *wishes.disk)
        pairs = list(itertools.product(rams, disks))
        rows = []
        for number, (ram, disk) in enumerate(pairs):
            rows.append(self._row(ram, disk))
            on_progress((number + 1) / len(pairs))
        return Plan(
            requests=survey.requests,
            pages_asked=self._asked,
            pages=survey.pages,
            tokens_asked=survey.tokens_asked,
            seconds=survey.seconds,
            sampled=survey.sample.rate,
            page_nbytes=wishes.page.nbytes,
            page_tokens=wishes.page.tokens,
            assumed=wishes.page.assumed,
            copies=wishes.copies,
            near_share=wishes.near_share,
            prefill_tokens_per_s=wishes.prefill_tokens_per_s,
            disk_gb_per_s=wishes.disk_gb_per_s,
            window_s=wishes.window_s,
            endless=self._endless / self._asked,
            nearly_all_pages=self._nearly_all,
            nearly_all_nbytes=wishes.ram_nbytes(self._nearly_all),
            wanted_pages=survey.pages_wanted,
            wanted_nbytes=wishes.ram_nbytes(survey.pages_wanted),
            ram_beside_disk_nbytes=self._ram_beside_disk(),
            ram_asked=bool(wishes.ram),
            rows=tuple(rows),
            copy_costs=tuple(self._copy_costs(max(*rams, *disks), max(rams) >= max(disks))),
            curve=tuple(self._curve()),
        )

    def _rams(self) -> tuple[int, ...]:
        """Return powers of two, from a twentieth of all hits up to where more RAM adds none."""
        least = self._survey.sample.pages_min
        sizes = [2**octave for octave in _OCTAVES if self._wishes.ram_pages(2**octave) >= least]
        pages = [self._wishes.ram_pages(nbytes) for nbytes in sizes]
        last = bisect_left(pages, max(1, self._survey.pages_wanted))
        first = bisect_left(pages, max(1, self._survey.size_for(self._endless / 20)))
        return tuple(sizes[max(first - 1, last - ROWS_MAX + 1, 0) : last + 1])

    def _row(self, ram: int, disk: int) -> Row:
        survey, wishes = self._survey, self._wishes
        ram_pages = wishes.ram_pages(ram)
        pages = max(ram_pages, wishes.pages(disk))
        hits, bound = survey.hits(pages), survey.most_hits(pages)
        tokens = survey.tokens(pages)
        here = self._by_window(self._hits, pages)
        from_disk = {
            window: have - self._at(self._hits, window, ram_pages) for window, have in here.items()
        }
        stored = self._by_window(self._stored, pages)
        written = {window: self._used[window] - have for window, have in stored.items()}
        nothing = dict.fromkeys(here, 0.0)
        return Row(
            ram_nbytes=ram,
            disk_nbytes=disk,
            pages=pages,
            hit_rate=self._share(hits),
            hit_rate_error=hits.error / self._asked,
            hit_rate_ram=self._share(survey.hits(ram_pages)),
            hit_rate_doubled=self._share(survey.hits(max(wishes.ram_pages(2 * ram), pages))),
            hit_rate_hinted=None if disk or self._hinted is None else self._hinted(pages),
            bound=max(self._share(bound), self._share(hits))
            if survey.sample is not EXACT
            else self._share(bound),
            bound_error=bound.error / self._asked,
            tokens_saved=round(tokens),
            gpu_saved_s=round(tokens / wishes.prefill_tokens_per_s, 1),
            gets=self._rate(here),
            puts=self._rate(written),
            disk_reads=self._rate(from_disk if disk else nothing),
            disk_writes=self._rate(written if disk else nothing),
        )

    def _share(self, found: Estimate) -> float:
        return found.value / self._asked

    def _at(self, windows: dict[int, list[float]], window: int, pages: int) -> float:
        return windows[window][self._survey.sizes.index(pages)] if pages else 0.0

    def _by_window(self, windows: dict[int, list[float]], pages: int) -> dict[int, float]:
        place = self._survey.sizes.index(pages)
        return {window: hits[place] for window, hits in windows.items()}

    def _rate(self, pages: dict[int, float]) -> Rate:
        """Return the rate of so many pages in each window."""
        seconds, nbytes = self._survey.seconds, self._wishes.page.nbytes
        if not seconds:
            return Rate(None, None)
        window_s = min(self._wishes.window_s, seconds)
        mean, peak = sum(pages.values()) / seconds, max(pages.values(), default=0.0) / window_s
        return Rate(max(0.0, mean) * nbytes / 1e9, max(0.0, mean, peak) * nbytes / 1e9)

    def _ram_beside_disk(self) -> int | None:
        survey, wishes = self._survey, self._wishes
        if not survey.seconds:
            return None
        sizes = survey.sizes
        full = min(bisect_left(sizes, self._nearly_all), len(sizes) - 1)
        for place, size in enumerate(sizes[:full]):
            if size < survey.sample.pages_min:
                continue
            reads = {window: hits[full] - hits[place] for window, hits in self._hits.items()}
            if (self._rate(reads).peak or 0.0) <= wishes.disk_gb_per_s:
                return wishes.ram_nbytes(size)
        return wishes.ram_nbytes(self._nearly_all)

    def _copy_costs(self, nbytes: int, is_ram: bool) -> Iterable[CopyCost]:
        """Yield the cost of copies at the largest size; only RAM holds copies of others' pages."""
        slot = slot_nbytes(self._wishes.page.nbytes)
        shares = sorted({0.0, self._wishes.near_share or NEAR_SHARE}) if is_ram else [0.0]
        for copies, share in itertools.product(sorted({*COPIES, self._wishes.copies}), shares):
            pages = int(nbytes * (1 - share)) // slot // copies
            needed = round(self._nearly_all * slot * copies / (1 - share))
            yield CopyCost(copies, share, self._share(self._survey.hits(pages)), needed)

    def _curve(self) -> Iterable[tuple[int, float]]:
        wanted, least = max(2, self._survey.pages_wanted), self._survey.sample.pages_min
        points: Sequence[int] = sorted(
            {round((2 * wanted) ** (step / CURVE_POINTS)) for step in range(CURVE_POINTS + 1)}
        )
        return (
            (self._wishes.ram_nbytes(pages), self._share(self._survey.hits(pages)))
            for pages in points
            if pages >= least
        )
