"""Measure saves and loads through the agent, end to end, with a node on the same host.

    save     lookup, reserve, gather into the node's memory, checksum, commit
    load     acquire, verify, scatter, release

Batches have 32 pages of new keys. "sustained": two in flight, as the agent's two workers allow;
"one batch": one alone. limit: one big copy between page-locked memory and the GPU in the same run,
by CUDA events. Every loaded byte is compared. Aim: sustained at least 0.95 of the limit.

    python benchmarks/agent.py                 on a machine with an NVIDIA GPU and CuPy (a minute)
    python benchmarks/agent.py --in-flight 4   as engines do, which do not wait between batches
    python benchmarks/agent.py --in-flight 3 --workers 3
    python benchmarks/agent.py --cpu           a small CPU pool, to test the script
"""

import argparse
import sys
import time
import uuid
from typing import Any

import torch
from gpu_work import PAGE_TOKENS, SHAPES, Work, synchronize, wait_locked
from measure import Report, median

from gpu_agent import Agent, AgentConfig
from gpu_agent.kernels.available import transfer_for
from gpu_agent.load_pipeline import LoadResult, SaveResult
from kvstore import Client, Namespace, client_config, prefix_hashes
from kvstore.tools.node_process import NodeProcess

BATCH_PAGES = 32
IN_FLIGHT = 2
AIM = 0.95
WAIT_S = 60.0


def copy_limit(work: Work, direction: str) -> float:
    """Measure one copy of everything in page-locked memory; return GB/s."""
    if not torch.cuda.is_available():
        return float("nan")
    host = torch.empty(work.nbytes, dtype=torch.uint8, pin_memory=True)
    gpu = torch.empty(work.nbytes, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        if direction == "save":
            host.copy_(gpu, non_blocking=True)
        else:
            gpu.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return work.nbytes / median(seconds) / 1e9


class Moves:
    """Saves and loads of one work's batches."""

    def __init__(self, agent: Agent, client: Client, work: Work, batches: int) -> None:
        self._agent, self._client, self._work = agent, client, work
        self._tokens = work.units
        self.keys = [
            prefix_hashes(
                [number * 7919 + token for token in range(PAGE_TOKENS * work.count)], PAGE_TOKENS
            )
            for number in range(batches)
        ]

    def forget(self) -> None:
        """Remove all pages."""
        for keys in self.keys:
            self._client.remove(self._agent.namespace, keys)

    def save(self, keys: list[bytes]) -> Any:
        """Begin to save a batch."""
        return self._agent.save(keys, self._tokens).done

    def load(self, keys: list[bytes]) -> Any:
        """Begin to load a batch."""
        return self._agent.load(keys, self._tokens).done

    def run(self, direction: str, in_flight: int) -> float:
        """Move all batches, some at a time, and return GB/s."""
        running: list[Any] = []
        begun = time.perf_counter()
        for keys in self.keys:
            if len(running) == in_flight:
                self._check(running.pop(0).result(WAIT_S))
            running.append(getattr(self, direction)(keys))
        for done in running:
            self._check(done.result(WAIT_S))
        return len(self.keys) * self._work.nbytes / (time.perf_counter() - begun) / 1e9

    def _check(self, result: SaveResult | LoadResult) -> None:
        moved = result.stored if isinstance(result, SaveResult) else result.loaded
        assert moved == self._work.count, result


def rows(
    client: Client, works: list[Work], args: argparse.Namespace, batches: int, repeats: int
) -> list[dict[str, Any]]:
    """Return the table's rows."""
    found = []
    config = AgentConfig(pending_nbytes_max=1 << 36, workers=args.workers)
    for work in works:
        namespace = Namespace(model=f"benchmark {uuid.uuid4()}", layout=work.pool.layout)
        transfer = transfer_for(work.pool.device)
        with Agent(client, namespace, work.pool, config, transfer) as agent:
            moves = Moves(agent, client, work, batches)
            moves.run("save", args.in_flight)
            wait_locked(client, namespace, moves.keys[0], transfer)
            check(agent, moves, work)
            for direction in ("save", "load"):
                limit = copy_limit(work, direction)
                for name, in_flight in (("sustained", args.in_flight), ("one batch", 1)):
                    speeds = []
                    for _ in range(repeats):
                        if direction == "save":
                            moves.forget()
                        speeds.append(moves.run(direction, in_flight))
                    found.append(row(work, direction, name, median(speeds), limit))
            assert client.stats.corrupt_pages == 0
            moves.forget()
    return found


def check(agent: Agent, moves: Moves, work: Work) -> None:
    """Check every byte of saved and loaded pages, and that nothing else is written."""
    expected = work.memory.clone()
    taken = torch.zeros(work.pool.planes[0].bits.shape[0], dtype=torch.bool)
    taken[work.units] = True
    for plane in work.pool.planes:
        plane.bits[taken.to(plane.bits.device)] = 0x5A
    synchronize()
    assert not torch.equal(work.memory, expected)
    moves.run("load", 1)
    synchronize()
    assert torch.equal(work.memory, expected), f"{work.name}: loaded bytes are wrong"


def row(work: Work, direction: str, name: str, speed: float, limit: float) -> dict[str, Any]:
    """Return a row of the table."""
    known = limit == limit
    return {
        "work": work.name,
        "batch": f"{work.count} pages, {work.nbytes >> 20} MiB",
        "direction": direction,
        "jobs": name,
        "GB/s": f"{speed:.1f}",
        "limit GB/s": f"{limit:.1f}" if known else None,
        "of limit": f"{speed / limit:.3f}" if known else None,
        f"aim {AIM}": ("met" if speed >= AIM * limit else "missed")
        if known and name == "sustained"
        else None,
    }


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--cpu", action="store_true", help="no GPU: a CPU pool, small")
    options.add_argument("--batches", type=int, default=12)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument(
        "--in-flight", type=int, default=IN_FLIGHT, help="batches of the rows that are sustained"
    )
    options.add_argument(
        "--workers", type=int, default=IN_FLIGHT, help="the agent's, for each direction"
    )
    options.add_argument("--json", action="store_true")
    args = options.parse_args(argv)
    pages = 2 if args.cpu else BATCH_PAGES
    batches = 2 if args.cpu else args.batches
    works = [
        Work(shape, "cpu" if args.cpu else "cuda", pages * shape.layout.page_nbytes)
        for shape in SHAPES
        if shape.name in ("llama", "mla", "tp8")
    ]
    ram = (batches + 4) * max(work.nbytes for work in works) + (1 << 30)
    report = Report("Pages through the agent, node on the same host", "python benchmarks/agent.py")
    extent = 64 << 20
    flags = (
        "--ram-bytes",
        str(ram),
        "--extent-bytes",
        str(extent),
        "--batch-bytes-max",
        str(512 << 20),
    )
    with (
        NodeProcess(*flags, "--log-level", "WARNING") as node,
        Client(client_config(address=node.address, timeout_s=30.0)) as client,
    ):
        report.rows = rows(client, works, args, batches, 1 if args.cpu else args.repeats)
        report.notes.append(
            f"over the {client.wire_name} wire; medians of {args.repeats} runs of {batches} batches"
        )
        report.notes.append(f"sustained: {args.in_flight} in flight, {args.workers} workers")
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
