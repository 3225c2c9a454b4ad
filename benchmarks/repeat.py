"""Run a benchmark several times in separate processes, and print medians and ranges.

    python benchmarks/repeat.py 3 benchmarks/bulk.py
    python benchmarks/repeat.py 5 benchmarks/disk.py --dir /data

README and RESULTS.md quote medians of several runs made by this script. A cell is `median
(least–greatest)` where the runs differ, and otherwise the common value; a cell that is no number
has the values of all runs.
"""

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from measure import Report, shown

RUNS_MIN = 2


def main() -> None:
    """Run the command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("runs", type=int, help=f"how often, at least {RUNS_MIN}")
    options.add_argument(
        "command", nargs=argparse.REMAINDER, help="the benchmark's file and its arguments"
    )
    chosen = options.parse_args()
    if chosen.runs < RUNS_MIN or not chosen.command:
        options.error(f"needs at least {RUNS_MIN} runs, and a benchmark")
    runs = [reports([sys.executable, *chosen.command, "--json"]) for _ in range(chosen.runs)]
    if len({tuple(len(report["rows"]) for report in run) for run in runs}) != 1:
        raise SystemExit(
            "the runs have tables of different lengths; run the benchmark by hand to see why"
        )
    for same in zip(*runs, strict=True):
        merged(list(same)).show(as_json=False)
        print()


def reports(command: list[str]) -> list[dict[str, Any]]:
    """Return the tables that one run reports."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def merged(same: list[dict[str, Any]]) -> Report:
    """Merge the tables of several runs.

    The notes are the first run's, each once.
    """
    first = same[0]
    loads = [report["machine"]["load"] for report in same]
    rows = [
        {name: cell([report["rows"][number][name] for report in same]) for name in row}
        for number, row in enumerate(first["rows"])
    ]
    notes = list(dict.fromkeys(note for report in same for note in report["notes"]))
    notes.append(f"median (least–greatest) of {len(same)} runs")
    return Report(
        first["title"], first["command"], notes, rows, {**first["machine"], "load": cell(loads)}
    )


def cell(values: list[Any]) -> Any:
    """Merge a cell's values of all runs."""
    texts = [shown(value) for value in values]
    if len(set(texts)) == 1:
        return texts[0]
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError):
        return ", ".join(f"{text} {texts.count(text)}×" for text in dict.fromkeys(texts))
    median = type(values[0])(
        statistics.median_low(numbers) if isinstance(values[0], int) else statistics.median(numbers)
    )
    return f"{shown(median)} ({shown(min(values, key=float))}–{shown(max(values, key=float))})"


if __name__ == "__main__":
    main()
