"""Measure LMCache's objects through this store, Redis and LMCache's own `lm://` server, in one run.

The measuring functions are those of `lmcache bench l2` (0.5.6), with its setting of 16 keys a call
and two calls at a time; contenders are the adapters that LMCache makes of their JSON:

    kvstore, shm     native_plugin over shared memory with a node on this host
    kvstore, bulk    the same over TCP
    Redis            LMCache's own C++ connector, `resp`, 4 threads
    lm://            the connector of LMCache's in-process mode, which makes one call at a time

They take turns in one process; a turn is four times store, lookup and load of 32 new objects, of
which the first does not count. After a turn the objects are deleted; `lm://` can not delete and
overwrites, which is the faster case for it. Bytes that came back are compared in every turn. MB/s:
2^20 bytes, as in the tool, in the median of all calls. Aim for objects of 1 MiB and above: store
and load each at least twice the better of Redis and `lm://` over shared memory, 1.2 times over TCP.
OMP_WAIT_POLICY keeps torch's idle threads from spinning: the tool zeroes its buffers right before a
load, and a spinning thread would use one of two cores during the measurement.

Run it with LMCache's environment (`make test-lmcache` makes .venv-lmcache-0.5.6) and name a Python
that has the node:

    .venv-lmcache-0.5.6/bin/python benchmarks/lmcache_l2.py --node-python .venv/bin/python
        [--rounds 5] [--json]
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from lmcache.cli.commands.bench.l2_adapter_bench import data, runner
from lmcache.utils import CacheEngineKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector
from measure import Report, Samples, median, parser, progress, rounds
from rival_stores import RedisServer, redis_client, rivals_missing

from kvstore.tools.node_process import NodeProcess

OBJECT_KIB = (512, 1024, 2048, 4096)
KEYS, IN_FLIGHT = 16, 2
TURN = 4
WARMUPS = 1
AIMS = {"kvstore, shm": 2.0, "kvstore, bulk": 1.2}
AIM_KIB_MIN = 1024
OPERATIONS = ("store", "load", "lookup")
NODE_FLAGS = ("--ram-bytes", "512MiB", "--extent-bytes", "64MiB", "--log-level", "WARNING")
START_S = 60.0
Contender = Callable[[], Samples]


class Objects:
    """Hold the same buffers for all contenders, with other bytes in each object."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        count = KEYS * IN_FLIGHT
        buffers = data.make_aligned_tensor(2 * count * nbytes, 4096)
        make = partial(data.make_memory_objects, buffers, KEYS, nbytes)
        self.sources = [make(base_offset=i * KEYS * nbytes) for i in range(IN_FLIGHT)]
        self.targets = [make(base_offset=(count + i * KEYS) * nbytes) for i in range(IN_FLIGHT)]
        self._sent = buffers[: count * nbytes]
        self._received = buffers[count * nbytes :]
        self._sent.copy_(torch.randint(0, 256, self._sent.shape, dtype=torch.uint8))
        self._first = 0

    def new_keys(self) -> list[Any]:
        """Return new keys."""
        self._first += KEYS * IN_FLIGHT
        return [
            data.make_object_keys(KEYS, key_offset=self._first + i * KEYS) for i in range(IN_FLIGHT)
        ]

    def check(self) -> None:
        """Check that loaded bytes are the stored ones."""
        assert torch.equal(self._sent, self._received), "what came back is not what was stored"
        self._received.zero_()


def adapter_turn(adapter: Any, objects: Objects) -> Samples:
    """Run one turn through an adapter."""
    samples: Samples = {operation: [] for operation in OPERATIONS}
    keys = [objects.new_keys() for _ in range(TURN)]
    common = {"in_flight": IN_FLIGHT, "num_keys": KEYS, "rounds": 1, "log": lambda line: None}
    for number, batches in enumerate(keys):
        sized = common | {
            "data_size": objects.nbytes,
            "keys_for_round": lambda r, batches=batches: batches,
        }
        found = {
            "store": runner.bench_store(adapter, objs_for_round=lambda r: objects.sources, **sized),
            "lookup": runner.bench_lookup(
                adapter, keys_for_round=sized["keys_for_round"], **common
            ),
            "load": runner.bench_load(adapter, objs_for_round=lambda r: objects.targets, **sized),
        }
        objects.check()
        for operation, result in found.items():
            assert result.success_counts == [KEYS * IN_FLIGHT], (
                f"{operation}: {result.success_counts}"
            )
            if number:
                samples[operation] += result.round_durations
    adapter.delete([key for batches in keys for batch in batches for key in batch])
    return samples


# ---- lm:// -------------------------------------------------------------------------------


