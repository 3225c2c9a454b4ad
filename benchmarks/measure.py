"""Share what benchmarks need: interleaved rounds, percentiles, the report.

Contenders take turns in every round and the order changes from round to round, so that the
machine's other work affects all of them alike. Figures are medians over rounds, never best cases.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

# Benchmarks that import this file find the helpers, too.
sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))

import kvstore

try:
    from rich.console import Console
    from rich.progress import Progress
except ImportError:  # the cli extra: without it there is no progress bar
    Console = Progress = None  # type: ignore[assignment, misc]

median = statistics.median
# What a contender measured in one round: seconds of each call, by operation.
Samples = dict[str, list[float]]


def percentile(seconds: Sequence[float], percent: int) -> float:
    """Return the smallest latency that `percent` of the calls do not exceed."""
    ordered = sorted(seconds)
    return ordered[-(-percent * len(ordered) // 100) - 1]


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def rounds(
    contenders: Mapping[str, Callable[[], Samples]],
    count: int,
    warmups: int,
    tick: Callable[[], None],
) -> dict[str, Samples]:
    """Return each contender's samples from `count` rounds, after `warmups`.

    Each round begins with another contender and every other one runs backwards.
    """
    names = list(contenders)
    samples: dict[str, Samples] = {name: {} for name in names}
    for number in range(-warmups, count):
        first = number % len(names)
        order = names[first:] + names[:first]
        for name in order if number % 2 else reversed(order):
            for op, seconds in contenders[name]().items():
                if number >= 0:
                    samples[name].setdefault(op, []).extend(seconds)
        tick()
    return samples


# ---- progress and report -----------------------------------------------------------------


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each of `total` steps, which draws a bar on a terminal.

    Only that call draws: a thread that redraws would take time from the measured calls.
    """
    if Progress is None or not sys.stderr.isatty():
        yield lambda: None
        return
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("measuring", total=total)
        yield lambda: bar.update(task, advance=1, refresh=True)


def machine() -> dict[str, Any]:
    """Describe the machine; `load` is the load average before the start."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in _lines("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        "?",
    )
    memory_kib = next(
        (int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0
    )
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / (1 << 20), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "kvstore": kvstore.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


@dataclass
class Report:
    """A table of results, as Markdown or as one JSON object.

    `command` repeats the measurement. `rows` are dicts with the same keys, one per line; None is
    shown as a dash. Make the report before the measurement begins: it records the machine's load.
    """

    title: str
    command: str
    notes: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=machine)

    def show(self, as_json: bool) -> None:
        """Print the report."""
        if as_json:
            print(json.dumps(vars(self), ensure_ascii=False))
            return
        m = self.machine
        print(
            f"{self.title}\n\n`{self.command}` on {m['date']}, {m['cores']} cores {m['cpu']}, "
            f"{m['memory_gib']} GiB,"
        )
        print(
            f"kernel {m['kernel']}, Python {m['python']}, kvstore {m['kvstore']}, load before "
            f"{m['load']}\n"
        )
        print(*_table(self.rows), sep="\n")
        print(*(f"\n* {note}" for note in self.notes), sep="")


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    lines = [list(rows[0]), *([shown(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        yield (
            "| "
            + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            + " |"
        )


def shown(value: object) -> str:
    """Format a table's cell."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}" if value < 10 else f"{value:.1f}"
    return str(value)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with --json."""
    found = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--json", action="store_true", help="print one JSON object")
    return found
