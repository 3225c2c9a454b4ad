"""Measure LightLLM's CPU cache pages through its `light_mem` module, beside `memcpy`.

    persist    create "w", until the pages may be reused (data_safe) and until they are stored
               (ready)
    load       create "r", until ready
    query      a request's first question, for all pages of the batch
    memcpy     the same rows copied into other memory, one after the other: no store, no checksum

The calls and their order are those of LightLLM's disk worker, which polls every millisecond;
LightLLM itself is not needed. Contenders take turns; the bytes of the first round are compared.

    python benchmarks/lightllm_cache.py [--rounds 7] [--page-mib 8] [--pages 16] [--json]
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Report, median, parser, timed

from gpu_agent.engines.lightllm import PyLocalCacheService, PyState
from kvstore.tools.node_process import NodeProcess

WIRES = ("shm", "bulk", "grpc")
POLL_S = 0.001


def wait(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    while not condition():
        time.sleep(POLL_S)


class Shim:
    """Use a pool of twice a batch: the first half is stored, the second half read into."""

    def __init__(self, wire: str, address: str, pages: int, page_nbytes: int) -> None:
        os.environ.update({"KVSTORE_ADDRESS": address, "KVSTORE_WIRE": wire, "KVSTORE_SALT": wire})
        os.environ.update(
            {"KVSTORE_AGENT_LOAD_TIMEOUT_S": "30", "KVSTORE_AGENT_LOOKUP_TIMEOUT_S": "10"}
        )
        self.memory = torch.randint(0, 256, (2 * pages, page_nbytes), dtype=torch.uint8)
        self._service = PyLocalCacheService(kvcache_tensor=self.memory, file="", storage_size=0)
        self._sources = torch.arange(pages, dtype=torch.int32)
        self._targets = self._sources + pages
        self._pages, self._chains = pages, 0

    def round(self) -> dict[str, float]:
        """Return the seconds of each step with new pages."""
        self._chains += 1
        hashes = [(self._chains << 64) + number for number in range(self._pages)]
        began = time.perf_counter()
        write = self._service.create(hash_128s=hashes, kv_page_indexer=self._sources, mode="w")
        wait(write.data_safe)
        safe = time.perf_counter() - began
        wait(write.ready)
        stored = time.perf_counter() - began
        asked = timed(lambda: self._service.query(hashes))
        self.memory[self._pages :] = 0
        began = time.perf_counter()
        read = self._service.create(hash_128s=hashes, kv_page_indexer=self._targets, mode="r")
        wait(read.ready)
        loaded = time.perf_counter() - began
        assert set(write.state()) == set(read.state()) == {PyState.Finished}
        if self._chains == 1:
            assert torch.equal(self.memory[: self._pages], self.memory[self._pages :])
        return {"safe": safe, "persist": stored, "load": loaded, "query": asked}

    def close(self) -> None:
        """Stop everything that was started."""
        self._service.close()


def memcpy(memory: torch.Tensor, other: torch.Tensor) -> Callable[[], dict[str, float]]:
    """Return a contender that copies memory."""

    def copy() -> None:
        for source, target in zip(memory, other, strict=False):
            target.copy_(source)

    def back() -> None:
        for source, target in zip(other, memory, strict=False):
            target.copy_(source)

    return lambda: {"persist": timed(copy), "load": timed(back)}


def row(name: str, samples: list[dict[str, float]], nbytes: int) -> dict[str, Any]:
    """Return a row of the table."""

    def rate(step: str) -> float | None:
        return (
            nbytes / median([sample[step] for sample in samples]) / 1e9
            if step in samples[0]
            else None
        )

    asked = median([sample["query"] for sample in samples]) * 1e6 if "query" in samples[0] else None
    return {
        "through": name,
        "persist GB/s": rate("persist"),
        "until pages are free GB/s": rate("safe"),
        "load GB/s": rate("load"),
        "query us": asked and round(asked),
    }


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--page-mib", type=int, default=8, help="size of a page (%(default)s)")
    options.add_argument("--pages", type=int, default=16, help="pages of a batch (%(default)s)")
    args = options.parse_args(argv)
    page_nbytes, nbytes = args.page_mib << 20, args.pages * args.page_mib << 20
    report = Report(
        "Pages of LightLLM's CPU cache, node on the same host",
        "python benchmarks/lightllm_cache.py",
    )
    ram = nbytes * 32  # pages found by a query are held for two seconds, gigabytes at this rate
    with (
        tempfile.TemporaryDirectory() as model,
        NodeProcess(
            "--ram-bytes", str(ram), "--extent-bytes", "64MiB", "--log-level", "WARNING"
        ) as node,
    ):
        (Path(model) / "config.json").write_text("{}")
        (Path(model) / "model.safetensors").write_bytes(b"none")
        os.environ["LIGHTLLM_START_ARGS"] = json.dumps(
            {"model_dir": model, "cpu_cache_token_page_size": 64, "enable_multimodal": False}
        )
        shims = {wire: Shim(wire, node.address, args.pages, page_nbytes) for wire in WIRES}
        memory = shims[WIRES[0]].memory[: args.pages]
        contenders: dict[str, Callable[[], dict[str, float]]] = {
            name: shim.round for name, shim in shims.items()
        }
        contenders["memcpy"] = memcpy(memory, torch.zeros_like(memory))
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
        for number in range(args.rounds + 1):
            for name, contender in contenders.items():
                sample = contender()
                if number:  # the first one connects and touches memory
                    samples[name].append(sample)
        for shim in shims.values():
            shim.close()
    report.rows = [row(name, found, nbytes) for name, found in samples.items()]
    report.notes.append(
        f"{args.pages} pages of {args.page_mib} MiB a batch; medians of {args.rounds} rounds"
    )
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
