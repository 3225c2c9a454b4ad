"""Time to first token of vLLM on the CPU: a prompt whose KV is in the store against computing it.

Two servers with the same random-weight model stay up and take turns, one without the store. The one with the store
is asked for each prompt when nobody has computed it (a miss; its KV is stored meanwhile), and again after its own
prefix cache was emptied (a hit of all full blocks). Prompts are new in each round, and the other server begins.

R16, the guard: no hit is slower than computing, and what misses cost is won back by few hits. With a miss that
costs M more than no store and a hit that saves H, the store pays from M / (M + H) of the prompts on.

After `make test-vllm`; the node runs in the environment that has one:

    KVSTORE_NODE_PYTHON=.venv/bin/python .venv-vllm/bin/python benchmarks/vllm_ttft.py
"""

import contextlib
import os
import random
import sys
import tempfile
from pathlib import Path

from measure import Report, Samples, median, parser, progress, rounds
from vllm_server import Answer, Server, save_llama, store_config

from kvstore.measure.node_process import NodeProcess

BLOCK_TOKENS = 32
VOCABULARY = 512
LAYERS, HIDDEN = 12, 768
LENGTHS = (512, 1024, 2048, 4096)
PAYS_FROM_MAX = 0.25  # of the prompts; the trace that eviction.py replays finds 0.35 of its pages again
SAVED, LOADED, LOAD_S = (f"vllm:kvstore_{name}_total" for name in ("pages_saved", "loaded_nbytes", "load_seconds"))


class Round:
    """One prompt length; each round has a prompt that nobody has seen."""

    def __init__(self, plain: Server, stored: Server, tokens: int) -> None:
        self._plain, self._stored, self._tokens = plain, stored, tokens
        self._numbers = random.Random(tokens)
        self.loaded_nbytes = 0
        self.same = True
        self._stored_first = False

    def __call__(self) -> Samples:
        prompt = [self._numbers.randrange(3, VOCABULARY) for _ in range(self._tokens)]
        self._plain.forget()
        self._stored.forget()
        before = self._stored.metrics()
        self._stored_first = not self._stored_first
        if self._stored_first:  # whoever comes second meets what the first one left in the processor
            miss = self._miss(prompt, before)
            alone = self._plain.complete(prompt)
        else:
            alone = self._plain.complete(prompt)
            miss = self._miss(prompt, before)
        assert miss.cached_tokens == alone.cached_tokens == 0, (miss, alone)
        self._stored.forget()
        hit = self._stored.complete(prompt)
        assert hit.cached_tokens >= (self._tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS, hit
        after_s = self._stored.wait_metric(LOAD_S, before.get(LOAD_S, 0.0) + 1e-9)
        self.loaded_nbytes = int(self._stored.metrics()[LOADED] - before.get(LOADED, 0.0))
        self.same &= alone.tokens == miss.tokens == hit.tokens
        load_s = after_s - before.get(LOAD_S, 0.0)
        return {"alone": [alone.ttft_s], "miss": [miss.ttft_s], "hit": [hit.ttft_s], "load": [load_s]}

    def _miss(self, prompt: list[int], before: dict[str, float]) -> Answer:
        """Until all of it is stored, so that the next one has the processor to itself."""
        blocks = self._tokens // BLOCK_TOKENS
        answer = self._stored.complete(prompt)
        saved = self._stored.wait_metric(SAVED, before.get(SAVED, 0.0) + blocks)
        assert saved - before.get(SAVED, 0.0) >= blocks, "the prompt was not stored in time"
        return answer


def guard(samples: Samples) -> dict[str, str]:
    """R16, with what it is made of."""
    alone, miss, hit = (median(samples[name]) for name in ("alone", "miss", "hit"))
    lost, won = max(0.0, miss - alone), alone - hit
    pays_from = lost / (lost + won) if won > 0 else 1.0
    met = max(samples["hit"]) < min(samples["alone"]) and pays_from <= PAYS_FROM_MAX
    return {
        "speed-up": f"{alone / hit:.1f}",
        "a miss costs %": f"{100 * (miss / alone - 1):.0f}",
        "pays from hits %": f"{100 * pays_from:.0f}",
        "never slower (R16)": "met" if met else "missed",
    }


def main(argv: list[str]) -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5, help="per prompt length (%(default)s)")
    options.add_argument("--tokens", type=int, nargs="+", default=LENGTHS, help="prompt lengths (%(default)s)")
    options.add_argument("--layers", type=int, default=LAYERS, help="of the model (%(default)s)")
    options.add_argument("--hidden", type=int, default=HIDDEN, help="its width, a multiple of 192 (%(default)s)")
    args = options.parse_args(argv)
    report = Report("vLLM's time to first token, full hit against recompute", "python benchmarks/vllm_ttft.py")
    python = os.environ.get("KVSTORE_NODE_PYTHON", sys.executable)
    with contextlib.ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-"))) / "model"
        save_llama(model, args.layers, args.hidden, VOCABULARY)
        flags = ("--ram-bytes", "4GiB", "--log-level", "WARNING")
        node = stack.enter_context(NodeProcess(*flags, python=python))
        length_max = max(args.tokens) + 16
        limits = {"max_model_len": length_max, "max_num_batched_tokens": length_max}
        plain = stack.enter_context(Server(model, **limits))
        plain.wait_up()
        store = store_config(node.address, lookup_timeout_s=10.0)  # a user's is 1 s; a busy machine may need more
        stored = stack.enter_context(Server(model, store, **limits))
        stored.wait_up()
        for server in (plain, stored):
            server.complete([7] * 16)
        with progress((args.rounds + 1) * len(args.tokens)) as tick:
            for tokens in args.tokens:
                one = Round(plain, stored, tokens)
                samples = rounds({"all": one}, args.rounds, 1, tick)["all"]
                alone, miss, hit, load = (median(samples[name]) for name in ("alone", "miss", "hit", "load"))
                report.rows.append(
                    {
                        "prompt tokens": tokens,
                        "KV MiB loaded": f"{one.loaded_nbytes / (1 << 20):.1f}",
                        "no store ms": f"{alone * 1e3:.0f}",
                        "miss ms": f"{miss * 1e3:.0f}",
                        "hit ms": f"{hit * 1e3:.0f}",
                        "of that load ms": f"{load * 1e3:.1f}",
                        **guard(samples),
                        "same tokens": "yes" if one.same else "no",
                    }
                )
    kind = f"{args.layers} layers x {args.hidden}, float32, random weights"
    report.notes.append(f"vLLM on the CPU, a Llama of {kind}, pages of {BLOCK_TOKENS} tokens")
    report.notes.append(
        f"medians of {args.rounds} rounds; R16: the slowest hit beats the fastest recompute, and the store pays from "
        f"at most {PAYS_FROM_MAX:.0%} hits on"
    )
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
