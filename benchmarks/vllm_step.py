"""Measure what each method of vLLM's connector costs a step of the engine.

The engine runs in this process, so all methods of both roles are on the step's way. A step's kind
is what its orders hold:

    idle     nothing is saved and nothing loaded: tokens are generated between two blocks' ends
    saves    blocks of a new prompt, or of an answer, are handed to the agent
    loads    a hit's blocks are ordered
    waits    nothing is computed: the engine waits for loads or saves
    skips    steps of requests that opt out (`kvstore.skip`)

A cell is µs in a step, median (99th percentile) of all steps of the kind.

    PYTHONPATH=. python benchmarks/vllm_step.py [--model tiny] [--requests 8] [--rounds 3] [--json]
        with a Python that has vLLM; KVSTORE_NODE_PYTHON names another one that has the node
"""

import collections
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))

from measure import Report, median, parser, percentile, progress
from vllm_gpu import MODELS, save_config
from vllm_server import environment, store_config

from kvstore.tools.node_process import NodeProcess

MODELS.setdefault("tiny", (4, 256, 512, 4, 2, 32_000, 64))
PROMPT_TOKENS, ANSWER_TOKENS = 500, 64
SETTLE_S = 30.0
KINDS = ("idle", "saves", "loads", "waits", "skips")
ALL, WHOLE = "all methods", "the whole step"
SHOWN_US = 1.0  # methods that take less are left out
Seconds = dict[str, list[float]]  # of each call, by method, in one step


class Meter:
    """Collects seconds of the connector's methods, step by step."""

    def __init__(self) -> None:
        self._now: Seconds = collections.defaultdict(list)
        self._kind = "idle"
        self.steps: dict[str, list[Seconds]] = collections.defaultdict(list)

    def watch(self, connector: type) -> None:
        """Wrap all public methods of the connector's class, base classes apart."""
        for name, method in list(vars(connector).items()):
            if callable(method) and not name.startswith("_") and not isinstance(method, type):
                setattr(connector, name, self._timed(name, method))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            found = method(*arguments, **options)
            self._now[name].append(time.perf_counter() - start)
            if name == "build_connector_meta":
                orders = found.orders
                self._kind = "loads" if orders.loads else "saves" if orders.saves else ""
                self._kind = self._kind or ("idle" if found.computes else "waits")
            return found

        return timed

    def step(self, step: Callable[[], object], kind: str = "") -> None:
        """Run a step of the engine. `kind`: overrides what its orders hold."""
        self._now, self._kind = collections.defaultdict(list), "idle"
        start = time.perf_counter()
        step()
        self._now[WHOLE].append(time.perf_counter() - start)
        self.steps[kind or self._kind].append(self._now)


def serve(llm: Any, meter: Meter, prompts: Sequence[list[int]], kind: str = "") -> None:
    """Serve prompts together, step by step, and wait for saves."""
    from vllm import SamplingParams, TokensPrompt

    parameters = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    parameters.detokenize = False
    if kind == "skips":
        parameters.extra_args = {"kv_transfer_params": {"kvstore.skip": True}}
    engine = llm.llm_engine
    for prompt in prompts:
        name = f"{random.getrandbits(64):x}"
        engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), parameters)
    while engine.has_unfinished_requests():
        meter.step(engine.step, kind)
    scheduler = engine.engine_core.engine_core.scheduler
    end = time.monotonic() + SETTLE_S
    while scheduler.connector.has_pending_push_work() and time.monotonic() < end:
        engine.step()
        time.sleep(0.002)


def rows(meter: Meter) -> list[dict[str, Any]]:
    """Return a row for each method, with a column for each kind of step."""
    kinds = [kind for kind in KINDS if kind in meter.steps]
    names = {name for kind in kinds for step in meter.steps[kind] for name in step} - {WHOLE}
    sums: dict[str, dict[str, float]] = {name: {} for name in [*sorted(names), ALL, WHOLE]}
    cells: dict[str, dict[str, str]] = {name: {} for name in sums}
    for kind in kinds:
        steps = [
            {name: 1e6 * sum(calls) for name, calls in step.items()} for step in meter.steps[kind]
        ]
        for name in sums:
            if name == ALL:
                found = [sum(step.values()) - step[WHOLE] for step in steps]
            else:
                found = [step.get(name, 0.0) for step in steps]
            sums[name][kind] = median(found)
            cells[name][kind] = f"{median(found):.1f} ({percentile(found, 99):.0f})"
    shown = [name for name in sums if max(sums[name].values()) >= SHOWN_US]
    counts = {kind: f"{kind}, {len(meter.steps[kind])} steps" for kind in kinds}
    return [
        {"method": name, **{counts[kind]: cells[name][kind] for kind in kinds}} for name in shown
    ]


def main() -> None:
    """Print the report."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", choices=sorted(MODELS), default="tiny")
    arguments.add_argument("--requests", type=int, default=8, help="at once (8)")
    arguments.add_argument("--rounds", type=int, default=3, help="misses, hits and skips (3)")
    chosen = arguments.parse_args()
    import torch

    gpu = torch.cuda.is_available()
    if not gpu:
        os.environ.update(environment(OMP_NUM_THREADS="1"))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    from gpu_agent.engines.vllm import KVStoreConnector

    command = f"python benchmarks/vllm_step.py --model {chosen.model} --requests {chosen.requests}"
    title = f"What the connector costs steps of vLLM with {chosen.requests} requests"
    report = Report(title, f"{command} --rounds {chosen.rounds}")
    meter, numbers = Meter(), random.Random(5)
    python = os.environ.get("KVSTORE_NODE_PYTHON", sys.executable)
    process = NodeProcess("--ram-bytes", "4GiB", python=python)
    with tempfile.TemporaryDirectory() as folder, process as node:
        save_config(chosen.model, Path(folder) / "model")
        llm = LLM(
            model=str(Path(folder) / "model"),
            load_format="dummy",
            skip_tokenizer_init=True,
            distributed_executor_backend="uni",
            enforce_eager=not gpu,
            dtype="bfloat16" if gpu else "float32",
            block_size=16 if gpu else 32,
            max_model_len=4096,
            max_num_seqs=max(8, chosen.requests),
            kv_cache_memory_bytes=(4 << 30) if gpu else (256 << 20),
            kv_transfer_config=store_config(node.address, revision="dummy", slow_hits="take"),
            disable_log_stats=True,
        )
        meter.watch(KVStoreConnector)
        with progress(3 * (chosen.rounds + 1)) as done:
            for round_number in range(chosen.rounds + 1):
                prompts = [
                    [numbers.randrange(5, 30_000) for _ in range(PROMPT_TOKENS)]
                    for _ in range(chosen.requests)
                ]
                for kind, chosen_prompts in (
                    ("", prompts),
                    ("", prompts),
                    ("skips", [list(reversed(one)) for one in prompts]),
                ):
                    llm.reset_prefix_cache()
                    serve(llm, meter, chosen_prompts, kind)
                    done()
                if not round_number:
                    meter.steps.clear()  # warm-up
        llm.llm_engine.engine_core.shutdown()
    report.rows = rows(meter)
    report.show(chosen.json)


if __name__ == "__main__":
    main()
