"""Run `kvstore plan`: recommend RAM and disk sizes from a trace, as table, text and picture.

A picture is a PNG, or an HTML page that needs nothing else, with figures and words.
"""

import html
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.exits import ExitCode, Failure
from kvstore.cli.invocation import Invocation
from kvstore.cli.output import (
    Report,
    emit,
    human_count,
    human_ms,
    human_nbytes,
    note,
    option_nbytes,
    option_sizes,
    progress,
    show_fitting,
)
from kvstore.errors import InvalidRequest
from kvstore.tools.model_config import cache_size
from kvstore.tools.plan import NEARLY_ALL, Plan, Rate, Row, Wishes, planned, surveyed
from kvstore.tools.sessions import hit_rate
from kvstore.tools.survey import EXACT, MOST, Sampling, Survey, page_size, sampling
from kvstore.tools.trace import TraceRequest, read_trace, trace_size

LITTLE = 0.01  # gain of the hit rate that twice the size must bring to be worth it
NEAR_BOUND = 0.95
# page uses: up to here exact, in some 2.5 minutes and 1 GiB; beyond, a sample
EXACT_PAGES_MAX = 10**8
SAMPLE_PAGES = 10**7  # page uses in a sample
HINTED_PAGES_MAX = 3 * 10**6  # page uses up to which hints are simulated, 10 s a size
PREFILL_TOKENS_PER_S = 10_000.0

_Sizes = list[str] | None
TraceArgument = Annotated[
    Path, typer.Argument(metavar="TRACE", help="JSONL file of requests with hash_ids.")
]
RamOption = Annotated[
    _Sizes,
    typer.Option(
        "--ram",
        metavar="SIZE",
        help="RAM of all nodes; several times, or 64GiB,128GiB. [default: chosen]",
    ),
]
DiskOption = Annotated[
    _Sizes,
    typer.Option("--disk", metavar="SIZE", help="Disk of all nodes beside it. [default: none]"),
]
PageOption = Annotated[
    str | None,
    typer.Option(
        "--page-bytes", metavar="SIZE", help="Of a page. [default: the trace's, or by the model]"
    ),
]
ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model-config",
        metavar="FILE",
        help="config.json of the model: bytes of a token, of a state.",
    ),
]
TokensOption = Annotated[
    float | None,
    typer.Option("--tokens-per-page", metavar="N", help="[default: as the trace has it]"),
]
SampleOption = Annotated[
    float | None,
    typer.Option(
        "--sample", metavar="N", help="Look at one page in N. [default: all, up to 10^8 of them]"
    ),
]
PictureOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--picture", metavar="FILE", help="plan.png or plan.html; give it twice for both."
    ),
]

_RATES = (">GET GB/s", ">PUT", ">DISK READ", ">WRITE")

