"""Access the gateway of a node in this process, which is a thread."""

import asyncio
from collections.abc import Callable
from typing import Any

from node.gateway.gateway import Gateway
from node.gateway.server import Servicer
from node.server import Node


def gateway_of(node: Node) -> Gateway:
    runner: Any = node.grpc._gateways[0]._runner
    gateway: Gateway = runner.gateway
    return gateway


def servicer_of(node: Node) -> Servicer:
    return gateway_of(node).servicer


def in_loop(node: Node, function: Callable[[], Any]) -> Any:
    """Call a function in the thread of the gateway's event loop, and return its result."""

    async def call() -> Any:
        return function()

    loop = gateway_of(node)._writer.transport._loop  # type: ignore[attr-defined]
    return asyncio.run_coroutine_threadsafe(call(), loop).result(60.0)
