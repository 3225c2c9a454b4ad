"""A vLLM engine in its own process, controlled by JSON objects, one per line.

    python engine_process.py '{"model": DIR, ...arguments of vllm.LLM}'

    {"do": "generate", "prompts": [[token, ...], ...], "salts": [text or null, ...], "max_tokens":
    8}
    {"do": "settle"}                          step until saves of finished requests have ended
    {"do": "reset", "connector": false}       clear the engine's own prefix cache
    {"do": "arm", "faults": [{...}]}          see engine_faults.py
    {"do": "report"}                          store calls and faults that struck, of each process
    {"do": "metrics"} {"do": "cache"} {"do": "chain", "prompt": [token, ...]}
    {"do": "blocks", "prompt": [token, ...]}  digests of the prompt's full blocks in the engine's
                                              own cache
    {"do": "agents"}                          the backend of each worker's agents, and its process

Each request has an answer of one line. The first answer says that the engine is up. The engine's
own output goes to stderr.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

# The engine runs in this process, so that it can be stepped and faults can be injected. Workers of
# TP > 1 are other processes.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault(
    "VLLM_ALLOW_INSECURE_SERIALIZATION", "1"
)  # to send our functions to the workers

import engine_faults
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.v1.request import Request

SETTLE_S = 60.0
DIGESTED_BLOCKS = 256  # per batch
DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    # 64 MiB instead of vLLM's minimum of 1 GiB
    "num_gpu_blocks_override": 1024,
    "disable_log_stats": False,
}


def in_workers(name: str, *faults: dict[str, Any]) -> Callable[[Any], Any]:
    """Return a function for `collective_rpc` that calls engine_faults in each worker."""

    def call(worker: Any) -> Any:
        import engine_faults

        return [getattr(engine_faults, name)(**fault) for fault in faults] or getattr(
            engine_faults, name
        )()

    return call


def store_rank() -> Any:
    """Return this worker's side of our connector, alone or in a `MultiConnector`, or None."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return None
    group = get_kv_transfer_group()
    ranks = [getattr(one, "_rank", None) for one in getattr(group, "sub_connectors", [group])]
    return next((rank for rank in ranks if rank), None)


def saves_end(worker: Any) -> None:
    """Wait in a worker until its saves have ended; for `collective_rpc`.

    Blocks are released when they have been read, before they are stored.
    """
    rank = store_rank()
    if rank:
        rank._backend.wait([job.done for _, job in rank._outcomes])  # saves have deadlines


def agents_of(worker: Any) -> dict[str, Any]:
    """Return the backend of a worker's agents and its process; for `collective_rpc`."""
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
    """Return the digests of blocks in a worker's cache; for `collective_rpc`."""
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
        transfer: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Serve the prompts; with `skip`, the requests bypass the store.

        `transfer`: the requests' `kv_transfer_params`.
        """
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        for prompt, salt in zip(asked, salts, strict=False):
            if salt:
                prompt["cache_salt"] = salt
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True
        )
        params.logprobs = logprobs
        transfer = {"kvstore.skip": True} if skip else transfer
        if transfer:
            params.extra_args = {"kv_transfer_params": transfer}
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
            "transfer": output.kv_transfer_params,
            "ttft_s": output.metrics.first_token_latency if output.metrics else None,
        }

    def settle(self) -> dict[str, Any]:
        """Step as a server's idle loop does, for saves that end after their request."""
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
            - pool.get_num_free_blocks(),  # block 0 is the null block
        }

    def reset(self, connector: bool = False) -> dict[str, Any]:
        return {"done": self.llm.reset_prefix_cache(reset_connector=connector)}

    def agents(self) -> dict[str, Any]:
        """Return the agents of each worker, ordered by rank."""
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
        """Return metric values by name, summed over labels."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", getattr(metric, "count", None))
            if value is not None:
                found[metric.name] = found.get(metric.name, 0) + value
        return found

    def chain(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Return the engine's own hashes of a prompt's full blocks."""
        params = SamplingParams(max_tokens=1)
        hasher = self.core.request_block_hasher
        request = Request("chain", list(prompt), params, None, block_hasher=hasher)
        return {"hashes": [bytes(name).hex() for name in request.block_hashes]}

    def blocks(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Return a digest of each full block of a prompt in the engine's own cache.

        A digest covers all layers; null stands for a block that is not cached.
        """
        pool = self.core.scheduler.kv_cache_manager.block_pool
        names = [bytes.fromhex(name) for name in self.chain(prompt)["hashes"]]
        found = [pool.get_cached_block(name, [0]) for name in names]
        numbers = [blocks[0].block_id for blocks in found if blocks]
        digests = iter(self.llm.collective_rpc(digests_of, args=(numbers,))[0])
        return {"digests": [next(digests) if blocks else None for blocks in found]}

    def cache(self) -> dict[str, Any]:
        """Return whether prefix caching is on, and facts about rank 0's cache.

        `groups`: the number of layers of each group. `block_tokens`: tokens of a block.
        `null_block_is_zero`: whether block 0, the null block, is all zeros in every layer.
        """

        def call(worker: Any) -> Any:
            groups = worker.model_runner.kv_cache_config.kv_cache_groups
            return {
                "groups": [len(group.layer_names) for group in groups],
                "block_tokens": groups[0].kv_cache_spec.block_size,
                "null_block_is_zero": all(
                    not state[0].any()
                    for cache in worker.model_runner.kv_caches
                    # A recurrent layer has several tensors.
                    for state in (cache if isinstance(cache, (list, tuple)) else [cache])
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
