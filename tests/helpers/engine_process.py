"""A vLLM engine that does what it is told, one JSON object per line, and answers with one each.

    python engine_process.py '{"model": DIR, ...arguments of vllm.LLM}'

    {"do": "generate", "prompts": [[token, ...], ...], "salts": [text or null, ...], "max_tokens":
    8}
    {"do": "settle"}                          steps the idle engine until it has nothing more to do
    {"do": "reset", "connector": false}       forgets the engine's own prefix cache
    {"do": "arm", "faults": [{...}]}          see engine_faults.py
    {"do": "report"}                          calls of the store per kind in each process, faults
                                              that struck
    {"do": "metrics"} {"do": "cache"} {"do": "chain", "prompt": [token, ...]}
    {"do": "blocks", "prompt": [token, ...]}  digests of the prompt's full blocks in the engine's
                                              own cache
    {"do": "agents"}                          where each worker's agents live, and their process if
                                              they have one

The first answer tells that the engine is up. Whatever the engine itself prints goes to stderr.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

# One process, which can be stepped and whose store can be made to fail; workers of TP > 1 are
# others.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions of ours in the workers

import engine_faults
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.v1.request import Request

SETTLE_S = 60.0
DIGESTED_BLOCKS = 256  # at a time
DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    # 64 MiB instead of the gigabyte that is the least vLLM takes by itself
    "num_gpu_blocks_override": 1024,
    "disable_log_stats": False,
}


def in_workers(name: str, *faults: dict[str, Any]) -> Callable[[Any], Any]:
    """A function for `collective_rpc`: the workers import what the engine's process has."""

    def call(worker: Any) -> Any:
        import engine_faults

        return [getattr(engine_faults, name)(**fault) for fault in faults] or getattr(
            engine_faults, name
        )()

    return call


