"""Engines under test: this program imports vLLM once and forks a process for each engine.

    python engine_process.py SOCKET [fresh]

A connection to the Unix socket is an engine. Its first line is {"arguments": {...of vllm.LLM},
"environment": {...}, "log": PATH}; with "model", the arguments of tiny_random.py, a model is made
instead. Each further line is a call, {"do": NAME, ...}, and has an answer of one line. Calls are
the public methods of `Engine`; an error in one is answered with {"error": TEXT}. The engine ends
when the connection closes. With `fresh`, each engine is a new interpreter that imports vLLM anew.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

# The engine runs in the forked process, so that its scheduler can be stepped and looked into.
# Functions are sent to the workers of other ranks.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Counting GPUs must not start CUDA in a process that forks.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import cache_blocks
import engine_control
import tiny_random
import torch
import vllm
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

SETTLE_S = 60.0
END_S = 15.0
PR_SET_PDEATHSIG = 1


class Engine:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.llm = LLM(**arguments)
        self.core: Any = self.llm.llm_engine.engine_core.engine_core
        self.scheduler: Any = self.core.scheduler
        self.pool: Any = self.scheduler.kv_cache_manager.block_pool
        self.taken: list[Any] = []
        self.preempted = 0
        self.requests = 0
        self._count_preemptions()

    def facts(self) -> dict[str, Any]:
        """Return what cases need to know of the engine."""
        config = self.llm.llm_engine.vllm_config
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        kinds = [type(group.kv_cache_spec).__name__ for group in groups]
        return {
            # Hits end at multiples of the largest block of all groups.
            "block": max(group.kv_cache_spec.block_size for group in groups),
            "chunk": config.scheduler_config.max_num_batched_tokens,
            "length": config.model_config.max_model_len,
            "groups": kinds,
            "blocks": self.pool.num_gpu_blocks,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "pid": os.getpid(),
        }

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 8,
        adapter: str | None = None,
        sound: int = 0,
    ) -> dict[str, Any]:
        """Serve the prompts together. `sound`: the seed of one in place of the token SOUND."""
        asked = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        for prompt in asked:
            if sound and engine_control.SOUND in prompt["prompt_token_ids"]:
                prompt["multi_modal_data"] = {"audio": tiny_random.sound(sound)}
        lora = LoRARequest("adapter", 1, adapter) if adapter else None
        found = self.llm.generate(asked, _params(max_tokens), use_tqdm=False, lora_request=lora)
        return {"answers": [_answer(output) for output in found]}

    def abort(self, prompt: Sequence[int], steps: int) -> dict[str, Any]:
        """Abort a request after some steps; return whether it was still running."""
        self.requests += 1
        name = f"aborted-{self.requests}"
        asked = TokensPrompt(prompt_token_ids=list(prompt))
        self.llm.llm_engine.add_request(name, asked, _params(8))
        ended = False
        for _ in range(steps):
            ended |= any(output.finished for output in self.llm.llm_engine.step())
        self.llm.llm_engine.abort_request([name])
        return {"running": not ended}

    def settle(self) -> dict[str, Any]:
        """Step until nothing is left to do, so that saves of finished requests have ended.

        Some connectors hand a save to their worker in the next step only. So a request shorter than
        a block comes last.
        """
        self._step_until_idle()
        self.requests += 1
        self.llm.generate(
            [TokensPrompt(prompt_token_ids=[7, 11 + self.requests % 400, 13])],
            _params(1),
            use_tqdm=False,
        )
        self._step_until_idle()
        self.llm.collective_rpc(cache_blocks.wait_for_device)
        held = self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks() - len(self.taken)
        return {"idle": not self.scheduler.has_requests(), "held": held}

    def reset(self) -> dict[str, Any]:
        """Clear the engine's own prefix cache; the connector keeps what it has."""
        return {"done": bool(self.llm.reset_prefix_cache())}

    def poison(self) -> dict[str, Any]:
        """Fill all free blocks with a value that no model computes; the null block stays."""
        free = [block.block_id for block in self.pool.blocks if not block.ref_cnt]
        free = [number for number in free if number]
        self.llm.collective_rpc(cache_blocks.fill, args=(free, self.pool.num_gpu_blocks))
        return {"blocks": len(free)}

    def squeeze(self, free: int) -> dict[str, Any]:
        """Take blocks out of the pool so that only `free` are left; 0 gives all back."""
        self.pool.free_blocks(self.taken)
        self.taken, self.preempted = [], 0
        if free:
            self.taken = list(self.pool.get_new_blocks(self.pool.get_num_free_blocks() - free))
        return {}

    def preemptions(self) -> dict[str, Any]:
        return {"preemptions": self.preempted}

    def tamper(self, how: str, prompt: Sequence[int]) -> dict[str, Any]:
        """Change cached blocks of a prompt in one of the ways of `cases.TAMPERINGS`."""
        groups = self._cached(prompt)
        done = self.llm.collective_rpc(
            cache_blocks.tamper, args=(how, groups, self.pool.num_gpu_blocks)
        )
        return {"tampered": bool(done[0]), "groups": groups}

    def _cached(self, prompt: Sequence[int]) -> list[list[Any]]:
        """Return the layers and the cached blocks of a prompt, of each group."""
        from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize
        from vllm.v1.request import Request

        hasher = self.core.request_block_hasher
        request = Request("cached", list(prompt), _params(1), None, block_hasher=hasher)
        found: list[list[Any]] = []
        for number, group in enumerate(self.scheduler.kv_cache_config.kv_cache_groups):
            size, unit = group.kv_cache_spec.block_size, self.pool.hash_block_size
            hashes: Any = request.block_hashes
            if size != unit:
                hashes = BlockHashListWithBlockSize(hashes, unit, size)
            blocks = [self.pool.get_cached_block(name, [number]) for name in hashes]
            kind = "state" if "Mamba" in type(group.kv_cache_spec).__name__ else "attention"
            numbers = [block[0].block_id for block in blocks if block]
            found.append([kind, list(group.layer_names), [one for one in numbers if one]])
        return found

    def _step_until_idle(self) -> None:
        end = time.monotonic() + SETTLE_S
        while self._busy() and time.monotonic() < end:
            self.llm.llm_engine.step()
            time.sleep(0.002)

    def _busy(self) -> bool:
        connector = self.scheduler.connector
        pending = getattr(connector, "has_pending_push_work", lambda: False)
        return bool(self.scheduler.has_requests() or (connector is not None and pending()))

    def _count_preemptions(self) -> None:
        schedule = self.scheduler.schedule

        def counted(*arguments: Any, **options: Any) -> Any:
            output = schedule(*arguments, **options)
            self.preempted += len(output.preempted_req_ids or ())
            return output

        self.scheduler.schedule = counted


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True, logprobs=5
    )


