"""Measure the first token of a prompt that one vLLM engine computes and another one answers.

    computed    decode's engine computes the prompt itself
    store       prefill on the first GPU, through a node on this host, decode on the second one,
                which waits for prefill's ticket
    no ticket   the same without the ticket: decode asks once, and computes what is not stored yet
    nixl        from GPU to GPU by vLLM's NixlConnector, where it is installed

A proxy's calls: prefill generates one token, decode gets what prefill's answer carries. Seconds are
those of `LLM.generate`; those of both calls add up. Weights are random, and prompts new in each
round. "loaded": tokens that decode did not compute, the fewest of all rounds; for NIXL vLLM reports
what prefill did not compute.

    PYTHONPATH=. python benchmarks/handover.py [--model 0.9b] [--rounds 5]
        [--tokens 8199 30007] [--ways computed store ...] [--one-gpu | --cpu] [--json]
        with a Python that has vLLM and, on GPUs, CuPy
"""

import argparse
import contextlib
import importlib.util
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
    "1"  # as users have it: the engine's loop in a process of its own
)

from engine_handle import EngineHandle
from measure import Report, Samples, median, parser, progress, rounds
from ports import free_ports
from vllm_gpu import MODELS, engine_arguments, save_config, spread, started, wait_agents
from vllm_server import REMOTE_DECODE, save_llama, store_config

from kvstore.tools.node_process import NodeProcess

WAYS = ("computed", "store", "no ticket", "nixl")
LENGTHS = (8_199, 30_007)
VOCABULARY = 512  # of the model on a CPU
WARMUPS = 1
SETTLED_S = 60.0
New = Callable[[int], list[int]]
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


@dataclass
class Way:
    """A way to the first token. `prefill`: None where decode computes. `asks`: for a ticket."""

    prefill: EngineHandle | None
    decode: EngineHandle
    asks: bool = True
    loaded: list[int] = field(default_factory=list)  # tokens, by rounds

    def first_token(self, prompt: list[int]) -> Samples:
        """Return the seconds of both calls, and together."""
        for engine in (self.prefill, self.decode):
            if engine:
                forget(engine)
        found: Samples = {}
        transfer: dict[str, Any] | None = None
        if self.prefill:
            ask = REMOTE_DECODE if self.asks else None
            before = _generate(self.prefill, prompt, ask)
            transfer = before["requests"][0]["transfer"]
            found["prefill"] = [before["seconds"]]
        after = _generate(self.decode, prompt, transfer)
        self.loaded.append(after["requests"][0]["cached"] or 0)
        found["decode"] = [after["seconds"]]
        found["first token"] = [sum(seconds for (seconds,) in found.values())]
        return found


def _generate(
    engine: EngineHandle, prompt: list[int], transfer: dict[str, Any] | None
) -> dict[str, Any]:
    order = {"max_tokens": 1, "logprobs": None, "transfer": transfer}
    return engine.ask("generate", prompts=[prompt], **order)


def forget(engine: EngineHandle) -> None:
    """Empty the engine's own cache, once its saves and hand-overs have ended."""
    end = time.monotonic() + SETTLED_S
    while not engine.ask("reset")["done"]:
        if time.monotonic() > end:
            raise SystemExit(f"blocks stay in use:\n{engine.said()[-3000:]}")
        time.sleep(0.05)


def available(ways: list[str]) -> list[str]:
    """Return the ways that can be gone here; print which cannot."""
    if "nixl" in ways and not importlib.util.find_spec("nixl"):
        print("NIXL is not installed here (pip install nixl): left out", file=sys.stderr)
        return [way for way in ways if way != "nixl"]
    return ways


