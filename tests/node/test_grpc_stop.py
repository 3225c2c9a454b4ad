"""`node.gateway.gateway.stopped` ends although gRPC waits for calls that no handler was given.

A fake server stands for gRPC.
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


def test_stop_does_not_wait_for_undelivered_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway, "LOOK_S", 0.01)

    async def stop() -> list[float | None]:
        server = Server()
        await asyncio.wait_for(gateway.stopped(server, 3600.0, lambda: 0), 30.0)
        return server.graces

    assert asyncio.run(stop()) == [3600.0, None]


def test_stop_waits_for_delivered_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "LOOK_S", 0.01)
    counts = [0, 1, 2, 0, 1, 0, 0]  # read twice per look while it is 0

    async def stop() -> int:
        server = Server()
        await asyncio.wait_for(
            gateway.stopped(server, 3600.0, lambda: counts.pop(0) if counts else 0), 30.0
        )
        return len(server.graces)

    assert asyncio.run(stop()) == 2
    assert counts == []
