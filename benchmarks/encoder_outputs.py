"""Time to store and to load an encoder's output through a node on this host.

    python benchmarks/encoder_outputs.py [--wire shm] [--runs 20] [--json]

For each size: milliseconds of CPU in this process and of the clock, median of the runs. A save is
timed from the engine's call to the store's answer, and the call itself apart. A load is timed from
the scheduler's request to verified bytes, and the copy into the engine's tensor apart.
"""

import argparse
import json
import statistics
import time
import uuid

import torch

from gpu_agent import AgentConfig
from gpu_agent.objects.store import ObjectStore
from gpu_agent.objects.tensor_loads import TensorLoads
from gpu_agent.objects.tensors import CHUNK_NBYTES, ChunkPool, TensorSaves, chunk_layout
from kvstore import Client, ClientConfig, Namespace
from kvstore.tools.node_process import NodeProcess

WIDTH = 4096  # of bfloat16: 128 rows are 1 MiB
MIB = (1, 8, 64)
Times = dict[str, float]


def measured(client: Client, mib: int, runs: int) -> Times:
    """Return medians in milliseconds for one size."""
    namespace = Namespace(uuid.uuid4().hex, chunk_layout())
    store, slots = ObjectStore(client, AgentConfig()), mib + 2
    saves = TensorSaves(store, namespace, torch.zeros((slots, CHUNK_NBYTES), dtype=torch.uint8))
    pool = ChunkPool(torch.zeros((slots, CHUNK_NBYTES), dtype=torch.uint8))
    loads = TensorLoads(store, namespace, pool, 0.0)
    found: list[Times] = []
    for run in range(runs + 1):
        output = torch.randn((128 * mib, WIDTH)).to(torch.bfloat16)
        wall, cpu = time.perf_counter(), time.process_time()
        saves.save(str(run), output)
        called = time.perf_counter()
        while saves.pending:
            time.sleep(0.0001)
        saved_wall, saved_cpu = time.perf_counter() - wall, time.process_time() - cpu
        time.sleep(0.01)
        load_wall, load_cpu = time.perf_counter(), time.process_time()
        loads.begin(str(run), len(output), "image")
        while loads.find(str(run), len(output)) is None:
            time.sleep(0.0001)
            loads.poll()
        loaded_wall, loaded_cpu = time.perf_counter() - load_wall, time.process_time() - load_cpu
        copy = time.perf_counter()
        spec, taken = loads.content(str(run))
        target = torch.empty_like(output)
        flat = target.view(-1).view(torch.uint8)
        for slot, (at, start, nbytes) in zip(taken, spec.pieces(), strict=True):
            flat[at : at + nbytes].copy_(pool.rows[slot, start : start + nbytes])
        copied = time.perf_counter() - copy
        assert torch.equal(target, output)
        found.append(
            {
                "save_call": called - wall,
                "save_cpu": saved_cpu,
                "save": saved_wall,
                "load_cpu": loaded_cpu,
                "load": loaded_wall,
                "copy": copied,
            }
        )
    saves.close()
    store.close()
    return {name: 1000 * statistics.median(one[name] for one in found[1:]) for name in found[0]}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--wire", default="shm", choices=["shm", "bulk", "grpc"])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with NodeProcess("--ram-bytes", "4GiB") as node:
        config = ClientConfig(address=node.address, wire=options.wire, connect_timeout_s=5.0)
        with Client(config) as client:
            table = {mib: measured(client, mib, options.runs) for mib in MIB}
    if options.json:
        print(json.dumps(table))
        return
    print("  MiB " + "".join(f"{name:>11}" for name in table[MIB[0]]))
    for mib, times in table.items():
        print(f"{mib:5} " + "".join(f"{one:8.2f} ms" for one in times.values()))


if __name__ == "__main__":
    main()
