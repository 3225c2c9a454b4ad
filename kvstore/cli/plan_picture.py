"""A plan as a picture: hit rates over sizes. A PNG, or an HTML page that needs nothing else, with figures and words."""

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.cli.exits import ExitCode, Failure
from kvstore.cli.output import human_nbytes
from kvstore.errors import InvalidRequest
from kvstore.tools.plan import Plan, Row

KINDS = (".png", ".html")
INCHES = (9.0, 5.0)
DPI = 144
COLUMNS = ("RAM", "disk", "hit", "bound", "tokens saved", "GPU s saved")
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvstore plan</title>
<style>body{{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}}svg{{width:100%;height:auto}}
table{{border-collapse:collapse}}td,th{{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}}</style></head>
<body><h1>kvstore plan</h1><p>{about}</p>
{svg}
<ul>{words}</ul>
<table>{head}{rows}</table>
</body></html>
"""


def check_pictures(paths: Sequence[Path]) -> None:
    """Before what takes long. Raises InvalidRequest."""
    for path in paths:
        if path.suffix.lower() not in KINDS:
            raise InvalidRequest(f"--picture {path} must end with {' or '.join(KINDS)}")
        if not path.absolute().parent.is_dir():
            raise InvalidRequest(f"--picture {path}: there is no folder {path.absolute().parent}")
    if paths:
        _figure_class()


def draw(plan: Plan, words: Sequence[str], path: Path) -> None:
    """Raises Failure if it can not be written."""
    data = _png(plan) if path.suffix.lower() == ".png" else _page(plan, words).encode()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise Failure(f"can not write {path}: {error.strerror}", ExitCode.UNWRITTEN) from error


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"{error.name} is not installed, which draws pictures; it comes with the extra plan of kvstore-llm "
            "(README, Install)"
        ) from error
    return Figure


def _figure(plan: Plan) -> Any:
    figure = _figure_class()(figsize=INCHES, layout="constrained")
    axes = figure.subplots()
    sizes = [nbytes / (1 << 30) for nbytes, _ in plan.curve]
    axes.plot(
        sizes, [100 * rate for _, rate in plan.curve], color="#1f5fa8", label="hit rate, RAM or disk of this size"
    )
    bounds = sorted({(max(row.ram_nbytes, row.disk_nbytes) / (1 << 30), 100 * row.bound) for row in plan.rows})
    axes.plot(*zip(*bounds, strict=True), "o--", color="#b05020", linewidth=0.8, label="bound: the future is known")
    axes.axhline(100 * plan.endless, color="#777777", linewidth=0.8, linestyle=":")
    top = (sizes[0], 100 * plan.endless)
    axes.annotate(f"never forgets: {100 * plan.endless:.1f} %", top, color="#777777", va="bottom")
    knee = plan.nearly_all_nbytes / (1 << 30)
    axes.axvline(knee, color="#2a7a3a", linewidth=0.8)
    axes.annotate(f" knee: {human_nbytes(plan.nearly_all_nbytes)}", (knee, 0), color="#2a7a3a")
    for row in plan.rows:
        if row.disk_nbytes:
            axes.plot(row.ram_nbytes / (1 << 30), 100 * row.hit_rate_ram, "s", color="#1f5fa8", markersize=4)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda gib, _: human_nbytes(gib * (1 << 30)).replace(".0", ""))
    axes.set(xlabel="capacity of all nodes together", ylabel="pages hit, %", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", frameon=False)
    return figure


def _png(plan: Plan) -> bytes:
    out = io.BytesIO()
    _figure(plan).savefig(out, format="png", dpi=DPI)
    return out.getvalue()


def _page(plan: Plan, words: Sequence[str]) -> str:
    out = io.StringIO()
    _figure(plan).savefig(out, format="svg", metadata={"Date": None})
    rows = "".join(_line("td", _cells(row)) for row in plan.rows)
    about = (
        f"{plan.requests:,} requests, {plan.pages_asked:,} pages asked for, {plan.pages:,} distinct; "
        f"a page is {plan.page_tokens:g} tokens, {human_nbytes(plan.page_nbytes)}"
    )
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in words)
    svg = out.getvalue()
    return _PAGE.format(about=about, svg=svg[svg.index("<svg") :], words=items, head=_line("th", COLUMNS), rows=rows)


def _cells(row: Row) -> tuple[str, ...]:
    sizes = (human_nbytes(nbytes) if nbytes else "-" for nbytes in (row.ram_nbytes, row.disk_nbytes))
    rates = (f"{100 * rate:.1f} %" for rate in (row.hit_rate, row.bound))
    return (*sizes, *rates, f"{row.tokens_saved:,}", f"{row.gpu_seconds_saved:,.0f}")


def _line(cell: str, texts: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{text}</{cell}>" for text in texts) + "</tr>"
