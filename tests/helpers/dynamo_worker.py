"""Register workers at Dynamo, as SGLang's with a Mooncake store; they answer with one token.

Runs in Dynamo's environment, with one argument, JSON:
    folder        the model
    block_tokens
    stores        for each worker's component what it publishes of its store, or null
    engine        address of vLLM's events that the workers follow, if any
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from dynamo.llm import (
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime

GIVEN = json.loads(sys.argv[1])


async def answer(request: Any, context: Any = None) -> AsyncIterator[Any]:
    yield {"token_ids": request["token_ids"][:1], "finish_reason": "stop"}


async def register(endpoint: Any, component: str, store: Any) -> object:
    """Register a worker; return what must live as long as it."""
    about = ModelRuntimeConfig()
    about.total_kv_blocks, about.max_num_seqs, about.max_num_batched_tokens = 1000, 16, 4096
    about.kv_event_publishing_enabled = about.enable_local_indexer = "engine" in GIVEN
    if store is not None:
        about.set_engine_specific("sglang_hicache_mooncake", json.dumps(store))
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        GIVEN["folder"],
        component,
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=GIVEN["block_tokens"],
        runtime_config=about,
    )
    if "engine" not in GIVEN:
        return None
    return KvEventPublisher(
        endpoint,
        kv_block_size=GIVEN["block_tokens"],
        zmq_endpoint=GIVEN["engine"],
        zmq_topic="",
        enable_local_indexer=True,
    )


async def main() -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    endpoints = {name: runtime.endpoint(f"dynamo.{name}.generate") for name in GIVEN["stores"]}
    serving = [endpoint.serve_endpoint(answer) for endpoint in endpoints.values()]

    async def registered() -> list[object]:
        kept = [await register(endpoints[name], name, GIVEN["stores"][name]) for name in endpoints]
        print(json.dumps({"ready": len(kept)}), flush=True)
        return kept

    await asyncio.gather(*serving, registered())


asyncio.run(main())