def _answer(output: Any) -> dict[str, Any]:
    sequence = output.outputs[0]
    return {
        "tokens": list(sequence.token_ids),
        "likely": [
            {str(token): place.logprob for token, place in position.items()}
            for position in sequence.logprobs or []
        ],
        "cached": output.num_cached_tokens or 0,
        "finish": sequence.finish_reason,
    }


def serve(connection: socket.socket) -> None:
    """Run one engine until the connection closes."""
    lines = connection.makefile("rw")
    first = json.loads(lines.readline())
    log = os.open(first["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for name, value in first["environment"].items():
        os.environ[name] = value
        if name == "PYTHONPATH":
            sys.path[1:1] = [path for path in value.split(os.pathsep) if path not in sys.path]
    try:
        if "model" in first:
            tiny_random.main(*first["model"])
            print(json.dumps({"facts": {"pid": os.getpid()}}), file=lines, flush=True)
            return
        # vLLM looks into a model's class in another process, which imports all of vLLM again. An
        # engine in this process may as well import the class here.
        if hasattr(registry, "_run_in_subprocess"):
            registry._run_in_subprocess = lambda function: function()
        engine = Engine(first["arguments"])
        print(json.dumps({"facts": engine.facts()}), file=lines, flush=True)
    except Exception as error:  # noqa: BLE001 -- of vLLM and the connector: logged and answered
        traceback.print_exc()
        print(json.dumps({"error": _short(error)}), file=lines, flush=True)
        return
    for line in lines:
        arguments = json.loads(line)
        try:
            answer = getattr(engine, arguments.pop("do"))(**arguments)
        except Exception as error:  # noqa: BLE001 -- logged and answered
            traceback.print_exc()
            answer = {"error": _short(error)}
        print(json.dumps(answer), file=lines, flush=True)
    signal.alarm(int(END_S))
    engine.core.shutdown()


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def main(path: str, *fresh: str) -> None:
    if path.isdecimal():
        serve(socket.socket(fileno=int(path)))
        return
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # A process that has started CUDA can not fork.
    anew = bool(fresh) or torch.cuda.is_initialized()
    facts = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": current_platform.device_type,
        "gpus": torch.cuda.device_count(),
    }
    print(json.dumps(facts), flush=True)
    while True:
        # The suite's process holds the other end of stdin, so this one ends with it.
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        # Also while it starts, when it looks at no connection: it may hold a GPU
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.setpgid(0, 0)
        if anew:
            connection.set_inheritable(True)
            os.execv(sys.executable, [sys.executable, __file__, str(connection.fileno())])
        status = 1
        try:
            serve(connection)
            status = 0
        finally:
            connection.close()
            # Workers of other ranks and threads of connectors do not hold the process.
            os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
