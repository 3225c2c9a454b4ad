"""vLLM on a GPU with the store, without, and with its own OffloadingConnector: first tokens and throughput, in turns.

Three engines with the same model (dummy weights: what is computed does not matter) stay up on one GPU, and a node on
the same host. One at a time works.

    computed   an engine without a connector
    miss       computed, and saved behind it; skip: the same engine, a request that stays out of the store
    hit        its own cache was emptied before, so that the KV comes from the store, or from vLLM's CPU tier
    local      a hit in its own cache

Seconds are those of `LLM.generate` with one token. Throughput: requests of new prompts at once, their prompt's and
answer's tokens. Prompts are new in each round, the same for all engines, and the order changes from round to round.

    PYTHONPATH=. python benchmarks/vllm_gpu.py [--model 0.9b] [--rounds 5] [--json]
                    with a python that has vLLM, CuPy and the node: see `make gpu-test-vllm`
"""

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

sys.path.append(str(Path(__file__).parent.parent / "tests" / "engines" / "common"))
sys.path.append(str(Path(__file__).parent.parent / "tests" / "engines" / "vllm"))
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # as users have it: the engine's loop in a process of its own

from engine_handle import EngineHandle
from measure import Report, Samples, median, parser, progress, rounds
from vllm_server import store_config

from kvstore.measure.node_process import NodeProcess

LENGTHS = (2_055, 8_199, 30_007)
# layers, width, width within, heads, heads of K and V, vocabulary; heads of 128
MODELS = {"0.9b": (16, 2048, 5632, 16, 8, 32_000), "8b": (32, 4096, 14_336, 32, 8, 128_256)}
REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 64, 1024, 128
STORED_S = 1.0  # until what was computed is saved; a prompt that is no hit then ends the run
SETTLED_S = 60.0
OPS = ("miss", "skip", "hit", "local")
WARMUPS = 1


class Contender:
    """An engine and what it is asked for. `keeps`: what it computed is a hit later; `skips`: requests can stay out."""

    def __init__(self, engine: EngineHandle, keeps: bool, skips: bool) -> None:
        self._engine = engine
        self._keeps = keeps
        self._skips = skips

    def first_tokens(self, prompts: Callable[[], list[int]]) -> Samples:
        """Of one prompt of a length; `prompts()` makes another."""
        prompt = prompts()
        self._forget()
        if not self._keeps:
            return {"computed": [self._seconds([prompt], 1)]}
        found = {"miss": [self._seconds([prompt], 1)]}
        time.sleep(STORED_S)
        self._forget()
        found["hit"] = [self._seconds([prompt], 1, cached=len(prompt) * 9 // 10)]
        found["local"] = [self._seconds([prompt], 1, cached=len(prompt) * 9 // 10)]
        if self._skips:
            found["skip"] = [self._seconds([prompts()], 1, skip=True)]
        return found

    def throughput(self, prompts: Callable[[], list[int]]) -> Samples:
        self._forget()
        found = {"new": [self._seconds([prompts() for _ in range(REQUESTS)], ANSWER_TOKENS)]}
        if self._skips:
            self._forget()
            found["skip"] = [self._seconds([prompts() for _ in range(REQUESTS)], ANSWER_TOKENS, skip=True)]
        return found

    def _seconds(self, prompts: list[list[int]], tokens: int, skip: bool = False, cached: int = 0) -> float:
        found = self._engine.ask("generate", prompts=prompts, max_tokens=tokens, logprobs=None, skip=skip)
        if min(request["cached"] or 0 for request in found["requests"]) < cached:
            raise SystemExit(
                f"a prompt of {len(prompts[0])} tokens was no hit of {cached}:\n{self._engine.said()[-3000:]}"
            )
        return float(found["seconds"])

    def _forget(self) -> None:
        """The engine's own cache; blocks that are being saved are in it until they are."""
        end = time.monotonic() + SETTLED_S
        while not self._engine.ask("reset")["done"]:
            if time.monotonic() > end:
                raise SystemExit(f"blocks stay in use:\n{self._engine.said()[-3000:]}")
            time.sleep(0.05)


@contextlib.contextmanager
def contenders(model: Path, node: NodeProcess, kv_gib: int, tier_gib: int) -> Iterator[dict[str, Contender]]:
    arguments: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        "block_size": 16,
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": kv_gib << 30,
        "gpu_memory_utilization": 0.03,  # is only compared with what is free
        "max_model_len": max(LENGTHS) + 256,
        "max_num_seqs": REQUESTS,
        "max_num_batched_tokens": 8192,
    }
    offload: dict[str, Any] = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": tier_gib << 30},
    }
    store = store_config(node.address, revision="dummy", slow_hits="take")
    connectors = {"no connector": None, "store": store, "OffloadingConnector": offload}
    with contextlib.ExitStack() as stack:
        engines = {
            name: EngineHandle(name, {**arguments, **({"kv_transfer_config": config} if config else {})})
            for name, config in connectors.items()
        }
        for engine in engines.values():
            stack.callback(engine.close)
        for engine in engines.values():
            engine.start()
        end = time.monotonic() + SETTLED_S
        while not all(worker["ready"] for worker in engines["store"].ask("agents")["workers"]):
            if time.monotonic() > end:
                raise SystemExit(f"the agents' process is not ready:\n{engines['store'].said()[-3000:]}")
            time.sleep(0.2)
        yield {name: Contender(engine, name != "no connector", name == "store") for name, engine in engines.items()}


def save_config(name: str, directory: Path) -> None:
    """A Llama's configuration, without weights."""
    layers, hidden, within, heads, kv_heads, vocabulary = MODELS[name]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": within,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocabulary,
        "max_position_embeddings": 1 << 17,
        "rope_theta": 500_000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))


