"""Measure SGLang's HiCache with this store and with its own `file` backend, in turns.

Backup and prefetch run through SGLang's own controller and threads.

    backup     from `write_storage` until the node's host slots are released
    query      hashing the prompt and asking how much of it is stored
    prefetch   from the allocated host slots until the last page is in them

Batches of 128 MiB of new keys. limits, in the same run: one copy of as many bytes within memory; as
many through one TCP connection without any processing. `file` calls no fsync: on a disk it is
measured into the page cache. Every prefetched byte is compared.

After `make test-sglang`; the node runs in its own environment (two minutes; no GPU):

    KVSTORE_NODE_PYTHON=.venv/bin/python .venv-sglang/bin/python benchmarks/hicache.py
"""

import contextlib
import itertools
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"
HARNESS = TESTS / "engines" / "sglang"
sys.path[:0] = [str(TESTS / "helpers"), str(HARNESS / "stubs")]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import harness
    import torch
from measure import Report, Samples, median, parser, progress, rounds  # noqa: E402
from workplace import workplace  # noqa: E402

from kvstore.checksum import CHUNK_NBYTES  # noqa: E402

BATCH_NBYTES = 128 << 20
PAGE_TOKENS = 64
# name -> layers, heads, dim of bfloat16 K and V
SHAPES = {"1 MiB": (8, 8, 64), "4 MiB": (32, 8, 64), "8 MiB, Llama-3-8B": (32, 8, 128)}
ROUNDS, WARMUPS = 9, 2
MEMORY = Path("/dev/shm")


class Backend:
    """One engine with a host pool: its first half is backed up, its second half prefetched into."""

    def __init__(
        self, entry: Any, pages: int, options: dict[str, Any], storage: str = "dynamic"
    ) -> None:
        self._engine = harness.Engine([entry], options, storage=storage)
        self._source = torch.arange(pages * PAGE_TOKENS)
        self._target = self._source + pages * PAGE_TOKENS
        self._salts = itertools.count()
        self._forgets = storage == "file"
        self._host = entry.host_pool

    def turn(self) -> Samples:
        """Run one turn and return its samples."""
        tokens = [next(self._salts), *range(1, self._source.numel())]
        keys = self._engine.hashes(tokens)
        controller = self._engine.controller
        start = time.perf_counter()
        controller.write_storage(self._source, tokens, hash_value=keys)
        stored = controller.ack_backup_queue.get(timeout=60).completed_tokens
        backed_up = time.perf_counter()
        operation = self._engine.query(tokens)
        queried = time.perf_counter()
        loaded, _ = self._engine.fetch(operation, self._target)
        prefetched = time.perf_counter()
        if not stored == loaded == len(tokens):
            raise SystemExit(f"{stored} tokens stored and {loaded} loaded of {len(tokens)}")
        pages = self._host.kv_buffer.view(torch.uint8)
        half = self._source.numel()
        if not torch.equal(pages[:, :half], pages[:, half : 2 * half]):
            raise SystemExit("other bytes came back")
        pages[:, half : 2 * half] = 0
        if self._forgets:
            self._engine.backend.clear()
        return {
            "backup": [backed_up - start],
            "query": [queried - backed_up],
            "prefetch": [prefetched - queried],
        }

    def close(self) -> None:
        """Stop everything that was started."""
        self._engine.detach()


def copies(entry: Any, pages: int) -> Callable[[], Samples]:
    """Return a contender that copies within the pool."""
    memory, half = entry.host_pool.kv_buffer, pages * PAGE_TOKENS
    other = torch.empty_like(memory[:, :half])

    def copy() -> Samples:
        start = time.perf_counter()
        other.copy_(memory[:, :half])
        middle = time.perf_counter()
        memory[:, half : 2 * half].copy_(other)
        end = time.perf_counter()
        memory[:, half : 2 * half] = 0
        return {"backup": [middle - start], "prefetch": [end - middle]}

    return copy


PEER = """
import mmap, socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
memory = mmap.mmap(-1, int(sys.argv[2]))
view = memoryview(memory)
while True:
    left = view
    while left.nbytes:
        got = connection.recv_into(left, min(left.nbytes, int(sys.argv[3])), socket.MSG_WAITALL)
        if not got:
            sys.exit()
        left = left[got:]
    connection.sendall(view)
"""


