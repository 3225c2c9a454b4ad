"""Ask Dynamo's own routers: a question is a line of JSON on stdin, the answer one on stdout.

Runs in Dynamo's environment. The first argument is JSON: `block_tokens` and `rules`, the arguments
of KvRouterConfig. Questions have `component`, whose router is made for the first one:
    {"scores": tokens}                  which blocks are where
    {"best": tokens, "request": id}     the worker for these tokens; with an id it has the request
    {"free": id}                        that request is over
"""

import asyncio
import json
import sys
from typing import Any

from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.runtime import DistributedRuntime

GIVEN = json.loads(sys.argv[1])


async def answer(router: Any, asked: dict[str, Any]) -> Any:
    if "scores" in asked:
        return await router.get_overlap_scores(asked["scores"])
    if "free" in asked:
        return await router.free(asked["free"])
    request = asked.get("request")
    found = await router.best_worker(
        asked["best"], request_id=request, update_indexer=request is not None
    )
    return found[0]


async def main() -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    routers: dict[str, Any] = {}
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        component = asked["component"]
        if component not in routers:
            endpoint = runtime.endpoint(f"dynamo.{component}.generate")
            rules = KvRouterConfig(**GIVEN["rules"])
            routers[component] = KvRouter(endpoint, GIVEN["block_tokens"], rules)
        print(json.dumps({"answer": await answer(routers[component], asked)}), flush=True)


asyncio.run(main())