def spread(samples: list[float], unit: float) -> str:
    values = sorted(value * unit for value in samples)
    digits = 1 if values[0] < 100 else 0
    return f"{median(values):.{digits}f} ({values[0]:.{digits}f}–{values[-1]:.{digits}f})"


def main(argv: list[str]) -> None:
    options = parser(__doc__)
    options.add_argument("--model", choices=MODELS, default="0.9b", help="(%(default)s)")
    options.add_argument("--rounds", type=int, default=5, help="of each length, and of the throughput (%(default)s)")
    options.add_argument("--tokens", type=int, nargs="+", default=LENGTHS, help="prompt lengths (%(default)s)")
    options.add_argument("--kv-gib", type=int, default=24, help="KV cache of each engine (%(default)s)")
    options.add_argument(
        "--tier-gib", type=int, default=24, help="RAM of the node, and of vLLM's CPU tier (%(default)s)"
    )
    args = options.parse_args(argv)
    command = f"python benchmarks/vllm_gpu.py --model {args.model} --rounds {args.rounds}"
    firsts, sums = Report("vLLM's first token on a GPU, ms", command), Report("vLLM's throughput on a GPU", command)
    numbers = random.Random(time.time_ns())
    vocabulary = MODELS[args.model][-1]

    def prompts(tokens: int) -> list[int]:
        return [numbers.randrange(3, vocabulary) for _ in range(tokens)]

    with contextlib.ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-"))) / "model"
        save_config(args.model, model)
        python = os.environ.get("KVSTORE_NODE_PYTHON", sys.executable)
        flags = ("--ram-bytes", f"{args.tier_gib}GiB", "--log-level", "WARNING")
        node = stack.enter_context(NodeProcess(*flags, python=python))
        all_of_them = stack.enter_context(contenders(model, node, args.kv_gib, args.tier_gib))
        tick = stack.enter_context(progress((args.rounds + WARMUPS) * (len(args.tokens) + 1)))
        for tokens in args.tokens:
            calls = {
                name: lambda one=one, tokens=tokens: one.first_tokens(lambda: prompts(tokens))
                for name, one in all_of_them.items()
            }
            for name, samples in rounds(calls, args.rounds, WARMUPS, tick).items():
                found = {op: spread(samples[op], 1e3) if op in samples else None for op in ("computed", *OPS)}
                firsts.rows.append({"prompt tokens": tokens, "connector": name, **found})
        calls = {
            name: lambda one=one: one.throughput(lambda: prompts(PROMPT_TOKENS)) for name, one in all_of_them.items()
        }
        tokens = REQUESTS * (PROMPT_TOKENS + ANSWER_TOKENS)
        samples_of = rounds(calls, args.rounds, WARMUPS, tick)
        bare = median(samples_of["no connector"]["new"])
        for name, samples in samples_of.items():
            for op, seconds in samples.items():
                what = f"{name}, all skip" if op == "skip" else name
                rate = spread([tokens / value for value in seconds], 1e-3)
                sums.rows.append(
                    {"connector": what, "thousand tokens/s": rate, "of no connector": bare / median(seconds)}
                )
    sums.notes.append(
        f"{REQUESTS} new prompts of {PROMPT_TOKENS} tokens at once, {ANSWER_TOKENS} tokens of answer each"
    )
    for report in (firsts, sums):
        report.notes.append(f"median (least–greatest) of {args.rounds} rounds; all engines up, one at a time works")
        report.show(args.json)
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
