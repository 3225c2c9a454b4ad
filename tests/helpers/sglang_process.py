"""An SGLang engine in its own process, controlled by JSON objects, one per line.

    python sglang_process.py '{"model_path": DIR, ...arguments of sglang.Engine}'

    {"do": "generate", "prompts": [[token, ...], ...], "salts": [text or null, ...], "max_tokens":
    8}
    {"do": "reset"}                           clear the engine's own caches, on the GPU and in
                                              host memory
    {"do": "chain", "prompt": [token, ...]}   SGLang's hashes of the full pages of a prompt

Each request has an answer of one line. The first answer says that the engine is up. The engine's
own output goes to stderr. The process exits when its stdin ends, and on SIGTERM like a server:
SGLang's own handlers run in its event loop, in which this process waits.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from fastapi import HTTPException  # SGLang raises it for refused requests

RESET_S = 60.0
LINE_NBYTES_MAX = 1 << 26
DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "page_size": 64,
    # Fixed backends, so that results do not depend on what else is installed.
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "max_total_tokens": 32768,
    "mem_fraction_static": 0.2,  # engines start side by side
    "max_running_requests": 32,
    "context_length": 2000,
    "random_seed": 0,
}


class Engine:
    def __init__(self, arguments: dict[str, Any]) -> None:
        from sglang.srt.entrypoints.engine import Engine as SGLangEngine

        self._page = arguments.get("page_size", DEFAULTS["page_size"])
        self._engine = SGLangEngine(**{**DEFAULTS, **arguments})
        self.loop = self._engine.loop

    def generate(
        self, prompts: Sequence[list[int]], max_tokens: int = 8, salts: Sequence[str | None] = ()
    ) -> dict[str, Any]:
        """Serve each prompt as a request of its own, so that one failure affects no other."""
        params = {"max_new_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        named = [*salts, *[None] * (len(prompts) - len(salts))]

        async def together() -> list[dict[str, Any]]:
            return await asyncio.gather(*map(self._one, prompts, named, [params] * len(prompts)))

        return {"requests": self.loop.run_until_complete(together())}

    async def _one(
        self, prompt: list[int], salt: str | None, params: dict[str, Any]
    ) -> dict[str, Any]:
        try:
            found = await self._engine.async_generate(
                input_ids=prompt,
                sampling_params=params,
                return_logprob=True,
                top_logprobs_num=5,
                cache_salt=salt,
            )
        except (HTTPException, ValueError) as error:
            answer = (
                f"{getattr(error, 'status_code', type(error).__name__)}: "
                f"{getattr(error, 'detail', error)}"
            )
            return {
                "tokens": [],
                "logprobs": [],
                "likely": [],
                "cached": 0,
                "details": {},
                "finish": answer,
            }
        meta = found["meta_info"]
        return {
            "tokens": list(found["output_ids"]),
            "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
            "likely": [
                [[entry[1], entry[0]] for entry in place] for place in meta["output_top_logprobs"]
            ],
            "cached": meta["cached_tokens"],
            "details": meta.get("cached_tokens_details") or {},
            "finish": meta["finish_reason"]["type"],
        }

    def reset(self) -> dict[str, Any]:
        """Clear the caches, waiting until the engine is idle and its saves have ended."""
        end = time.monotonic() + RESET_S
        while not (done := self._engine.flush_cache().success) and time.monotonic() < end:
            time.sleep(0.05)
        return {"done": done}

    def chain(self, prompt: list[int]) -> dict[str, Any]:
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        whole = len(prompt) // self._page * self._page
        return {
            "hashes": list(
                get_storage_hash_str(RadixKey(prompt[:whole]), None, page_size=self._page)
            )
        }

    def shutdown(self) -> None:
        self._engine.shutdown()


async def orders() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=LINE_NBYTES_MAX)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


def main(argument: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = Engine(json.loads(argument))
    reader = engine.loop.run_until_complete(orders())
    print(json.dumps({"ready": True}), file=answers)
    while line := engine.loop.run_until_complete(reader.readline()):
        order = json.loads(line)
        answer = getattr(engine, order.pop("do"))(**order)
        print(json.dumps(answer), file=answers)
    print("asked to end", file=sys.stderr)
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