@contextlib.contextmanager
def engines(
    names: list[str], arguments: dict[str, Any], address: str, gpus: tuple[str, str] | None
) -> Iterator[dict[str, Way]]:
    """Start two engines for each connector, one on each GPU; yield the ways by name."""
    configs = {
        "computed": None,
        "store": store_config(
            address, revision="dummy", slow_hits="take", handover_wait_s=10.0, lookup_timeout_s=10.0
        ),
        "nixl": NIXL,
    }
    wanted = dict.fromkeys("store" if name == "no ticket" else name for name in names)
    ports = iter(free_ports(2 * len(wanted)))
    running: dict[str, EngineHandle] = {}
    with contextlib.ExitStack() as stack:
        for kind in wanted:
            config = configs[kind]
            for side in (1,) if kind == "computed" else (0, 1):
                variables = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(next(ports))}
                if gpus:
                    variables["CUDA_VISIBLE_DEVICES"] = gpus[side]
                more = {"kv_transfer_config": config} if config else {}
                engine = EngineHandle(f"{kind} {side}", {**arguments, **more}, **variables)
                stack.callback(engine.close)
                running[f"{kind} {side}"] = engine
        started(running)
        for name, engine in running.items():
            if name.startswith("store"):
                wait_agents(engine)
        ways = {}
        for name in names:
            kind = "store" if name == "no ticket" else name
            if f"{kind} 1" in running:
                before = running.get(f"{kind} 0")
                ways[name] = Way(before, running[f"{kind} 1"], asks=name != "no ticket")
        yield ways


def rows(ways: dict[str, Way], tokens: int, args: argparse.Namespace, new: New) -> Iterator[Any]:
    """Yield the rows of one length of prompt."""
    calls = {name: lambda way=way: way.first_token(new(tokens)) for name, way in ways.items()}
    with progress(args.rounds + WARMUPS) as tick:
        samples_of = rounds(calls, args.rounds, WARMUPS, tick)
    computed = samples_of.get("computed", {}).get("first token", [])
    for name, samples in samples_of.items():
        beside = [
            mine / theirs for mine, theirs in zip(samples["first token"], computed, strict=False)
        ]
        yield {
            "prompt tokens": tokens,
            "way": name,
            **{
                op: spread(samples[op], 1e3) if op in samples else None
                for op in ("prefill", "decode", "first token")
            },
            "of computed": round(median(beside), 2) if beside else None,
            "loaded": None if name == "nixl" else min(ways[name].loaded[-args.rounds :]),
        }


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument("--model", choices=MODELS, default="0.9b", help="(%(default)s)")
    options.add_argument("--rounds", type=int, default=5, help="of each length (%(default)s)")
    options.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS, help="(all)")
    options.add_argument(
        "--tokens", type=int, nargs="+", default=LENGTHS, help="prompt lengths (%(default)s)"
    )
    options.add_argument(
        "--kv-gib", type=int, default=8, help="KV cache of an engine (%(default)s)"
    )
    options.add_argument("--ram-gib", type=int, default=16, help="RAM of the node (%(default)s)")
    where = options.add_mutually_exclusive_group()
    where.add_argument("--one-gpu", action="store_true", help="both engines on the first GPU")
    where.add_argument("--cpu", action="store_true", help="a tiny model, to try this program")
    args = options.parse_args(argv)
    report = Report(
        "First token after a hand-over, ms", f"python benchmarks/handover.py {' '.join(argv)}"
    )
    numbers = random.Random(time.time_ns())
    vocabulary = VOCABULARY if args.cpu else MODELS[args.model][5]

    def new(tokens: int) -> list[int]:
        return [numbers.randrange(3, vocabulary) for _ in range(tokens)]

    with contextlib.ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-"))
        model = Path(made) / "model"
        if args.cpu:
            save_llama(model, 4, 384, VOCABULARY)
            arguments = {"model": str(model), "max_model_len": max(args.tokens) + 64}
        else:
            save_config(args.model, model)
            arguments = engine_arguments(model, args.kv_gib, max(args.tokens), 16)
        python = os.environ.get("KVSTORE_NODE_PYTHON", sys.executable)
        flags = ("--ram-bytes", f"{args.ram_gib}GiB", "--log-level", "WARNING")
        node = stack.enter_context(NodeProcess(*flags, python=python))
        gpus = None if args.cpu else ("0", "0" if args.one_gpu else "1")
        names = available(list(args.ways))
        ways = stack.enter_context(engines(names, arguments, node.address, gpus))
        for tokens in args.tokens:
            report.rows += rows(ways, tokens, args, new)
    report.notes.append(
        f"median (least–greatest) of {args.rounds} rounds; one engine at a time works"
    )
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
