"""How gRPC's server stops: no call of ours left, and none of its own that we never saw."""

import asyncio
from collections.abc import Callable
from typing import Any

LOOK_S = 0.5


async def stopped(server: Any, drain_s: float, call_count: Callable[[], int]) -> None:
    """Running calls have `drain_s`, then they are cancelled. `call_count`: of those that were handed to us. A call that
    gRPC takes just when it stops is handed to nobody, and would be waited for all that time: it is cancelled when for
    `LOOK_S` none of ours was left."""
    stopping = asyncio.ensure_future(server.stop(drain_s))
    left = True
    while not (await asyncio.wait([stopping], timeout=LOOK_S))[0]:
        if not left and not call_count():
            await server.stop(None)
        left = call_count() > 0
    await stopping
