"""Measure as many agents as GPUs, each in its own process, with one node on their host.

Batches have 32 llama pages of new keys, two in flight at each agent. All agents save, then all
load, at the same time. Bare: one big copy between page-locked memory and each GPU, at the same
time. GB/s: the sum over the GPUs. Every loaded byte is compared before.

    python benchmarks/agents.py          on a machine with several NVIDIA GPUs and CuPy (a minute)
    python benchmarks/agents.py --cpu    two small CPU pools, to test the script
"""

import argparse
import multiprocessing
import sys
import uuid
from typing import Any

import torch
from agent import BATCH_PAGES, IN_FLIGHT, Moves, check, copy_limit
from gpu_work import SHAPES, Work, wait_locked
from measure import Report, median

from gpu_agent import Agent, AgentConfig
from gpu_agent.kernels.available import transfer_for
from kvstore import Client, Namespace, client_config
from kvstore.tools.node_process import NodeProcess

BATCHES, REPEATS = 12, 5
STARTED_S = 120.0  # for the slowest agent to be ready


def beside(number: int, device: str, address: str, together: Any, found: Any) -> None:
    """Run one agent; report its saves, loads and bare copies in GB/s."""
    on_gpu = device != "cpu"
    pages, batches = (BATCH_PAGES, BATCHES) if on_gpu else (2, 2)
    work = Work(SHAPES[0], device, pages * SHAPES[0].layout.page_nbytes)
    if on_gpu:
        torch.cuda.set_device(device)
    transfer = transfer_for(work.pool.device)
    namespace = Namespace(model=f"benchmark {uuid.uuid4()}", layout=work.pool.layout)
    speeds: dict[str, list[float]] = {}
    with Client(client_config(address=address, timeout_s=30.0)) as client:
        config = AgentConfig(pending_nbytes_max=1 << 36)
        with Agent(client, namespace, work.pool, config, transfer) as agent:
            moves = Moves(agent, client, work, batches)
            moves.run("save", IN_FLIGHT)
            wait_locked(client, namespace, moves.keys[0], transfer)
            check(agent, moves, work)
            for direction in ("save", "load"):
                together.wait(STARTED_S)
                speeds[f"{direction}, bare copies"] = [copy_limit(work, direction)]
                speeds[direction] = []
                for _ in range(REPEATS):
                    if direction == "save":
                        moves.forget()
                    together.wait(STARTED_S)
                    speeds[direction].append(moves.run(direction, IN_FLIGHT))
            assert client.stats.corrupt_pages == 0
            moves.forget()
    found.put((number, speeds))


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--cpu", action="store_true", help="no GPU: two CPU pools, small")
    options.add_argument("--json", action="store_true")
    args = options.parse_args(argv)
    devices = ["cpu"] * 2 if args.cpu else [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if len(devices) < 2:
        raise SystemExit("this machine has fewer than two GPUs; --cpu proves the script")
    pages, batches = (2, 2) if args.cpu else (BATCH_PAGES, BATCHES)
    ram = len(devices) * (batches + 4) * pages * SHAPES[0].layout.page_nbytes + (1 << 30)
    spawn = multiprocessing.get_context("spawn")
    together, found = spawn.Barrier(len(devices)), spawn.SimpleQueue()
    flags = (
        "--ram-bytes",
        str(ram),
        "--extent-bytes",
        str(64 << 20),
        "--batch-bytes-max",
        str(512 << 20),
    )
    with NodeProcess(*flags, "--log-level", "WARNING") as node:
        agents = [
            spawn.Process(
                target=beside, args=(number, device, node.address, together, found), daemon=True
            )
            for number, device in enumerate(devices)
        ]
        for process in agents:
            process.start()
        for process in agents:
            process.join()
        if any(process.exitcode for process in agents):
            raise SystemExit("an agent broke; its reason stands above")
    speeds = [found.get()[1] for _ in devices]
    report = Report(
        f"{len(devices)} agents and one node on the same host", "python benchmarks/agents.py"
    )
    for direction in ("save", "load"):
        ours, bare = (
            sum(median(one[name]) for one in speeds)
            for name in (direction, f"{direction}, bare copies")
        )
        of_limit = f"{ours / bare:.3f}" if bare == bare else None
        each = ", ".join(f"{median(one[direction]):.1f}" for one in speeds)
        bare_text = f"{bare:.1f}" if bare == bare else None
        report.rows.append(
            {
                "direction": direction,
                "GB/s": f"{ours:.1f}",
                "each": each,
                "bare": bare_text,
                "of bare": of_limit,
            }
        )
    report.notes.append(f"medians of {REPEATS} runs of {batches} batches")
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
