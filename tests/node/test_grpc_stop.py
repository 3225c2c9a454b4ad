"""`node.gateway.gateway.stopped`: with gRPC's part played by a server that waits for calls nobody
was handed.
"""

import asyncio

import pytest

from node.gateway import gateway


class Server:
    def __init__(self) -> None:
        self.graces: list[float | None] = []
        self._over = asyncio.Event()

    async def stop(self, grace: float | None) -> None:
        self.graces.append(grace)
        if grace is None:
            self._over.set()
        await self._over.wait()


def test_a_call_that_nobody_was_handed_does_not_take_the_whole_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway, "LOOK_S", 0.01)

    async def stop() -> list[float | None]:
        server = Server()
        await asyncio.wait_for(gateway.stopped(server, 3600.0, lambda: 0), 30.0)
        return server.graces

    assert asyncio.run(stop()) == [3600.0, None]


def test_calls_that_were_handed_over_have_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "LOOK_S", 0.01)
    counts = [0, 1, 2, 0, 1, 0, 0]  # asked for twice a look while none is left

    async def stop() -> int:
        server = Server()
        await asyncio.wait_for(
            gateway.stopped(server, 3600.0, lambda: counts.pop(0) if counts else 0), 30.0
        )
        return len(server.graces)

    assert asyncio.run(stop()) == 2
    assert counts == []