def store_rank() -> Any:
    """Our connector's side of this worker, alone or in a `MultiConnector`; None without it."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return None
    group = get_kv_transfer_group()
    ranks = [getattr(one, "_rank", None) for one in getattr(group, "sub_connectors", [group])]
    return next((rank for rank in ranks if rank), None)


def saves_end(worker: Any) -> None:
    """For `collective_rpc`: blocks are given back when they have been read; this waits until they
    are stored.
    """
    rank = store_rank()
    if rank:
        rank._backend.wait([job.done for _, job in rank._outcomes])  # by the deadlines of the saves


def agents_of(worker: Any) -> dict[str, Any]:
    """For `collective_rpc`: the home of the worker's agents, and the number of the process that
    they live in.
    """
    home = store_rank()._backend
    home.poll()
    child = getattr(home, "_child", None)
    return {
        "home": type(home).__name__,
        "pid": child.pid if child else None,
        "ready": child.ready if child else True,
        "violations": home.check(),
    }


def digests_of(worker: Any, numbers: Sequence[int]) -> list[str]:
    """For `collective_rpc`: of blocks by their numbers."""
    import torch

    digests = []
    for first in range(0, len(numbers), DIGESTED_BLOCKS):
        some = list(numbers[first : first + DIGESTED_BLOCKS])
        layers = [
            cache[some].flatten(1).view(torch.uint8).cpu().numpy()
            for cache in worker.model_runner.kv_caches
        ]
        for block in zip(*layers, strict=True):
            digest = hashlib.blake2b(digest_size=16)
            for layer in block:
                digest.update(layer)
            digests.append(digest.hexdigest())
    return digests


class Engine:
    def __init__(self, arguments: dict[str, Any]) -> None:
        store = arguments.pop("kv_transfer_config", None)
        self.llm = LLM(
            **{**DEFAULTS, **arguments}, **({"kv_transfer_config": store} if store else {})
        )
        self.core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        self.apart = arguments.get("tensor_parallel_size", 1) > 1

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 8,
        salts: Sequence[str | None] = (),
        logprobs: int | None = 5,
        skip: bool = False,
    ) -> dict[str, Any]:
        """`skip`: these requests stay out of the store."""
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        for prompt, salt in zip(asked, salts, strict=False):
            if salt:
                prompt["cache_salt"] = salt
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True
        )
        params.logprobs = logprobs
        if skip:
            params.extra_args = {"kv_transfer_params": {"kvstore.skip": True}}
        start = time.perf_counter()
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        return {
            "seconds": time.perf_counter() - start,
            "requests": [self._request(output) for output in outputs],
        }

    def _request(self, output: Any) -> dict[str, Any]:
        sequence = output.outputs[0]
        tokens = list(sequence.token_ids)
        positions = sequence.logprobs or []
        logprobs = [
            position[token].logprob for token, position in zip(tokens, positions, strict=False)
        ]
        return {
            "tokens": tokens,
            "logprobs": logprobs,
            "likely": [
                [[token, place.logprob] for token, place in position.items()]
                for position in positions
            ],
            "cached": output.num_cached_tokens,
            "finish": sequence.finish_reason,
            "ttft_s": output.metrics.first_token_latency if output.metrics else None,
        }

    def settle(self) -> dict[str, Any]:
        """As the loop of a server does that has no requests: for saves that end after their
        request.
        """
        start, steps = time.monotonic(), 0
        while self.core.scheduler.has_requests() and time.monotonic() < start + SETTLE_S:
            self.llm.llm_engine.step()
            steps += 1
            time.sleep(0.002)
        self.llm.collective_rpc(saves_end)
        pool = self.core.scheduler.kv_cache_manager.block_pool
        return {
            "steps": steps,
            "idle": not self.core.scheduler.has_requests(),
            "blocks_held": pool.num_gpu_blocks
            - 1
            - pool.get_num_free_blocks(),  # block 0 is nobody's
        }

    def reset(self, connector: bool = False) -> dict[str, Any]:
        return {"done": self.llm.reset_prefix_cache(reset_connector=connector)}

    def agents(self) -> dict[str, Any]:
        """Of each worker, in the order of their ranks."""
        return {"workers": self.llm.collective_rpc(agents_of)}

    def arm(self, faults: Sequence[dict[str, Any]]) -> dict[str, Any]:
        for fault in faults:
            engine_faults.arm(**fault)
        if self.apart:
            self.llm.collective_rpc(in_workers("arm", *faults))
        return {}

    def report(self) -> dict[str, Any]:
        workers = self.llm.collective_rpc(in_workers("report")) if self.apart else []
        return {"processes": [engine_faults.report(), *workers]}

    def metrics(self) -> dict[str, Any]:
        """Values by name, added up over labels."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", getattr(metric, "count", None))
            if value is not None:
                found[metric.name] = found.get(metric.name, 0) + value
        return found

    def chain(self, prompt: Sequence[int]) -> dict[str, Any]:
        """The engine's own hashes of the full blocks of a prompt."""
        params = SamplingParams(max_tokens=1)
        hasher = self.core.request_block_hasher
        request = Request("chain", list(prompt), params, None, block_hasher=hasher)
        return {"hashes": [bytes(name).hex() for name in request.block_hashes]}

    def blocks(self, prompt: Sequence[int]) -> dict[str, Any]:
        """What the engine's own cache holds of a prompt's full blocks, all layers of each; null: it
        has it not.
        """
        pool = self.core.scheduler.kv_cache_manager.block_pool
        names = [bytes.fromhex(name) for name in self.chain(prompt)["hashes"]]
        found = [pool.get_cached_block(name, [0]) for name in names]
        numbers = [blocks[0].block_id for blocks in found if blocks]
        digests = iter(self.llm.collective_rpc(digests_of, args=(numbers,))[0])
        return {"digests": [next(digests) if blocks else None for blocks in found]}

    def cache(self) -> dict[str, Any]:
        """Whether vLLM's own prefix caching is on.

        Of rank 0: how many layers each group of the cache has, and whether block 0, which is
        nobody's, is still all zeros in every layer.
        """

        def call(worker: Any) -> Any:
            groups = worker.model_runner.kv_cache_config.kv_cache_groups
            return {
                "groups": [len(group.layer_names) for group in groups],
                "null_block_is_zero": all(
                    not cache[0].any() for cache in worker.model_runner.kv_caches
                ),
            }

        found: dict[str, Any] = self.llm.collective_rpc(call)[0]
        return {
            "prefix_caching": self.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching,
            **found,
        }


def main(argument: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine_faults.install()
    engine = Engine(json.loads(argument))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(engine, order.pop("do"))(**order)
        print(json.dumps(answer), file=answers)
    print("asked to end", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1])
