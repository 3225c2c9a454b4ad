"""Connections of a gateway to its node: one for each call that it forwards just then, and no more than so many."""

import contextlib
from collections.abc import Callable

import grpc
import pytest
from gateway_store import Frames, Store

PUTS_MAX = 8  # idle connections of the gateway are used first, and there are few


def test_a_gateway_has_so_many_connections_to_its_node(
    start_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = start_store()
    store.watch()
    store.serves()
    monkeypatch.setattr("node.serve.gateway.CONNECTIONS_MAX", 1)
    refused = ""
    with store.channel() as channel, contextlib.ExitStack() as ends:
        for _ in range(PUTS_MAX):
            frames = Frames()
            ends.callback(frames.end)
            talk = store.put(channel, store.key(), frames)  # it has a connection until it ends
            try:
                next(talk)
            except grpc.RpcError as error:
                refused = f"{error.code().name}: {error.details()}"
                break
    assert refused.startswith("RESOURCE_EXHAUSTED: this gateway has 1 connections, and may have no more")
    monkeypatch.undo()
    store.serves()
