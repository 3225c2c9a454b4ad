"""`kvstore plan`: how much RAM and disk, from a trace."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.invocation import Invocation
from kvstore.cli.output import Report, emit, human_count, human_ms, human_nbytes, note, progress, show
from kvstore.cli.plan_picture import check_pictures, draw
from kvstore.cli.plan_words import percent, recommendation
from kvstore.cli.sizes import option_nbytes, option_sizes
from kvstore.errors import InvalidRequest
from kvstore.measure.trace import TraceRequest, read_trace, trace_size
from kvstore.plan.pages import MOST, page_size, token_nbytes
from kvstore.plan.plan import Plan, Rate, Row, Wishes, planned, surveyed
from kvstore.plan.survey import EXACT, Sampling, sampling

EXACT_PAGES_MAX = 10**8  # uses of pages: some 2.5 minutes, 1 GiB; beyond, a sample
SAMPLE_PAGES = 10**7  # of about so many uses
PREFILL_TOKENS_PER_S = 10_000.0


_Sizes = list[str] | None
TraceArgument = Annotated[Path, typer.Argument(metavar="TRACE", help="JSONL file of requests with hash_ids.")]
RamOption = Annotated[
    _Sizes,
    typer.Option("--ram", metavar="SIZE", help="RAM of all nodes; several times, or 64GiB,128GiB. [default: chosen]"),
]
DiskOption = Annotated[
    _Sizes, typer.Option("--disk", metavar="SIZE", help="Disk of all nodes beside it. [default: none]")
]
PageOption = Annotated[
    str | None, typer.Option("--page-bytes", metavar="SIZE", help="Of a page. [default: the trace's, or by the model]")
]
ModelOption = Annotated[
    Path | None, typer.Option("--model-config", metavar="FILE", help="config.json of the model: bytes of a token.")
]
TokensOption = Annotated[
    float | None, typer.Option("--tokens-per-page", metavar="N", help="[default: as the trace has it]")
]
SampleOption = Annotated[
    float | None,
    typer.Option("--sample", metavar="N", help="Look at one page in N. [default: all, up to 10^8 of them]"),
]
PictureOption = Annotated[
    list[Path] | None, typer.Option("--picture", metavar="FILE", help="plan.png or plan.html; or both, said twice.")
]


def plan(
    run: Invocation,
    trace: TraceArgument,
    ram: RamOption = None,
    disk: DiskOption = None,
    page_bytes: PageOption = None,
    model_config: ModelOption = None,
    page_tokens: TokensOption = None,
    prefill: Annotated[
        float, typer.Option("--prefill-tokens-per-s", metavar="X", help="What a GPU computes of a prompt.")
    ] = PREFILL_TOKENS_PER_S,
    copies: Annotated[int, typer.Option("--copies", metavar="R", help="Owners of each page (--replicas).")] = 1,
    near_share: Annotated[
        float, typer.Option("--near-share", metavar="F", help="Share of RAM with copies of others' pages.")
    ] = 0.0,
    window_s: Annotated[float, typer.Option("--window", metavar="S", help="Peak rates are of so long.")] = 60.0,
    disk_gb_per_s: Annotated[
        float, typer.Option("--disk-gb-per-s", metavar="X", help="What the disks do, in all.")
    ] = 2.0,
    one_in: SampleOption = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", help="Only the first N requests.")] = None,
    picture: PictureOption = None,
) -> int:
    """Plan RAM and disk from a trace.

    TRACE has a JSON object on each line with timestamp (ms), input_length, output_length and
    hash_ids, one id per page, as Mooncake's traces have and as kvstore record writes. Shows what
    stores of several sizes would have hit, beside the most that any policy could have hit; what
    that saves; what links and disks must bear; and says what to take. No node is asked. Sizes are
    of all nodes together.

    \b
    Examples:
      kvstore plan trace.jsonl
      kvstore plan trace.jsonl --ram 64GiB,256GiB --disk 2TiB --model-config config.json
      kvstore plan trace.jsonl --copies 2 --picture plan.html --json
    """
    if limit is not None and not 1 <= limit <= sys.maxsize:
        raise InvalidRequest(f"--limit {limit} must be at least 1, at most {sys.maxsize}")
    if one_in is not None and not 1 <= one_in <= MOST:
        raise InvalidRequest(f"--sample {one_in:g} must be at least 1: one page in so many; at most {MOST:g}")
    check_pictures(picture or [])
    token = token_nbytes(model_config) if model_config else None
    nbytes = option_nbytes(page_bytes, "--page-bytes") if page_bytes is not None else None
    page = page_size(read_trace(trace, limit), page_tokens, nbytes, token)
    rams, disks = option_sizes(ram, "--ram"), option_sizes(disk, "--disk")
    wishes = Wishes(page, prefill, rams, disks, copies, near_share, window_s, disk_gb_per_s)
    requests, pages = trace_size(trace, limit)
    with progress("reading", requests) as on_progress:
        survey = surveyed(_counted(read_trace(trace, limit), on_progress), wishes, _sample(one_in, pages))
    with progress("planning", 1.0) as on_progress:
        made = planned(survey, wishes, on_progress)
    words = recommendation(made)
    for path in picture or []:
        draw(made, words, path)
        note(f"drawn: {path}")
    if run.as_json:
        emit({**made.as_dict(), "recommendation": words})
    else:
        _show(made, words)
    return 0


def _sample(one_in: float | None, pages: int) -> Sampling:
    if one_in is not None:
        return sampling(one_in)
    return sampling(pages / SAMPLE_PAGES) if pages > EXACT_PAGES_MAX else EXACT


def _counted(requests: Iterator[TraceRequest], on_progress: Report) -> Iterator[TraceRequest]:
    for number, request in enumerate(requests):
        if number & 1023 == 0:
            on_progress(number)
        yield request


def _show(plan: Plan, words: Sequence[str]) -> None:
    about = f"{plan.requests:,} requests, {plan.pages_asked:,} pages asked for, {plan.pages:,} distinct"
    span = f", {human_ms(1000 * plan.seconds)}" if plan.seconds else ""
    print(f"{about}{span}; a page is {plan.page_tokens:g} tokens, {human_nbytes(plan.page_nbytes)}")
    for assumed in plan.assumed:
        print(f"assumed: {assumed}")
    if plan.sampled < 1:
        print(
            f"from {percent(plan.sampled)} of the pages; ± is one standard error; bounds are besides a little too low"
        )
    print()
    rows = [_cells(plan, row) for row in plan.rows]
    show((">RAM", ">DISK", ">PAGES", ">HIT", ">IN RAM", ">BOUND", ">TOKENS SAVED", ">GPU s", *_RATES), rows)
    print()
    for sentence in words:
        print(f"* {sentence}")


_RATES = (">GET GB/s", ">PUT", ">DISK READ", ">WRITE")


def _cells(plan: Plan, row: Row) -> tuple[object, ...]:
    return (
        human_nbytes(row.ram_nbytes),
        human_nbytes(row.disk_nbytes) if row.disk_nbytes else "-",
        row.pages,
        _rate_cell(row.hit_rate, row.hit_rate_error),
        percent(row.hit_rate_ram) if row.disk_nbytes else "",
        _rate_cell(row.bound, row.bound_error),
        human_count(row.tokens_saved),
        f"{row.gpu_seconds_saved:,.0f}",
        *(_speed(rate) for rate in (row.gets, row.puts)),
        *(_speed(rate) if row.disk_nbytes else "" for rate in (row.disk_reads, row.disk_writes)),
    )


def _rate_cell(share: float, error: float) -> str:
    return percent(share) + (f" ±{100 * error:.1f}" if error else "")


def _speed(rate: Rate) -> str:
    """Mean / peak."""
    return "-" if rate.mean is None else f"{rate.mean:.2f} / {rate.peak:.2f}"
