"""Measure vLLM on a GPU with the store, without, and with other connectors, in turns.

One engine for each connector (vllm_connectors.py) stays up on one GPU, with the same model and
dummy weights, as the values do not matter, and a node on the same host. One engine works at a time.
LMCache's are left out where it is not installed.

    computed   an engine without a connector
    miss       computed, and saved afterwards; skip: the same engine, a request that opts out
    hit        its own cache was emptied before, so that the KV comes from the store, or from the
               other connectors' storage
    local      a hit in its own cache

Seconds are those of `LLM.generate` with one token. Throughput: many requests with new prompts at
once, tokens of prompts and answers. Prompts are new in each round, the same for all engines, and
the order changes from round to round. A machine's speed changes more from minute to minute than
connectors change it: engines are compared within a round.

    PYTHONPATH=. python benchmarks/vllm_gpu.py [--model 0.9b] [--rounds 5]
        [--connectors none store ...] [--tokens 131079 --first-tokens] [--json]
        with a Python that has vLLM, CuPy and the node: see `make gpu-test-vllm`
"""

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
    "1"  # as users have it: the engine's loop in a process of its own
)

from engine_handle import EngineHandle
from measure import Report, Samples, median, parser, progress, rounds
from vllm_connectors import NAMES, Connector, available, connector

from kvstore import Client, ClientConfig
from kvstore.tools.node_process import NodeProcess

LENGTHS = (2_055, 8_199, 30_007)
# layers, width, width within, heads, heads of K and V, vocabulary, size of a head
MODELS = {
    "0.9b": (16, 2048, 5632, 16, 8, 32_000, 128),
    "8b": (32, 4096, 14_336, 32, 8, 128_256, 128),
    # 1.1 B in the shape of Qwen3.5: three layers of recurrent states for each of attention
    "1b-hybrid": (24, 2048, 3584, 8, 2, 32_000, 256),
}
RECURRENT_HEADS = 16  # of 128, for queries, keys and values
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 500_000.0}
REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 64, 1024, 128
SAVED_TOKENS_S = 50_000  # tokens that are saved in a second, at least
SETTLED_S = 60.0
SAVES = "What vLLM's connector stores of a prompt"
OPS = ("miss", "skip", "hit", "local")
WARMUPS = 1
Prompts = Callable[[int], list[int]]
Tick = Callable[[], None]
Row = dict[str, Any]


class Contender:
    """An engine and its requests."""

    def __init__(self, name: str, engine: EngineHandle, connector: Connector) -> None:
        self._name = name
        self._engine = engine
        self._connector = connector

    def first_tokens(self, prompts: Callable[[], list[int]]) -> Samples:
        """Return the seconds to the first token; `prompts()` makes another prompt."""
        prompt = prompts()
        self._forget()
        if self._connector.config is None:
            return {"computed": [self._seconds([prompt], 1)]}
        found = {"miss": [self._seconds([prompt], 1)]}
        time.sleep(self._connector.saves_s + len(prompt) / SAVED_TOKENS_S)
        self._forget()
        self._connector.forget()
        found["hit"] = self._hit(prompt)
        found["local"] = self._hit(prompt)
        if self._connector.skips:
            found["skip"] = [self._seconds([prompts()], 1, skip=True)]
        return found

    def throughput(self, prompts: Callable[[], list[int]]) -> Samples:
        """Return the seconds of many requests."""
        self._forget()
        found = {"new": [self._seconds([prompts() for _ in range(REQUESTS)], ANSWER_TOKENS)]}
        if self._connector.skips:
            self._forget()
            found["skip"] = [
                self._seconds([prompts() for _ in range(REQUESTS)], ANSWER_TOKENS, skip=True)
            ]
        return found

    def dropped(self) -> float:
        """Return how many pages were never saved, as a counter."""
        return float(self._engine.ask("metrics").get("vllm:kvstore_pages_dropped", 0))

    def _hit(self, prompt: list[int]) -> list[float]:
        """Return the seconds of a hit; ours must hit, others may not."""
        found = self._engine.ask("generate", prompts=[prompt], max_tokens=1, logprobs=None)
        cached = found["requests"][0]["cached"] or 0
        if cached >= len(prompt) * 9 // 10:
            return [float(found["seconds"])]
        print(
            f"{self._name}: a prompt of {len(prompt)} tokens was a hit of {cached}", file=sys.stderr
        )
        if self._name == "store":
            raise SystemExit(self._engine.said()[-3000:])
        return []

    def _seconds(self, prompts: list[list[int]], tokens: int, skip: bool = False) -> float:
        found = self._engine.ask(
            "generate", prompts=prompts, max_tokens=tokens, logprobs=None, skip=skip
        )
        return float(found["seconds"])

    def _forget(self) -> None:
        """Empty the engine's own cache."""
        end = time.monotonic() + SETTLED_S
        while not self._engine.ask("reset")["done"]:
            if time.monotonic() > end:
                raise SystemExit(f"blocks stay in use:\n{self._engine.said()[-3000:]}")
            time.sleep(0.05)


