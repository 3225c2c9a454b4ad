"""Measure how fast KV moves between a GPU pool and host pages, and what it costs other work.

    python benchmarks/transfer.py          on a machine with an NVIDIA GPU and CuPy (two minutes)
    python benchmarks/transfer.py --cpu    the reference on the CPU, small, to test the script

Every strategy's bytes are checked with fresh random data and poisoned destinations before it is
timed. GB/s = payload / median of CUDA-event times, from the first operation on the GPU to the end
of the last; `of limit` compares with one big copy in the same run. Wall GB/s counts from the call
to the return. Page-locked memory is a registered shared mapping.
"""

import argparse
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_work import SHAPES, Work
from measure import Report, median, timed

from gpu_agent import TorchTransfer

log = logging.getLogger("transfer")
NBYTES = 256 << 20
CPU_NBYTES = 2 << 20
RUNS = 20
WARMUPS = 3
BOTH_WAYS_MOVES = 12  # of each direction
BARRIER_S = 30.0  # so that a failed thread does not block the others
PRODUCTS = 30  # replays during a transfer
DIRECTIONS = ("gather", "scatter")


def attempt(what: str, step: Callable[[], Any]) -> Any:
    """Run a step; on failure log it and return None, so that the other rows are still made."""
    try:
        return step()
    except Exception:
        log.exception("%s failed", what)
        return None


def row(
    work: str, name: str, direction: str, gb_s: float, wall_gb_s: float | None, limit: float | None
) -> dict[str, Any]:
    """Return a row of the table."""
    return {
        "work": work,
        "strategy": name,
        "direction": {"gather": "D2H", "scatter": "H2D"}.get(direction, direction),
        "GB/s": f"{gb_s:.1f}",
        "wall GB/s": None if wall_gb_s is None else f"{wall_gb_s:.1f}",
        "of limit": None if limit is None else f"{gb_s / limit:.3f}",
    }


# ---- on a GPU ----------------------------------------------------------------------------


def gpu_rows(nbytes: int, runs: int) -> Iterator[dict[str, Any]]:
    """Yield a row per work, strategy and direction, then both directions at once."""
    import gpu_strategies as gpu  # needs cupy and a GPU, unlike --cpu

    for shape in SHAPES:
        work = Work(shape, "cuda", nbytes)
        gpu.HOST.register(work.arena.data_ptr(), work.arena.nbytes)
        yield from work_rows(gpu, work, runs)
        torch.cuda.synchronize()
        gpu.HOST.unregister(work.arena.data_ptr())


