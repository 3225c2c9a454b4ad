"""Requests that are refused: nothing of them stays."""

import gc
import threading
import time
from typing import Any

import grpc
import pytest

from kvstore.errors import InvalidRequest
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from node.server import Node


class Errors:
    """The errors with which a service refuses, watched from outside: each keeps the frames it went through, and they
    the request."""

    class Watched(InvalidRequest):
        pass

    def alive(self) -> int:
        return sum(isinstance(one, self.Watched) for one in gc.get_objects())

    def fail(self, *_: Any) -> Any:
        raise self.Watched("no")


@pytest.mark.parametrize("count", [1, 1000], ids=["in the loop", "in a thread"])
def test_refused_calls_over_grpc_leave_nothing_to_collect(
    node: Node, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """267 calls of 2 MiB, one after the other, took 5 GiB."""
    errors = Errors()
    monkeypatch.setitem(node.service._unary, "stat", errors.fail)
    monkeypatch.setattr(node.service, "begin_get", errors.fail)
    keys = [bytes(32)] * count
    gc.collect()
    gc.disable()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
            stub = KVStoreStub(channel)
            for _ in range(5):
                with pytest.raises(grpc.RpcError, match="no"):
                    stub.Stat(pb.StatRequest(prefix_hashes=keys), timeout=20.0)
                with pytest.raises(grpc.RpcError, match="no"):
                    list(stub.Get(pb.GetRequest(prefix_hashes=keys), timeout=20.0))
        end = time.monotonic() + 20.0
        while errors.alive() and time.monotonic() < end:  # the last call's task ends behind its status
            threading.Event().wait(0.05)
        assert errors.alive() == 0
    finally:
        gc.enable()