def engine_arguments(model: Path, kv_gib: int, tokens_max: int, requests: int) -> dict[str, Any]:
    """Return vLLM's arguments for dummy weights and so many requests at a time, on a GPU."""
    return {
        "model": str(model),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        "block_size": 16,
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": kv_gib << 30,
        "gpu_memory_utilization": 0.03,  # vLLM only compares it with the free memory
        "max_model_len": tokens_max + 256,
        "max_num_seqs": requests,
        "max_num_batched_tokens": 8192,
    }


@contextlib.contextmanager
def contenders(
    names: list[str], model: Path, node: NodeProcess, args: argparse.Namespace, tokens_max: int
) -> Iterator[dict[str, Contender]]:
    """Yield the engines to compare."""
    arguments = engine_arguments(model, args.kv_gib, tokens_max, REQUESTS)
    # FlashInfer may not be installed.
    arguments["additional_config"] = {"gdn_prefill_backend": "triton"}
    with contextlib.ExitStack() as stack:
        connectors = {name: connector(name, node.address, args.tier_gib, stack) for name in names}
        engines = {
            name: EngineHandle(
                name, {**arguments, **({"kv_transfer_config": one.config} if one.config else {})}
            )
            for name, one in connectors.items()
        }
        for engine in engines.values():
            stack.callback(engine.close)
        started(engines)
        if "store" in engines:
            wait_agents(engines["store"])
        yield {name: Contender(name, engine, connectors[name]) for name, engine in engines.items()}


def started(engines: dict[str, EngineHandle]) -> None:
    """Wait for all engines; leave out a rival's that does not start."""
    for name, engine in list(engines.items()):
        try:
            engine.start()
        except AssertionError as error:
            if name in ("none", "store"):
                raise
            print(f"{name} is left out: {error}", file=sys.stderr)
            del engines[name]


def wait_agents(engine: EngineHandle) -> None:
    """Wait for the agents."""
    end = time.monotonic() + SETTLED_S
    while not all(worker["ready"] for worker in engine.ask("agents")["workers"]):
        if time.monotonic() > end:
            raise SystemExit(f"the agents' process is not ready:\n{engine.said()[-3000:]}")
        time.sleep(0.2)


def save_config(name: str, directory: Path) -> None:
    """Write the configuration of a Llama or a hybrid, without weights."""
    layers, hidden, within, heads, kv_heads, vocabulary, head_dim = MODELS[name]
    config = {
        **(_hybrid(layers) if name.endswith("hybrid") else LLAMA),
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": within,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": 1 << 18,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))


def _hybrid(layers: int) -> dict[str, Any]:
    sizes = {
        f"linear_{what}": value
        for role in ("key", "value")
        for what, value in ((f"num_{role}_heads", RECURRENT_HEADS), (f"{role}_head_dim", 128))
    }
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        **sizes,
    }


def stored_rows(store: Contender, node: NodeProcess, new: Prompts, tokens: int) -> Iterator[Row]:
    """Yield the rows of what a new prompt stores, by kind of layer.

    Pages of recurrent states hold bytes; those of attention hold numbers.
    """
    with Client(ClientConfig(address=node.address)) as client:
        before, dropped = _stored(client), store.dropped()
        store.first_tokens(lambda: new(tokens))
        found, dropped = _stored(client), store.dropped() - dropped
    for kind, (pages, nbytes) in found.items():
        pages, nbytes = pages - before[kind][0], nbytes - before[kind][1]
        yield {
            "prompt tokens": tokens,
            "pages of": kind,
            "pages": pages,
            "KiB per token": round(nbytes / tokens / 1024, 2),
        }
    kind = "both, not saved"
    yield {
        "prompt tokens": tokens,
        "pages of": kind,
        "pages": round(dropped),
        "KiB per token": None,
    }


def _stored(client: Client) -> dict[str, tuple[int, int]]:
    """Return the number and the bytes of stored pages by kind."""
    found = {"attention": (0, 0), "states": (0, 0)}
    for space, _ in client.namespaces():
        dtypes = {plane.dtype for group in space.layout.groups for plane in group.planes}
        kind = "states" if dtypes <= {"int8", "uint8"} else "attention"
        pages = sum(1 for _ in client.list_pages(space))
        found[kind] = found[kind][0] + pages, found[kind][1] + pages * space.layout.page_nbytes
    return found


