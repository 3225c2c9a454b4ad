"""Measure the asyncio client beside the synchronous one, over bulk TCP to one node.

    sync   1 or 32 threads share one `kvstore.Client`
    aio    1 or 32 tasks share one `kvstore.aio.Client` in one thread

Both take turns in one run. A lookup has 64 keys; a get reads 16 pages of 256 KiB, whose bytes are
compared. CPU: of this process, per call.

    python benchmarks/aio.py [--seconds 1.0] [--rounds 3] [--json]
"""

import asyncio
import concurrent.futures
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from measure import Report, parser

import kvstore.aio
from kvstore import Client, ClientConfig, Namespace, opaque_layout
from kvstore.tools.node_process import NodeProcess
from kvstore.tools.trace import page_content

PAGE_NBYTES, BATCH, LOOKED_UP = 256 << 10, 16, 64
SPACE = Namespace("aio-benchmark", opaque_layout(PAGE_NBYTES))
KEYS = [number.to_bytes(32, "big") for number in range(LOOKED_UP)]
CONTENT = [page_content(SPACE.digest, key, PAGE_NBYTES) for key in KEYS[:BATCH]]


def of_threads(client: Client, op: str, count: int, seconds: float) -> int:
    """Return how many calls so many threads complete."""

    def work() -> int:
        calls, buffers = 0, [bytearray(PAGE_NBYTES) for _ in range(BATCH)]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if op == "lookup":
                client.lookup(SPACE, KEYS)
            else:
                assert all(client.get(SPACE, KEYS[:BATCH], buffers))
            calls += 1
        assert op == "lookup" or buffers == CONTENT
        return calls

    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        return sum(future.result() for future in [threads.submit(work) for _ in range(count)])


async def of_tasks(client: kvstore.aio.Client, op: str, count: int, seconds: float) -> int:
    """Return how many calls so many tasks complete."""

    async def work() -> int:
        calls, buffers = 0, [bytearray(PAGE_NBYTES) for _ in range(BATCH)]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if op == "lookup":
                await client.lookup(SPACE, KEYS)
            else:
                assert all(await client.get(SPACE, KEYS[:BATCH], buffers))
            calls += 1
        assert op == "lookup" or buffers == CONTENT
        return calls

    return sum(await asyncio.gather(*(work() for _ in range(count))))


def rows(config: ClientConfig, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Return a row per operation, number of concurrent calls and client."""
    found: dict[tuple[str, int, str], list[tuple[float, float]]] = {}

    def timed(kind: tuple[str, int, str], run: Callable[[], int]) -> None:
        began, used = time.monotonic(), time.process_time()
        calls = run()
        rate, cpu_us = calls / (time.monotonic() - began), time.process_time() - used
        found.setdefault(kind, []).append((rate, 1e6 * cpu_us / calls))

    loop = asyncio.new_event_loop()
    with Client(config) as client, contextlib.closing(loop):
        client.put(SPACE, KEYS[:BATCH], CONTENT)
        other = kvstore.aio.Client(config)
        for number in range(rounds + 1):
            for op, count in itertools.product(("lookup", "get"), (1, 32)):
                timed((op, count, "sync"), partial(of_threads, client, op, count, seconds))
                tasks = of_tasks(other, op, count, seconds)
                timed((op, count, "aio"), partial(loop.run_until_complete, tasks))
            if not number:
                found.clear()  # the first round warms up
        loop.run_until_complete(other.close())
    return [
        {
            "op": op,
            "concurrent": count,
            "client": name,
            "calls_per_s": round(statistics.median(rate for rate, _ in some)),
            "cpu_us": round(statistics.median(cpu for _, cpu in some), 1),
            "gb_per_s": round(
                statistics.median(rate for rate, _ in some) * BATCH * PAGE_NBYTES / 1e9, 2
            )
            if op == "get"
            else None,
        }
        for (op, count, name), some in found.items()
    ]


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=1.0)
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args(argv)
    report = Report("asyncio beside threads", " ".join(["python benchmarks/aio.py", *argv]))
    with NodeProcess("--ram-bytes", "256MiB") as node:
        config = ClientConfig(node.address, wire="bulk", timeout_s=30.0)
        report.rows = rows(config, args.seconds, args.rounds)
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