class LmConnector(LMCServerConnector):
    """A connector without its engine: `targets` replace what a load allocates."""

    def __init__(self, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self.client_socket = socket.create_connection(("127.0.0.1", port))
        self.loop = loop
        self.targets: list[Any] = []
        self.local_cpu_backend: Any = SimpleNamespace(allocate=lambda *shape: self.targets.pop(0))
        self.async_socket_lock = asyncio.Lock()


async def lm_turn(connector: LmConnector, objects: Objects) -> Samples:
    """Run one turn through an `lm://` connector."""
    samples: Samples = {operation: [] for operation in OPERATIONS}
    sources = [item for batch in objects.sources for item in batch]
    keys = [
        CacheEngineKey("bench-model", 1, 0, number, torch.uint8) for number in range(len(sources))
    ]
    for number in range(TURN):
        start = time.perf_counter()
        for key, item in zip(keys, sources, strict=True):
            await connector.put(key, item)
        # Puts have no reply; this call returns after them
        assert await connector.exists(keys[-1])
        stored = time.perf_counter()
        assert all([await connector.exists(key) for key in keys])
        found = time.perf_counter()
        connector.targets = [item for batch in objects.targets for item in batch]
        assert None not in [await connector.get(key) for key in keys]
        loaded = time.perf_counter()
        objects.check()
        if number:
            samples["store"].append(stored - start)
            samples["lookup"].append(found - stored)
            samples["load"].append(loaded - found)
    return samples


@contextlib.contextmanager
def lm_server() -> Iterator[int]:
    """Run LMCache's own server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_S
        while True:
            with (
                contextlib.suppress(ConnectionError),
                socket.create_connection(("127.0.0.1", port)),
            ):
                break
            assert process.poll() is None, "lmcache.v1.server did not start"
            assert time.monotonic() < end, "lmcache.v1.server does not listen"
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


# ---- the run -----------------------------------------------------------------------------


@contextlib.contextmanager
def opened(spec: dict[str, Any]) -> Iterator[Any]:
    """Open an adapter as LMCache makes it from JSON."""
    config = parse_args_to_l2_adapters_config(SimpleNamespace(l2_adapter=[json.dumps(spec)]))
    adapter = create_l2_adapter(config.adapters[0])
    try:
        yield adapter
    finally:
        adapter.close()


def ours(address: str, wire: str) -> dict[str, Any]:
    """Return our adapter's options."""
    params = {
        "address": address,
        "wire": wire,
        "revision": "bench",
        "kv_format": "bytes",
        "salt": wire,
    }
    names = {"module_path": "gpu_agent.engines.lmcache", "class_name": "NodeConnector"}
    return {"type": "native_plugin", **names, "adapter_params": params}


def size_rows(
    turns: dict[str, Callable[[Objects], Samples]], kib: int, count: int, tick: Callable[[], None]
) -> Any:
    """Return the rows of one size."""
    objects = Objects(kib << 10)
    contenders = {name: partial(turn, objects) for name, turn in turns.items()}
    samples = rounds(contenders, count, WARMUPS, tick)
    mib = KEYS * IN_FLIGHT * kib / 1024
    seconds = {
        name: {op: median(values) for op, values in ops.items()} for name, ops in samples.items()
    }
    rivals = [found for name, found in seconds.items() if not name.startswith("kvstore")]
    for name, found in seconds.items():
        row: dict[str, Any] = {"object KiB": kib, "contender": name}
        for op in ("store", "load"):
            row[f"{op} MB/s"] = round(mib / found[op])
            row[f"{op} to best rival"] = (
                round(min(rival[op] for rival in rivals) / found[op], 2) if rivals else None
            )
        row["lookup keys/s"] = round(KEYS * IN_FLIGHT / found["lookup"])
        aim = AIMS.get(name) if kib >= AIM_KIB_MIN and rivals else None
        met = aim and min(row["store to best rival"], row["load to best rival"]) >= aim
        yield row | {"aim": f"{aim:g} {'met' if met else 'missed'}" if aim else None}


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument(
        "--rounds", type=int, default=5, help="turns of each contender per size (%(default)s)"
    )
    options.add_argument(
        "--object-kib", type=int, nargs="+", default=OBJECT_KIB, help="sizes (%(default)s)"
    )
    options.add_argument(
        "--node-python", default=sys.executable, help="a python that has the node (%(default)s)"
    )
    args = options.parse_args(argv)
    title = f"LMCache: {IN_FLIGHT} calls of {KEYS} objects, medians of {args.rounds * (TURN - 1)}"
    report = Report(title, " ".join(["python benchmarks/lmcache_l2.py", *argv]))
    loop = asyncio.new_event_loop()
    with contextlib.ExitStack() as stack:
        stack.callback(loop.close)
        node = stack.enter_context(NodeProcess(*NODE_FLAGS, python=args.node_python))
        adapters = {f"kvstore, {wire}": ours(node.address, wire) for wire in ("shm", "bulk")}
        redis = None
        if lacking := rivals_missing().get("Redis"):
            report.notes.append(f"Redis rows are left out; missing here: {lacking}")
        else:
            server = stack.enter_context(contextlib.closing(RedisServer()))
            redis = stack.enter_context(contextlib.closing(redis_client(server.address)))
            report.notes.append(RedisServer.version())
            adapters["Redis"] = {
                "type": "resp",
                "host": "127.0.0.1",
                "port": int(server.address.partition(":")[2]),
                "num_workers": 4,
            }
        turns: dict[str, Callable[[Objects], Samples]] = {
            name: partial(adapter_turn, stack.enter_context(opened(spec)))
            for name, spec in adapters.items()
        }
        connector = LmConnector(stack.enter_context(lm_server()), loop)
        stack.callback(connector.client_socket.close)
        turns["lm://"] = lambda objects: loop.run_until_complete(lm_turn(connector, objects))
        tick = stack.enter_context(progress(len(args.object_kib) * (args.rounds + WARMUPS)))
        for kib in args.object_kib:
            report.rows += size_rows(turns, kib, args.rounds, tick)
            if redis is not None:
                redis.clear()  # its connector can not delete
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
