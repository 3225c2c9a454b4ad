"""A call that is interrupted, by Ctrl-C or an engine's signal, touches nothing afterwards: its buffers are the
caller's again."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore import Client
from kvstore.wires import grpc_wire
from kvstore.wires.grpc_wire import GrpcWire
from node.server import Node


class Interrupted:
    """A stream whose caller is interrupted while it waits for the second answer."""

    def __init__(self, replies: Any) -> None:
        self._replies, self._heard = replies, False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._heard:
            raise KeyboardInterrupt
        self._heard = True
        return next(self._replies)

    def cancel(self) -> None:
        self._replies.cancel()


def test_a_put_over_grpc_stores_nothing_more(
    node: Node, connect: Callable[..., Client], pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had come into the buffers meanwhile was stored under the old keys, with checksums that fit."""
    client, keys, reused = connect(node, "grpc"), pages.keys(1, 2), threading.Event()
    client.open(pages.namespace)
    wire, split, sent = client._fan_out.nodes.only._link.wire, grpc_wire.split, threading.Event()
    assert isinstance(wire, GrpcWire)
    put = wire._stub.Put

    def later(some: Any) -> Iterator[memoryview]:
        assert reused.wait(20.0)
        yield from split(some)
        sent.set()

    monkeypatch.setattr(grpc_wire, "split", later)
    monkeypatch.setattr(wire._stub, "Put", lambda *sent, **named: Interrupted(put(*sent, **named)))
    buffers = [bytearray(pages.content(key)) for key in keys]
    with pytest.raises(KeyboardInterrupt) as held:  # as by an engine that looks at it
        client.put(pages.namespace, keys, buffers)
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    reused.set()
    sent.wait(1.0)  # where it goes on
    other = connect(node, "bulk")
    for _ in range(20):
        assert pages.get(other, keys) == [False, False]
        threading.Event().wait(0.02)
    assert held.tb is not None, "its frames have the stream, which gRPC ends when nobody has it any more"