PICTURE_KINDS = (".png", ".html")
_INCHES = (9.0, 5.0)
_DPI = 144
_PICTURE_COLUMNS = ("RAM", "disk", "hit", "bound", "tokens saved", "GPU s saved")
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvstore plan</title>
<style>body{{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}}
svg{{width:100%;height:auto}}table{{border-collapse:collapse}}
td,th{{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}}</style></head>
<body><h1>kvstore plan</h1><p>{about}</p>
{svg}
<ul>{words}</ul>
<table>{head}{rows}</table>
</body></html>
"""


PrefillOption = Annotated[
    float,
    typer.Option("--prefill-tokens-per-s", metavar="X", help="Prompt tokens that a GPU computes."),
]
NearOption = Annotated[
    float,
    typer.Option("--near-share", metavar="F", help="Share of RAM with copies of others' pages."),
]


def plan(
    run: Invocation,
    trace: TraceArgument,
    ram: RamOption = None,
    disk: DiskOption = None,
    page_bytes: PageOption = None,
    model_config: ModelOption = None,
    page_tokens: TokensOption = None,
    prefill: PrefillOption = PREFILL_TOKENS_PER_S,
    copies: Annotated[
        int, typer.Option("--copies", metavar="R", help="Owners of each page (--replicas).")
    ] = 1,
    near_share: NearOption = 0.0,
    window_s: Annotated[
        float, typer.Option("--window", metavar="S", help="Time window of peak rates.")
    ] = 60.0,
    disk_gb_per_s: Annotated[
        float, typer.Option("--disk-gb-per-s", metavar="X", help="Read rate of all disks together.")
    ] = 2.0,
    one_in: SampleOption = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", help="Only the first N requests.")
    ] = None,
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
        raise InvalidRequest(
            f"--sample {one_in:g} must be at least 1: one page in so many; at most {MOST:g}"
        )
    check_pictures(picture or [])
    model = cache_size(model_config) if model_config else None
    nbytes = option_nbytes(page_bytes, "--page-bytes") if page_bytes is not None else None
    page = page_size(read_trace(trace, limit), page_tokens, nbytes, model)
    rams, disks = option_sizes(ram, "--ram"), option_sizes(disk, "--disk")
    wishes = Wishes(page, prefill, rams, disks, copies, near_share, window_s, disk_gb_per_s)
    requests, pages = trace_size(trace, limit)
    with progress("reading", requests) as on_progress:
        survey = surveyed(
            _counted(read_trace(trace, limit), on_progress), wishes, _sample(one_in, pages)
        )
    with progress("planning", 1.0) as on_progress:
        made = planned(survey, wishes, on_progress, _hinted(survey, trace, limit))
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


def _hinted(survey: Survey, trace: Path, limit: int | None) -> Callable[[int], float] | None:
    """Return a function that simulates hints, for a trace with sessions that is not too long."""
    if not survey.has_sessions or survey.sample is not EXACT:
        return None
    if survey.pages_asked > HINTED_PAGES_MAX:
        return None
    return lambda pages: hit_rate(read_trace(trace, limit), pages, hinted=True)


def _counted(requests: Iterator[TraceRequest], on_progress: Report) -> Iterator[TraceRequest]:
    for number, request in enumerate(requests):
        if number & 1023 == 0:
            on_progress(number)
        yield request


def _show(plan: Plan, words: Sequence[str]) -> None:
    about = (
        f"{plan.requests:,} requests, {plan.pages_asked:,} pages requested, {plan.pages:,} distinct"
    )
    span = f", {human_ms(1000 * plan.seconds)}" if plan.seconds else ""
    print(f"{about}{span}; a page is {plan.page_tokens:g} tokens, {human_nbytes(plan.page_nbytes)}")
    for assumed in plan.assumed:
        print(f"assumed: {assumed}")
    if plan.sampled < 1:
        print(
            f"from {percent(plan.sampled)} of the pages; ± is one standard error; bounds "
            "are also slightly too low"
        )
    print()
    with_hints = any(row.hit_rate_hinted is not None for row in plan.rows)
    rows = [_cells(plan, row, with_hints) for row in plan.rows]
    show_fitting(
        (
            ">RAM",
            ">DISK",
            ">PAGES",
            ">HIT",
            *([">WITH HINTS"] if with_hints else []),
            ">IN RAM",
            ">BOUND",
            ">TOKENS SAVED",
            ">GPU s",
            *_RATES,
        ),
        rows,
    )
    print()
    for sentence in words:
        print(f"* {sentence}")


def _cells(plan: Plan, row: Row, with_hints: bool) -> tuple[object, ...]:
    hinted = "" if row.hit_rate_hinted is None else percent(row.hit_rate_hinted)
    return (
        human_nbytes(row.ram_nbytes),
        human_nbytes(row.disk_nbytes) if row.disk_nbytes else "-",
        row.pages,
        _rate_cell(row.hit_rate, row.hit_rate_error),
        *([hinted] if with_hints else []),
        percent(row.hit_rate_ram) if row.disk_nbytes else "",
        _rate_cell(row.bound, row.bound_error),
        human_count(row.tokens_saved),
        f"{row.gpu_saved_s:,.0f}",
        *(_speed(rate) for rate in (row.gets, row.puts)),
        *(_speed(rate) if row.disk_nbytes else "" for rate in (row.disk_reads, row.disk_writes)),
    )


def _rate_cell(share: float, error: float) -> str:
    return percent(share) + (f" ±{100 * error:.1f}" if error else "")


def _speed(rate: Rate) -> str:
    """Format a rate as mean / peak."""
    return "-" if rate.mean is None else f"{rate.mean:.2f} / {rate.peak:.2f}"


def recommendation(plan: Plan) -> list[str]:
    """Return the recommendation as sentences."""
    if not plan.endless:
        return ["No page is requested twice: no store would save anything on this trace."]
    return [
        *_of_size(plan),
        _of_ram(plan),
        *_of_disk(plan),
        _of_policy(plan.rows),
        *_of_copies(plan),
    ]


def percent(share: float) -> str:
    """Format a share as a percentage."""
    return f"{100 * share:.1f} %"


def _points(share: float) -> str:
    return f"{100 * max(0.0, share):.1f} points"


def _of_size(plan: Plan) -> Iterator[str]:
    knee, wanted = human_nbytes(plan.nearly_all_nbytes), human_nbytes(plan.wanted_nbytes)
    yield (
        f"A store that never forgets would hit {percent(plan.endless)} of the pages; the "
        f"rest is requested once. The knee is at {knee}, {plan.nearly_all_pages:,} pages: "
        f"{percent(NEARLY_ALL * plan.endless)}. Beyond {wanted} nothing is gained."
    )
    ram, worst = (
        plan.ram_beside_disk_nbytes,
        f"more than {plan.disk_gb_per_s:g} GB/s in the worst {plan.window_s:g} s",
    )
    if ram is None:
        yield "The trace has no times, so the load on links and disks is unknown."
    elif ram < LITTLE * plan.nearly_all_nbytes:
        yield f"Of those {knee} nearly all may be disk: disks would have to read no {worst}."
    elif ram < plan.nearly_all_nbytes:
        yield (
            f"Of those {knee}, {human_nbytes(ram)} should be RAM, and the rest may be disk: "
            f"with less RAM disks would have to read {worst}."
        )
    else:
        yield f"All of it should be RAM: disks would have to read {worst}."


def _of_ram(plan: Plan) -> str:
    """Say whether more RAM would help."""
    rams = sorted((row for row in plan.rows if not row.disk_nbytes), key=lambda row: row.ram_nbytes)
    row, gain = rams[-1], 0.0
    for row in rams[-1:] if plan.ram_asked else rams:
        gain = row.hit_rate_doubled - row.hit_rate
        if row.pages >= plan.nearly_all_pages and gain < LITTLE:
            break
    size, rate = human_nbytes(row.ram_nbytes), percent(row.hit_rate)
    if row.pages >= plan.wanted_pages:
        return (
            f"RAM of {size} has all that is ever asked for again: more is of no use, nor is a "
            "disk but over a restart."
        )
    if gain < LITTLE and row.pages >= plan.nearly_all_pages:
        return (
            f"More RAM than {size}, which gives {rate}, is of little use: twice as much adds "
            f"{_points(gain)}."
        )
    said = f"RAM of {size} alone gives {rate}, and twice as much {_points(gain)} more."
    if row.pages >= plan.nearly_all_pages:
        return f"{said} A disk adds at most {_points(plan.endless - row.hit_rate)}."
    disk, more = (
        human_nbytes(plan.nearly_all_nbytes),
        _points(NEARLY_ALL * plan.endless - row.hit_rate),
    )
    return f"{said} A disk is needed for the rest: one of {disk} adds {more}."


def _of_disk(plan: Plan) -> Iterator[str]:
    """Say what each disk size would add to the largest RAM."""
    ram, most = max(row.ram_nbytes for row in plan.rows), plan.disk_gb_per_s
    rows = {row.disk_nbytes: row for row in plan.rows if row.ram_nbytes == ram}
    for row in rows.values():
        if not row.disk_nbytes:
            continue
        gain = row.hit_rate - rows[0].hit_rate
        said = (
            f"A disk of {human_nbytes(row.disk_nbytes)} beside RAM of {human_nbytes(ram)} adds "
            f"{_points(gain)}"
        )
        reads, writes = row.disk_reads.peak, row.disk_writes.peak
        if gain < LITTLE:
            yield f"{said}: for hits it is hardly worth it; it keeps the pages over a restart."
        elif reads is None or writes is None:
            yield f"{said}."
        else:
            more = (
                f", more than the {most:g} that disks are believed to do"
                if max(reads, writes) > most
                else ""
            )
            yield f"{said}. At the worst it reads {reads:.2f} GB/s and writes {writes:.2f}{more}."


def _of_policy(rows: Sequence[Row]) -> str:
    """Say where the eviction policy loses most."""
    far = [row for row in rows if row.hit_rate < NEAR_BOUND * row.bound]
    if not far:
        return (
            "At all these sizes the store is within 5 % of what any policy could hit: only size "
            "helps."
        )
    row = max(far, key=lambda row: row.bound - row.hit_rate)
    size = f"RAM of {human_nbytes(row.ram_nbytes)}"
    if row.disk_nbytes:
        size += f" and disk of {human_nbytes(row.disk_nbytes)}"
    return (
        f"With {size} the store hits {percent(row.hit_rate)}, and an optimal policy "
        f"{percent(row.bound)}: no policy could gain more."
    )


def _of_copies(plan: Plan) -> Iterator[str]:
    costs = {(cost.copies, cost.near_share): cost for cost in plan.copy_costs}
    share = plan.near_share if (1, plan.near_share) in costs else 0.0
    one, two = costs[1, share], costs[2, share]
    yield (
        f"Two owners for each page (R=2) cost {_points(one.hit_rate - two.hit_rate)} at the "
        "largest size of the table, or twice the bytes for the same: the knee is at "
        f"{human_nbytes(two.nearly_all_nbytes)} then."
    )
    near = max(
        (cost for cost in plan.copy_costs if cost.copies == plan.copies),
        key=lambda cost: cost.near_share,
    )
    if near.near_share:
        lost = costs[plan.copies, 0.0].hit_rate - near.hit_rate
        yield (
            f"Near copies cost at most {_points(lost)} there, if they fill "
            f"{percent(near.near_share)} of the RAM; they go before all other pages."
        )


def check_pictures(paths: Sequence[Path]) -> None:
    """Raise InvalidRequest for unusable picture paths, before the long computation."""
    for path in paths:
        if path.suffix.lower() not in PICTURE_KINDS:
            raise InvalidRequest(f"--picture {path} must end with {' or '.join(PICTURE_KINDS)}")
        if not path.absolute().parent.is_dir():
            raise InvalidRequest(f"--picture {path}: there is no folder {path.absolute().parent}")
    if paths:
        _figure_class()


def draw(plan: Plan, words: Sequence[str], path: Path) -> None:
    """Draw the plan as PNG or HTML. Raises Failure if the file cannot be written."""
    data = _png(plan) if path.suffix.lower() == ".png" else _html(plan, words).encode()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise Failure(f"can not write {path}: {error.strerror}", ExitCode.UNWRITTEN) from error


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"{error.name} is not installed, which draws pictures; pip install 'kvstore-llm[plan]'"
        ) from error
    return Figure


def _figure(plan: Plan) -> Any:
    figure = _figure_class()(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    sizes = [nbytes / (1 << 30) for nbytes, _ in plan.curve]
    axes.plot(
        sizes,
        [100 * rate for _, rate in plan.curve],
        color="#1f5fa8",
        label="hit rate, RAM or disk of this size",
    )
    bounds = sorted(
        {(max(row.ram_nbytes, row.disk_nbytes) / (1 << 30), 100 * row.bound) for row in plan.rows}
    )
    axes.plot(
        *zip(*bounds, strict=True),
        "o--",
        color="#b05020",
        linewidth=0.8,
        label="bound: the future is known",
    )
    axes.axhline(100 * plan.endless, color="#777777", linewidth=0.8, linestyle=":")
    top = (sizes[0], 100 * plan.endless)
    axes.annotate(f"never forgets: {100 * plan.endless:.1f} %", top, color="#777777", va="bottom")
    knee = plan.nearly_all_nbytes / (1 << 30)
    axes.axvline(knee, color="#2a7a3a", linewidth=0.8)
    axes.annotate(f" knee: {human_nbytes(plan.nearly_all_nbytes)}", (knee, 0), color="#2a7a3a")
    for row in plan.rows:
        if row.disk_nbytes:
            axes.plot(
                row.ram_nbytes / (1 << 30),
                100 * row.hit_rate_ram,
                "s",
                color="#1f5fa8",
                markersize=4,
            )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda gib, _: human_nbytes(gib * (1 << 30)).replace(".0", ""))
    axes.set(xlabel="capacity of all nodes together", ylabel="pages hit, %", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", frameon=False)
    return figure


def _png(plan: Plan) -> bytes:
    out = io.BytesIO()
    _figure(plan).savefig(out, format="png", dpi=_DPI)
    return out.getvalue()


def _html(plan: Plan, words: Sequence[str]) -> str:
    out = io.StringIO()
    _figure(plan).savefig(out, format="svg", metadata={"Date": None})
    rows = "".join(_html_row("td", _picture_cells(row)) for row in plan.rows)
    about = (
        f"{plan.requests:,} requests, {plan.pages_asked:,} pages requested, {plan.pages:,} "
        f"distinct; a page is {plan.page_tokens:g} tokens, {human_nbytes(plan.page_nbytes)}"
    )
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in words)
    svg = out.getvalue()
    return _PAGE.format(
        about=about,
        svg=svg[svg.index("<svg") :],
        words=items,
        head=_html_row("th", _PICTURE_COLUMNS),
        rows=rows,
    )


def _picture_cells(row: Row) -> tuple[str, ...]:
    sizes = (
        human_nbytes(nbytes) if nbytes else "-" for nbytes in (row.ram_nbytes, row.disk_nbytes)
    )
    rates = (f"{100 * rate:.1f} %" for rate in (row.hit_rate, row.bound))
    return (*sizes, *rates, f"{row.tokens_saved:,}", f"{row.gpu_saved_s:,.0f}")


def _html_row(cell: str, texts: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{text}</{cell}>" for text in texts) + "</tr>"
