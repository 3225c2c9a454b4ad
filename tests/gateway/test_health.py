"""The health status that a gateway reports for a node that hangs."""

import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from stopping import stop
from waiting import wait_until

from kvstore.tools.node_process import NodeProcess
from node.gateway.server import SILENT_S_MAX

SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)


@pytest.fixture
def process() -> Iterator[NodeProcess]:
    with NodeProcess("--ram-bytes", "64MiB") as node:
        yield node


def test_hanging_node_is_not_serving_until_it_resumes(process: NodeProcess) -> None:
    request = health_pb2.HealthCheckRequest(service="kvstore.KVStore")
    with grpc.insecure_channel(process.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def status() -> Any:
            return stub.Check(request, timeout=30.0).status

        watch = stub.Watch(request, timeout=300.0)
        assert next(watch).status == status() == SERVING
        began = time.monotonic()
        stop(process.pid)
        assert next(watch).status == NOT_SERVING
        # The node's last sign of life was some time before the stop, seconds on a busy machine
        assert time.monotonic() - began > SILENT_S_MAX / 2, "reported too soon"
        assert status() == NOT_SERVING
        process.resume()
        assert next(watch).status == SERVING
        wait_until(lambda: status() == SERVING)