def spread(samples: list[float], unit: float) -> str:
    """Format the median and range of samples."""
    values = sorted(value * unit for value in samples)
    digits = 1 if values[0] < 100 else 0
    return f"{median(values):.{digits}f} ({values[0]:.{digits}f}–{values[-1]:.{digits}f})"


def first_token_rows(
    names: dict[str, Contender], tokens: int, count: int, new: Prompts, tick: Tick
) -> Iterator[Row]:
    """Yield the rows of first tokens."""
    calls = {
        name: lambda one=one: one.first_tokens(lambda: new(tokens)) for name, one in names.items()
    }
    for name, samples in rounds(calls, count, WARMUPS, tick).items():
        found = {
            op: spread(samples[op], 1e3) if samples.get(op) else None for op in ("computed", *OPS)
        }
        yield {"prompt tokens": tokens, "connector": name, **found}


def throughput_rows(
    names: dict[str, Contender], count: int, new: Prompts, tick: Tick
) -> Iterator[Row]:
    """Yield the rows of throughput."""
    calls = {
        name: lambda one=one: one.throughput(lambda: new(PROMPT_TOKENS))
        for name, one in names.items()
    }
    tokens = REQUESTS * (PROMPT_TOKENS + ANSWER_TOKENS)
    samples_of = rounds(calls, count, WARMUPS, tick)
    bare = samples_of.get("none", {}).get("new", [])
    for name, samples in samples_of.items():
        for op, seconds in samples.items():
            what = f"{name}, all skip" if op == "skip" else name
            rate = spread([tokens / value for value in seconds], 1e-3)
            # In the same round
            beside = [one / value for one, value in zip(bare, seconds, strict=False)]
            ratio = (
                f"{median(beside):.2f} ({min(beside):.2f}–{max(beside):.2f})" if beside else None
            )
            yield {"connector": what, "thousand tokens/s": rate, "of none, by rounds": ratio}


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument("--model", choices=MODELS, default="0.9b", help="(%(default)s)")
    options.add_argument(
        "--rounds", type=int, default=5, help="of each length, and of the throughput (%(default)s)"
    )
    options.add_argument(
        "--connectors", choices=NAMES, nargs="+", default=NAMES[:-1], help="(%(default)s)"
    )
    options.add_argument(
        "--tokens",
        type=int,
        nargs="*",
        default=LENGTHS,
        help="prompt lengths; none: only the throughput (%(default)s)",
    )
    options.add_argument("--first-tokens", action="store_true", help="no throughput")
    options.add_argument(
        "--kv-gib", type=int, default=12, help="KV cache of each engine (%(default)s)"
    )
    options.add_argument(
        "--tier-gib",
        type=int,
        default=12,
        help="RAM of the node, and of each that keeps KV elsewhere (%(default)s)",
    )
    args = options.parse_args(argv)
    command = " ".join(["python benchmarks/vllm_gpu.py", *argv])
    firsts, sums, saves = (
        Report("vLLM's first token on a GPU, ms", command),
        Report("vLLM's throughput on a GPU", command),
        Report(SAVES, command),
    )
    numbers = random.Random(time.time_ns())
    vocabulary = MODELS[args.model][5]

    def new(tokens: int) -> list[int]:
        return [numbers.randrange(3, vocabulary) for _ in range(tokens)]

    with contextlib.ExitStack() as stack:
        model = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-")))
            / "model"
        )
        save_config(args.model, model)
        python = os.environ.get("KVSTORE_NODE_PYTHON", sys.executable)
        flags = ("--ram-bytes", f"{args.tier_gib}GiB", "--log-level", "WARNING")
        node = stack.enter_context(NodeProcess(*flags, python=python))
        longest = max([*args.tokens, PROMPT_TOKENS + ANSWER_TOKENS])
        names = available(args.connectors)
        engines = stack.enter_context(contenders(names, model, node, args, longest))
        if "store" in engines:
            for tokens in args.tokens:
                saves.rows += stored_rows(engines["store"], node, new, tokens)
            _show(saves, args)
        tick = stack.enter_context(progress((args.rounds + WARMUPS) * (len(args.tokens) + 1)))
        for tokens in args.tokens:
            firsts.rows += first_token_rows(engines, tokens, args.rounds, new, tick)
        _show(firsts, args)
        if not args.first_tokens:
            sums.rows += throughput_rows(engines, args.rounds, new, tick)
            sums.notes.append(
                f"{REQUESTS} new prompts of {PROMPT_TOKENS} tokens at once, {ANSWER_TOKENS} tokens "
                "of answer each"
            )
            _show(sums, args)


def _show(report: Report, args: argparse.Namespace) -> None:
    if not report.rows:
        return
    if report.title != SAVES:
        report.notes.append(
            f"median (least–greatest) of {args.rounds} rounds; all engines up, one at a time works"
        )
    report.show(args.json)
    print(flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