@contextlib.contextmanager
def tcp() -> Iterator[Callable[[], Samples]]:
    """Yield a contender that sends to a process over TCP and receives it back."""
    memory = memoryview(bytearray(BATCH_NBYTES))
    chunks = [
        memory[start : start + CHUNK_NBYTES] for start in range(0, BATCH_NBYTES, CHUNK_NBYTES)
    ]

    def turn() -> Samples:
        start = time.perf_counter()
        for chunk in chunks:
            connection.sendall(chunk)
        connection.recv(1, socket.MSG_PEEK)  # it answers when it has all
        middle = time.perf_counter()
        for chunk in chunks:
            left = chunk
            while left.nbytes:
                got = connection.recv_into(left, left.nbytes, socket.MSG_WAITALL)
                if not got:
                    raise SystemExit("the other end of the TCP connection is gone")
                left = left[got:]
        return {"backup": [middle - start], "prefetch": [time.perf_counter() - middle]}

    with socket.create_server(("127.0.0.1", 0)) as listener:
        sizes = [str(number) for number in (listener.getsockname()[1], BATCH_NBYTES, CHUNK_NBYTES)]
        with subprocess.Popen([sys.executable, "-c", PEER, *sizes]):
            connection, _ = listener.accept()
            with connection:
                yield turn


@contextlib.contextmanager
def backends(
    entries: dict[str, Any], pages: int, address: str, directories: dict[str, Path]
) -> Iterator[Any]:
    """Yield the backends."""
    ours = harness.options(address, revision="1", load_timeout_s=60.0, save_timeout_s=60.0)
    made = {
        "this store, shm": Backend(entries["default"], pages, {**ours, "wire": "shm"}),
        "this store, shm, memfd pool": Backend(
            entries["shm"], pages, {**ours, "wire": "shm", "revision": "2"}
        ),
        "this store, shm, generic": Backend(
            entries["default"], pages, {**ours, "wire": "shm", "interface_v1": 0, "revision": "3"}
        ),
        "this store, bulk TCP": Backend(
            entries["default"], pages, {**ours, "wire": "bulk", "revision": "4"}
        ),
    }
    for name, directory in directories.items():
        made[f"SGLang file, {name}"] = Backend(
            entries["default"], pages, {"file_storage_path": str(directory)}, storage="file"
        )
    try:
        yield made
    finally:
        for backend in made.values():
            backend.close()


def measured(
    shape: tuple[int, int, int], directories: dict[str, Path], count: int
) -> dict[str, Samples]:
    """Measure one shape."""
    layers, heads, dim = shape
    pages = BATCH_NBYTES // (2 * layers * PAGE_TOKENS * heads * dim * 2)
    slots = 2 * pages * PAGE_TOKENS
    entries = {
        allocator: harness.mha(
            slots=slots, page=PAGE_TOKENS, layers=layers, heads=heads, dim=dim, allocator=allocator
        )
        for allocator in ("default", "shm")
    }
    for entry in entries.values():
        harness.fill(entry.host_pool)
    with (
        harness.start_node("--ram-bytes", "1GiB", "--extent-bytes", "64MiB") as node,
        backends(entries, pages, node.address, directories) as made,
        tcp() as stream,
        progress(count + WARMUPS) as tick,
    ):
        contenders = {"limit: one copy": copies(entries["default"], pages), "limit: TCP": stream}
        contenders |= {name: backend.turn for name, backend in made.items()}
        return rounds(contenders, count, WARMUPS, tick)


def main() -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument(
        "--dir", type=Path, default=Path("."), help="where `file` writes (%(default)s)"
    )
    options.add_argument("--rounds", type=int, default=ROUNDS, help="(%(default)s)")
    chosen = options.parse_args()
    report = Report(
        f"SGLang HiCache: {BATCH_NBYTES >> 20} MiB between the host pool and the store, medians of "
        f"{chosen.rounds}",
        "python benchmarks/hicache.py",
    )
    with harness.parallel(), workplace(chosen.dir) as disk, contextlib.ExitStack() as stack:
        directories = {"disk": disk / "hicache"}
        if MEMORY.is_dir():
            folder = tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=MEMORY)
            directories["tmpfs"] = Path(stack.enter_context(folder)) / "hicache"
        for name, shape in SHAPES.items():
            samples = measured(shape, directories, chosen.rounds)
            limit = samples["limit: one copy"]
            for contender, seconds in samples.items():
                row: dict[str, Any] = {"page": name, "contender": contender}
                for op in ("backup", "prefetch"):
                    row[f"{op} GB/s"] = BATCH_NBYTES / median(seconds[op]) / 1e9
                    row[f"{op} of limit"] = median(limit[op]) / median(seconds[op])
                row["query ms"] = median(seconds["query"]) * 1e3 if "query" in seconds else None
                report.rows.append(row)
    report.show(chosen.json)


if __name__ == "__main__":
    main()
