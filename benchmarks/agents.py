"""Measure as many agents as GPUs, each in its own process, with one node on their host.

Batches have 32 pages of new keys, two in flight at each agent: 256 MiB of a Llama on one GPU, 32
MiB of one in eight parts. All agents save, then all load, at the same time. Bare: one big copy
between page-locked memory and each GPU, at the same time. GB/s: the sum over the GPUs. Every loaded
byte is compared before. `--clients N`: the same again beside N processes that put and get 16 pages
of 1 MiB over TCP without a pause.

    python benchmarks/agents.py          on a machine with several NVIDIA GPUs and CuPy (a minute)
    python benchmarks/agents.py --cpu    two small CPU pools, to test the script
"""

import argparse
import multiprocessing
import secrets
import sys
import time
import uuid
from typing import Any

import torch
from agent import BATCH_PAGES, IN_FLIGHT, Moves, check, copy_limit
from gpu_work import SHAPES, Work, wait_locked
from measure import Report, median

from gpu_agent import Agent, AgentConfig
from gpu_agent.kernels.available import transfer_for
from kvstore import Client, Namespace, client_config, opaque_layout
from kvstore.tools.node_process import NodeProcess

BATCHES, REPEATS = 12, 5
WORKS = ("llama", "tp8")
STARTED_S = 120.0  # for the slowest agent to be ready
CLIENT_PAGES, CLIENT_PAGE_NBYTES = 16, 1 << 20


def agent_beside(
    number: int, name: str, device: str, address: str, together: Any, found: Any
) -> None:
    """Run one agent; report its saves, loads and bare copies in GB/s."""
    on_gpu = device != "cpu"
    shape = next(shape for shape in SHAPES if shape.name == name)
    pages, batches = (BATCH_PAGES, BATCHES) if on_gpu else (2, 2)
    work = Work(shape, device, pages * shape.layout.page_nbytes)
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


def client_beside(address: str, stop: Any, moved: Any) -> None:
    """Put and get pages until `stop` is set, compare them, and add the bytes to `moved`."""
    namespace = Namespace(f"benchmark {uuid.uuid4()}", opaque_layout(CLIENT_PAGE_NBYTES))
    pages = [secrets.token_bytes(CLIENT_PAGE_NBYTES) for _ in range(CLIENT_PAGES)]
    buffers = [bytearray(CLIENT_PAGE_NBYTES) for _ in range(CLIENT_PAGES)]
    with Client(client_config(address=address, timeout_s=30.0, wire="bulk")) as client:
        while not stop.is_set():
            keys = [secrets.token_bytes(32) for _ in range(CLIENT_PAGES)]
            client.put(namespace, keys, pages)
            assert all(client.get(namespace, keys, buffers))
            assert buffers == pages, "the bytes that came back are not those that were put"
            client.remove(namespace, keys)
            with moved.get_lock():
                moved.value += 2 * CLIENT_PAGES * CLIENT_PAGE_NBYTES


def measured(
    name: str, devices: list[str], address: str, clients: int
) -> tuple[list[dict[str, list[float]]], float]:
    """Return the speeds of each agent, and the clients' GB/s, beside each other."""
    spawn = multiprocessing.get_context("spawn")
    together, found = spawn.Barrier(len(devices)), spawn.SimpleQueue()
    stop, moved = spawn.Event(), spawn.Value("q", 0)
    others = [
        spawn.Process(target=client_beside, args=(address, stop, moved), daemon=True)
        for _ in range(clients)
    ]
    agents = [
        spawn.Process(
            target=agent_beside, args=(number, name, device, address, together, found), daemon=True
        )
        for number, device in enumerate(devices)
    ]
    begun = time.perf_counter()
    for process in [*others, *agents]:
        process.start()
    for process in agents:
        process.join()
    seconds = time.perf_counter() - begun
    stop.set()
    for process in others:
        process.join()
    if any(process.exitcode for process in [*agents, *others]):
        raise SystemExit("a process broke; its reason stands above")
    return [found.get()[1] for _ in devices], moved.value / seconds / 1e9


def row(
    name: str, clients: int, direction: str, speeds: list[dict[str, list[float]]], others: float
) -> dict[str, Any]:
    """Return a row of the table."""
    ours, bare = (
        sum(median(one[key]) for one in speeds) for key in (direction, f"{direction}, bare copies")
    )
    known = bare == bare
    return {
        "work": name,
        "clients": clients,
        "direction": direction,
        "GB/s": f"{ours:.1f}",
        "each": ", ".join(f"{median(one[direction]):.1f}" for one in speeds),
        "bare": f"{bare:.1f}" if known else None,
        "of bare": f"{ours / bare:.3f}" if known else None,
        "clients GB/s": f"{others:.1f}" if clients else None,
    }


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--cpu", action="store_true", help="no GPU: two CPU pools, small")
    options.add_argument("--clients", type=int, default=8, help="processes (%(default)s)")
    options.add_argument("--json", action="store_true")
    args = options.parse_args(argv)
    devices = ["cpu"] * 2 if args.cpu else [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if len(devices) < 2:
        raise SystemExit("this machine has fewer than two GPUs; --cpu proves the script")
    pages, batches = (2, 2) if args.cpu else (BATCH_PAGES, BATCHES)
    in_flight = 4 * args.clients * CLIENT_PAGES * CLIENT_PAGE_NBYTES
    ram = len(devices) * (batches + 4) * pages * SHAPES[0].layout.page_nbytes + in_flight
    flags = (
        "--ram-bytes",
        str(ram + (1 << 30)),
        "--extent-bytes",
        str(64 << 20),
        "--batch-bytes-max",
        str(512 << 20),
    )
    report = Report(
        f"{len(devices)} agents and one node on the same host", "python benchmarks/agents.py"
    )
    with NodeProcess(*flags, "--log-level", "WARNING") as node:
        for name in WORKS:
            for clients in dict.fromkeys((0, args.clients)):
                speeds, others = measured(name, devices, node.address, clients)
                report.rows += [
                    row(name, clients, direction, speeds, others) for direction in ("save", "load")
                ]
    report.notes.append(f"medians of {REPEATS} runs of {batches} batches")
    report.notes.append("clients GB/s: over the agents' whole life, their start included")
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