def work_rows(gpu: Any, work: Work, runs: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of one work."""
    limits: dict[str, float] = {}
    for kind in gpu.STRATEGIES:
        strategy = attempt(f"{work.name}: {kind.name}", partial(kind, work))
        for direction in DIRECTIONS if strategy else ():
            found = attempt(
                f"{work.name}: {kind.name}: {direction}", partial(speeds, strategy, direction, runs)
            )
            if found and kind is gpu.Limit:
                limits[direction] = found[0]
            if found:
                gb_s, wall_gb_s = found
                yield row(work.name, kind.name, direction, gb_s, wall_gb_s, limits.get(direction))
        del strategy
    for kind in (gpu.Limit, gpu.Staged):
        both = attempt(f"{work.name}: {kind.name}: both ways", partial(both_ways, kind, work))
        if both:
            limits.setdefault("both", both)
            direction = "both at once" if kind.jobs == 1 else f"both at once, {kind.jobs} jobs each"
            yield row(work.name, kind.name, direction, both, None, limits["both"])


def speeds(strategy: Any, direction: str, runs: int) -> tuple[float, float]:
    """Return GB/s by CUDA events and by the wall clock."""
    by_events, by_wall = seconds_of(strategy, direction, runs)
    return strategy.work.nbytes / by_events / 1e9, strategy.work.nbytes / by_wall / 1e9


def seconds_of(strategy: Any, direction: str, runs: int) -> tuple[float, float]:
    """Return median seconds of a checked move, by CUDA events and by the wall clock."""
    work, move = strategy.work, getattr(strategy, direction)
    if strategy.checked:
        getattr(work, f"check_{direction}")(lambda: strategy.run(move), strategy.units)
    times = [strategy.timed(move) for _ in range(WARMUPS + runs)][WARMUPS:]
    by_events, by_wall = (median(seconds) for seconds in zip(*times, strict=True))
    return by_events, by_wall


def both_ways(kind: Any, work: Work) -> float:
    """Return the GB/s of both directions together."""
    strategies = {direction: kind(work) for direction in DIRECTIONS}
    barrier = threading.Barrier(2 * kind.jobs + 1)

    def loop(direction: str) -> None:
        strategy = strategies[direction]
        strategy.run(getattr(strategy, direction))
        barrier.wait(BARRIER_S)
        for _ in range(BOTH_WAYS_MOVES // kind.jobs):
            strategy.run(getattr(strategy, direction))

    threads = [
        threading.Thread(target=loop, args=(direction,)) for direction in DIRECTIONS * kind.jobs
    ]
    for thread in threads:
        thread.start()
    barrier.wait(BARRIER_S)
    begun = time.perf_counter()
    for thread in threads:
        thread.join()
    return 2 * BOTH_WAYS_MOVES * work.nbytes / (time.perf_counter() - begun) / 1e9


def tiny_rows(runs: int) -> Iterator[dict[str, Any]]:
    """Yield the latency of a load of one page."""
    import gpu_strategies as gpu

    work = Work(next(shape for shape in SHAPES if shape.name == "tp8"), "cuda", 1)
    gpu.HOST.register(work.arena.data_ptr(), work.arena.nbytes)
    for kind in gpu.TINY:
        found = attempt(
            f"tiny load: {kind.name}", lambda kind=kind: seconds_of(kind(work), "scatter", runs)
        )
        if found:
            yield {
                "work": "tiny load: 1 page of tp8",
                "strategy": kind.name,
                "direction": "H2D",
                "us on the GPU": f"{found[0] * 1e6:.0f}",
                "us to the return": f"{found[1] * 1e6:.0f}",
            }
    torch.cuda.synchronize()
    gpu.HOST.unregister(work.arena.data_ptr())


def slowdown_rows(nbytes: int) -> Iterator[dict[str, Any]]:
    """Yield what matrix products lose while transfers run."""
    import gpu_strategies as gpu

    works = [Work(shape, "cuda", nbytes) for shape in SHAPES if shape.name in ("llama", "tp8")]
    for work in works:
        gpu.HOST.register(work.arena.data_ptr(), work.arena.nbytes)
    products = list(gpu.products())
    for name, seconds in products:
        for _ in range(PRODUCTS):
            seconds()
        alone = median([seconds() for _ in range(PRODUCTS)])
        for work in works:
            for kind in gpu.BACKGROUND:
                for direction in DIRECTIONS:
                    what = f"{name} beside {work.name}: {kind.name}: {direction}"
                    beside = attempt(what, partial(during, kind, work, direction, seconds))
                    if beside:
                        yield {
                            "product": name,
                            "beside": f"{work.name}: {kind.name}",
                            "direction": "D2H" if direction == "gather" else "H2D",
                            "us alone": f"{alone * 1e6:.1f}",
                            "us beside": f"{beside[0] * 1e6:.1f}",
                            "slowdown": f"{beside[0] / alone:.2f}",
                            "transfer GB/s": f"{beside[1]:.1f}",
                        }
    torch.cuda.synchronize()
    for work in works:
        gpu.HOST.unregister(work.arena.data_ptr())


def during(
    kind: Any, work: Work, direction: str, seconds: Callable[[], float]
) -> tuple[float, float]:
    """Return a product's median seconds during a strategy's moves, and their GB/s."""
    strategy = kind(work)
    stop, moving, moves = threading.Event(), threading.Event(), 0

    def loop() -> None:
        nonlocal moves
        while not stop.is_set():
            strategy.run(getattr(strategy, direction))
            moves += 1
            moving.set()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        if not moving.wait(10):
            raise RuntimeError("the transfer does not move")
        before, begun = moves, time.perf_counter()
        times = [seconds() for _ in range(PRODUCTS)]
        rate = (moves - before) * strategy.work.nbytes / (time.perf_counter() - begun) / 1e9
    finally:
        stop.set()
        thread.join()
    return median(times), rate


# ---- without a GPU -----------------------------------------------------------------------


def cpu_rows(nbytes: int, runs: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of the reference on CPU memory."""
    transfer = TorchTransfer()
    for shape in SHAPES:
        work = Work(shape, "cpu", max(nbytes, 2 * shape.layout.page_nbytes))
        for direction in DIRECTIONS:
            move = partial(
                getattr(transfer, direction), work.pool, work.table(work.units), work.pages, None
            )
            getattr(work, f"check_{direction}")(move, work.units)
            seconds = median([timed(move) for _ in range(runs)])
            yield row(
                work.name,
                "reference on the CPU",
                direction,
                work.nbytes / seconds / 1e9,
                None,
                None,
            )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="no GPU: the reference transfer, small")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write all rows as JSON")
    parser.add_argument(
        "--nbytes", type=int, help=f"payload of a move (default {NBYTES}, with --cpu {CPU_NBYTES})"
    )
    parser.add_argument(
        "--runs", type=int, default=RUNS, help=f"timed moves of each strategy (default {RUNS})"
    )
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    nbytes = arguments.nbytes or (CPU_NBYTES if arguments.cpu else NBYTES)
    command = "python benchmarks/transfer.py" + (" --cpu" if arguments.cpu else "")
    reports = [Report("KV between pool and pages", command)]
    if arguments.cpu:
        reports[0].rows.extend(cpu_rows(nbytes, min(arguments.runs, 3)))
    else:
        reports[0].notes.append(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
        )
        reports[0].notes.append(
            f"{nbytes} bytes a move, random token slots, median of {arguments.runs}"
        )
        reports.append(Report("Other work on the GPU while transfers run back to back", command))
        reports.append(Report("Latency of a tiny load", command))
        sources = gpu_rows(nbytes, arguments.runs), slowdown_rows(nbytes), tiny_rows(arguments.runs)
        for report, rows in zip(reports, sources, strict=True):
            attempt(report.title, lambda report=report, rows=rows: report.rows.extend(rows))
    for report in reports:
        if report.rows:
            report.show(as_json=False)
            print()
    if arguments.json:
        arguments.json.write_text(json.dumps([vars(report) for report in reports], indent=1) + "\n")


if __name__ == "__main__":
    main()
