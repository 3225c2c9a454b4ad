"""Time to first token of vLLM on the CPU: a prompt whose KV is in the store against computing it.

Two servers with the same random-weight model stay up and take turns, one without the store. The one with the store
is asked twice for each prompt: when nobody has computed it (a miss; its KV is stored meanwhile), and again after
its own prefix cache was emptied (a hit of all full blocks). Prompts are new in each round.
"""

import contextlib
import os
import random
import sys
import tempfile
from pathlib import Path

from measure import Report, Samples, median, parser, progress, rounds
from vllm_server import Server, save_llama, store_config

from kvstore.measure.node_process import NodeProcess

BLOCK_TOKENS = 32
VOCABULARY = 512
LAYERS, HIDDEN = 12, 768
LENGTHS = (512, 1024, 2048, 4096)
SAVED, LOADED, LOAD_S = (f"vllm:kvstore_{name}_total" for name in ("pages_saved", "loaded_nbytes", "load_seconds"))


class Round:
    """One prompt length; each round has a prompt that nobody has seen."""

    def __init__(self, plain: Server, stored: Server, tokens: int) -> None:
        self._plain, self._stored, self._tokens = plain, stored, tokens
        self._numbers = random.Random(tokens)
        self.loaded_nbytes = 0
        self.same = True

    def __call__(self) -> Samples:
        prompt = [self._numbers.randrange(3, VOCABULARY) for _ in range(self._tokens)]
        blocks = self._tokens // BLOCK_TOKENS
        self._plain.forget()
        self._stored.forget()
        before = self._stored.metrics()
        alone = self._plain.complete(prompt)
        miss = self._stored.complete(prompt)
        assert miss.cached_tokens == alone.cached_tokens == 0, (miss, alone)
        saved = self._stored.wait_metric(SAVED, before.get(SAVED, 0.0) + blocks)
        assert saved - before.get(SAVED, 0.0) >= blocks, "the prompt was not stored in time"
        self._stored.forget()
        hit = self._stored.complete(prompt)
        assert hit.cached_tokens >= (self._tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS, hit
        after_s = self._stored.wait_metric(LOAD_S, before.get(LOAD_S, 0.0) + 1e-9)
        self.loaded_nbytes = int(self._stored.metrics()[LOADED] - before.get(LOADED, 0.0))
        self.same &= alone.tokens == miss.tokens == hit.tokens
        load_s = after_s - before.get(LOAD_S, 0.0)
        return {"alone": [alone.ttft_s], "miss": [miss.ttft_s], "hit": [hit.ttft_s], "load": [load_s]}


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
        stored = stack.enter_context(Server(model, store_config(node.address), **limits))
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
                        "speed-up": f"{alone / hit:.1f}",
                        "never slower (R16)": "met" if max(samples["hit"]) < min(samples["alone"]) else "missed",
                        "same tokens": "yes" if one.same else "no",
                    }
                )
    kind = f"{args.layers} layers x {args.hidden}, float32, random weights"
    report.notes.append(f"vLLM on the CPU, a Llama of {kind}, pages of {BLOCK_TOKENS} tokens")
    report.notes.append(f"medians of {args.rounds} rounds; R16: the slowest hit against the fastest recompute")
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
